"""The data by which lint is judged on code of others (benchmarks/data) keeps its own rules."""

import csv
import hashlib
import re
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import pytest  # noqa: E402
from lint_levels import Record, earned, levels, read_bases, rows, without_worth  # noqa: E402
from lint_precision import read_judgements, repositories, unseen  # noqa: E402
from lint_recall import Fault, read_faults, read_named  # noqa: E402

from paceline.catalog.failure import load_failures  # noqa: E402


def test_a_failure_has_the_level_that_its_record_has_earned() -> None:
    set_ = {name: one.lint for name, one in load_failures().items() if one.lint is not None}
    assert levels(unseen()) == set_


def repositories_named(number: int) -> set[str]:
    return {f"owner/{each}" for each in range(number)}


@pytest.mark.parametrize(
    ("basis", "right", "wrong", "unseen_right", "unseen_wrong", "level"),
    [
        ("refused", 0, 0, 0, 0, "error"),
        ("refused", 0, 0, 0, 1, "info"),  # corrected since, but for the one that was seen
        ("proof", 2, 0, 2, 0, "info"),
        ("proof", 3, 0, 2, 0, "error"),
        ("proof", 9, 1, 0, 0, "warning"),
        ("proof", 8, 1, 0, 0, "info"),
        ("proof", 12, 0, 8, 1, "info"),
        ("proof", 12, 0, 9, 1, "error"),
        ("absence", 2, 0, 2, 0, "info"),
        ("absence", 3, 0, 2, 0, "warning"),
        ("condition", 3, 0, 0, 0, "warning"),
        ("name", 30, 0, 4, 6, "info"),
        ("own", 0, 0, 0, 0, "error"),
    ],
)
def test_a_level_is_earned_by_three_independent_cases_of_which_nine_in_ten_are_right(
    basis: str, right: int, wrong: int, unseen_right: int, unseen_wrong: int, level: str
) -> None:
    record = Record(*map(repositories_named, (right, wrong, unseen_right, unseen_wrong)))
    assert earned(basis, record) == level


def test_what_only_slows_a_run_is_no_error() -> None:
    known, found = load_failures(), levels(unseen())
    slow = [name for name in read_bases() if known[name].effect == "degraded"]
    assert slow
    assert "error" not in {found[name] for name in slow}


def test_the_hash_of_a_name_decides_its_half_unless_its_findings_were_read_before() -> None:
    halved = [one for one in repositories() if not one.half.startswith("fresh")]
    for one in halved:
        even = hashlib.sha256(one.name.encode()).digest()[-1] % 2 == 0
        assert one.half == ("away" if even and not one.seen else "open"), one.name


def test_a_hint_is_supported_by_three_cases_in_the_code_of_others_or_is_promised() -> None:
    assert without_worth(unseen()) == []


def test_what_is_promised_names_a_row_of_the_capabilities() -> None:
    told = (BENCHMARKS.parent / "docs" / "capabilities.md").read_text(encoding="utf-8")
    for row in rows("lint_basis.csv"):
        assert not row["promised"] or f"| {row['promised']} |" in told, row["rule"]


def test_every_judgement_is_of_a_listed_repository_at_its_commit() -> None:
    listed = {(one.name, one.commit[:12]) for one in repositories()}
    assert {key[:2] for key in read_judgements()} <= listed


def test_a_fault_is_listed_once_with_a_whole_commit() -> None:
    faults = read_faults()
    assert len({(one.commit, one.file) for one in faults}) == len(faults) >= 60
    assert all(re.fullmatch(r"[0-9a-f]{40}", one.commit) for one in faults)


def test_what_a_rule_names_is_said_of_listed_faults_alone() -> None:
    assert set(read_named()) <= {(one.commit, one.file) for one in read_faults()}


def test_the_last_digit_of_a_commit_decides_the_half_of_a_fault() -> None:
    fault = {"repository": "a/b", "file": "c.py", "kind": "seed", "shown_by": "file", "fault": "-"}
    assert Fault(commit="0" * 40, **fault).half == "open"
    assert Fault(commit="0" * 39 + "f", **fault).half == "away"


def test_the_name_of_a_repository_decides_the_half_of_a_fault_of_the_third_sample() -> None:
    third = [one for one in read_faults() if one.sample == "3"]
    for one in third:
        even = hashlib.sha256(one.repository.encode()).digest()[-1] % 2 == 0
        assert one.half == ("away" if even else "open"), one.repository
    assert {one.half for one in third} == {"away", "open"}


def test_the_data_holds_no_code() -> None:
    for path in (BENCHMARKS / "data").glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            texts = [row[-1] for row in csv.reader(file)]
        assert all("\n" not in text and len(text) < 200 for text in texts), path.name
