"""What can go wrong, in the reader's own words: problems, and one exception per exit code."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "a check failed, or what was asked for was not found",
    2: "the job file, an option or an input is wrong; nothing was started",
    3: "no layout fits, or the batch cannot be divided",
    4: "the run failed and could not be recovered",
    5: "no checkpoint is valid, or none that this job can resume from",
    6: "trained to the end, but the last state could not be saved",
    7: "failed again and again at the same place; starting again does not help",
    130: "interrupted: stopped at a step boundary with a checkpoint",
}
"""Every exit code of the command line and what it means, in a line of 80 columns."""

EXIT_1: dict[str, str] = {
    "verify": "the layout does not compute what one device computes",
    "checkpoint verify": "a checkpoint is damaged",
    "lint": "there are findings of severity error",
    "data check": "the data has errors",
    "diagnose": "no cause is known",
    "preflight": "a machine is not fit for the job",
    "doctor": "a check failed",
    "smoke": "a step of the pipeline failed",
    "sync": "a host has other files",
    "adapt": "something is left to you",
    "run --resume --check": "the checkpoint must be converted first",
}
"""Command -> what its exit code 1 means; the others have none, or their own `--help` says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that clashes: what, where, and the change that fixes it."""

    code: str
    """Stable id, such as `J003`; catalog/codes.md has a section for each."""

    what: str
    """The clash in the reader's own numbers."""

    where: str
    """The field and the file line, or the path."""

    fix: str
    """The change that fixes it."""

    def __str__(self) -> str:
        fix = self.fix.replace("; or ", "\n       or ")
        return f"{self.code}: {self.what}\n  where: {self.where}\n  fix: {fix}"


def reason_of(error: BaseException, *, most: int = 300) -> str:
    """An exception on one line: its class and the first line of its text, cut to `most` characters.

    >>> reason_of(ValueError("no such layer\\nmore"))
    'ValueError: no such layer'
    """
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:most]}"


class PacelineError(Exception):
    """Something the reader can fix. Shown without a traceback; `exit_code` ends the process."""

    exit_code = 2

    def __init__(self, *problems: Problem) -> None:
        self.problems: Sequence[Problem] = problems
        super().__init__("\n".join(str(problem) for problem in problems))

    @classmethod
    def of(cls, *, code: str, what: str, where: str, fix: str) -> Self:
        """The error of one problem."""
        return cls(Problem(code=code, what=what, where=where, fix=fix))

    @classmethod
    def raise_for(cls, problems: Iterable[Problem]) -> None:
        """Raise the error of all these problems, where there are any."""
        if found := list(problems):
            raise cls(*found)


class JobError(PacelineError):
    """The job file, an option or an input is wrong."""

    exit_code = 2


class PlanError(PacelineError):
    """No layout satisfies the job."""

    exit_code = 3

    needed_bytes: int | None = None
    """What the leanest layout takes of a rank, where memory is all that lacks."""


class RunError(PacelineError):
    """The run failed and could not be recovered."""

    exit_code = 4


class CheckpointError(PacelineError):
    """No checkpoint is valid."""

    exit_code = 5


class CrashLoop(RunError):
    """The run fails at the same place however often it is tried."""

    exit_code = 7


def nearest(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names that are spelled most like this one, the nearest first."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A question with the known name that is nearest, or nothing where none is near.

    >>> did_you_mean("ful", ["none", "full"])
    'did you mean `full`?'
    """
    near = nearest(name, known, cutoff=cutoff)
    return f"did you mean `{near[0]}`?" if near else ""
