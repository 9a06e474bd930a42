"""The page and the table of a script's run: what is known, and nothing else."""

from paceline.record import events as log
from paceline.record.metrics import StepMetrics
from paceline.record.script_profile import Part, ScriptProfile
from paceline.report.script_page import render_script_page
from paceline.report.script_text import profile_lines

PROFILE = ScriptProfile(
    steps=5,
    after=3,
    step_s=0.1,
    phases=[Part(name="backward", seconds=0.06)],
    communication=[Part(name="all_reduce", seconds=0.02, calls=2)],
    operators=[Part(name="aten::<mm>", seconds=0.01, calls=3)],
)


def page(**known) -> str:
    values = {"name": "mine", "folder": "runs/mine", "job_text": "command: [x]\n", "events": []}
    return render_script_page(**(values | known))


def test_steps_losses_and_the_profile_are_on_the_page():
    lines = [
        StepMetrics(step=n, generation=1, at=n, loss=3.0 / n, num_steps=9, not_finite=[])
        for n in range(1, 4)
    ]
    events = [log.Evaluated(at=1.0, generation=1, step=3, loss=1.5)]
    text = page(metrics=lines, events=events, profile=PROFILE)
    assert "Step 3 of 9." in text
    assert "Loss 1 at step 3, 3 at first." in text
    assert "Evaluation loss 1.5 at step 3." in text
    assert "<svg" in text
    assert "60%" in text
    assert "aten::&lt;mm&gt;" in text


def test_what_is_not_known_has_no_place():
    text = page()
    assert "no steps or losses" in text
    assert "<svg" not in text
    assert "None" not in text
    assert "null" not in text


def test_a_profile_is_a_table_and_too_few_steps_are_named():
    lines = list(profile_lines(PROFILE))
    assert lines[2].split() == ["backward", "60", "ms", "60%"]
    assert lines[3].split()[-1] == "2"
    (short,) = profile_lines(ScriptProfile(steps=0, after=2))
    assert short == "not measured: only 2 optimizer steps"
