import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.record.checkpoints import (
    COMMIT,
    MANIFEST,
    CheckpointEntry,
    Manifest,
    checkpoint_name,
    choose_deletions,
    commit,
    hash_file,
    list_checkpoints,
    newest_valid,
    prune,
    verify_checkpoint,
)

FILES = {"__0_0.distcp": b"weights" * 300, "__1_0.distcp": b"moments" * 200, ".metadata": b"m"}


def write(folder, step, files=FILES, **facts):
    """A committed checkpoint of made-up data."""
    tmp, final = folder / f"{checkpoint_name(step)}.tmp", folder / checkpoint_name(step)
    tmp.mkdir(parents=True)
    for name, content in files.items():
        (tmp / name).write_bytes(content + b"%d" % step)
    records = {name: hash_file(tmp / name) for name in files}
    commit(tmp, final, Manifest(step=step, world_size=2, files=records, **facts))
    return final


def test_a_checkpoint_as_it_was_written_is_valid(tmp_path):
    assert verify_checkpoint(write(tmp_path, 50)) is None


def test_checkpoints_are_listed_newest_first_and_unfinished_ones_are_not(tmp_path):
    for step in (100, 50, 123456789):
        write(tmp_path, step, held_out_loss=step / 100)
    (tmp_path / "step-00000200.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    entries = list_checkpoints(tmp_path)
    assert [entry.step for entry in entries] == [123456789, 100, 50]
    assert [entry.held_out_loss for entry in entries][1:] == [1.0, 0.5]
    assert all(entry.is_complete for entry in entries)


def test_a_folder_that_is_not_there_has_no_checkpoints(tmp_path):
    assert list_checkpoints(tmp_path / "nowhere") == []
    assert newest_valid(tmp_path / "nowhere") == (None, [])


@given(
    name=st.sampled_from([*FILES, MANIFEST, COMMIT]), place=st.floats(0, 1), bit=st.integers(0, 7)
)
def test_any_flipped_bit_in_any_file_is_refused(tmp_path_factory, name, place, bit):
    path = write(tmp_path_factory.mktemp("flip"), 50)
    content = bytearray((path / name).read_bytes())
    content[int(place * (len(content) - 1))] ^= 1 << bit
    (path / name).write_bytes(content)
    problem = verify_checkpoint(path)
    assert problem is not None
    if name in FILES:
        assert problem.code == "C005"
        assert problem.what.startswith(f"{name} in step-00000050 is not what was written")


@given(name=st.sampled_from([*FILES, MANIFEST, COMMIT]), share=st.floats(0, 0.999))
def test_any_truncated_file_is_refused(tmp_path_factory, name, share):
    path = write(tmp_path_factory.mktemp("cut"), 50)
    os.truncate(path / name, int((path / name).stat().st_size * share))
    problem = verify_checkpoint(path)
    assert problem is not None
    if name in FILES:
        assert problem.code == "C004"
        assert name in problem.what
        assert f"{len(FILES[name]) + 2} were written" in problem.what


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path, name):
    path = write(tmp_path, 50)
    (path / name).unlink()
    problem = verify_checkpoint(path)
    assert (problem.code, problem.what) == ("C003", f"{name} is missing in step-00000050")


@pytest.mark.parametrize("name", [*FILES, MANIFEST, COMMIT])
def test_a_file_of_another_checkpoint_is_refused(tmp_path, name):
    path, other = write(tmp_path, 50), write(tmp_path, 60)
    shutil.copy(other / name, path / name)
    assert verify_checkpoint(path).code in ("C002", "C005")


def test_a_checkpoint_without_commit_never_finished(tmp_path):
    path = write(tmp_path, 50)
    (path / COMMIT).unlink()
    problem = verify_checkpoint(path)
    assert (problem.code, problem.what) == (
        "C001",
        "step-00000050 has no COMMIT: its save never finished",
    )


def test_a_renamed_checkpoint_is_refused(tmp_path):
    path = write(tmp_path, 50).rename(tmp_path / checkpoint_name(60))
    problem = verify_checkpoint(path)
    assert (problem.code, problem.where) == ("C006", str(path))
    assert "step-00000060 holds step 50" in problem.what


def test_a_form_of_the_future_is_refused_by_its_number(tmp_path):
    path = write(tmp_path, 50, format=9)
    assert "has form 9, this Paceline reads form 1 and 2" in verify_checkpoint(path).what


def test_the_newest_valid_checkpoint_is_found_behind_damaged_ones(tmp_path):
    paths = {step: write(tmp_path, step) for step in (10, 20, 30, 40)}
    (paths[40] / COMMIT).unlink()
    (paths[30] / ".metadata").write_bytes(b"x")
    entry, refused = newest_valid(tmp_path)
    assert entry.step == 20
    assert [(path.name, problem.code) for path, problem in refused] == [
        ("step-00000040", "C001"),
        ("step-00000030", "C004"),
    ]


def test_a_refused_checkpoint_is_replaced_by_the_same_step_saved_again(tmp_path):
    path = write(tmp_path, 50)
    (path / ".metadata").write_bytes(b"broken")
    write(tmp_path, 50)
    assert verify_checkpoint(path) is None
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000050"]


def test_a_commit_that_fails_puts_the_replaced_checkpoint_back(tmp_path, monkeypatch):
    path = write(tmp_path, 50)
    before = (path / MANIFEST).read_bytes()

    def full(path, content):
        if path.name == COMMIT:
            raise OSError(28, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr("paceline.record.checkpoints._write_synced", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 50, held_out_loss=1.0)
    assert verify_checkpoint(path) is None
    assert (path / MANIFEST).read_bytes() == before


ENTRIES = st.lists(
    st.builds(
        lambda step, complete, loss: CheckpointEntry(
            step=step,
            path=None,
            manifest=Manifest(step=step, world_size=1, files={}, held_out_loss=loss)
            if complete
            else None,
        ),
        st.integers(0, 40),
        st.booleans(),
        st.none() | st.floats(0, 9),
    ),
    unique_by=lambda entry: entry.step,
    max_size=12,
)
POLICIES = st.fixed_dictionaries(
    {
        "keep_last": st.integers(1, 4),
        "keep_every": st.none() | st.integers(1, 10),
        "keep_best": st.integers(0, 3),
    }
)


@given(ENTRIES, POLICIES)
def test_the_newest_complete_checkpoint_is_never_deleted(entries, policy):
    deleted = {entry.step for entry in choose_deletions(entries, **policy)}
    complete = sorted((e.step for e in entries if e.is_complete), reverse=True)
    assert deleted.isdisjoint(complete[: policy["keep_last"]])
    assert bool(complete) or not deleted


@given(ENTRIES, POLICIES)
def test_what_is_kept_follows_the_policy_and_nothing_more(entries, policy):
    deleted = {entry.step for entry in choose_deletions(entries, **policy)}
    complete = sorted((e for e in entries if e.is_complete), key=lambda e: -e.step)
    measured = sorted(
        (e for e in complete if e.held_out_loss is not None),
        key=lambda e: (e.held_out_loss, -e.step),
    )
    best = {e.step for e in measured[: policy["keep_best"]]}
    for index, entry in enumerate(complete):
        every = policy["keep_every"] is not None and entry.step % policy["keep_every"] == 0
        wanted = index < policy["keep_last"] or every or entry.step in best
        assert (entry.step not in deleted) == wanted
    for entry in (e for e in entries if not e.is_complete):
        assert (entry.step in deleted) == (bool(complete) and entry.step < complete[0].step)


@given(ENTRIES, POLICIES)
def test_pruning_twice_deletes_nothing_more(entries, policy):
    deleted = choose_deletions(entries, **policy)
    left = [entry for entry in entries if entry not in deleted]
    assert choose_deletions(left, **policy) == []


def test_pruning_removes_old_checkpoints_and_what_crashes_left(tmp_path):
    for step in (10, 20, 30, 40):
        write(tmp_path, step, held_out_loss=float(abs(step - 20)))
    for name in ("step-00000050.tmp", "step-00000005.deleting", "step-00000030.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("left")
    (tmp_path / "mine.tmp").mkdir()
    deleted = prune(tmp_path, keep_last=1, keep_every=None, keep_best=1)
    assert [entry.step for entry in deleted] == [30, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.tmp",
        "step-00000020",
        "step-00000040",
    ]


def write_until(folder, call):
    """Write in a process that is gone before its n-th call of the system; how it ended."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = call

    def counting(function):
        def counted(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            return function(*args, **kwargs)

        return counted

    for owner, names in (
        (os, ("fsync", "open", "rename", "rmdir", "unlink")),
        (Path, ("rename", "mkdir", "open", "write_bytes")),
    ):
        for name in names:
            setattr(owner, name, counting(getattr(owner, name)))
    try:
        write(folder, 60)
    except BaseException:  # noqa: BLE001 - the edge of the child
        os._exit(1)
    os._exit(0)


def test_a_crash_before_any_call_of_a_commit_leaves_the_old_checkpoint_or_the_new(tmp_path):
    write(tmp_path, 50)
    used = []
    for call in range(200):
        folder = tmp_path / f"at-{call}"
        shutil.copytree(tmp_path / "step-00000050", folder / "step-00000050")
        ended = write_until(folder, call)
        entry, refused = newest_valid(folder)
        assert refused == []
        used.append(entry.step)
        prune(folder, keep_last=2, keep_every=None, keep_best=0)
        assert {path.name for path in folder.iterdir()} <= {"step-00000050", "step-00000060"}
        if ended == 0:
            break
        assert ended == 9
    assert used == sorted(used)
    assert (used[0], used[-1], len(used) > 10) == (50, 60, True)
