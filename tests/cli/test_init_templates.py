"""`paceline init --template`: each project is whole, can be planned, and trains on two ranks."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from tests.command import run_command
from tests.run.scene import Scene

from paceline.cli import COMMANDS
from paceline.job import load_job
from paceline.plan import plan_job
from paceline.record import events as log

NAMES = (
    *("classification-full", "domain-adapt", "multi-adapter", "peft-quick", "sentiment"),
    *("text-gen-lora", "trade-classifier"),
)


@pytest.mark.parametrize("name", NAMES)
def test_s0_24_a_template_is_planned_for_two_ranks_of_this_machine(name: str, tmp_path: Path):
    done = run_command("init", "--template", name, folder=tmp_path)
    assert f"paceline run {name}/job.yaml" in done.stderr
    job_file, read = tmp_path / name / "job.yaml", tmp_path / name / "README.md"
    assert plan_job(load_job(job_file)).layout.num_ranks == 2
    shown = re.findall(r"^paceline .*", read.read_text(), re.MULTILINE)
    assert f"paceline run {name}/job.yaml" in {line.partition("  ")[0] for line in shown}
    for line in shown:
        words = shlex.split(line, comments=True)
        assert words[1] in COMMANDS
        of_a_run = words[1] in ("export", "report")  # the others are given a job or its data
        assert any(word.startswith("runs/" if of_a_run else f"{name}/") for word in words[2:])
        load_job(job_file, tuple(to for option, to in pairwise(words) if option == "--set"))


@pytest.mark.repeat  # that each can be planned is above; such jobs are run in `tests/run/`
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["classification-full", "peft-quick"])
def test_s0_24_a_template_learns_on_two_ranks(name: str, tmp_path: Path):
    scene = Scene(tmp_path)
    assert scene.paceline("init", "--template", name, ".", "--force").returncode == 0
    run = scene.run("run")
    losses = [evaluated.loss for evaluated in run.of(log.Evaluated)]
    assert losses[-1] < losses[0]
    assert len(run.of(log.Recovered)) == (name == "classification-full")


@pytest.mark.repeat
@pytest.mark.ranks
def test_s0_24_domain_adaptation_trains_all_weights_and_then_an_adapter_beside_them(tmp_path: Path):
    scene = Scene(tmp_path)
    assert scene.paceline("init", "--template", "domain-adapt", ".", "--force").returncode == 0
    first = scene.run("first")
    assert scene.paceline("plan", "adapter.yaml").returncode == 2  # it needs the first's weights
    assert scene.paceline("export", "first", "model").returncode == 0
    done = scene.paceline("run", "adapter.yaml", "--no-report", "--out", "task")
    assert done.returncode == 0, done.stderr
    for run in (first, scene.record("task")):
        losses = [evaluated.loss for evaluated in run.of(log.Evaluated)]
        assert losses[-1] < losses[0]


def test_s0_24_a_wrong_name_lists_the_templates(tmp_path: Path):
    done = run_command("init", "--template", "sentimnet", folder=tmp_path)
    assert done.returncode == 2
    assert "J008: there is no template sentimnet\n  where: --template\n" in done.stderr
    assert f"fix: choose one of {', '.join(NAMES)}\n" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_s0_24_a_folder_that_exists_is_left_as_it_is(tmp_path: Path):
    (tmp_path / "job.yaml").write_text("mine")
    done = run_command("init", "--template", "sentiment", ".", folder=tmp_path)
    assert done.returncode == 2
    assert "J008: . exists" in done.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
