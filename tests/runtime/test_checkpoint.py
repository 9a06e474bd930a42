import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime.tiny import build, layout_of, train_steps

from paceline.errors import CheckpointError
from paceline.job import CheckpointSpec
from paceline.parallel.layout import Layout
from paceline.record.checkpoints import verify_checkpoint
from paceline.runtime.checkpoint import Checkpointer, SaveFailed, _files
from paceline.runtime.digest import state_digest
from paceline.runtime.strategy import LossScaler

pytestmark = pytest.mark.ranks

SHARDINGS = ["none", "full"]


def save_after_training(rank, world, folder, sharding, optimizer, saves=((2, range(2)),)):
    """Train and save at each (step, steps before it); the digest of the last state."""
    layout = layout_of(world, sharding)
    model, trained_by = build(layout, optimizer=optimizer)
    keeper = Checkpointer(folder, CheckpointSpec())
    for step, steps in saves:
        train_steps(model, trained_by, layout, rank, steps)
        saved = keeper.save(step, model, trained_by, held_out_loss=1.5, layout=layout.name)
        assert (saved.step, saved.path.name) == (step, f"step-{step:08d}")
        assert saved.num_bytes > 0
    return state_digest(model, trained_by)


def digests_of_restored(rank, world, folders, optimizer):
    """Digest of each folder's newest state, restored into DDP and into FSDP2."""
    digests = []
    for folder in folders:
        for sharding in SHARDINGS:
            model, fresh = build(layout_of(world, sharding), optimizer=optimizer, seed=9)
            restored = Checkpointer(folder, CheckpointSpec()).restore_newest(model, fresh)
            assert (restored.step, restored.manifest.held_out_loss) == (2, 1.5)
            assert restored.refused == []
            digests.append(state_digest(model, fresh))
    return digests


@pytest.mark.parametrize(
    "optimizer",
    # AdamW's state has two tensors for each parameter and a count; SGD's has one tensor.
    ["adamw", pytest.param("sgd", marks=pytest.mark.repeat)],
)
def test_s1_13_a_checkpoint_of_two_ranks_is_the_same_state_on_any_ranks_and_layout(
    tmp_path, optimizer
):
    folders = [tmp_path / sharding for sharding in SHARDINGS]
    expected = []
    for folder, sharding in zip(folders, SHARDINGS, strict=True):
        saved = run_ranks(save_after_training, 2, folder, sharding, optimizer)
        expected += [saved[0]] * 2
        assert saved == [saved[0]] * 2
    for world in (1, 2, 4):
        for digests in run_ranks(digests_of_restored, world, folders, optimizer):
            assert digests == expected


def interrupted_and_not(rank, world, folder, sharding):
    layout = layout_of(world, sharding)
    model, optimizer = build(layout)
    keeper = Checkpointer(folder, CheckpointSpec())
    train_steps(model, optimizer, layout, rank, range(3))
    keeper.save(3, model, optimizer)
    losses = train_steps(model, optimizer, layout, rank, range(3, 6))
    digest = state_digest(model, optimizer)
    model, optimizer = build(layout, seed=9)
    step = keeper.restore_newest(model, optimizer).step
    again = train_steps(model, optimizer, layout, rank, range(step, 6))
    return digest == state_digest(model, optimizer), losses == again


# DDP resumes from checkpoints in every whole run of `tests/run/test_resume.py`.
@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.repeat), "full"])
def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(tmp_path, sharding):
    assert run_ranks(interrupted_and_not, 2, tmp_path, sharding) == [(True, True)] * 2


def saved_before_any_step(rank, world, folder):
    layout = layout_of(world, "none")
    keeper = Checkpointer(folder, CheckpointSpec())
    model, optimizer = build(layout)
    keeper.save(0, model, optimizer)
    train_steps(model, optimizer, layout, rank, range(2))
    other, fresh = build(layout, seed=9)
    keeper.restore_newest(other, fresh)
    train_steps(other, fresh, layout, rank, range(2))
    return state_digest(model, optimizer) == state_digest(other, fresh)


def test_a_checkpoint_from_before_the_first_step_is_a_fresh_start(tmp_path):
    assert run_ranks(saved_before_any_step, 2, tmp_path) == [True, True]


def flip(path, _):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path, _):
    os.truncate(path, path.stat().st_size - 1)


def swap(path, other):
    shutil.copy(other, path)


def remove(path, _):
    path.unlink()


def restore_each_damaged(rank, world, folder):
    """For each file of the newest checkpoint and each damage: what was used and what refused."""
    newest, older = folder / "step-00000002", folder / "step-00000001"
    names = sorted(path.name for path in newest.iterdir())
    model, optimizer = build(layout_of(world, "full"), seed=9)
    keeper = Checkpointer(folder, CheckpointSpec())
    outcomes = {}
    for name in names:
        for damage in (flip, cut, swap, remove):
            if rank == 0:
                shutil.copy(newest / name, folder / "whole")
                damage(newest / name, older / name)
            torch.distributed.barrier()
            restored = keeper.restore_newest(model, optimizer)
            problems = [(path.name, problem.what) for path, problem in restored.refused]
            outcomes[name, damage.__name__] = (restored.step, problems)
            torch.distributed.barrier()
            if rank == 0:
                shutil.copy(folder / "whole", newest / name)
    return outcomes, keeper.restore_newest(model, optimizer).step


def test_s4_13_any_damaged_file_is_refused_and_the_previous_checkpoint_used(tmp_path):
    saves = ((1, range(1)), (2, range(1, 2)))
    run_ranks(save_after_training, 2, tmp_path, "full", "adamw", saves)
    results = run_ranks(restore_each_damaged, 2, tmp_path)
    for outcomes, step_when_whole in results:
        assert step_when_whole == 2
        assert len(outcomes) == 4 * 6  # two shards, two tables, manifest.json and COMMIT
        # torch's table of contents says where tensors lie: of two steps it is the same.
        assert outcomes.pop((".metadata", "swap")) == (2, [])
        for (name, _), (step, refused) in outcomes.items():
            assert step == 1
            ((folder, what),) = refused
            assert folder == "step-00000002"
            assert name in what or name in ("COMMIT", "manifest.json")


def restore_or_why_not(rank, world, folder, hidden):
    model, optimizer = build(layout_of(world, "none"))
    if hidden:  # as many names and other shapes
        model.module.norm.weight = torch.nn.Parameter(torch.ones(hidden))
    try:
        return Checkpointer(folder, CheckpointSpec()).restore_newest(model, optimizer).step
    except CheckpointError as error:
        return str(error)


def test_without_a_checkpoint_the_start_is_fresh(tmp_path):
    assert run_ranks(restore_or_why_not, 2, tmp_path / "nothing", 0) == [0, 0]


def test_when_no_checkpoint_is_valid_all_ranks_say_so(tmp_path):
    run_ranks(save_after_training, 2, tmp_path, "none", "adamw")
    (tmp_path / "step-00000002" / "COMMIT").unlink()
    reasons = run_ranks(restore_or_why_not, 2, tmp_path, 0)
    assert reasons[0] == reasons[1]
    assert reasons[0].startswith("C001: step-00000002 has no COMMIT")


def test_a_checkpoint_of_another_model_is_refused_by_the_parameter(tmp_path):
    run_ranks(save_after_training, 2, tmp_path, "none", "adamw")
    reasons = run_ranks(restore_or_why_not, 2, tmp_path, 7)
    assert reasons[0] == reasons[1]
    assert "norm.weight is [7] in the model and [32] in the checkpoint" in reasons[0]


def copied_from_another_job(rank, world, folder):
    model, optimizer = build(layout_of(world, "none"))
    keeper = Checkpointer(folder, CheckpointSpec())
    keeper.save(1, model, optimizer, job_digest="ours")
    keeper.save(2, model, optimizer, job_digest="theirs")
    restored = keeper.restore_newest(model, optimizer, job_digest="ours")
    unasked = keeper.restore_newest(model, optimizer)
    return restored.step, [str(problem) for _, problem in restored.refused], unasked.step


def test_a_checkpoint_of_another_job_is_refused_with_both_digests(tmp_path):
    ((step, (reason,), unasked),) = run_ranks(copied_from_another_job, 1, tmp_path)
    assert (step, unasked) == (1, 2)
    assert reason.startswith(
        "C010: step-00000002 is of another job: its digest is theirs, this job's is ours"
    )


def saved_in_fp16(rank, world, folder):
    model, optimizer = build(layout_of(world, "none"))
    keeper, scaler = Checkpointer(folder, CheckpointSpec()), LossScaler(patience=3)
    scaler.update(found_inf=True)
    scaler.update(found_inf=False)
    keeper.save(1, model, optimizer, loss_scaler=scaler.state_dict())
    again = LossScaler(patience=3)
    again.load_state_dict(keeper.restore_newest(model, optimizer).manifest.loss_scaler)
    before = again.factor
    for each in (scaler, again):
        each.update(found_inf=False)
        each.update(found_inf=False)
    keeper.save(2, model, optimizer)
    return (
        before,
        scaler.factor,
        again.factor,
        keeper.restore_newest(model, optimizer).manifest.loss_scaler,
    )


def test_the_loss_scale_and_its_patience_go_on_from_a_checkpoint(tmp_path):
    results = run_ranks(saved_in_fp16, 2, tmp_path)
    assert results == [(2.0**15, 2.0**16, 2.0**16, None)] * 2


def save_where_a_file_is(rank, world, folder):
    model, optimizer = build(layout_of(world, "none"))
    keeper = Checkpointer(folder / "taken", CheckpointSpec())
    try:
        keeper.save(1, model, optimizer)
    except SaveFailed as failed:
        torch.distributed.barrier()
        if rank == 0:
            (folder / "taken").unlink()
        torch.distributed.barrier()
        return failed.reason, keeper.save(2, model, optimizer).step
    return None


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_works(tmp_path):
    (tmp_path / "taken").write_text("a file where the folder should be")
    outcomes = run_ranks(save_where_a_file_is, 2, tmp_path)
    assert outcomes[0] == outcomes[1]
    reason, next_step = outcomes[0]
    assert reason.startswith(("not a directory", "file exists"))
    assert next_step == 2


def save_on_a_small_disk(rank, world, disk, hide_fullness):
    model, optimizer = build(layout_of(world, "none"))
    train_steps(model, optimizer, layout_of(world, "none"), rank, range(1))
    keeper = Checkpointer(disk / "checkpoints", CheckpointSpec())
    keeper.save(1, model, optimizer)
    torch.distributed.barrier()
    if rank == 0:
        left = _files.free_bytes(disk) - 100_000
        (disk / "ballast").write_bytes(bytes(left))
    torch.distributed.barrier()
    look = _files.free_bytes
    if hide_fullness:  # another program fills the disk after the space was checked
        _files.free_bytes = lambda folder: 1 << 40
    reason = None
    try:
        keeper.save(2, model, optimizer)
    except SaveFailed as failed:
        reason = failed.reason
    _files.free_bytes = look
    left_behind = sorted(path.name for path in (disk / "checkpoints").iterdir())
    torch.distributed.barrier()
    if rank == 0:
        (disk / "ballast").unlink()
    torch.distributed.barrier()
    train_steps(model, optimizer, layout_of(world, "none"), rank, range(1, 2))
    keeper.save(3, model, optimizer)
    restored = keeper.restore_newest(model, optimizer)
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(disk / "checkpoints")
    return reason, left_behind, restored.step


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("SKIPPED DISK-FULL TEST: mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("hide_fullness", [False, True], ids=["seen before", "in the middle"])
def test_a_full_disk_costs_one_save_and_nothing_else(small_disk, hide_fullness):
    outcomes = run_ranks(save_on_a_small_disk, 2, small_disk, hide_fullness)
    assert outcomes[0] == outcomes[1]
    reason, left_behind, restored_step = outcomes[0]
    assert reason.lower().startswith("no space left on device")
    assert left_behind == ["step-00000001"]
    assert restored_step == 3


def save_many(rank, world, folder):
    policy = CheckpointSpec(keep_last=2, keep_every=4, keep_best=1)
    model, optimizer = build(Layout(data=world, sharding="none", micro_batch=4, accumulation=1))
    keeper = Checkpointer(folder, policy)
    phases = []
    for step in range(1, 8):
        loss = 0.5 if step == 2 else float(step)
        keeper.save(step, model, optimizer, held_out_loss=loss, on_phase=phases.append)
    return phases


def test_s1_13_checkpoints_are_kept_by_the_policy_and_all_are_whole(tmp_path):
    assert run_ranks(save_many, 2, tmp_path) == [["writing"] * 7] * 2
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step-{step:08d}" for step in (2, 4, 6, 7)]
    assert all(verify_checkpoint(tmp_path / name) is None for name in names)


def test_a_part_that_gets_its_name_while_room_is_looked_for_costs_no_save(tmp_path, monkeypatch):
    task = SimpleNamespace(tmp=tmp_path / "tmp", folder=tmp_path, num_bytes=10)
    task.tmp.mkdir()
    (task.tmp / "part-1").write_bytes(b"there")
    listed = [task.tmp / "part-1.partial", task.tmp / "part-1"]  # the first was renamed since
    monkeypatch.setattr(type(task.tmp), "iterdir", lambda self: iter(listed))
    _files._check_room(task)
