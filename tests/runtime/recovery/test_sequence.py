"""How far a rank is in its process groups."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.runtime.recovery.sequence import collectives


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_last_collective_called_and_ended_is_known_by_group() -> None:
    began = time.time_ns()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    assert collectives(began) == {"0": (3, 3)}


def test_what_an_earlier_generation_did_in_a_group_of_the_same_name_does_not_count(
    tmp_path: Path,
) -> None:
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    began = time.time_ns()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/next", rank=0, world_size=1)
    assert collectives(began) == {}
    dist.all_reduce(torch.ones(1))
    assert collectives(began) == {"0": (1, 1)}
