"""A decision that all ranks take together."""

import numpy as np
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


@pytest.mark.parametrize("flag", ["x", None, [True], 2, 0.5, torch.ones(2), float("nan")])
def test_s3_4_what_is_neither_true_nor_false_is_refused(flag):
    with pytest.raises(TypeError, match=r"takes True or False of each rank: .* is neither"):
        paceline.all_ranks_agree(flag)


@pytest.mark.parametrize("flag", [1, np.bool_(True), np.ones(1), torch.ones(1, 1), 1.0])
def test_s3_4_numbers_and_arrays_that_are_true_or_false_will_do(flag):
    assert paceline.all_ranks_agree(flag) is True


def decide_by_words(rank: int, world: int) -> str:
    try:
        return str(paceline.all_ranks_agree("x" if rank == 1 else True))
    except TypeError as error:
        return str(error)


@pytest.mark.ranks
def test_s3_4_a_flag_that_is_none_is_refused_on_every_rank_and_none_waits():
    first, second = run_ranks(decide_by_words, 2)
    assert "another rank's flag is neither" in first
    assert "'x' is neither" in second


@pytest.mark.ranks
def test_s3_4_one_rank_that_says_no_is_heard_by_all():
    first, second, third = run_ranks(decide, 3)
    assert first == third == [True, False, False, True]
    assert second == [True, False, False]


def compare(rank: int, world: int) -> list[object]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    found: list[object] = [paceline.replicas_differ(model)]
    model(torch.ones(2, 4) * (rank + 1)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    found.append(paceline.replicas_differ(model))
    if rank == 2:
        model[0].bias.grad[1] += 1e-7
    found.append(paceline.replicas_differ(model))
    if rank == 1:
        model[0].weight.data.view(torch.int32)[3, 3] ^= 1
    found.append(paceline.replicas_differ(model))
    if rank != 1:
        pair = dist.new_group([0, 2], use_local_synchronization=True)
        found.append(paceline.replicas_differ(model, pair))
    return found


@pytest.mark.ranks
def test_s1_19_the_rank_and_the_first_tensor_that_differ_are_named_in_a_script_of_ones_own():
    assert paceline.replicas_differ(torch.nn.Linear(2, 2)) is None
    first, second, third = run_ranks(compare, 3)
    gradient, weight = ("gradient of 0.bias", (2,)), ("0.weight", (1,))
    assert second == [None, None, gradient, weight]
    # Of two that differ, none is the usual one.
    assert first == third == [*second, ("gradient of 0.bias", (0, 1))]
