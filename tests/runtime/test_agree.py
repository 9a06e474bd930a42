"""A decision that all ranks take together."""

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

import paceline


def test_s3_4_alone_it_is_ones_own_opinion():
    assert paceline.all_ranks_agree(True)
    assert not paceline.all_ranks_agree(torch.tensor(False))


def decide(rank: int, world: int) -> list[bool]:
    opinions = [True, rank != 1, False]
    agreed = [paceline.all_ranks_agree(each) for each in opinions]
    pair = dist.new_group([0, 2])
    if rank != 1:
        agreed.append(paceline.all_ranks_agree(torch.tensor(rank != 1), pair))
    return agreed


@pytest.mark.ranks
def test_s3_4_one_rank_that_says_no_is_heard_by_all():
    first, second, third = run_ranks(decide, 3)
    assert first == third == [True, False, False, True]
    assert second == [True, False, False]
