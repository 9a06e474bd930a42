"""What can go wrong, in the reader's own words: problems, and one exception per exit code."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "`verify` ran, and the layout is not right; `checkpoint verify`, and some are damaged; "
    "`lint` or `data check`, and there are errors; `diagnose`, and no cause is known; `preflight`, "
    "and a machine is not fit; `doctor` or `smoke`, and a check fails; `sync`, and a host has "
    "other files; `adapt`, and something is left to you; `run --resume --check`, and the "
    "checkpoint has to be converted first",
    2: "the job file, an option or an input is wrong; nothing was started",
    3: "no layout fits, or the batch does not divide",
    4: "the run failed and could not be recovered",
    5: "no checkpoint is valid; `run --resume --check`, and the job cannot go on from it",
    6: "trained to the end, but the last state could not be saved",
    7: "stopped: it failed again and again without getting further; starting it again is no help",
    130: "interrupted: at a step boundary with a checkpoint, or at once when asked twice",
}
"""Every exit code of the command line and what it means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that clashes: what, where, and the change that mends it."""

    code: str
    """Stable id, such as `J003`; catalog/codes.md has a section for each."""

    what: str
    """The clash in the reader's own numbers."""

    where: str
    """The field and the file line, or the path."""

    fix: str
    """The change that mends it."""

    def __str__(self) -> str:
        return f"{self.code}: {self.what}\n  where: {self.where}\n  fix: {self.fix}"


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


class RunError(PacelineError):
    """The run failed and could not be recovered."""

    exit_code = 4


class CheckpointError(PacelineError):
    """No checkpoint is valid."""

    exit_code = 5


class CrashLoop(RunError):
    """The run fails at the same place however often it is tried."""

    exit_code = 7


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A question with the known name that is nearest, or nothing where none is near.

    >>> did_you_mean("ful", ["none", "full"])
    'did you mean `full`?'
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean `{near[0]}`?" if near else ""
