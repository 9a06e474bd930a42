"""A run that somebody looks at, followed from its files: read once, however many look."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.errors import JobError
from paceline.job import JobSpec
from paceline.plan import Plan
from paceline.record.events import AnyEvent, RunFinished, RunStarted
from paceline.record.follow import Follower
from paceline.record.machine_series import MachineSeries
from paceline.record.machines import MachineSample, decode_machine, machine_files
from paceline.record.ownership import is_held
from paceline.record.run import RunFolder, RunInfo
from paceline.record.series import Line, Series
from paceline.report.view import RunView

_T = TypeVar("_T")

_HELD_S = 2.0
"""Between two looks whether a process holds the run. A guess: that takes a lock on a file."""

_LOOK_S = 0.2
"""A look that is younger counts for others too."""

_MACHINES_S = 2.0
"""Between two looks at the machines' files, which get a line every few seconds."""


class Watched:
    """A run's events and columns, as new as the last look."""

    def __init__(self, run: RunFolder) -> None:
        """Args:
        run: Its folder; nothing is read before the first look.
        """
        self.run = run
        self.series, self.machines = Series(), MachineSeries()
        self.events: list[AnyEvent] = []
        self.num_begun = 0
        """How often everything was read from the beginning."""

        self._lock = threading.Lock()  # of threads: a request that is given up leaves its thread
        self._looked_s = self._held_s = self._found_s = float("-inf")
        self._is_held = False
        self._info: RunInfo | None = None
        self._job: JobSpec | None = None
        self._plan: Plan | None = None
        self._follow()

    def look(self, *, at_once: bool = False) -> None:
        """Take what is new in the run's files.

        Args:
            at_once: However new the last look is.

        Raises:
            JobError: `run.json` or the job file cannot be read.
        """
        with self._lock:
            if at_once or time.monotonic() - self._looked_s >= _LOOK_S:
                self._look()
                self._looked_s = time.monotonic()

    def show(self, make: Callable[[RunView], _T]) -> _T:
        """What is made of the run as of the last look, while nothing of it changes."""
        with self._lock:
            return make(self._view())

    @property
    def is_running(self) -> bool:
        """Whether a process holds the run, as of the last seconds."""
        return self._is_held

    def _look(self) -> None:
        now_s = time.monotonic()
        lines, events = self._lines.look(), self._events.look()
        if lines.is_anew or events.is_anew:
            self._follow()
            lines, events = self._lines.look(), self._events.look()
        self.series.take(lines.lines)
        self.events.extend(events.lines)
        self._look_at_machines(now_s)
        if now_s - self._held_s >= _HELD_S or events.lines:
            # Never of a run that is over: to ask takes its lock for a moment.
            self._is_held = not _is_over(self.events) and is_held(self.run.path)
            self._held_s = now_s
        # A resumed run may have another plan, and more steps to do.
        if self._info is None or any(isinstance(event, RunStarted) for event in events.lines):
            self._read()

    def _view(self) -> RunView:
        info, job = self._info, self._job
        assert info is not None, "looked at first"
        return RunView(
            name=info.name,
            folder=str(self.run.path),
            created_at=info.created_at,
            num_steps=job.train.steps if job is not None else self.series.num_steps,
            global_batch=job.train.global_batch if job is not None else None,
            is_program=job is None or job.program is not None,
            plan=self._plan,
            events=self.events,
            series=self.series,
            machines=self.machines,
            is_running=self._is_held,
            now_s=time.time(),
            data_padding=info.data_padding,
        )

    def _follow(self) -> None:
        """Begin with empty hands: nothing read, nothing known."""
        self._lines = Follower(self.run.metrics_file, msgspec.json.Decoder(Line).decode)
        self._events: Follower[AnyEvent] = Follower(
            self.run.events_file, msgspec.json.Decoder(AnyEvent).decode
        )
        self.series, self.machines, self.events = Series(), MachineSeries(), []
        self._nodes: dict[Path, Follower[MachineSample]] = {}
        self._found_s = float("-inf")
        self.num_begun += 1

    def _look_at_machines(self, now_s: float) -> None:
        if now_s - self._found_s < _MACHINES_S:
            return
        self._found_s = now_s
        for path in machine_files(self.run.path):
            follower = self._nodes.setdefault(path, Follower(path, decode_machine))
            self.machines.take(follower.look().lines)

    def _read(self) -> None:
        self._info = self.run.info()
        self._job = self.run.job().spec if self.run.script() is None else None
        try:
            self._plan = self.run.plan() if self.run.plan_file.exists() else None
        except JobError:
            self._plan = None


def _is_over(events: Sequence[AnyEvent]) -> bool:
    """Whether a controller has ended the run, and none has taken charge since."""
    turns = [event for event in events if isinstance(event, RunStarted | RunFinished)]
    return bool(turns) and isinstance(turns[-1], RunFinished)
