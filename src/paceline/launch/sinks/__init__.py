"""Where a run's numbers go besides its folder: one module for each sink of `choices.sinks.SINKS`.

A sink is a process of its own that follows the run's files (`feed.py`). Another one
(`supervisor.py`) starts it, keeps its log and starts it again; `run_sinks.py` starts that one with
a run. So a sink that fails, hangs or is killed delays no step, and what it missed is sent later
from the same files.
"""

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast


class Sink(Protocol):
    """Takes a run's numbers, from one thread, in the order of the steps."""

    def begin(self, done: int) -> None:
        """Steps after `done` follow. Some may have been here before: a sink that was killed had
        maybe more than was known to be safe, and a run that went back repeats steps."""

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Take numbers of a step; an evaluation's come after the step's own. All are finite."""

    def media(self, step: int, at: float, name: str, file: Path) -> None:
        """Take a picture (`.png`) or a text (`.txt`)."""

    def flush(self) -> None:
        """Return once everything so far is safe."""


class SinkRefused(Exception):
    """The other side knows the key, the user or the right to write there not: trying again is no
    use."""


REFUSED = 77
"""How a sink's process ends then. Source: sysexits.h, EX_NOPERM."""

REFUSES = "refused: "
"""Before the reason, in the sink's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a sink is opened with."""

    run: Path
    """The run's folder."""

    id: str
    """Id that every part of the run has, also after the folder was moved."""

    settings: Mapping[str, Any]
    """The sink's section of the job file."""

    job: Mapping[str, Any]
    """The job's other settings, dotted, to be shown beside the curves."""


Open = Callable[[Told], AbstractContextManager[Sink]]
"""Opens a sink; leaving it closes the sink."""


def opener(name: str) -> Open:
    """The function that opens a sink."""
    return cast(Open, importlib.import_module(f"paceline.launch.sinks.{name}").open_sink)


def mark_file(run: Path, name: str) -> Path:
    """Where a sink keeps how much of the run's files is safe with it."""
    return run / f".sink-{name}"


def lock_file(run: Path, name: str) -> Path:
    """Held by the one process that sends a run to this sink."""
    return run / f".sink-{name}.lock"
