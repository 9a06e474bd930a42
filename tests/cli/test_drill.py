"""What `paceline drill` says of its run before there is one."""

import time

import pytest
import yaml
from click.testing import CliRunner
from tests.run.scene import JOB

from paceline.check.drill.schedule import random_schedule
from paceline.cli import drill
from paceline.errors import JobError


@pytest.fixture
def job(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("pace line\n" * 500)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(JOB | {"train": JOB["train"] | {"steps": 60}}))
    return str(file)


def test_help_says_how_many_steps_are_run_when_none_are_given():
    told = " ".join(CliRunner().invoke(drill.command, ["--help"]).output.split())
    assert "Left out: the job's, but at most 40 unless a fault comes later; then 10 more" in told


@pytest.mark.parametrize(
    ("steps", "given", "says"),
    [
        (40, False, "40 of 60: enough to see the faults and the run go on; --steps 60 for all"),
        (70, False, "70, the job has 60: 10 after the last fault"),
        (30, True, "30 of 60, as --steps says"),
        (60, False, "all 60 of the job"),
    ],
)
def test_a_run_of_another_length_than_the_job_says_why(steps, given, says):
    assert drill._length(steps, 60, given=given) == says


def test_more_random_faults_than_steps_are_refused_with_how_many_fit(job, tmp_path):
    arguments = [job, "--random", "100000", "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(drill.command, arguments, standalone_mode=False)
    assert isinstance(done.exception, JobError)
    (problem,) = done.exception.problems
    assert "100000 faults do not fit into a run of 40 steps" in problem.what
    assert problem.where == "--random"
    assert problem.fix.startswith("--random 34, or --steps 100006; ")
    assert not (tmp_path / "runs").exists()


def test_s1_18_a_fault_beyond_the_jobs_steps_is_refused_and_does_not_lengthen_it(job, tmp_path):
    fault = "kill rank=0 step=99999"
    arguments = [job, "--fault", fault, "--set", "train.steps=40", "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(drill.command, arguments, standalone_mode=False)
    assert isinstance(done.exception, JobError)
    (problem,) = done.exception.problems
    assert problem.code == "R061"
    assert problem.what == f"{fault}: the steps are 1 to 40"
    assert "raise train.steps" in problem.fix
    assert not (tmp_path / "runs").exists()


def test_a_hundred_thousand_faults_are_drawn_at_once():
    began = time.process_time()
    faults = random_schedule(3, num_faults=100_000, num_ranks=2, first_step=2, last_step=100_001)
    assert len(faults) == 100_000
    assert time.process_time() - began < 5
