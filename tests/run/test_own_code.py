"""A person's own training function, right and wrong."""

import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.run.scene import Scene

from paceline.errors import CrashLoop
from paceline.record import events as log

pytestmark = pytest.mark.ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-code"

PROGRAM = """
import torch
from torch import nn
from paceline.runtime import Session

def build_model():
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 1))

def train(session: Session) -> None:
    points = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    model = session.build(build_model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in session.steps(model, optimizer):
        for ids in step.micro_batches(len(points)):
            loss = (model(points[ids]) - points[ids].sum(1, keepdim=True)).square().mean()
            {fault}
            step.backward(loss)
        {apply}
"""


def own_scene(folder, *, fault: str = "pass", apply: str = "step.apply()") -> Scene:
    scene = Scene(folder)
    scene.job = {
        "name": "own",
        "model": {"factory": "mine:build_model"},
        "program": "mine:train",
        "cluster": {"accelerator": "cpu", "per_node": 2},
        "train": {"global_batch": 8, "steps": 12, "learning_rate": 0.01, "precision": "fp32"},
        "checkpoint": {"every": 4},
        "recovery": {"max_restarts": 1},
    }
    scene.write_job()
    text = PROGRAM.replace("{fault}", fault).replace("{apply}", apply)
    (scene.folder / "mine.py").write_text(text)
    return scene


@pytest.mark.repeat  # code of one's own recovers in the next test
def test_the_example_logs_its_accuracy_in_every_steps_line_and_recovers(tmp_path):
    scene = Scene(tmp_path)
    for name in ("job.yaml", "train.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    options = ("--set", "train.steps=12", "--set", "drill.kill=[rank=0@step=6@apply]")
    run = scene.run("run", *options, "--set", "metrics.sinks=[tensorboard]")
    without = [line.step for line in run.metrics if "accuracy" not in line.logged]
    assert set(without) <= {6}, "only the step that the failure cut off may be without"
    assert all(0 <= line.logged["accuracy"] <= 1 for line in run.metrics if line.logged)
    assert run.finished.step == 12
    scene.paceline("runs", "send", "run", "--to", "tensorboard")  # what a starved sink left
    shown = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == list(range(1, 13))
    assert shown.Scalars("eval/loss")[-1].step == 12


@pytest.mark.parametrize("sharding", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_own_code_with_dropout_and_batch_norm_recovers_to_the_same_bits(tmp_path, sharding):
    scene = own_scene(tmp_path)
    program = scene.folder / "mine.py"
    program.write_text(program.read_text().replace("nn.ReLU()", "nn.BatchNorm1d(16)"))
    option = ("--set", f"layout.sharding={sharding}")
    clean = scene.run("clean", *option)
    kills = "drill.kill=[rank=1@step=4, rank=0@step=9@apply]"
    killed = scene.run("killed", *option, "--set", kills, "--set", "recovery.max_restarts=2")
    assert killed.digest == clean.digest
    assert killed.samples == clean.samples


@pytest.mark.slow  # the quick one is row 20 in `tests/drill/test_fault_matrix.py`
def test_a_loss_that_is_not_finite_on_one_rank_is_refused_by_all_and_training_goes_on(tmp_path):
    is_poison = "(session.place.rank, step.number) == (1, 3)"
    zero = "loss * 0 if step.number > 4 else loss"  # a gradient of zero is one like any other
    poison = f"loss = loss * float('nan') if {is_poison} else {zero}"
    run = own_scene(tmp_path, fault=poison).run("run")
    (refused,) = run.of(log.StepRefused)
    assert (refused.step, refused.reason) == (3, "the loss is not finite on rank 1")
    assert [line.step for line in run.metrics if not line.applied] == [3]
    assert run.finished.step == 12


@pytest.mark.repeat  # one refused step is row 20 in `tests/drill/test_fault_matrix.py`
def test_steps_that_are_refused_again_and_again_end_the_run(tmp_path):
    scene = own_scene(tmp_path, fault="loss = loss * float('inf')")
    run = scene.run("run", "--set", "train.max_refused_steps=3", code=4)
    assert "R022: " in run.output
    assert "RunError" not in run.output
    assert run.finished.restarts == 0


def test_an_exception_before_the_first_step_is_shown_and_not_retried_also_if_it_is_no_unicode(
    tmp_path,
):
    fault = "raise ValueError('my own mistake ' + chr(0xDCFF) + ' name')"
    run = own_scene(tmp_path, fault=fault).run("run", code=4)
    assert "ValueError: my own mistake \\udcff name" in run.output
    assert run.finished.restarts == 0
    (lost,) = run.of(log.WorkerLost)
    assert "my own mistake" in (run.folder / f"logs/rank-{lost.rank}.log").read_text()


@pytest.mark.slow  # the quick one exits instead, below
def test_a_batch_that_always_raises_ends_the_run_after_the_restarts_allowed(tmp_path):
    scene = own_scene(tmp_path, fault="assert step.number != 6, 'poison'")
    run = scene.run("run", code=7)
    assert run.finished.restarts == 1
    assert "made no progress, last finished step 5" in run.output


POISON = "assert not (step.number == 6 and 3 in ids.tolist() + [3] * session.place.rank), 'poison'"
"""Rank 1 raises in step 6, whatever process it is."""


@pytest.mark.slow  # the quick one is row 21 in `tests/drill/test_fault_matrix.py`
def test_a_poison_batch_stops_the_run_and_is_named_by_its_sample_ids(tmp_path):
    scene = own_scene(tmp_path, fault=POISON)
    run = scene.run("run", "--set", "recovery.max_restarts=3", code=7)
    assert "step 6 raised it on two processes: a poison batch, sample ids" in run.output
    assert run.of(log.WorkerLost)[-1].cause == "data or software"
    assert len({lost.pid for lost in run.of(log.WorkerLost)}) == 2
    assert not run.of(log.NodeSetAside)


@pytest.mark.repeat  # that it is named is row 21 in `tests/drill/test_fault_matrix.py`
def test_a_poison_batch_is_left_out_by_every_rank_when_the_job_says_skip(tmp_path):
    scene = own_scene(tmp_path, fault=POISON)
    option = ("--set", "recovery.max_restarts=3", "--set", "recovery.poison=skip")
    run = scene.run("run", *option)
    (skipped,) = run.of(log.BatchSkipped)
    assert skipped.step == 6
    assert len(skipped.samples) == 4
    (refused,) = run.of(log.StepRefused)
    assert refused.reason.startswith("poison batch, sample ids")
    assert [line.step for line in run.metrics if not line.applied] == [6]
    assert [line.step for line in run.metrics] == list(range(1, 13))


@pytest.mark.slow  # the quick one is row 22 in `tests/drill/test_fault_matrix.py`
def test_a_full_memory_is_told_apart_and_not_held_against_the_node(tmp_path):
    full = "session.place.generation < 2 and step.number == 4 and torch.empty(10**15)"
    scene = own_scene(tmp_path, fault=full)
    run = scene.run("run", "--set", "recovery.max_restarts=9", "--set", "recovery.node_strikes=1")
    lost = run.of(log.WorkerLost)
    assert {event.cause for event in lost} == {"out of memory"}
    assert not run.of(log.NodeSetAside)


@pytest.mark.repeat  # the decision is in `tests/control/test_script_run.py`
def test_a_worker_that_exits_quietly_is_no_success(tmp_path):
    scene = own_scene(
        tmp_path, fault="import os; step.number == 6 and session.is_first and os._exit(0)"
    )
    run = scene.run("run", code=CrashLoop.exit_code)
    assert "exited with 0 without a completion record" in run.output
    assert run.finished.restarts == 1
    assert "made no progress, last finished step 5" in run.output


@pytest.mark.parametrize(
    ("program", "text"),
    [
        pytest.param("nothing:train", "nothing", marks=pytest.mark.slow),
        ("mine:absent", "absent"),
    ],
)
def test_a_program_that_cannot_be_imported_is_named(tmp_path, program, text):
    run = own_scene(tmp_path).run("run", "--set", f"program={program}", code=2)
    assert "R023" in run.output
    assert text in run.output


def test_a_model_that_cannot_be_built_is_named_before_anything_starts(tmp_path):
    done = own_scene(tmp_path).paceline("run", "job.yaml", "--set", "model.factory=mine:absent")
    assert done.returncode == 2
    assert "J009" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_micro_batch_left_out_is_named_and_does_not_drift(tmp_path):
    run = own_scene(tmp_path, fault="break").run("run", code=4)
    assert "R024" in run.output
    assert "called 0 times for 1 micro-batch" in run.output


READS = """
import torch
from torch import nn
from paceline.runtime import Session

class Rows:
    "Map-style, with samples that draw."
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.arange(4.0) * index + torch.rand(4)

class Drawn:
    "Iterable, with a state."
    def __init__(self, rank, ranks):
        self.rank, self.ranks, self.at, self.order = rank, ranks, 0, None

    def __iter__(self):
        if self.order is None:
            self.order = torch.randperm(22).tolist()
        while self.at < 11:
            self.at += 1
            yield torch.full((1, 4), float(self.order[self.at * self.ranks - 1 - self.rank]))
        self.at, self.order = 0, None

    def state_dict(self):
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state):
        self.at, self.order = state["at"], state["order"]

def build_model():
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 1))

def train(session: Session) -> None:
    rows = session.loader(Rows(), num_workers=1)
    drawn = session.stream("drawn", Drawn)
    model = session.build(build_model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in session.steps(model, optimizer):
        for points in step.batches(rows if step.number % 2 else drawn):
            step.backward((model(points / 30) - points.mean(1, keepdim=True)).square().mean())
        step.apply()
"""


def test_a_dataset_and_an_iterable_with_a_state_are_read_on_exactly_after_kills(tmp_path):
    scene = own_scene(tmp_path)
    (scene.folder / "mine.py").write_text(READS)
    clean = scene.run("clean")
    # In mid-epoch of both; the second kill takes the process that has lived since the beginning.
    kills = "drill.kill=[rank=1@step=6, rank=0@step=10@apply]"
    killed = scene.run("killed", "--set", kills, "--set", "recovery.max_restarts=2")
    assert killed.digest == clean.digest
    assert killed.samples == clean.samples
    assert [bool(digest) for _, digest in clean.samples] == [True, False] * 6
