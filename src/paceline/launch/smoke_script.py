"""Run a script for a few steps and keep what was seen: the facts of `paceline smoke SCRIPT`.

It runs in a copy of its folder, unchanged, with hooks around torch (`runtime/script_observed.py`),
on one rank and, where it joins a process group, on two. Nothing is judged here.
"""

import os
import re
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.job import Script
from paceline.launch.attached import versions
from paceline.launch.scratch import Listed, list_writable, write_copy
from paceline.launch.script_run import run_script
from paceline.launch.smoke import OnNote, last_words
from paceline.record.events import AnyEvent, WorkerStarted
from paceline.record.metrics import StepMetrics, read_metrics
from paceline.record.run import create_script_run
from paceline.record.script_observed import Observed, observed_file, read_observed
from paceline.topology.machine import find_local_machine
from paceline.units import format_bytes

_OBSERVER = "paceline.runtime.script_observed"
_GRACE_S = 5.0
"""What a script may take to end after Ctrl-C. A guess."""


@dataclass(slots=True, kw_only=True)
class SeenRun:
    """One start of the script."""

    ranks: list[Observed]
    lines: list[StepMetrics]
    """What it printed or logged."""

    seconds: float
    until_forward_s: float | None = None
    """From the start of rank 0's process to its model's first forward pass, imports included."""

    why_failed: str | None = None
    stood_at: str | None = None
    """Where the script was when its time was over, `train.py:12`, or empty where that is not known;
    None where it ended in time."""


@dataclass(slots=True, kw_only=True)
class SeenScript:
    """What was seen of a script."""

    asked_steps: int
    limit_s: float
    one: SeenRun
    about: list[str] = field(default_factory=list)
    two: SeenRun | None = None


def smoke_script(
    script: Script, steps: int, folder: Path, *, limit_s: float, in_place: bool, on_note: OnNote
) -> SeenScript:
    """Run a script for so many optimizer steps.

    Args:
        folder: For the runs and the copies.
        limit_s: Each start is ended after so many seconds.
        in_place: Run it in its own folder instead of copies.

    Raises:
        JobError: It cannot be started, or its folder is not copied.
    """
    listed = None if in_place else list_writable(script.folder)
    where = "its own folder" if listed is None else _described(listed)
    on_note(f"{steps} optimizer steps in {where}")
    one = _run(script, steps, folder / "one-rank", listed, limit_s)
    seen = SeenScript(asked_steps=steps, limit_s=limit_s, one=one)
    seen.about += [f"not observed: {each}" for each in one.ranks[0].troubles]
    if listed is not None:
        seen.about += [f"not in the copy: {each}" for each in listed.left_out]
    backend = one.ranks[0].backend
    has_two = backend == "gloo" or len(find_local_machine().gpus) > 1
    if backend is not None and has_two and len(one.ranks[0].steps) == steps:
        on_note("the same on two ranks")
        two = replace(script, spec=replace(script.spec, processes=2))
        seen.two = _run(two, steps, folder / "two-ranks", listed, limit_s)
    return seen


def place_in(log: str, folder: Path) -> str:
    """The last line of a file in the folder that a traceback names; empty without one."""
    for path, line in reversed(re.findall(r'File "([^"]+)", line (\d+)', log)):
        if (folder / path).is_relative_to(folder):
            return f"{(folder / path).relative_to(folder)}:{line}"
    return ""


def _described(listed: Listed) -> str:
    size = format_bytes(listed.num_bytes)
    return f"a copy of its folder ({len(listed.files)} files, {size})"


def _run(
    script: Script, steps: int, folder: Path, listed: Listed | None, limit_s: float
) -> SeenRun:
    run = create_script_run(script, folder=folder, runs=folder.parent)
    moved = script
    if listed is not None:
        copy = folder.with_name(f"{folder.name}-files") / script.folder.name
        write_copy(listed, copy)
        moved = _moved(script, copy)
    began, is_late = time.monotonic(), threading.Event()
    started: list[WorkerStarted] = []

    def hear(event: AnyEvent) -> None:
        if isinstance(event, WorkerStarted):
            started.append(event)

    def end(number: signal.Signals) -> None:
        is_late.set()
        for event in started:
            with suppress(ProcessLookupError):
                os.killpg(event.pid, number)

    # Ctrl-C first: Python then prints where the script stood.
    timers = [
        threading.Timer(limit_s, end, [signal.SIGINT]),
        threading.Timer(limit_s + _GRACE_S, end, [signal.SIGKILL]),
    ]
    try:
        for timer in timers:
            timer.start()
        observed = _observed(moved, run.path, steps)
        state = run_script(observed, run, versions=versions(), on_event=hear)
    finally:
        for timer in timers:
            timer.cancel()
    if state.outcome == "interrupted":
        raise KeyboardInterrupt
    ranks = [read_observed(observed_file(run.path, rank)) for rank in range(script.spec.processes)]
    first = ranks[0].first_forward_at
    log = run.rank_log(0).read_text(errors="replace")
    return SeenRun(
        ranks=ranks,
        lines=read_metrics(run.metrics_file),
        seconds=time.monotonic() - began,
        until_forward_s=None if first is None else first - started[0].at,
        why_failed=last_words(run) if state.outcome == "failed" else None,
        stood_at=place_in(log, moved.folder) if is_late.is_set() else None,
    )


def _observed(script: Script, run: Path, steps: int) -> Script:
    """The script with the observer before it."""
    python, *words = script.spec.command
    command = [python, "-P", "-m", _OBSERVER, str(run), str(steps), *words]
    return replace(script, spec=replace(script.spec, command=command))


def _moved(script: Script, copy: Path) -> Script:
    """The script as it runs in a copy of its folder, with its own paths into the folder."""
    here, there = str(script.folder), str(copy)

    def moved(word: str) -> str:
        return there if word == here else word.replace(f"{here}/", f"{there}/")

    environment = {"PWD": there, "PYTHONDONTWRITEBYTECODE": "1"} | script.spec.environment
    spec = replace(
        script.spec,
        command=[script.spec.command[0], *map(moved, script.spec.command[1:])],
        environment={name: moved(value) for name, value in environment.items()},
    )
    return replace(script, spec=spec, folder=copy)
