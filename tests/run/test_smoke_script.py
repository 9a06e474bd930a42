"""`paceline smoke SCRIPT`: really observed steps, in a copy that no write leaves."""

import json
import os
from pathlib import Path

import pytest
from tests.command import run_command

from paceline.check.smoke_script import judge_script
from paceline.errors import JobError
from paceline.launch import scratch
from paceline.launch.scratch import list_writable, write_copy
from paceline.launch.smoke_script import SeenRun, SeenScript, place_in
from paceline.record.script_observed import Act, Observed, StepSeen

DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
points = torch.randn(64, 4)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for epoch in range(1000):
    for (batch,) in DataLoader(TensorDataset(points), batch_size=8, shuffle=True):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        model(points)
    torch.save(model.state_dict(), "checkpoint.pt")
    open("log.txt", "a").write(f"{epoch}\\n")
"""


def rows_of(stdout: str) -> dict[str, dict]:
    answer = json.loads(stdout)
    return {row["name"]: row for row in (*answer["steps"], *answer["checks"])}


@pytest.mark.ranks
def test_s0_19_a_script_is_judged_by_what_it_did_and_its_folder_is_left_as_it_was(tmp_path):
    (tmp_path / "train.py").write_text(DDP)
    (tmp_path / "checkpoint.pt").write_text("weeks of work")
    (tmp_path / "elsewhere").mkdir()
    os.link(tmp_path / "checkpoint.pt", tmp_path / "elsewhere" / "same.pt")
    (tmp_path / "log.txt").symlink_to("elsewhere/log.txt")
    done = run_command("smoke", "train.py", "--loss-range", "0:100", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    unjudged = {name for name, row in rows.items() if row["status"] == "not judged"}
    assert unjudged == {"tokenization", "metrics"}
    assert rows["training_step"]["found"].startswith("10 steps, loss ")
    assert rows["data_loading"]["found"].endswith("10 batches, 10 different")
    assert rows["checkpoint_save"]["found"].startswith("1 file, the last checkpoint.pt: read back")
    assert rows["validation_step"]["value"] == 1
    assert "2 ranks, gloo: all trained parameters equal" in rows["two_ranks"]["found"]
    assert json.loads(done.stdout)["about"] == ["not in the copy: log.txt (a link to nothing)"]
    assert (tmp_path / "checkpoint.pt").read_text() == "weeks of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint.pt", "elsewhere", "log.txt", "train.py",
    ]  # fmt: skip
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["same.pt"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("script", "verdict", "says"),
    [
        ("raise ValueError('no weights')", "fail", "ValueError: no weights"),
        ("import sys; sys.exit(3)", "fail", "exited with 3"),
        ("import argparse; p = argparse.ArgumentParser(); p.add_argument('x'); p.parse_args()",
         "fail", "the following arguments are required: x"),
        ("\0\1\2", "fail", "SyntaxError: source code"),
        ("x = 1\ndef f(:", "fail", "SyntaxError: invalid syntax (train.py:2)"),
        ("open('new.txt', 'w').write('x')", "not judged", "no step of a torch optimizer was seen"),
        ("print('step 1 loss 0.5')", "not judged", "no step of a torch optimizer was seen"),
    ],
)  # fmt: skip
def test_s0_19_a_script_without_a_step_fails_with_its_words_or_is_not_judged(
    tmp_path, script, verdict, says
):
    (tmp_path / "train.py").write_text(script)
    done = run_command("smoke", "train.py", "--json", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(done.stdout)["verdict"] == verdict
    assert says in rows_of(done.stdout)["training_step"]["found"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.ranks
def test_s0_19_a_script_that_hangs_is_ended(tmp_path):
    (tmp_path / "train.py").write_text("import threading\n\nthreading.Event().wait()\n")
    done = run_command("smoke", "train.py", "--timeout", "5", "--json", folder=tmp_path)
    found = rows_of(done.stdout)["training_step"]["found"]
    assert found.startswith("0 steps of 10; it had not ended after 5 s")


def test_s0_19_where_a_script_hung_is_its_own_last_line():
    log = (
        'File "/copy/train.py", line 3, in <module>\n  File "/lib/threading.py", line 9, in wait\n'
    )
    assert place_in(log, Path("/copy")) == "train.py:3"
    assert place_in(log, Path("/elsewhere")) == ""


@pytest.mark.ranks
def test_s0_19_the_headline_and_its_counts_agree(tmp_path):
    (tmp_path / "train.py").write_text("x = 1")
    done = run_command("smoke", "train.py", folder=tmp_path)
    assert done.stdout.startswith("not judged  train.py: 0 passed, 0 failed, 14 not judged, in ")


@pytest.mark.ranks
def test_s0_19_in_place_the_writes_are_real(tmp_path):
    (tmp_path / "train.py").write_text("open('new.txt', 'w').write('x')")
    run_command("smoke", "train.py", "--in-place", folder=tmp_path)
    assert (tmp_path / "new.txt").read_text() == "x"


def step(**changes) -> StepSeen:
    given = {"seconds": 0.1, "losses": [2.0], "grad_norm": 1.0, "memory_bytes": 10**8} | changes
    return StepSeen(**given)


def seen(two: tuple[str, str] | None = ("a", "a"), **changes) -> SeenScript:
    """A script of which everything held."""
    given = {
        "first_forward_at": 1.0, "model": "Net", "parameters": 9, "steps": [step()] * 10,
        "num_batches": 10, "num_different": 10, "data_s": 0.1, "tokens": 4, "text": "some words",
        "validation": Act(name="Net", count=2), "saves": [Act(name="a.pt", count=2, num_bytes=9)],
        "reload": Act(count=6), "inference": Act(count=1), "trained": 2, "unchanged": 0,
        "digest": "a", "backend": "gloo",
    } | changes  # fmt: skip
    both = None if two is None else [Observed(**given | {"digest": each}) for each in two]
    return SeenScript(
        asked_steps=10,
        limit_s=60,
        one=SeenRun(ranks=[Observed(**given)], lines=[], seconds=1.0, until_forward_s=0.5),
        two=None if both is None else SeenRun(ranks=both, lines=[], seconds=1.0),
    )


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, []),
        ({"has_one_batch": True}, ["data_loading"]),
        ({"text": " "}, ["tokenization"]),
        ({"unchanged": 2}, ["training_step"]),
        ({"validation": Act(problem="NaN")}, ["validation_step"]),
        ({"saves": [Act(name="a.pt", problem="1 of 2 tensors differ")]}, ["checkpoint_save"]),
        ({"reload": Act(problem="KeyError")}, ["checkpoint_load"]),
        ({"inference": Act(problem="NaN")}, ["inference"]),
        ({"steps": [step(losses=[9.0])] * 10}, ["loss_range"]),
        ({"steps": [step(memory_bytes=10**8 + n * 10**6) for n in range(10)]}, ["memory_leak"]),
        ({"steps": [step(grad_norm=0.0)] * 10}, ["gradients"]),
        ({"steps": [step(grad_norm=None)] * 10}, ["gradients", "nan_inf"]),
        ({"steps": [step(losses=[None])] * 10}, ["nan_inf"]),
        ({"two": ("a", "b")}, ["two_ranks"]),
    ],
)  # fmt: skip
def test_s0_19_one_broken_thing_of_a_script_fails_its_own_line(changes, failing):
    smoke = judge_script(seen(**changes), (1.0, 6.0))
    rows = (*smoke.steps, *smoke.checks)
    assert [row.name for row in rows if row.status == "fail"] == failing
    assert smoke.verdict == ("fail" if failing else "pass")


def test_a_copy_has_no_way_back_to_its_folder(tmp_path):
    source, outside = tmp_path / "source", tmp_path / "outside"
    outside.mkdir()
    (outside / "data.txt").write_text("data")
    (outside / "round").symlink_to(outside)
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a.txt").write_text("a")
    os.link(source / "sub" / "a.txt", source / "hard.txt")
    (source / "latest").symlink_to(source / "sub")
    (source / "there").symlink_to(outside)
    (source / "file").symlink_to(outside / "data.txt")
    (source / "nothing").symlink_to(tmp_path / "gone.txt")
    (source / "env").mkdir()
    (source / "env" / "pyvenv.cfg").touch()
    os.mkfifo(source / "pipe")
    listed = list_writable(source)
    copy = tmp_path / "copy"
    write_copy(listed, copy)
    for path in copy.rglob("*.txt"):
        path.write_text("overwritten")
    (copy / "file").write_text("overwritten")
    assert (copy / "latest" / "a.txt").read_text() == "overwritten"
    assert (copy / "there" / "round" / "data.txt").read_text() == "overwritten"
    assert all(path.resolve().is_relative_to(copy) for path in copy.rglob("*"))
    assert (source / "hard.txt").read_text() == "a"
    assert (outside / "data.txt").read_text() == "data"
    assert sorted(listed.left_out) == [
        "env (a virtual environment)", "nothing (a link to nothing)", "pipe (no plain file)",
    ]  # fmt: skip


@pytest.mark.parametrize("limit", ["MOST_BYTES", "MOST_FILES"])
def test_a_folder_that_is_too_large_is_refused_before_anything_is_copied(
    tmp_path: Path, monkeypatch, limit
):
    (tmp_path / "small.py").write_text("x")
    (tmp_path / "data").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "data" / name).write_text("many words")
    monkeypatch.setattr(scratch, limit, 2)
    with pytest.raises(JobError, match=r"(?s)data has most of it.*--in-place"):
        list_writable(tmp_path)
