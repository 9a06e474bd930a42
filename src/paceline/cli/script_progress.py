"""What `paceline run` shows of a person's own script: its output, what happened, how it ended."""

import re
import shlex
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from paceline.cli.screen import Screen
from paceline.control import script_run
from paceline.job import Script
from paceline.record import events as log
from paceline.record.run import RunFolder
from paceline.record.run_row import read_row
from paceline.report.alert_text import describe_alert, summarise_alerts
from paceline.units import counted, format_seconds

_TRACEBACK = b"Traceback (most recent call last):"
_EXCEPTION = re.compile(rb"(?:\[rank\d+\]: )?[^\s\[]")
"""A line that is not indented ends a traceback. torch puts the rank before each."""

_LONGEST = 64 << 10
"""Bytes of a hidden rank's line that are kept."""

_MOST_TRACEBACKS = 20
"""Tracebacks of hidden ranks: a script that catches its exceptions may print them with every
step."""


class ScriptView:
    """Shows output and events as they come."""

    def __init__(
        self, *, job: Script, run: RunFolder, ranks: Collection[int], to_stderr: bool
    ) -> None:
        self._job = job
        self._word = "node" if job.spec.starts == "nodes" else "rank"
        self._run = run
        self._ranks = ranks
        self._screen = Screen(to_stderr=to_stderr)
        self._line = self._screen.line
        self._torn: dict[int, bytes] = {}
        self._unseen: dict[int, bytes] = {}
        self._raising: set[int] = set()
        """Hidden ranks that are in the middle of a traceback."""

        self._num_tracebacks = 0

    def opening(self) -> None:
        """What is started, and where its output is kept."""
        spec = self._job.spec
        self._line(f"script      {shlex.join(spec.command)}")
        if self._word == "node":
            self._line(f"nodes       {spec.nodes}, the script once on each")
        else:
            self._line(f"processes   {spec.processes}, started and ended together")
        self._line(f"logs        {self._run.logs}/rank-N.log; {self._shown()}")

    def output(self, rank: int, content: bytes) -> None:
        """What a rank has printed."""
        if rank not in self._ranks:
            if self._ranks:
                self._hidden(rank, content)
            return
        if len(self._ranks) == 1:
            self._screen.output(content)
            return
        *lines, self._torn[rank] = (self._torn.get(rank, b"") + content).split(b"\n")
        for line in lines:
            self._screen.output(self._last_frame(rank, line))

    def _hidden(self, rank: int, content: bytes) -> None:
        """Show tracebacks alone of a rank that is not shown: it may have failed first, and its
        process may take seconds to end."""
        *lines, torn = (self._unseen.get(rank, b"") + content).split(b"\n")
        self._unseen[rank] = torn[-_LONGEST:]
        for line in lines:
            if _TRACEBACK in line and self._num_tracebacks < _MOST_TRACEBACKS:
                self._num_tracebacks += 1
                self._raising.add(rank)
            elif rank not in self._raising:
                continue
            elif _EXCEPTION.match(line):
                self._raising.discard(rank)
            self._screen.end_live()
            self._screen.output(self._last_frame(rank, line))

    def event(self, event: log.AnyEvent) -> None:
        """An event that a person wants to see."""
        text = _describe(event, self._word)
        if text is not None:
            self._line(f"{time.strftime('%H:%M:%S', time.localtime(event.at))}  {text}")

    def ending(self, state: script_run.State) -> None:
        """How it ended, and the end of the traceback of the rank that failed first."""
        for rank, rest in sorted(self._torn.items()):
            if rest:
                self._screen.output(self._last_frame(rank, rest))
        self._line("")
        took = format_seconds(read_row(self._run.path).ran_s)
        restarts = counted(state.restarts, "restart")
        self._line(f"{state.outcome}    {restarts}, ran for {took}")
        if state.reason:
            self._line(f"why         {state.reason}")
        for text in summarise_alerts(log.read_events(self._run.events_file)):
            self._line(f"alerts      {text}")
        if state.outcome == "finished":
            self._line("proof       all processes exited with 0 (their results are not checked)")
        if state.outcome == "failed" and state.raised is not None:
            self._line(f"printed     by {self._word} {state.raised.rank} at its end:")
            self._lines(f"  {line}" for line in state.raised.lines)

    def diagnosis(self, lines: Iterable[str]) -> None:
        """What `paceline diagnose` concludes."""
        self._lines(lines)
        self._line(f"more        paceline diagnose {shlex.quote(str(self._run.path))}")

    def profile(self, lines: Iterable[str]) -> None:
        """Where a step's time goes."""
        self._line("profile")
        self._lines(f"  {line}" for line in lines)

    def closing(self, state: script_run.State, report: Path | None, why_not: str | None) -> None:
        """What to do next. The report's path is the last line."""
        self._line(f"logs        {self._run.logs}")
        if state.outcome == "interrupted":
            self._line(f"resume      paceline run --resume {shlex.quote(str(self._run.path))}")
        self._line(f"report      {report}" if report is not None else f"no report   {why_not}")

    def _shown(self) -> str:
        if not self._ranks:
            return "none is shown (--ranks)"
        hidden = self._job.num_watched - len(self._ranks)
        if not hidden:
            return "shown here as it comes"
        ranks = ", ".join(map(str, sorted(self._ranks)))
        return f"{self._word} {ranks} is shown here; --ranks all shows every {self._word}"

    def _lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._line(line)

    def _last_frame(self, rank: int, line: bytes) -> bytes:
        """A line behind its rank; of a progress bar drawn over itself, the last picture."""
        last = line.rstrip(b"\r").rpartition(b"\r")[2]
        return b"%b %d: %b\n" % (self._word.encode(), rank, last)


def _describe(event: log.AnyEvent, word: str) -> str | None:
    match event:
        case log.WorkerStarted():
            return f"{word} {event.rank} is process {event.pid}, attempt {event.generation}"
        case log.WorkerLost():
            words = f": {event.detail}" if event.detail else ""
            if event.cause == "hang":  # no rank is known to be the one
                return f"hang: {event.how}{words}"
            return f"{word} {event.rank} lost ({event.cause}): {event.how}{words}"
        case log.WorkerStuck():
            return f"{word} {event.rank} (pid {event.pid}) stands at:\n{event.stacks}".rstrip()
        case log.Noted():
            return event.text
        case log.StopAsked():
            return f"{event.by}: SIGTERM to every process; again to end them at once"
        case _:
            return describe_alert(event)
