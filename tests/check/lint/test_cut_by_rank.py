"""Samples that are cut by rank by hand: found where a rank may have a batch more than another."""

from pathlib import Path

import pytest
from tests.check.lint.marked_cases import lint_program

from paceline.check.finding import Severity
from paceline.check.lint.context import Context

PROGRAMS = Path(__file__).parent / "programs"
SUBSET = (PROGRAMS / "bad_ninth_subset_cut_by_rank.py").read_text()
FILES = (PROGRAMS / "bad_ninth_files_cut_by_rank.py").read_text()
STREAM = (PROGRAMS / "bad_ninth_stream_cut_by_rank.py").read_text()


def found_in(text: str) -> list[Severity]:
    findings = lint_program("train.py", text, Context())
    return [one.severity for one in findings if one.id == "uneven-inputs-hang"]


@pytest.mark.parametrize("text", [SUBSET, FILES, STREAM])
def test_s3_4_samples_cut_by_rank_are_a_hint_that_names_the_condition(text):
    assert found_in(text) == [Severity.INFO]
    (finding,) = [
        one for one in lint_program("t.py", text, Context()) if one.id == "uneven-inputs-hang"
    ]
    assert "where their number is no multiple of the number of ranks" in finding.what


@pytest.mark.parametrize(
    ("text", "was", "becomes"),
    [
        (SUBSET, "shuffle=True)", "shuffle=True, drop_last=True)"),
        (SUBSET, "range(rank, len(data), world)", "range(0, len(data), world)"),
        (SUBSET, "range(rank, len(data), world)", "range(rank * 8, (rank + 1) * 8)"),
        (SUBSET, "    for epoch in range(20):", "    with model.join():"),
        (SUBSET, "            opt.step()", "            opt.step()\n            break"),
        (SUBSET, "DDP(torch.nn.Linear(4, 1))", "torch.nn.Linear(4, 1)"),
        (FILES, "files[rank::world]", "files[: len(files) // world * world][rank::world]"),
        (FILES, "files[rank::world]", "files[::world]"),
        (STREAM, "            yield from", "          while True:\n            yield from"),
        (STREAM, "self.rank, None", "0, None"),
    ],
)
def test_s3_4_equal_parts_joins_and_loops_that_end_alike_are_left_alone(text, was, becomes):
    assert was in text
    assert found_in(text.replace(was, becomes)) == []
