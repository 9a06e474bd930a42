"""Runs beside each other."""

import json

import pytest
from tests.record.made_runs import (
    JOB,
    PLAN,
    add_line,
    evaluated,
    finished,
    job_with,
    make_run,
    started,
)

from paceline.record.compare import compare_runs


def values(found):
    return {one.name: one.values for one in found}


def test_only_settings_that_differ_are_listed_unless_all_are_asked_for(tmp_path):
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", job=job_with(learning_rate=0.1))
    found = compare_runs([a, b])
    assert values(found.settings) == {"train.learning_rate": (0.003, 0.1)}
    every = compare_runs([a, b], all_settings=True)
    assert values(every.settings)["train.seed"] == (0, 0)
    assert found.num_same_settings == every.num_same_settings == len(every.settings) - 1


def test_a_setting_that_one_job_does_not_have_is_unknown_there(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", job=job_with(extra=1))]
    assert values(compare_runs(runs).settings) == {"train.extra": (None, 1)}


def test_plans_that_chose_differently_show_what(tmp_path):
    other = {**PLAN, "layout": {"data": 1, "micro_batch": 4}, "rejected": [1, 2, 3]}
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", plan=other)]
    assert values(compare_runs(runs).plan) == {"layout.data": (2, 1)}


def test_code_and_packages_that_differ_are_named(tmp_path):
    runs = []
    for name, commit, torch in (("a", "aa", "2.12"), ("b", "bb", "2.13")):
        runs.append(make_run(tmp_path / name))
        code = {"commit": commit, "is_dirty": False, "diff_sha256": None}
        packages = {"torch": torch, "click": "8.1"}
        start = {"command": ["x"], "host": "h", "python": "3.11", "packages": packages}
        add_line(runs[-1] / "starts.jsonl", {**start, "code": code})
    found = values(compare_runs(runs).code)
    assert found == {"commit": ("aa", "bb"), "package torch": ("2.12", "2.13")}


def test_curves_are_cut_into_the_same_stretches_without_losing_a_spike(tmp_path):
    a = make_run(tmp_path / "a", losses=[1.0] * 50 + [9.0] + [1.0] * 49, events=[started()])
    b = make_run(tmp_path / "b", losses=[2.0] * 50, events=[started()])
    curves = {one.name: one for one in compare_runs([a, b], points=4).curves}
    loss = curves["train/loss"]
    assert loss.steps == [25, 50, 75, 100]
    assert loss.high[0] == [1.0, 1.0, 9.0, 1.0]
    assert loss.mean[0][2] == pytest.approx(1.32)
    assert loss.mean[1] == [2.0, 2.0, None, None]


def test_evaluations_and_the_programs_own_numbers_are_curves_too(tmp_path):
    lines = {"logged": {"val/accuracy": 0.5}}
    events = [started(), evaluated(0, 3.0), evaluated(2, 2.0)]
    a = make_run(tmp_path / "a", losses=[1.0, 2.0], events=events, lines=lines)
    curves = {one.name: one for one in compare_runs([a]).curves}
    assert (curves["eval/loss"].steps, curves["eval/loss"].mean) == ([0, 2], [[3.0, 2.0]])
    assert curves["val/accuracy"].mean == [[0.5, 0.5]]
    assert "speed/mfu" not in curves


def test_a_repeated_step_counts_as_it_was_done_last(tmp_path):
    a = make_run(tmp_path / "a", losses=[3.0, 2.0], events=[started()])
    add_line(a / "metrics.jsonl", {"step": 2, "loss": 1.0})
    (curve, *_) = compare_runs([a]).curves
    assert curve.mean == [[3.0, 1.0]]


def test_throughput_is_the_median_of_all_steps_and_memory_that_of_the_fullest_rank(tmp_path):
    a = make_run(tmp_path / "a", losses=[1.0] * 101, events=[started(), finished()])
    found = values(compare_runs([a]).measured)
    assert (found["tokens_per_s"], found["memory_bytes"]) == ((1051.0,), (700,))


def with_digests(folder, losses, *, digest="d", state=None, end=None):
    events = [started(), *([finished(state_digest=end)] if end else [])]
    lines = {"samples_digest": digest, "state_digest": state}
    return make_run(folder, losses=losses, events=events, lines=lines)


def test_bits_are_equal_where_all_digests_are(tmp_path):
    runs = [with_digests(tmp_path / name, [1.0, 2.0], state="s", end="e") for name in "ab"]
    (bits,) = compare_runs(runs).bits
    assert (bits.samples.is_same, bits.losses.is_same, bits.state.is_same) == (True, True, True)
    assert bits.largest_loss_difference == 0.0


def test_bits_that_differ_name_the_first_step_and_how_far(tmp_path):
    a = with_digests(tmp_path / "a", [1.0, 2.0, 3.0], end="e")
    b = with_digests(tmp_path / "b", [1.0, 2.5, 3.0], end="f")
    (bits,) = compare_runs([a, b]).bits
    assert (bits.losses.first_difference, bits.losses.num_steps) == (2, 3)
    assert bits.largest_loss_difference == pytest.approx(0.2)
    assert bits.state.is_same is False


def test_bits_that_nobody_recorded_are_unknown_and_not_equal(tmp_path):
    runs = [with_digests(tmp_path / name, [1.0], digest="") for name in "ab"]
    (bits,) = compare_runs(runs).bits
    assert (bits.samples.is_same, bits.state.is_same) == (None, None)


def test_ends_at_different_steps_say_nothing_of_the_state(tmp_path):
    a = with_digests(tmp_path / "a", [1.0, 2.0], end="e")
    b = with_digests(tmp_path / "b", [1.0], end="e")
    assert compare_runs([a, b]).bits[0].state.is_same is None


def test_a_damaged_run_and_a_script_can_be_compared(tmp_path):
    a = make_run(tmp_path / "a", losses=[1.0], events=[started()])
    (a / "plan.json").write_text("nothing")
    (a / "job.yaml").write_text("{")
    b = make_run(tmp_path / "b", job={"name": "s", "command": ["x"]}, plan=None)
    found = compare_runs([a, b])
    assert [row.state for row in found.runs] == ["damaged", "new"]
    json.dumps([one.name for one in found.settings])
    assert JOB["name"] == "tiny"
