"""Rules of the section `evaluate`."""

from pathlib import Path

import pytest

from paceline.errors import JobError
from paceline.job import parse_job
from paceline.job.evaluate_rules import check_measured, kept_every, most_kept, num_best

TEXT = """\
model: {decoder: {layers: 2, hidden: 32, heads: 2}}
data: {path: x}
train: {global_batch: 8, steps: 100}
"""


def read(*overrides: str):
    return parse_job(TEXT, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)


def test_early_stopping_keeps_the_best_checkpoint():
    assert num_best(read().spec) == 0
    assert num_best(read("evaluate.patience=3").spec) == 1
    assert num_best(read("evaluate.patience=3", "checkpoint.keep_best=2").spec) == 2


@pytest.mark.parametrize("name", ["evaluate.patience", "checkpoint.keep_best"])
def test_what_goes_by_the_evaluation_loss_is_refused_without_one(name):
    with pytest.raises(JobError) as caught:
        read(f"{name}=3", "data.held_out=0")
    (problem,) = caught.value.problems
    assert problem.what == f"{name} goes by the evaluation loss, and data.held_out is 0"
    assert problem.where == f"{name}, --set"


def test_min_delta_without_patience_is_refused():
    with pytest.raises(JobError, match="without evaluate"):
        read("evaluate.min_delta=0.1")


def test_checkpoints_of_chosen_steps_are_kept_beside_those_of_keep_every():
    asked = ("evaluate.prompts=p.txt", "evaluate.outputs_every=20")
    assert kept_every(read().spec) is None
    assert most_kept(read().spec) == 4
    assert kept_every(read(*asked).spec) == 20
    assert most_kept(read(*asked).spec) == 9
    assert kept_every(read(*asked, "checkpoint.keep_every=10").spec) == 10
    assert kept_every(read(*asked, "checkpoint.keep_every=40").spec) == 20
    with pytest.raises(JobError, match="neither is a multiple"):
        read(*asked, "checkpoint.keep_every=30")


def test_chosen_steps_with_nothing_to_do_are_refused():
    with pytest.raises(JobError, match="outputs_every 20 is given without prompts and tasks"):
        read("evaluate.outputs_every=20")


def test_evaluations_without_held_out_data_are_refused_before_a_run_and_not_of_an_earlier_one():
    job = read("evaluate={every: 2, samples: 8}", "data.held_out=0")
    whats = [each.what for each in check_measured(job.spec, job.where)]
    assert whats == [
        "evaluate.every goes by the evaluation loss, and data.held_out is 0",
        "evaluate.samples goes by the evaluation loss, and data.held_out is 0",
    ]
    for good in (read("data.held_out=0"), read("evaluate={every: 2, samples: 8}")):
        assert not list(check_measured(good.spec, good.where))
