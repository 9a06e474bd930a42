"""The table of metric names, and what it makes of the lines of a run."""

import re
from dataclasses import fields

import msgspec
import pytest

from paceline.record.events import Evaluated
from paceline.record.machines import MachineSample, numbers_of_machine
from paceline.record.metric_names import (
    FIELDS,
    METRICS,
    find_metric,
    numbers_of,
    numbers_of_evaluation,
)
from paceline.record.metrics import StepMetrics

LINE = StepMetrics(
    step=3,
    generation=1,
    at=1000.0,
    loss=2.5,
    grad_norm=None,
    learning_rate=0.1,
    tokens_per_s=400.0,
    step_s=0.25,
    forward_s=0.1,
    backward_s=0.1,
    vote_s=0.0,
    apply_s=0.01,
    memory_bytes=1 << 20,
    applied=True,
    samples_digest="",
    logged={"own": 7.0},
)


def test_every_name_is_an_area_and_lower_case_words():
    assert [name for name in METRICS if not re.fullmatch(r"[a-z]+/[a-z_]+", name)] == []


def test_every_field_is_one_of_a_steps_line():
    assert set(FIELDS) <= {field.name for field in fields(StepMetrics)}


def test_a_steps_line_gives_its_numbers_by_name_and_what_was_logged_as_it_is():
    numbers = numbers_of(LINE)
    assert numbers["train/loss"] == 2.5
    assert numbers["speed/tokens_per_s"] == 400.0
    assert numbers["train/grad_norm"] is None
    assert numbers["own"] == 7.0


def test_what_a_script_did_not_print_is_left_out_and_what_was_not_finite_is_none():
    line = StepMetrics(step=3, generation=1, at=1.0, loss=2.5, not_finite=["grad_norm"])
    assert numbers_of(line) == {"train/loss": 2.5, "train/grad_norm": None}


def test_a_line_of_plain_json_gives_the_same_numbers_as_the_record():
    assert numbers_of(msgspec.json.decode(msgspec.json.encode(LINE))) == numbers_of(LINE)


def test_a_line_without_some_fields_gives_the_numbers_it_has():
    assert numbers_of({"step": 1, "loss": 4.0}) == {"train/loss": 4.0}


def test_an_evaluation_gives_the_loss_of_each_source():
    event = Evaluated(step=3, loss=2.0, seconds=1.0, by_source={"web": 1.5}, accuracy=0.5)
    assert numbers_of_evaluation(event) == {
        "eval/loss": 2.0,
        "eval/accuracy": 0.5,
        "eval/loss/web": 1.5,
    }


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("train/loss", "train/loss"),
        ("loss", "train/loss"),
        ("memory_bytes", "memory/peak_bytes"),
        ("eval_loss", "eval/loss"),
        ("gpu_temperature_c", "gpu/temperature_c"),
        ("Loss/train", "train/loss"),
        ("val/loss", "eval/loss"),
    ],
)
def test_a_metric_is_found_by_its_name_its_field_and_the_words_of_other_tools(word, name):
    metric = find_metric(word)
    assert metric is not None
    assert metric.name == name


def test_everything_that_a_machine_is_asked_has_its_row():
    numbers = dict.fromkeys(("cpu_utilization", "received_bytes_per_s"), 1.0)
    integers = dict.fromkeys(("memory_bytes", "disk_free_bytes"), 1)
    sample = MachineSample(at=1.0, node=0, **numbers, **integers)
    names = [name for name, _, _ in numbers_of_machine(sample)]
    assert len(names) == 4
    assert [name for name in names if name not in METRICS] == []


def test_an_unknown_word_finds_no_metric():
    assert find_metric("own") is None
