"""Processes that are ranks of a helper (`verify`, `bench`, `calibrate`): started together, heard,
and ended.

Leaves out: ranks of a run, which the agents start and restart.
"""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.control.environment import spins
from paceline.control.error_texts import names_lost_peer
from paceline.errors import JobError, PacelineError, PlanError, Problem, RunError
from paceline.units import counted

OnProgress = Callable[[str], None]

_PATIENCE_S = 3.0
"""For the other ranks to say what they know, once one has failed. A guess: they notice a closed
connection at once, and write a small file."""

_POLL_S = 0.1
"""Between two looks at the processes. A guess: short beside their start, which takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """What a command of such ranks reports where they fail by themselves."""

    code: str
    where: str
    late: str
    """What to change where they take too long."""

    died: str
    """What to change where one of them dies."""

    def problem(self, what: str, fix: str) -> Problem:
        return Problem(code=self.code, what=what, where=self.where, fix=fix)


def surroundings(threads: int | None) -> dict[str, str]:
    """The environment of a rank; of one that meets others over gloo, with its share of the cores
    and the interface of this machine alone."""
    found = dict(os.environ)
    if threads is not None:
        found.setdefault("OMP_NUM_THREADS", str(threads))
        found |= spins(found)
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return found


class RankProcess:
    """One rank's process, and what it says."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        mark: str,
        read_problems: Callable[[], Sequence[Problem]] = tuple,
    ) -> None:
        """Args:
        log: Where all that it prints goes.
        mark: What its lines of progress begin with.
        read_problems: What it wrote about its end; nothing when it wrote nothing.
        """
        self.rank = rank
        self.read_problems = read_problems
        self._command = command
        self._log = log
        self._environment = environment
        self._mark = mark
        self._told = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self._environment),
            )

    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._process is not None, "it was started"
        return self._process.poll()

    def progress(self) -> list[str]:
        """New lines about how far it is."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()[: text.count("\n")]
        new, self._told = lines[self._told :], len(lines)
        return [line.removeprefix(self._mark) for line in new if line.startswith(self._mark)]

    def last_line(self) -> str:
        """Last line of what it printed about its end."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = [line for line in lines if not line.startswith((self._mark, "[rank", "USDT:"))]
        return said[-1] if said else f"it ended with {self.exit_code()}"

    def end(self) -> None:
        """Gone, however it is."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def run_ranks(
    ranks: Sequence[RankProcess],
    *,
    limit_s: float,
    on_progress: OnProgress,
    failing: Failing,
) -> None:
    """Start them, and return once all have ended well; none is left behind.

    Args:
        failing: Its code is also that of what the ranks write about an end that nobody can fix.

    Raises:
        JobError, PlanError: What a person can fix, as the ranks report.
        RunError: They took too long, or a rank failed by itself.
    """
    try:
        for rank in ranks:
            rank.start()
        _wait(ranks, limit_s, on_progress, failing)
    finally:
        for rank in ranks:
            rank.end()


def _wait(
    ranks: Sequence[RankProcess], limit_s: float, on_progress: OnProgress, failing: Failing
) -> None:
    end = time.monotonic() + limit_s
    while True:
        codes = [rank.exit_code() for rank in ranks]
        for line in ranks[0].progress():
            on_progress(line)
        if any(codes):
            raise _failure(ranks, failing)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            what = f"{counted(len(ranks), 'rank')} took longer than {limit_s:.0f} s"
            raise RunError(failing.problem(what, failing.late))
        time.sleep(_POLL_S)


def _failure(ranks: Sequence[RankProcess], failing: Failing) -> PacelineError:
    """What a person can fix first, then the first that failed by itself and not because another
    one was gone."""
    first_end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < first_end and any(rank.exit_code() is None for rank in ranks):
        time.sleep(_POLL_S)
    failed = [rank for rank in ranks if rank.exit_code()]
    own = [rank for rank in failed if not names_lost_peer(rank.last_line())]
    first = (own or failed)[0]
    end = failing.problem(f"rank {first.rank} failed: {first.last_line()[:400]}", failing.died)
    told = [problem for rank in ranks for problem in rank.read_problems()]
    if mendable := list(dict.fromkeys(each for each in told if each.code != end.code)):
        is_plan = all(problem.code.startswith("L") for problem in mendable)
        return (PlanError if is_plan else JobError)(*mendable)
    by_itself = [problem for problem in told if not names_lost_peer(problem.what)]
    return RunError((by_itself or told or [end])[0])
