"""What a script's profile means."""

import pytest

from paceline.check.script_profile import limits_of, verdict_of
from paceline.record.script_profile import Part, ScriptProfile
from paceline.report.script_text import advice_lines


def profile(busy: float | None = None, communication: float = 0.0, **phases: float):
    names = {"rest": "everything else"}
    return ScriptProfile(
        steps=5,
        after=3,
        step_s=1.0,
        phases=[Part(name=names.get(name, name), seconds=s) for name, s in phases.items()],
        communication=[Part(name="all_reduce", seconds=communication)],
        busy=busy,
        peak_bytes=2**30,
    )


@pytest.mark.parametrize(
    ("found", "names", "verdict"),
    [
        (profile(data=0.6, forward=0.2, backward=0.2), ["data"], "data limits the step: 60% of it"),
        (
            profile(data=0.06, forward=0.3, backward=0.5, optimizer=0.1, rest=0.04),
            ["optimizer", "data"],
            "the model limits the step: forward and backward are 80%",
        ),
        (
            profile(busy=0.3, forward=0.3, backward=0.5, rest=0.2, communication=0.4),
            ["waiting for the host", "communication", "everything else"],
            "waiting for the host limits the step: 70% of it",
        ),
        (
            profile(busy=1.0, forward=0.4, backward=0.6),
            [],
            "the model limits the step: forward and backward are 100%",
        ),
    ],
)
def test_s0_10_what_limits_a_scripts_step_is_said_largest_first(found, names, verdict):
    assert [limit.name for limit in limits_of(found)] == names
    assert verdict_of(found) == verdict


def test_s0_10_a_scripts_advice_has_use_and_memory():
    first, second = advice_lines(profile(busy=0.9, forward=0.5, backward=0.5))
    assert first.endswith("; the accelerator computes 90% of it; 1 GiB at the peak")
    assert second.startswith("1. waiting for the host, up to 10% of a step: ")


def test_too_few_steps_have_no_limit():
    found = ScriptProfile(steps=0, after=2)
    assert limits_of(found) == list(advice_lines(found)) == []
