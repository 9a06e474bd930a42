"""docs/capabilities.md: every row has tests that carry its id, and every such test has a row."""

import re
from collections import Counter
from pathlib import Path

from paceline.cli import COMMANDS

ROOT = Path(__file__).parents[2]
NUMBERS = {"S0": 27, "S1": 21, "S2": 16, "S3": 13, "S4": 22}
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs/capabilities.md").read_text().splitlines()
    if re.match(r"\| S\d-\d+ ", line)
]


def ids_of_tests() -> set[str]:
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= set(re.findall(r"def test_s(\d_\d+)_", path.read_text()))
    return {f"S{each.replace('_', '-')}" for each in found}


def test_there_are_ninety_nine_ids_and_each_row_has_one_of_them_once():
    known = {f"{document}-{n}" for document, most in NUMBERS.items() for n in range(1, most + 1)}
    ids = [row[0] for row in ROWS]
    assert len(known) == 99
    assert len(ids) == len(set(ids))
    assert set(ids) == known


def test_the_page_counts_its_rows():
    states = Counter(row[2] for row in ROWS)
    said = f"{states['whole']} are whole, {states['part']} are part and {states['withdrawn']} is"
    assert said in (ROOT / "docs/capabilities.md").read_text()


def test_rows_and_tests_name_the_same_ids():
    assert {row[0] for row in ROWS} == ids_of_tests()


def test_every_row_says_its_state_and_a_command_that_there_is():
    for id, _, state, command, *limits in ROWS:
        assert state in ("whole", "part", "withdrawn"), id
        verb = re.match(r"`paceline[ .]([a-z_]+)", command)
        assert verb, id
        assert verb[1] in COMMANDS or verb[1] == "all_ranks_agree", id
        assert state == "whole" or limits, id
