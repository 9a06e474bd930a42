"""What each pipeline schedule needs: one row, read by the planner, the laws and the runtime."""

from pathlib import Path
from typing import get_args

import numpy as np

import paceline
from paceline.choices import Schedule
from paceline.choices.pipeline_schedules import SCHEDULE_FACTS
from paceline.parallel.table import SCHEDULES, code_of
from paceline.parallel.word_columns import (
    is_in_v,
    least_rounds,
    splits_backward,
    stages_each,
    takes_rounds,
)

SOURCE = Path(paceline.__file__).parent
NAMES_A_SCHEDULE = {
    "choices/pipeline_schedules.py",
    "estimate/schedule.py",
    "runtime/strategy/pipeline/schedules.py",
}
"""Besides engines, which say what they have of it and what they call it."""


def test_every_schedule_has_a_row():
    assert set(SCHEDULE_FACTS) == set(get_args(Schedule))


def test_a_schedule_is_named_in_three_files_and_by_engines():
    files = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if '"dualpipe-v"' in path.read_text(encoding="utf-8")
    }
    engines = {name for name in files if name.startswith("render/")}
    assert files - engines <= NAMES_A_SCHEDULE


def test_columns_say_what_the_rows_say():
    codes = np.array([code_of("schedule", word) for word in SCHEDULES])
    ones, twos = np.ones(len(codes), int), np.full(len(codes), 2)
    in_v = dict(zip(SCHEDULES, is_in_v(codes, ones), strict=True))
    assert [word for word, is_v in in_v.items() if is_v] == ["dualpipe-v"]
    in_v = dict(zip(SCHEDULES, is_in_v(codes, twos), strict=True))
    assert [word for word, is_v in in_v.items() if is_v] == ["zero-bubble", "dualpipe-v"]
    loops = dict(zip(SCHEDULES, takes_rounds(codes, ones), strict=True))
    assert [word for word, is_loop in loops.items() if is_loop] == ["interleaved", "zero-bubble"]
    for word, code in zip(SCHEDULES, codes, strict=True):
        facts = SCHEDULE_FACTS[word]
        assert splits_backward(code) == facts.splits_backward
        assert least_rounds(code) == facts.least_rounds
        assert stages_each(code, 1) == (2 if facts.chunks == "two" else 1)
