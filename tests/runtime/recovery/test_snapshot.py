"""Copies of a rank's state in memory: brought back bit for bit, and never a torn one."""

import os
import random
from pathlib import Path

import pytest
import torch
from tests.runtime.recovery.test_fingerprint import flip
from tests.runtime.tiny import build, fake_rank, layout_of

from paceline.record.snapshot_files import remove_snapshots, snapshot_path
from paceline.runtime.recovery.fingerprint import fingerprint
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.recovery.snapshot import Facts, SnapshotError, Snapshots


def small(seed: int = 0, width: int = 24) -> LiveState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return LiveState(model, optimizer)


def change(state: LiveState) -> None:
    for _, tensor in state.tensors():
        flip(tensor, 3)


def taken(folder: Path, steps: range, state: LiveState) -> Snapshots:
    snapshots = Snapshots(folder / "run", 0, generation=1, folder=folder)
    for step in steps:
        snapshots.take(0, step, state)
    snapshots.wait()
    return snapshots


@pytest.mark.parametrize(
    ("sharding", "optimizer"),
    [
        ("none", "adamw"),
        ("zero1", "adamw"),
        ("hybrid", "sgd"),
        ("full", "adamw"),
        ("full", "muon"),
        ("full", "adafactor"),
        ("full", "adamw-8bit"),
    ],
)
def test_a_new_process_of_the_same_layout_gets_the_state_back_bit_for_bit(
    tmp_path: Path, sharding: str, optimizer: str
):
    layout = layout_of(2, sharding)
    with fake_rank(layout, 1):
        model, updates = build(layout, optimizer=optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        updates.step()
        state = LiveState(model, updates)
        before = fingerprint(state.tensors()).by_name()
        writer = Snapshots(tmp_path / "run", 0, generation=3, folder=tmp_path)
        facts = Facts(job_digest="ab", held_out_loss=1.25, loss_scaler={"factor": 2.0})
        writer.take(1, 17, state, facts, certified=True)
        writer.wait()

        new_model, new_updates = build(layout, optimizer=optimizer, seed=9)
        fresh = LiveState(new_model, new_updates)
        reader = Snapshots(tmp_path / "run", 0, generation=4, folder=tmp_path)
        assert reader.seen() == {1: [(17, True)]}
        assert reader.load_into(1, 17, fresh) == facts
        assert fingerprint(fresh.tensors()).by_name() == before
        assert fresh.entries() == state.entries()
        for parameter in (*model.parameters(), *new_model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.5)
        updates.step()
        new_updates.step()
        after = fingerprint(state.tensors()).by_name()
        assert fingerprint(fresh.tensors()).by_name() == after != before


def test_two_are_kept_and_the_older_gives_way(tmp_path: Path):
    snapshots = taken(tmp_path, range(5, 9), small())
    assert [each.step for each in snapshots.held(0)] == [8, 7]
    assert snapshots.newest(0) == 8
    assert snapshots.newest(1) is None


def test_what_is_loaded_is_of_the_step_that_is_asked_for(tmp_path: Path):
    state = small()
    snapshots = taken(tmp_path, range(1, 2), state)
    first = fingerprint(state.tensors()).by_name()
    change(state)
    snapshots.take(0, 2, state)
    second = fingerprint(state.tensors()).by_name()
    snapshots.load_into(0, 1, state)
    assert fingerprint(state.tensors()).by_name() == first != second
    snapshots.load_into(0, 2, state)
    assert fingerprint(state.tensors()).by_name() == second
    assert snapshots.seen() == {0: [(2, False), (1, False)]}
    with pytest.raises(SnapshotError, match="no snapshot of slot 0 at step 3 on node 0"):
        snapshots.load_into(0, 3, state)


def test_a_process_that_is_killed_while_it_writes_leaves_the_one_before(tmp_path: Path):
    state = small()
    taken(tmp_path, range(1, 3), state)
    want = fingerprint(state.tensors()).by_name()
    change(state)
    pid = os.fork()
    if pid == 0:
        snapshots = Snapshots(tmp_path / "run", 0, generation=1, folder=tmp_path)
        snapshots._seal = lambda *_, **__: os._exit(9)  # type: ignore[method-assign]
        snapshots.take(0, 3, state)
        snapshots.wait()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    after = Snapshots(tmp_path / "run", 0, generation=2, folder=tmp_path)
    assert [each.step for each in after.held(0)] == [2]
    after.load_into(0, 2, state)
    assert fingerprint(state.tensors()).by_name() == want


def test_every_damaged_byte_is_found_and_nothing_is_changed(tmp_path: Path):
    state = small()
    snapshots = taken(tmp_path, range(1, 2), state)
    change(state)
    now = fingerprint(state.tensors()).by_name()
    path = snapshot_path(tmp_path, tmp_path / "run", node=0, slot=0, turn=0)
    whole, draw = bytearray(path.read_bytes()), random.Random(0)
    places = [*range(64), *(draw.randrange(4096, len(whole)) for _ in range(100))]
    for place in places:
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([whole[place] ^ 1 << draw.randrange(8)]))
        with pytest.raises(SnapshotError):
            snapshots.load_into(0, 1, state)
        with path.open("r+b") as file:
            file.seek(place)
            file.write(whole[place : place + 1])
    assert fingerprint(state.tensors()).by_name() == now
    snapshots.load_into(0, 1, state)
    assert fingerprint(state.tensors()).by_name() != now


def test_another_model_is_refused(tmp_path: Path):
    snapshots = taken(tmp_path, range(1, 2), small())
    with pytest.raises(SnapshotError, match=r"model/0\.weight is Entry"):
        snapshots.load_into(0, 1, small(width=25))


def test_a_state_that_grows_gets_a_longer_file(tmp_path: Path):
    snapshots = taken(tmp_path, range(1, 3), small())
    large = small(width=100)
    snapshots.take(0, 3, large)
    snapshots.take(0, 4, large)
    snapshots.wait()
    assert [each.step for each in snapshots.held(0)] == [4, 3]
    snapshots.load_into(0, 4, large)


def test_memory_that_is_not_there_is_an_error_and_not_a_signal(tmp_path: Path):
    snapshots = Snapshots(tmp_path / "run", 0, generation=1, folder=Path("/dev/shm"))
    try:
        with pytest.raises(SnapshotError, match="has no room for"):
            snapshots.room(0, 2**50)
        assert snapshots.newest(0) is None
    finally:
        remove_snapshots(Path("/dev/shm"), tmp_path / "run")


def test_snapshots_of_a_node_are_taken_away_and_no_others(tmp_path: Path):
    state = small()
    for node in (0, 1):
        snapshots = Snapshots(tmp_path / "run", node, generation=1, folder=tmp_path)
        for step in (1, 2):
            snapshots.take(5, step, state)
        snapshots.wait()
    Snapshots(tmp_path / "other", 0, generation=1, folder=tmp_path).take(5, 1, state)
    assert remove_snapshots(tmp_path, tmp_path / "run", node=1) == 2
    assert remove_snapshots(tmp_path, tmp_path / "run") == 2
    assert len(list(tmp_path.glob("paceline-*"))) == 1


def test_what_may_be_of_a_wrong_state_is_dropped_and_what_is_certified_stays(tmp_path: Path):
    state = small()
    snapshots = Snapshots(tmp_path / "run", 0, generation=1, folder=tmp_path)
    snapshots.take(0, 4, state, certified=True)
    snapshots.take(0, 6, state, certified=True)
    snapshots.drop(0, after=6)
    assert snapshots.seen() == {0: [(6, True), (4, True)]}
    snapshots.drop(0, after=5)
    assert snapshots.seen() == {0: [(4, True)]}
    snapshots.take(0, 6, state)
    snapshots.drop(0, after=9)
    assert snapshots.seen() == {0: [(4, True)]}
    snapshots.take(0, 8, state)
    assert [each.step for each in snapshots.held(0)] == [8, 4]
