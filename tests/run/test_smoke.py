"""`paceline smoke`: nine steps and five checks, really run, and how each of them fails."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.command import run_command

from paceline.check.smoke import judge
from paceline.errors import Problem
from paceline.launch.drill import Ran
from paceline.launch.smoke import Seen
from paceline.record import events as log
from paceline.record.conversion import LogitsCheck
from paceline.record.metrics import StepMetrics
from paceline.record.run import RunFolder

NAMES = (
    *("data_loading", "tokenization", "model_loading", "training_step", "validation_step"),
    *("checkpoint_save", "checkpoint_load", "inference", "metrics"),
    *("loss_range", "memory_leak", "gradients", "nan_inf", "two_ranks"),
)
JOB = """
model: {decoder: {layers: 2, hidden: 32, heads: 2}}
data: {path: text, seq_len: 32}
train: {global_batch: 64, steps: 100000, learning_rate: 0.003, warmup_steps: 500, precision: bf16}
cluster: {accelerator: cpu, nodes: 4, per_node: 8}
layout: {tensor: 8, sharding: none}
"""
LARGE_JOB = """
model: {factory: "large:build"}
program: "large:train"
train: {global_batch: 64, steps: 10}
cluster: {accelerator: H100-SXM, nodes: 4, per_node: 8}
"""
LARGE = """
from torch import nn

def build():
    return nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(100)))

def train(session):
    raise SystemExit("not reached")
"""


def line(step: int, **changes) -> StepMetrics:
    found = StepMetrics(
        step=step, generation=1, at=100.0 + step, loss=5.0 - step / 10, grad_norm=1.0,
        learning_rate=1e-3, tokens_per_s=100.0, step_s=0.5, data_s=0.0, memory_bytes=10**8,
        samples_digest=f"{step}",
    )  # fmt: skip
    return replace(found, **changes)


def ran(**changes) -> Ran:
    started = log.TrainingStarted(
        first_step=1, checkpoint="step-00000005", pids=[1, 2], backend="gloo", world_size=2
    )
    found = Ran(
        run=RunFolder(Path("run")), events=[started], lines=[line(step) for step in range(1, 11)],
        left_behind=(), seconds=1.0,
    )  # fmt: skip
    finished = log.RunFinished(
        outcome="finished", step=10, state_digest="a" * 64, held_out_loss=4.0, restarts=0,
        reason=None, baseline_bytes=[], peak_bytes=[],
    )  # fmt: skip
    return replace(found, events=[started, finished], **changes)


def whole(**changes) -> Seen:
    """A job of which everything held."""
    lines = [line(step) for step in range(1, 11)]
    seen = Seen(
        asked_steps=10, lines=lines, memory=[10**8] * 10, data_s=0.1,
        data_found="9 samples in 1 files", token_s=0.1, tokens=32, text="some words",
        parameters=100, digest="a" * 64, again=ran(), two=ran(), inference_s=1.0,
        inference=LogitsCheck(samples=8, largest_difference=1e-6, largest_logit=3.0),
        events=[
            log.WorkerStarted(at=99.0, rank=0, node=0, pid=1),
            log.CheckpointSaved(step=10, checkpoint="step-00000010", num_bytes=9, write_s=0.1),
            log.Evaluated(step=10, loss=4.0, seconds=0.1),
        ],
    )  # fmt: skip
    for name, value in changes.items():
        setattr(seen, name, value)
    return seen


def statuses(seen: Seen, loss_range=(1.0, 6.0)) -> dict[str, str]:
    smoke = judge(seen, loss_range)
    return {row.name: row.status for row in (*smoke.steps, *smoke.checks)}


def test_s0_19_a_whole_pipeline_passes_all_nine_steps_and_five_checks_with_a_number_each():
    smoke = judge(whole(), (1.0, 6.0))
    rows = (*smoke.steps, *smoke.checks)
    assert tuple(row.name for row in rows) == NAMES
    assert {row.status for row in rows} == {"pass"}
    assert all(row.value is not None for row in rows)
    assert smoke.verdict == "pass"


def with_lines(**changes) -> list[StepMetrics]:
    return [line(step, **(changes if step == 7 else {})) for step in range(1, 11)]


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"lines": [replace(line(n), samples_digest="same") for n in range(1, 11)]},
         ["data_loading"]),
        ({"text": " "}, ["tokenization"]),
        ({"lines": with_lines(applied=False)}, ["training_step"]),
        ({"damage": "a file is cut off"}, ["checkpoint_save"]),
        ({"digest": "b" * 64}, ["checkpoint_load"]),
        ({"inference": LogitsCheck(problem=Problem(code="C013", what="no", where="", fix=""))},
         ["inference"]),
        ({"memory": [10**8 + step * 10**6 for step in range(10)]}, ["memory_leak"]),
        ({"lines": with_lines(grad_norm=0.0)}, ["gradients"]),
        ({"unchanged": ("head.weight",)}, ["gradients"]),
        ({"lines": with_lines(loss=None)}, ["loss_range", "nan_inf", "two_ranks"]),
        ({"two": ran(lines=[line(n, loss=5.1) for n in range(1, 11)])}, ["two_ranks"]),
        ({"lines": with_lines(loss=9.0), "two": ran(lines=with_lines(loss=9.0))}, ["loss_range"]),
    ],
)  # fmt: skip
def test_s0_19_one_broken_thing_fails_its_own_line_and_the_whole(changes, failing):
    found = statuses(whole(**changes))
    assert [name for name, status in found.items() if status == "fail"] == failing
    assert judge(whole(**changes), (1.0, 6.0)).verdict == "fail"


def test_s0_19_memory_that_warms_up_and_then_stays_is_no_leak():
    warm = [10**8, 2 * 10**8, 3 * 10**8, 3 * 10**8, 3 * 10**8, 3 * 10**8, 31 * 10**7, 31 * 10**7]
    assert statuses(whole(memory=warm))["memory_leak"] == "pass"


def test_s0_19_a_loss_range_that_nobody_gave_is_not_called_passed():
    assert statuses(whole(), None)["loss_range"] == "not judged"


def test_s0_19_a_run_that_failed_at_once_fails_and_leaves_the_rest_unseen():
    seen = Seen(asked_steps=10, why_failed="ValueError: no")
    found = statuses(seen, None)
    assert found["model_loading"] == found["training_step"] == "fail"
    assert found["checkpoint_load"] == found["two_ranks"] == "not judged"


def rows_of(stdout: str) -> dict[str, dict]:
    answer = json.loads(stdout)
    return {row["name"]: row for row in (*answer["steps"], *answer["checks"])}


@pytest.mark.ranks
def test_s0_19_a_job_for_a_cluster_is_really_run_here_on_one_rank_and_on_two(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for number in range(4):
        words = f"the quick brown fox {number} jumps over the lazy dog\n" * 40
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    (tmp_path / "job.yaml").write_text(JOB.replace("path: text", "path: 'text/*.txt'"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    words = ("smoke", "job.yaml", "--loss-range", "0:9", "--steps", "8", "--json")
    done = run_command(*words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(NAMES, "pass")
    assert rows["checkpoint_load"]["value"] == 1
    assert rows["training_step"]["found"].startswith("8 steps, ")
    assert "2 ranks, gloo" in rows["two_ranks"]["found"]
    about = json.loads(done.stdout)["about"]
    assert about[0].startswith("in fp32, not bf16")
    assert about[1:] == ["layout.tensor 2, not 8"]
    assert list(temporary.glob("paceline-smoke-*")) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none.yaml",), "there is no file none.yaml"),
        (("none.py",), "  where: none.py\n"),
        (("folder.py",), "folder.py is a folder, and no program of Python's"),
        (("../outside.py",), "R077: ../outside.py is not in this folder"),
        (("job.yaml", "--in-place"), "Arguments go with a script: --in-place is one too many"),
        (("own.py", "--set", "processes=2"), "--set of a script takes environment.NAME=VALUE"),
        (("job.yaml", "--loss-range", "5"), "5 is not LOW:HIGH"),
        (("job.yaml", "--loss-range", "nan:1"), "nan:1 is not LOW:HIGH"),
        (("job.yaml", "more"), "Arguments go with a script"),
        (("program.yaml",), "`command` is a program of its own"),
        (("large.yaml",), "R076: the model of large:train is too large for a smoke run"),
    ],
)
def test_s0_19_what_cannot_be_tried_is_refused_with_the_reason(tmp_path, words, says):
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "program.yaml").write_text("command: [python, train.py]\n")
    (tmp_path / "text").write_text("all work and no play " * 200)
    (tmp_path / "large.py").write_text(LARGE)
    (tmp_path / "large.yaml").write_text(LARGE_JOB)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "own.py").write_text("x = 1")
    (tmp_path.parent / "outside.py").write_text("x = 1")
    done = run_command("smoke", *words, folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
