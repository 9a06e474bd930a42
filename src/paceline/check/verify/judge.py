"""The judgement of a verification: every line, from recorded facts alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.check.verify.bits import (
    check_elsewhere,
    check_recompute,
    check_repeat,
    check_resume,
)
from paceline.check.verify.copies import (
    check_copies,
    check_dropout,
    check_ranks,
    check_samples,
    check_shards,
)
from paceline.check.verify.equality import (
    check_compression,
    check_job_precision,
    check_same_sums,
    check_wide,
)
from paceline.check.verify.line import Line
from paceline.record.verification import Facts

CHECKS: tuple[Callable[[Facts], Iterator[Line]], ...] = (
    check_ranks,
    check_samples,
    check_shards,
    check_wide,
    check_same_sums,
    check_job_precision,
    check_copies,
    check_repeat,
    check_resume,
    check_elsewhere,
    check_recompute,
    check_dropout,
    check_compression,
)
"""In the order in which a person should read them: the first may explain what comes after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All lines of a verification."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    """What was made smaller than the job, and what is not covered."""

    @property
    def failed(self) -> tuple[Line, ...]:
        """The lines that are wrong."""
        return tuple(line for line in self.lines if line.status == "fail")

    @property
    def is_right(self) -> bool:
        """Whether nothing failed, and something was looked at."""
        return not self.failed and any(line.status == "pass" for line in self.lines)


def judge(facts: Facts) -> Verdict:
    """Every line, in the order of `CHECKS`."""
    lines = tuple(line for check in CHECKS for line in check(facts))
    return Verdict(lines=lines, notes=facts.case.notes)
