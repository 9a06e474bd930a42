"""How far a rank is in its process groups."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.check.diagnose.flight import last_calls, read_dump
from paceline.record.log_files import find_logs
from paceline.runtime.recovery.sequence import collectives, keep_dump


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def settled(began: int) -> dict[str, tuple[int, int]]:
    """Once all that was called has ended: gloo's thread notes that after the call has returned."""
    until = time.monotonic() + 300
    while True:
        found = collectives(began)
        if all(called == ended for called, ended in found.values()):
            return found
        assert time.monotonic() < until, found
        time.sleep(0.01)


def test_the_last_collective_called_and_ended_is_known_by_group() -> None:
    began = time.time_ns()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    assert settled(began) == {"0 gloo|0": (3, 3)}


def test_groups_of_the_same_ranks_are_kept_apart() -> None:
    began, other = time.time_ns(), dist.new_group([0])
    dist.all_reduce(torch.ones(1))
    for _ in range(2):
        dist.all_reduce(torch.ones(1), group=other)
    assert sorted(settled(began).values()) == [(1, 1), (2, 2)]


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
    assert settled(began) == {"0 gloo|0": (1, 1)}


def test_s1_15_what_is_kept_of_a_hang_is_what_diagnose_reads(tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(3))
    began = time.time_ns()
    keep_dump(tmp_path, rank=5, generation=2, since_ns=began)
    assert not list(tmp_path.glob("flight*"))  # nothing of this generation
    dist.all_reduce(torch.ones(3))
    keep_dump(tmp_path, rank=5, generation=2, since_ns=began)
    [log] = [each for each in find_logs([str(tmp_path)], tmp_path) if "flight" in each.name]
    assert (Path(log.name).name, log.rank) == ("flight-rank-5.json", 5)
    dump = read_dump(b"".join(log.blocks), source=log.name, rank=None)
    assert (dump.rank, dump.generation, len(dump.calls)) == (5, 2, 1)
    assert dump.groups["0"]["ranks"] == "[0]"
    assert "collective" in last_calls(dump)
