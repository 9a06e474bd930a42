"""docs/reference/engines-tested.md is written from what the tests of engines recorded."""

import importlib.util
from pathlib import Path

from paceline.render import ENGINES

ROOT = Path(__file__).parent.parent.parent
SPEC = importlib.util.spec_from_file_location("engine_table", ROOT / "scripts/engine_table.py")
assert SPEC is not None
assert SPEC.loader is not None
table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(table)

LINE = {
    "engine": "torchrun",
    "kind": "ran",
    "what": "DDP, 2 ranks",
    "outcome": "passed",
    "reason": "",
    "versions": {"torch": "2.13.0"},
    "seconds": 27.8,
    "date": "2026-11-22",
    "test": "a",
}


def test_the_page_is_what_the_kept_runs_make_of_it():
    text = table.PAGE.read_text()
    assert table.page(text, table.read(table.KEPT)) == text


def test_every_engine_that_is_rendered_has_its_row():
    assert [row[0] for row in table.rows([])] == list(ENGINES)


def test_of_a_test_that_ran_twice_the_last_counts_and_only_passing_ones_are_kept():
    failed = LINE | {"outcome": "failed", "test": "b"}
    again = LINE | {"seconds": 9.0}
    (kept,) = table.keep([LINE], [failed, again])
    assert kept["seconds"] == 9.0


def test_what_ran_in_two_ways_is_said_once_with_both_times():
    (row,) = [
        row
        for row in table.rows([LINE, LINE | {"test": "b", "seconds": 9.0}])
        if row[0] == "torchrun"
    ]
    assert row[4] == "DDP, 2 ranks: 28 and 9 s"


def test_a_failed_run_is_no_run_and_is_said():
    (row,) = [row for row in table.rows([LINE | {"outcome": "failed"}]) if row[0] == "torchrun"]
    assert row[1] == "-"
    assert row[4] == "failed: DDP, 2 ranks"
