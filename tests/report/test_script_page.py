"""The page and the table of a script's run: what is known, and nothing else."""

from dataclasses import replace

import pytest
from tests.report import made

from paceline.record import events as log
from paceline.record.metrics import StepMetrics
from paceline.record.script_profile import Part, ScriptProfile
from paceline.report.page import render_page, render_tables
from paceline.report.picture import picture
from paceline.report.script_text import profile_lines
from paceline.report.view import view_of

PROFILE = ScriptProfile(
    steps=5,
    after=3,
    step_s=0.1,
    phases=[Part(name="backward", seconds=0.06)],
    communication=[Part(name="all_reduce", seconds=0.02, calls=2)],
    operators=[Part(name="aten::<mm>", seconds=0.01, calls=3)],
)


def record(events=(), metrics=(), **known):
    return replace(made.record(events, metrics, with_plan=False), job=None, **known)


def test_steps_losses_and_the_profile_are_on_the_page():
    lines = [
        StepMetrics(step=n, generation=1, at=made.T0 + n, loss=3.0 / n, num_steps=9, not_finite=[])
        for n in range(1, 4)
    ]
    events = [made.started(), log.Evaluated(at=made.T0 + 3, generation=1, step=3, loss=1.5)]
    script = record(events, lines, profile=PROFILE, is_running=True)
    shown = picture(view_of(script))
    assert "step 3 of 9" in shown["head"]["sentence"]
    assert [chart["name"] for chart in shown["head"]["charts"]] == ["train/loss"]
    steps, evaluations = shown["tables"]
    assert steps["curves"]["train/loss"]["mean"] == [3, 1.5, 1]
    assert evaluations["curves"]["eval/loss"]["mean"] == [1.5]
    text = render_tables(script)
    assert "60%" in text
    assert "aten::&lt;mm&gt;" in text


def test_lines_of_several_steps_without_a_loss_are_counted_and_not_taken_for_nan():
    lines = [
        StepMetrics(step=5, generation=1, at=made.T0 + 5, loss=3.0, step_s=1.0, not_finite=[]),
        StepMetrics(step=10, generation=1, at=made.T0 + 10, step_s=1.0, not_finite=[]),
    ]
    finished = made.finished(10, step=10)
    evaluated = log.Evaluated(at=made.T0 + 9, generation=1, step=9, loss=1.5)
    script = record([made.started(), evaluated, finished], lines)
    tiles = {tile["name"]: tile["note"] for tile in picture(view_of(script))["head"]["tiles"]}
    assert tiles["Evaluation loss"] == "on data that is not trained on; training loss 3.000"
    assert tiles["Wall time"].startswith("60")  # the first line counts as one step


@pytest.mark.parametrize(("rate", "unit"), [(80.0, "samples"), (8000.0, "tokens")])
def test_a_rate_of_a_batch_in_a_step_counts_samples(rate, unit):
    line = StepMetrics(
        step=1, generation=1, at=made.T0, tokens_per_s=rate, step_s=0.1, not_finite=[]
    )
    view = view_of(record([made.started()], [line]))
    assert replace(view, is_program=True, global_batch=8).unit == unit


def test_what_is_not_known_has_no_place():
    text = render_tables(record())
    assert "profile" not in text
    assert "None" not in text.replace("None was written", "")
    assert "null" not in text
    assert picture(view_of(record()))["head"]["charts"] == []
    assert "Not started yet." in render_page(record())


def test_a_profile_is_a_table_and_too_few_steps_are_named():
    lines = list(profile_lines(PROFILE))
    assert lines[2].split() == ["backward", "60", "ms", "60%"]
    assert lines[3].split()[-1] == "2"
    (short,) = profile_lines(ScriptProfile(steps=0, after=2))
    assert short == "not measured: only 2 optimizer steps"
