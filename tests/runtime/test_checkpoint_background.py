import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime.tiny import build, layout_of, train_steps

from paceline.job import CheckpointSpec
from paceline.record.checkpoints import read_manifest, verify_checkpoint
from paceline.runtime.checkpoint import Checkpointer, Saved, SaveFailed
from paceline.runtime.checkpoint._process import writer_process
from paceline.runtime.digest import state_digest

pytestmark = pytest.mark.ranks

# Whole copies are saved in the background by every run of `tests/run`.
SHARDINGS = [pytest.param("none", marks=pytest.mark.repeat), "full"]


def trained(rank, world, sharding):
    layout = layout_of(world, sharding)
    model, optimizer = build(layout)
    train_steps(model, optimizer, layout, rank, range(1))
    return layout, model, optimizer


def save_both_ways(rank, world, folder, sharding):
    _, model, optimizer = trained(rank, world, sharding)
    Checkpointer(folder / "sync", CheckpointSpec()).save(1, model, optimizer)
    background = Checkpointer(folder / "background", CheckpointSpec())
    stall_s = background.start(1, model, optimizer)
    saved = background.wait()
    assert saved.stall_s == stall_s > 0
    assert saved.write_s > 0
    assert background.wait() is None


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_background_save_writes_the_same_bytes(tmp_path, sharding):
    run_ranks(save_both_ways, 2, tmp_path, sharding)
    sync, background = (
        read_manifest(tmp_path / way / "step-00000001") for way in ("sync", "background")
    )
    for name in sync.files.keys() | background.files.keys():
        if name != ".metadata":  # it holds the folder's name and a random id
            assert sync.files[name] == background.files[name]


def train_while_writing(rank, world, folder, sharding):
    layout, model, optimizer = trained(rank, world, sharding)
    keeper = Checkpointer(folder, CheckpointSpec())
    expected = state_digest(model, optimizer)
    gate = threading.Event()
    keeper.start(1, model, optimizer, on_phase=lambda phase: gate.wait(300))
    polled = []
    for step in range(1, 4):
        train_steps(model, optimizer, layout, rank, range(step, step + 1))
        polled.append(keeper.poll())
    if rank == 0:
        gate.set()  # rank 1's part stays unfinished for some steps more
    for step in range(4, 6):
        train_steps(model, optimizer, layout, rank, range(step, step + 1))
        polled.append(keeper.poll())
    gate.set()
    saved = keeper.wait()
    moved_on = state_digest(model, optimizer) != expected
    assert keeper.restore_newest(model, optimizer).step == 1
    return polled, saved.step, moved_on, state_digest(model, optimizer) == expected


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_s4_13_what_is_saved_is_the_state_at_the_start_while_training_goes_on(tmp_path, sharding):
    for outcome in run_ranks(train_while_writing, 2, tmp_path, sharding):
        assert outcome == ([None] * 5, 1, True, True)


def many_saves(rank, world, folder, num_saves):
    layout, model, optimizer = trained(rank, world, "full")
    keeper = Checkpointer(folder, CheckpointSpec(keep_last=2))
    outcomes = []
    for step in range(1, num_saves + 1):
        train_steps(model, optimizer, layout, rank, range(step, step + 1))
        if step % 10 == 0:
            keeper.save(step, model, optimizer)
        else:
            keeper.start(step, model, optimizer)
        if step % 3 == 0:
            while (outcome := keeper.poll()) is not None:
                outcomes.append(outcome.step)
    while (outcome := keeper.wait()) is not None:
        outcomes.append(outcome.step)
    return outcomes


@pytest.mark.parametrize("num", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_s4_13_many_saves_end_to_end_come_through_each_once(tmp_path, num):
    outcomes = run_ranks(many_saves, 2, tmp_path, num)
    assert outcomes[0] == outcomes[1] == [step for step in range(1, num + 1) if step % 10]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step-{num - 1:08d}", f"step-{num:08d}"]
    assert all(verify_checkpoint(tmp_path / name) is None for name in names)


def fail_on_one_rank(rank, world, folder):
    layout, model, optimizer = trained(rank, world, "full")
    keeper = Checkpointer(folder, CheckpointSpec())

    def break_rank_1(phase):
        if rank == 1:
            raise OSError(5, "Input/output error")

    keeper.start(1, model, optimizer, on_phase=break_rank_1)
    for step in range(1, 1000):
        train_steps(model, optimizer, layout, rank, range(step, step + 1))
        failed = keeper.poll()
        if failed is not None:
            break
    assert isinstance(failed, SaveFailed)
    left = sorted(path.name for path in folder.iterdir())
    torch.distributed.barrier()
    keeper.start(2, model, optimizer)
    saved = keeper.wait()
    assert isinstance(saved, Saved)
    return step, failed.reason, left, saved.step


def test_a_background_failure_is_told_on_all_ranks_at_the_same_step(tmp_path):
    first, second = run_ranks(fail_on_one_rank, 2, tmp_path)
    assert first == second
    _, reason, left, next_step = first
    assert reason == "input/output error (rank 1)"
    assert left == []
    assert next_step == 2


def abandon_and_go_on(rank, world, folder):
    layout, model, optimizer = trained(rank, world, "full")
    keeper = Checkpointer(folder, CheckpointSpec())
    assert keeper.abandon() is None
    gate = threading.Event()
    keeper.start(1, model, optimizer, on_phase=lambda phase: gate.wait(300) if rank else None)
    abandoned = keeper.abandon()
    assert (keeper.poll(), keeper.wait(), keeper.abandon()) == (None, None, None)
    torch.distributed.barrier()
    train_steps(model, optimizer, layout, rank, range(1, 2))
    keeper.start(2, model, optimizer)
    saved = keeper.wait()
    gate.set()
    return abandoned.step, abandoned.reason, saved.step


def test_a_save_is_abandoned_at_once_and_the_next_one_goes_through(tmp_path):
    outcomes = run_ranks(abandon_and_go_on, 2, tmp_path)
    assert outcomes == [(1, "abandoned, as a rank was lost", 2)] * 2
    assert [path.name for path in tmp_path.glob("step-00000002")] == ["step-00000002"]


def kill_a_writer(rank, world, folder, killed):
    _, model, optimizer = trained(rank, world, "full")
    keeper = Checkpointer(folder, CheckpointSpec())

    def strike(phase):
        if rank == killed:
            os.kill(writer_process().pid, signal.SIGKILL)

    keeper.start(1, model, optimizer, on_phase=strike)
    failed = keeper.wait()
    left = sorted(path.name for path in folder.iterdir())
    torch.distributed.barrier()
    keeper.start(2, model, optimizer)
    saved = keeper.wait()
    return failed.reason, left, saved.step


@pytest.mark.parametrize("killed", [0, 1])
def test_a_writer_that_is_killed_costs_its_save_and_hangs_nobody(tmp_path, killed):
    first, second = run_ranks(kill_a_writer, 2, tmp_path, killed)
    assert first == second
    reason, left, step = first
    assert reason == f"the process that writes it ended by SIGKILL (rank {killed})"
    assert all(".tmp" in name for name in left)
    assert step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def kill_a_writer_between_saves(rank, world, folder):
    _, model, optimizer = trained(rank, world, "none")
    keeper = Checkpointer(folder, CheckpointSpec())
    keeper.start(1, model, optimizer)
    steps, writers = [keeper.wait().step], [writer_process().pid]
    os.kill(writers[0], signal.SIGKILL)
    while writer_process().pid is not None:
        time.sleep(0.01)
    for step in (2, 3):
        keeper = Checkpointer(folder, CheckpointSpec())
        keeper.start(step, model, optimizer)
        steps.append(keeper.wait().step)
        writers.append(writer_process().pid)
    return steps, writers[0] != writers[1] == writers[2]


def test_another_writer_is_started_for_one_that_died_and_then_kept(tmp_path):
    assert run_ranks(kill_a_writer_between_saves, 1, tmp_path) == [([1, 2, 3], True)]


def die_while_writing(rank, world, folder):
    _, model, optimizer = trained(rank, world, "none")
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    keeper = Checkpointer(folder / "saves", CheckpointSpec())
    gate = threading.Event()
    written = threading.Event()

    def hold(phase):
        written.set()
        gate.wait(300)

    keeper.start(1, model, optimizer, on_phase=hold)
    written.wait(300)
    named = set(Path("/dev/shm").iterdir()) - before if before else set()
    (folder / "writer").write_text(str(writer_process().pid))
    (folder / "named").write_text(str(len(named)))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="SKIPPED: only Linux ends it at once")
def test_a_worker_that_is_killed_takes_its_writer_and_all_memory_with_it(tmp_path):
    with pytest.raises(AssertionError, match="ended with -9"):
        run_ranks(die_while_writing, 1, tmp_path)
    writer = int((tmp_path / "writer").read_text())
    end = time.monotonic() + 300
    while Path(f"/proc/{writer}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{writer}").exists()
    assert (tmp_path / "named").read_text() == "0"
    (left,) = (tmp_path / "saves").iterdir()
    assert left.name.endswith(".tmp")
