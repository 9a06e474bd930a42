"""Snapshots on real ranks: lost with a node, found on the holder's, and brought back."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.runtime.tiny import build, layout_of, train_steps

from paceline.parallel.replicas import neighbour_of
from paceline.record.snapshot_files import remove_snapshots, snapshot_path
from paceline.runtime.recovery.fingerprint import fingerprint
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.recovery.peer_snapshots import Peers
from paceline.runtime.recovery.rollback import recall, sources
from paceline.runtime.recovery.snapshot import Facts, SnapshotError, Snapshots

FACTS = Facts(job_digest="this")


def test_a_step_counts_only_when_every_slot_has_it():
    own = [{0: [(9, True), (6, True)]}, {1: [(6, True), (3, True)]}]
    assert sources(own, certified=True) == {6: [0, 1]}
    assert sources([{0: [(9, False), (6, True)]}, {1: [(9, True), (6, True)]}], certified=True) == {
        6: [0, 1]
    }
    assert sources([{}, {1: [(6, True)]}], certified=False) == {}
    held = [{0: [(6, True)], 3: [(6, True)]}, {1: [(6, True)]}, {2: [(6, True)]}, {}]
    assert sources(held, certified=True) == {6: [0, 1, 2, 0]}


def lose_a_node(rank: int, world: int, folder: str, sharding: str) -> dict[str, object]:
    """Two nodes of two ranks; the second one's memory is lost, and all processes with it."""
    layout, place, node = layout_of(world, sharding), Path(folder), rank // 2
    run = place / "run"
    model, optimizer = build(layout)
    state = LiveState(model, optimizer)
    snapshots = Snapshots(run, node, generation=1, folder=place)
    holders = [neighbour_of(layout, (0, 0, 1, 1), each) for each in range(world)]
    group = dist.new_group(backend="gloo")
    peers = Peers(snapshots, holders, group)
    wanted = {}
    for step in (1, 2, 3):
        train_steps(model, optimizer, layout, rank, range(step - 1, step))
        content = snapshots.take(rank, step, state, FACTS, certified=step != 3)
        peers.begin(step, content, certified=step != 3)
        wanted[step] = fingerprint(state.tensors()).by_name()
    peers.finish()
    seen = snapshots.seen()
    dist.barrier()
    if rank == 0:
        remove_snapshots(place, run, node=1)
    dist.barrier()

    node = node if node == 0 else 2  # another machine takes the place of the lost one
    fresh_model, fresh_optimizer = build(layout, seed=4)
    fresh = LiveState(fresh_model, fresh_optimizer)
    reader = Snapshots(run, node, generation=2, folder=place)
    other = recall(reader, fresh, job_digest="another")
    newest = recall(reader, fresh, job_digest="this")
    same = fingerprint(fresh.tensors()).by_name() == wanted[3]
    agreed = recall(reader, fresh, job_digest="this", certified=True)
    same &= fingerprint(fresh.tensors()).by_name() == wanted[2]
    dist.barrier()
    if rank == 0:  # one damaged copy makes all go further back
        for turn in (0, 1):
            path = snapshot_path(place, run, node=0, slot=0, turn=turn)
            if Snapshots(run, 0, generation=3, folder=place).newest(0) == 3:
                _damage(path)
    dist.barrier()
    back = recall(reader, fresh, job_digest="this")
    return {
        "seen": sorted(seen),
        "other": other,
        "newest": newest and newest[0],
        "agreed": agreed and agreed[0],
        "same": same,
        "back": back and back[0],
    }


def _damage(path: Path) -> None:
    whole = path.read_bytes()
    if int.from_bytes(whole[8:16], "little") == 3:
        with path.open("r+b") as file:
            file.seek(len(whole) - 5)
            file.write(bytes([whole[-5] ^ 16]))


def run_out_of_memory(rank: int, world: int, folder: str) -> list[object]:
    """Rank 1 cannot take its snapshot of step 1, and cannot keep another's of step 2."""
    layout, place = layout_of(world, "none"), Path(folder)
    model, optimizer = build(layout)
    state = LiveState(model, optimizer)
    snapshots = Snapshots(place / "run", rank, generation=1, folder=place)
    holders = [neighbour_of(layout, range(world), each) for each in range(world)]
    peers = Peers(snapshots, holders, dist.new_group(backend="gloo"))
    seen: list[object] = []
    for step in (1, 2, 3):
        content = torch.empty(0, dtype=torch.uint8)
        if (rank, step) != (1, 1):
            content = snapshots.take(rank, step, state, FACTS, certified=True)
        if (rank, step) == (1, 2):
            snapshots.room = _no_room  # type: ignore[method-assign]
        failures = peers.begin(step, content, certified=True)
        peers.finish()
        vars(snapshots).pop("room", None)
        seen.append((failures, {slot: steps[0][0] for slot, steps in snapshots.seen().items()}))
    return seen


def _no_room(slot: int, num_bytes: int) -> torch.Tensor:
    raise SnapshotError("no room")


@pytest.mark.ranks
def test_a_rank_without_memory_is_missing_and_nobody_waits_for_it(tmp_path: Path):
    results = run_ranks(run_out_of_memory, 2, os.fspath(tmp_path))
    assert results[0] == [([], {0: 1}), ([], {0: 2, 1: 2}), ([], {0: 3, 1: 3})]
    assert results[1] == [([], {0: 1}), (["no room"], {0: 1, 1: 2}), ([], {0: 3, 1: 3})]


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["full", "zero1"])
def test_a_lost_nodes_states_come_back_from_the_other_nodes_memory(tmp_path: Path, sharding: str):
    results = run_ranks(lose_a_node, 4, os.fspath(tmp_path), sharding)
    for result in results:
        assert result["seen"] == [0, 1, 2, 3]  # its own node's two, and two held for the other
        assert result["other"] is None
        assert result["newest"] == 3
        assert result["agreed"] == 2
        assert result["same"]
        assert result["back"] == 2
