"""The files that a script's run writes beside its logs: the same as any run's.

What the script gives to `paceline.log` counts; what it prints does only where it gives nothing.
"""

import time
from collections.abc import Iterable

import msgspec

from paceline.launch.logs import Growing
from paceline.launch.script_lines import named
from paceline.launch.script_numbers import Found, Lines, Numbers
from paceline.record.events import AnyEvent, event_log
from paceline.record.metrics import MetricsLog, StepMetrics
from paceline.record.run import RunFolder


class _Logged(msgspec.Struct, frozen=True, kw_only=True):
    """A line that `paceline.log` writes."""

    at: float
    values: dict[str, float | None]
    step: int | None = None
    steps: int | None = None
    checkpoint: str | None = None


class ScriptRecord:
    """Writes events and metrics, and reads what the script logs."""

    def __init__(self, run: RunFolder, *, num_ranks: int) -> None:
        """Args:
        run: Its folder.
        num_ranks: Of the program: some print a number for each of them.
        """
        self.logged = run.path / "logged.jsonl"
        """Where `paceline.log` writes."""

        self._num_ranks = num_ranks
        self._events = event_log(run.events_file)
        self._metrics = MetricsLog(run.metrics_file)
        self._decode = msgspec.json.Decoder(_Logged).decode
        self.step = 0
        """The newest that is known; 0 before one is."""

        self.begin(0)

    def begin(self, attempt: int) -> None:
        size = self.logged.stat().st_size if self.logged.exists() else 0
        self._growing, self._torn = Growing(self.logged, at=size), b""
        self._attempt, self._has_logged = attempt, False
        self._lines = Lines(attempt, every_s=0.0)
        self._numbers = Numbers(generation=attempt, num_ranks=self._num_ranks)

    def write(self, event: AnyEvent) -> None:
        self._events.write(event)

    def take(self, rank: int, content: bytes, at: float) -> bool:
        """Record what a rank has printed; whether it shows progress."""
        found, has_progressed = self._numbers.feed(rank, content, at)
        if not self._has_logged:
            self._keep(found, at)
        return has_progressed

    def take_logged(self) -> bool:
        """Record what the script has given to `paceline.log`; whether it gave anything."""
        *lines, self._torn = (self._torn + self._growing.more()).split(b"\n")
        for line in lines:
            try:
                logged = self._decode(line)
            except msgspec.DecodeError:  # torn by a kill
                continue
            self._has_logged = True
            values = {
                named(name) or name: float("nan") if value is None else value
                for name, value in logged.values.items()
            }
            found = self._lines.add(
                logged.step,
                values,
                logged.at,
                num_steps=logged.steps,
                checkpoint=logged.checkpoint,
            )
            self._keep(found, logged.at)
        return bool(lines)

    def end(self, rank: int) -> None:
        """A rank is over: record what was waited for."""
        at = time.time()
        if not self._has_logged:
            self._keep(self._numbers.end(rank, at), at)

    def close(self) -> None:
        """Close the files."""
        self._events.close()
        self._metrics.close()

    def _keep(self, found: Iterable[Found], at: float) -> None:
        for each in found:
            self.step = each.step
            if isinstance(each, StepMetrics):
                self._metrics.write(each)
            else:
                event = msgspec.structs.replace(each, at=at, generation=self._attempt)
                self._events.write(event)
