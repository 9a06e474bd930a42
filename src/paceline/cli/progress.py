"""What `paceline run` shows: a live line in a terminal, plain lines in a log file."""

import sys
import time
from collections import deque
from pathlib import Path

import click

from paceline.control import messages as say
from paceline.control.controller import Progress
from paceline.control.state import State
from paceline.plan import Plan
from paceline.record import events as log
from paceline.record.checkpoints import checkpoint_name, list_checkpoints
from paceline.record.metrics import most_bytes
from paceline.record.run import RunFolder
from paceline.report.alert_text import describe_alert, summarise_alerts
from paceline.report.plan_text import format_plan
from paceline.spec import Job
from paceline.units import counted, format_bytes, format_count, format_seconds

_LOG_EVERY_S = 10.0
"""Without a terminal, a progress line about this often."""

_WINDOW = 50
"""Steps that the time left is estimated from."""


class ProgressView:
    """Turns events and progress into lines for a person."""

    def __init__(self, *, job: Job, run: RunFolder, plan: Plan, to_stderr: bool) -> None:
        self._job = job
        self._run = run
        self._plan = plan
        self._stream = sys.stderr if to_stderr else sys.stdout
        self._live = self._stream.isatty()
        self._is_read = True
        self._began = time.monotonic()
        self._shown_at = 0.0
        self._step_times: deque[float] = deque(maxlen=_WINDOW)
        self._held_out: list[tuple[int, float | None]] = []
        self._finished: log.RunFinished | None = None
        self._baseline: log.BaselineEvaluated | None = None
        self._early: log.StoppedEarly | None = None

    def opening(self, *, resumed: bool) -> None:
        """The plan, and where everything is kept."""
        self._line(format_plan(self._plan))
        self._line("")
        if resumed:
            events = log.read_events(self._run.events_file)
            for event in events:
                self._note(event)
            before = [event.layout for event in events if isinstance(event, log.RunStarted)]
            if before and before[-1] != self._plan.layout.name:
                self._line(
                    f"The layout was {before[-1]} and is {self._plan.layout.name}: from here on "
                    "equal to rounding, no longer to the bit."
                )
        padding = self._run.info().data_padding
        if padding is not None:
            self._line(f"padding     {padding:.2%} of a batch")
        self._line(f"run folder  {_short(self._run.path)}")

    def progress(self, progress: Progress) -> None:
        """A worker's news: a line for rank 0's steps."""
        message = progress.message
        if progress.rank != 0 or not isinstance(message, say.StepDone):
            return
        now = time.monotonic()
        self._step_times.append(now)
        total = self._job.spec.train.steps
        wait = 0.1 if self._live else _LOG_EVERY_S
        first = len(self._step_times) == 1
        if now - self._shown_at < wait and message.step != total and not first:
            return
        self._shown_at = now
        line = (
            f"step {message.step:>{len(str(total))}}/{total}"
            f"  loss {_loss(message.loss)}"
            f"  {format_count(message.tokens_per_s):>6} {message.unit}/s"
            f"  {self._left(total - message.step):>7} left"
            f"  ranks {progress.num_alive}/{progress.num_ranks}"
        )
        if self._live:
            self._print(f"\r\x1b[2K{line}", newline=False)
        else:
            self._line(line)

    def note(self, text: str) -> None:
        """What the command did itself."""
        self._line(f"{time.strftime('%H:%M:%S')}  {text}")

    def event(self, event: log.AnyEvent) -> None:
        """An event that a person wants to see."""
        self._note(event)
        text = describe(event)
        if text is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(event.at))
            self._line(f"{clock}  {text}")
        if isinstance(event, log.WorkerLost | log.TrainingStarted):
            self._step_times.clear()

    def _note(self, event: log.AnyEvent) -> None:
        if isinstance(event, log.Evaluated):
            self._held_out.append((event.step, event.loss))
        if isinstance(event, log.BaselineEvaluated):
            self._baseline = event
        if isinstance(event, log.StoppedEarly | log.TrainingStarted):
            self._early = event if isinstance(event, log.StoppedEarly) else None
        if isinstance(event, log.RunFinished):
            self._finished = event

    def closing(self, state: State, report: Path | None, why_not: str | None) -> None:
        """How it ended. The report's path is the last line."""
        took = format_seconds(time.monotonic() - self._began)
        step = self._finished.step if self._finished is not None else state.step
        steps = f"step {step} of {self._job.spec.train.steps}"
        restarts = f"{state.restarts} restart{'' if state.restarts == 1 else 's'}"
        self._line("")
        self._line(f"{state.outcome}    {steps}, {restarts}, {took}")
        if state.exactness != "bitwise":
            self._line(
                "exactness   numeric: some steps were split over fewer ranks, or "
                "train.deterministic is off; they equal an undisturbed run's to rounding"
            )
        if self._early is not None and state.outcome == "finished":
            self._line(f"early       {_describe_early(self._early)}")
        if state.reason:
            self._line(f"why         {state.reason}")
        if state.outcome == "failed":
            self._line(f"logs        {_short(self._run.logs)}")
        for text in summarise_alerts(log.read_events(self._run.events_file)):
            self._line(f"alerts      {text}")
        self._line_of_losses()
        self._line_of_state(state)
        if state.outcome == "finished" and state.unsaved:
            saved = self._finished.saved_step if self._finished is not None else None
            self._line(f"NOT SAVED   the last state; the newest checkpoint is of step {saved}")
        if state.outcome == "interrupted":
            self._line(f"go on       paceline run --resume {_short(self._run.path)}")
        if report is not None:
            self._line(f"report      {_short(report)}")
        else:
            self._line(f"no report   {why_not}")

    def _line_of_losses(self) -> None:
        if not self._held_out:
            return
        unit = " nats per token" if self._plan.decoder is not None else ""
        (first_step, first), (last_step, last) = self._held_out[0], self._held_out[-1]
        text = f"held-out    {_loss(last)}{unit} after step {last_step}"
        if len(self._held_out) > 1:
            text += f", {_loss(first)} after step {first_step}"
        if self._baseline is not None:
            text += f"; {self._baseline.name} {self._baseline.loss:.4f}"
        self._line(text)

    def _line_of_state(self, state: State) -> None:
        kept = [entry.path.name for entry in list_checkpoints(self._run.checkpoints)]
        if kept:
            self._line(f"checkpoints {', '.join(reversed(kept))}")
        records = [slot.completed for slot in state.slots if slot.completed is not None]
        if not records:
            return
        most = most_bytes(record.peak_bytes for record in records)
        seen = "not measured" if most is None else f"{format_bytes(most)} seen at the fullest rank"
        predicted = self._plan.estimate.memory.total_bytes
        digest = records[0].state_digest
        hashed = "not hashed (recovery.final_digest: false)"
        self._line(f"state       {hashed if digest is None else f'sha256 {digest}'}")
        asked = f", {format_bytes(predicted)} predicted" if predicted is not None else ""
        self._line(f"memory      {seen}{asked}")

    def _left(self, steps: int) -> str:
        if len(self._step_times) < 2:
            return "?"
        span = self._step_times[-1] - self._step_times[0]
        return format_seconds(span / (len(self._step_times) - 1) * steps)

    def _line(self, text: str) -> None:
        start = "\r\x1b[2K" if self._live else ""
        self._print(f"{start}{text}")

    def _print(self, text: str, *, newline: bool = True) -> None:
        """To a reader that may have left (`| head`, a closed terminal): the run goes on."""
        if self._is_read:
            try:
                click.echo(text, file=self._stream, nl=newline)
            except OSError:
                self._is_read = False


def describe(event: log.AnyEvent) -> str | None:
    """One line for a person, or None for what only the record wants."""
    match event:
        case log.TrainingStarted():
            origin = f"from {event.checkpoint or _ORIGINS.get(event.source, event.source)}"
            return (
                f"{event.world_size} rank{'s' if event.world_size > 1 else ''} met over "
                f"{event.backend}; "
                f"training from step {event.first_step}, {origin}"
            )
        case log.CheckpointRefused():
            return f"checkpoint {event.checkpoint} refused: {event.reason}"
        case log.CheckpointFailed():
            return f"checkpoint of step {event.step} not written: {event.reason}; training goes on"
        case log.CheckpointCopyFailed():
            return f"checkpoint of step {event.step} not copied: {event.reason}; training goes on"
        case log.Evaluated():
            parts = ", ".join(f"{name} {_loss(loss)}" for name, loss in event.by_source.items())
            text = f"held-out loss after step {event.step}: {_loss(event.loss)}"
            if event.accuracy is not None:
                text += f", accuracy {event.accuracy:.1%}"
            return f"{text} ({parts})" if parts else text
        case log.StoppedEarly():
            return f"stopping early after step {event.step}: {_describe_early(event)}"
        case log.BaselineEvaluated():
            return f"held-out loss of a {event.name}: {event.loss:.4f}"
        case log.Noted():
            return f"note: {event.text}"
        case log.StepRefused():
            return f"step {event.step} refused by all ranks: {event.reason}"
        case log.FaultInjected():
            who = f"rank {event.rank}" if event.rank >= 0 else "a spare"
            return f"drill: {event.fault}, at {who} (pid {event.pid})"
        case log.WorkerStuck():
            return (
                f"rank {event.rank} is stuck ({event.kind}): in {event.phase} of step "
                f"{event.step} for {format_seconds(event.waited_s)}"
            )
        case log.StragglerNamed():
            does = "; a spare takes its rank" if event.evicted else ""
            return f"rank {event.rank} is {event.factor:.2f} times as slow as its peers{does}"
        case log.WorkerLost():
            return (
                f"rank {event.rank} lost ({event.cause}): {event.how}; "
                f"it had finished step {event.last_step}"
            )
        case log.WorldChanged():
            ranks = f"{event.num_ranks} rank{'s' if event.num_ranks > 1 else ''}"
            return f"on with {ranks} ({event.layout}), the same global batch: {event.reason}"
        case log.ExactnessChanged():
            return f"from here on equal to rounding, no longer to the bit: {event.reason}"
        case log.NodeSetAside():
            goes = "what it loses goes to other nodes"
            if event.is_only:
                goes = "the run has no other, and its ranks stay there; look at its hardware"
            return (
                f"node {event.node} failed {event.strikes} times within "
                f"{format_seconds(event.window_s)}: {goes}"
            )
        case log.GpuHealth():
            sign = "; a strike against its node" if event.is_fatal else ""
            return f"node {event.node}, GPU {event.gpu}: {event.what} {event.value}{sign}"
        case log.BatchSkipped():
            ids = ", ".join(map(str, event.samples))
            return f"step {event.step} is left out by all ranks: poison batch, sample ids {ids}"
        case log.Recovered():
            return _describe_recovery(event)
        case log.ControllerReplaced():
            return (
                f"the controller was killed; another one took over after "
                f"{format_seconds(event.away_s)}, and training went on"
            )
        case log.StopAsked():
            return f"{event.by}: stopping at the next step boundary; again to stop at once"
        case _:
            return describe_alert(event)


def _describe_early(event: log.StoppedEarly) -> str:
    waited = counted(event.waited, "evaluation")
    text = f"no improvement in {waited}; lowest {_loss(event.best_loss)} after step "
    kept = f" ({checkpoint_name(event.best_step)})" if event.best_step else ", before training"
    return f"{text}{event.best_step}{kept}"


def _describe_recovery(event: log.Recovered) -> str:
    parts = [
        ("fence", event.fence_s),
        ("meet", event.start_s),
        ("state", event.restore_s),
        ("first step", event.first_step_s),
    ]
    if event.detect_s is not None:
        parts.insert(0, ("detect", event.detect_s))
    shown = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts)
    lost = (
        f"{event.steps_lost} finished steps done again from step {event.resumed_from_step}"
        if event.steps_lost
        else f"no finished step lost, state from {_SOURCES.get(event.source, event.source)}"
    )
    return f"recovered in {format_seconds(event.downtime_s)} ({shown}); {lost}"


_ORIGINS = {
    "own": "where they were",
    "replica": "where they were",
    "memory": "the newest step in memory",
    "checkpoint": "a checkpoint",
    "initial": "the initial state",
}

_SOURCES = {
    "own": "the ranks themselves",
    "replica": "a replica",
    "memory": "memory",
    "checkpoint": "a checkpoint",
    "initial": "the seed",
}


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _short(path: Path) -> str:
    """Relative to here where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
