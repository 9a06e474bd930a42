"""`paceline smoke SCRIPT`: really observed steps, in a copy that no write leaves."""

import json
import os
from pathlib import Path

import pytest
from tests.command import run_command
from torch import nn

from paceline.check.smoke import CAUSES, Smoke, judged, unjudged
from paceline.check.smoke_script import judge_script
from paceline.cli.smoke import _show
from paceline.errors import JobError
from paceline.launch import scratch
from paceline.launch.scratch import list_writable, write_copy
from paceline.launch.smoke_script import SeenRun, SeenScript, place_in
from paceline.record.metrics import StepMetrics
from paceline.record.script_observed import Act, Observed, StepSeen
from paceline.runtime.script_tensors import models_of, names_of

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

TWO_MODELS = """
import copy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
painter, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
critic[0].bias.requires_grad_(False)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
of_painter = torch.optim.SGD(painter.parameters(), lr=0.01)
idle = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.01)
while True:
    noise = torch.randn(4, 4)
    (critic(painter(noise).detach()).mean() - critic(torch.ones(4, 8)).mean()).backward()
    of_critic.step()
    critic.zero_grad()
    loss = -checkpoint(critic, painter(noise), use_reentrant=False).mean()
    loss.backward()
    of_painter.step()
    painter.zero_grad()
    print("loss", loss.item())
    with torch.no_grad():
        critic(painter(noise))
    torch.save(copy.deepcopy(critic), "copy.pt")
    torch.save(critic, "critic.pt")
"""

DETACHED = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    hidden = model[0](torch.randn(8, 4)).detach()
    optimizer.zero_grad()
    model[1](hidden).square().mean().backward()
    optimizer.step()
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
    answer = json.loads(done.stdout)
    assert (answer["verdict"], answer["not_judged"]) == ("pass", ["tokenization", "metrics"])
    assert answer["about"] == ["not in the copy: log.txt (a link to nothing)"]
    assert (tmp_path / "checkpoint.pt").read_text() == "weeks of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint.pt", "elsewhere", "log.txt", "train.py",
    ]  # fmt: skip
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["same.pt"]


@pytest.mark.ranks
def test_s0_19_all_models_are_judged_and_can_be_pickled_and_copied(tmp_path):
    (tmp_path / "train.py").write_text(TWO_MODELS)
    done = run_command("smoke", "train.py", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    assert not json.loads(done.stdout)["about"]
    assert rows["validation_step"]["value"] == 18
    assert rows["model_loading"]["found"].startswith("Sequential and Linear, 113 trained")
    assert rows["training_step"]["found"].startswith("10 steps of the first of 2 optimizers, ")
    assert "1 other optimizer did none and is not judged" in rows["training_step"]["found"]
    assert rows["gradients"]["found"].endswith("5 of 5 tensors changed")
    assert "read back equal, 4 tensors" in rows["checkpoint_save"]["found"]
    assert rows["checkpoint_load"]["value"] == 6
    assert rows["inference"]["value"] == 2
    assert rows["metrics"]["found"].endswith("with loss, printed or logged")


@pytest.mark.ranks
def test_s0_19_a_detached_part_fails_by_name(tmp_path):
    (tmp_path / "train.py").write_text(DETACHED)
    done = run_command("smoke", "train.py", "--json", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    assert [name for name, row in rows.items() if row["status"] == "fail"] == ["gradients"]
    assert "2 tensors never had a gradient: Linear.weight" in rows["gradients"]["found"]
    assert "detach()" in rows["gradients"]["fix"]
    assert "25 trained parameters" in rows["model_loading"]["found"]
    assert rows["checkpoint_load"]["value"] == 4


def ids_of(*modules: nn.Module) -> set[int]:
    return {id(each) for module in modules for each in module.parameters()}


def test_s0_19_models_are_the_largest_modules_that_hold_what_is_trained():
    inner, other, frozen = nn.Linear(3, 3), nn.Linear(2, 2), nn.Linear(9, 9)
    whole = nn.Sequential(inner, nn.Linear(3, 1))
    called = [inner, whole, nn.Sequential(whole), frozen, other]
    assert models_of(called, ids_of(whole, other)) == [whole, other]
    assert set(names_of([whole]).values()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert set(names_of([inner, other]).values()) == {"Linear.weight", "Linear.bias"}


def test_s0_19_the_model_of_an_optimizer_with_weights_of_its_own_is_the_largest_module():
    small, large = nn.Linear(2, 2), nn.Linear(3, 3)
    assert models_of([large, small], ids_of(nn.Linear(3, 3))) == [large]
    assert models_of([], set()) == []


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("script", "verdict", "says"),
    [
        ("raise ValueError('no weights')", "fail", "ValueError: no weights"),
        ("import sys; sys.exit(3)", "fail", "exited with 3"),
        ("import argparse; p = argparse.ArgumentParser(); p.add_argument('x'); p.parse_args()",
         "fail", "the following arguments are required: x"),
        # Another syntax error, and another script without a step, are beside them.
        pytest.param("\0\1\2", "fail", "SyntaxError: source code", marks=pytest.mark.repeat),
        ("x = 1\ndef f(:", "fail", "SyntaxError: invalid syntax (train.py:2)"),
        ("open('new.txt', 'w').write('x')", "not judged", "no step of a torch optimizer was seen"),
        pytest.param("print('step 1 loss 0.5')", "not judged",
                     "no step of a torch optimizer was seen", marks=pytest.mark.repeat),
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


def test_s0_19_the_headline_of_a_pass_names_what_was_not_judged(capsys):
    rows = (judged("training_step", True, "x"), unjudged("metrics", "it prints none"))
    _show(Smoke(steps=rows, checks=(unjudged("loss_range", "none given"),)), [], Path("a.py"), 3)
    headline = capsys.readouterr().out.splitlines()[0]
    assert headline == (
        "pass in part  a.py: 1 passed, 0 failed, 2 not judged (metrics, loss_range), in 3 s"
    )
    _show(Smoke(steps=rows[:1], checks=()), [], Path("a.py"), 3)
    assert capsys.readouterr().out.startswith("pass  a.py: 1 passed, 0 failed, 0 not judged, in")


@pytest.mark.ranks
def test_s0_19_in_place_the_writes_are_real_and_the_headline_has_the_counts(tmp_path):
    (tmp_path / "train.py").write_text("open('new.txt', 'w').write('x')")
    done = run_command("smoke", "train.py", "--in-place", folder=tmp_path)
    assert (tmp_path / "new.txt").read_text() == "x"
    assert done.stdout.startswith("not judged  train.py: 0 passed, 0 failed, 14 not judged, in ")


def step(**changes) -> StepSeen:
    given = {"seconds": 0.1, "losses": [2.0], "grad_norm": 1.0, "memory_bytes": 10**8} | changes
    return StepSeen(**given)


def seen(two: tuple[str, str] | None = ("a", "a"), **changes) -> SeenScript:
    """A script of which everything held."""
    given = {
        "first_forward_at": 1.0, "models": ["Net"], "parameters": 9, "steps": [step()] * 10,
        "num_batches": 10, "num_different": 10, "data_s": 0.1, "tokens": 4, "text": "some words",
        "validation": Act(name="Net", count=2), "saves": [Act(name="a.pt", count=2, num_bytes=9)],
        "reload": Act(count=6), "inference": Act(count=1), "trained": 2, "unchanged": [],
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
        ({"unchanged": ["a", "b"]}, ["training_step"]),
        ({"unchanged": ["a"]}, []),
        ({"unchanged": ["a"], "no_gradient": ["a"]}, ["gradients"]),
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


def gradients_of(**changes):
    checks = judge_script(seen(**changes), None).checks
    return next(row for row in checks if row.name == "gradients")


def test_s0_19_the_fix_for_gradients_is_that_of_what_is_wrong():
    assert gradients_of(steps=[step(grad_norm=None)]).fix == CAUSES["nan_inf"]
    assert gradients_of(no_gradient=["a"]).fix == CAUSES["gradients"]


def test_s0_19_tensors_that_did_not_change_are_named():
    found = gradients_of(trained=9, unchanged=list("abcde"), no_gradient=["a"]).found
    assert "; 1 tensor never had a gradient: a; " in found
    assert found.endswith("4 of 9 tensors changed, not b, c, d and 1 more")


def test_s0_19_a_time_that_we_measured_is_no_metric_of_the_script():
    script = seen()
    script.one.lines = [StepMetrics(step=1, generation=0, at=1.0, num_steps=None, step_s=0.1)]
    row = next(row for row in judge_script(script, None).steps if row.name == "metrics")
    assert row.status == "not judged"


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
