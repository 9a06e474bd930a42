"""Which settings make a resumed run another training than one that was never stopped."""

from pathlib import Path
from typing import Any

import pytest

from paceline.job import JobSpec, parse_job
from paceline.job.train_rules import other_training

JOB = "{name: a, model: {decoder: {layers: 1, hidden: 8, heads: 1}}, data: {path: t, seq_len: 8}}"


def spec(**train: Any) -> JobSpec:
    words = ", ".join(f"{name}: {value}" for name, value in {"global_batch": 8, **train}.items())
    return parse_job(JOB[:-1] + f", train: {{{words}}}}}", source="job.yaml", folder=Path()).spec


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_s0_9_more_steps_stretch_a_schedule_that_falls_to_the_end(schedule):
    before, after = (spec(steps=steps, schedule=schedule) for steps in (60, 75))
    assert other_training(before, after, 60) == ["train.steps was 60 and is 75"]


@pytest.mark.parametrize(
    ("schedule", "done"),
    [("constant", 60), ("wsd", 54), ("cosine", 0), ("cosine, warmup_steps: 9", 9)],
)
def test_s0_9_more_steps_change_nothing_where_the_steps_before_had_the_same_rate(schedule, done):
    before, after = (spec(steps=steps, schedule=schedule) for steps in (60, 75))
    assert other_training(before, after, done) == []


def test_s0_9_a_decay_that_had_begun_is_no_longer_the_one_of_a_longer_run():
    before, after = (spec(steps=steps, schedule="wsd") for steps in (60, 75))
    assert other_training(before, after, 55) == ["train.steps was 60 and is 75"]


def test_s0_9_every_setting_that_changes_a_steps_numbers_is_named():
    before = spec(steps=60, learning_rate=0.1)
    after = spec(steps=60, learning_rate=0.2, clip_norm=0.5, gradient_compression="bf16")
    assert other_training(before, after, 1) == [
        "train.learning_rate was 0.1 and is 0.2",
        "train.clip_norm was 1.0 and is 0.5",
        "train.gradient_compression was none and is bf16",
    ]
