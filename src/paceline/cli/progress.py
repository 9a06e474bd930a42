"""What `paceline run` prints of a run: its plan, its progress, its events and its end."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.screen import Screen
from paceline.control import messages as say
from paceline.control.controller import Progress
from paceline.control.state import State
from paceline.job import Job
from paceline.plan import Plan
from paceline.record import events as log
from paceline.record.checkpoints import list_checkpoints
from paceline.record.metrics import most_bytes
from paceline.record.run import RunFolder
from paceline.record.run_row import read_row
from paceline.record.step_text import step_text
from paceline.report.alert_text import summarise_alerts
from paceline.report.event_text import describe, early_text, exactness_text, loss_text
from paceline.report.plan_text import format_plan, plan_summary
from paceline.units import counted, format_bytes, format_seconds

_WINDOW = 50
"""Steps that the time left is estimated from."""


class ProgressView:
    """Turns events and progress into lines for a person."""

    def __init__(
        self,
        *,
        job: Job,
        run: RunFolder,
        plan: Plan,
        before: Sequence[log.AnyEvent] | None,
        to_stderr: bool,
        verbose: bool = False,
    ) -> None:
        """
        Args:
            before: Events of a run that is resumed, until now; None is a new run.
            to_stderr: Because standard output is for JSON.
            verbose: Print the whole plan, also of a run that is resumed.
        """
        self._job = job
        self._run = run
        self.plan = plan
        self._before = before
        self._verbose = verbose
        self._screen = Screen(to_stderr=to_stderr)
        self._line = self._screen.line
        self._is_open = False
        self._step_times: deque[float] = deque(maxlen=_WINDOW)
        self._held_out: list[tuple[int, float | None]] = []
        self._finished: log.RunFinished | None = None
        self._baseline: log.BaselineEvaluated | None = None
        self._early: log.StoppedEarly | None = None
        self._trains_since: float | None = None

    def _open(self) -> None:
        """The plan, and where everything is kept: once the run has begun, so that a refusal stands
        alone."""
        self._is_open = True
        if self._verbose:
            self._line(f"{format_plan(self.plan)}\n")
        elif self._before is None:
            self._line("\n".join(plan_summary(self.plan)))
        for event in self._before or ():
            self._note(event)
        padding = self._run.info().data_padding
        if padding is not None:
            self._line(f"padding     {padding:.2%} of a batch")
        self._line(f"run folder  {_short(self._run.path)}")

    def progress(self, progress: Progress) -> None:
        """A worker's news: a line for rank 0's steps."""
        message = progress.message
        if progress.rank != 0 or not isinstance(message, say.StepDone):
            return
        self._step_times.append(time.monotonic())
        total = self._job.spec.train.steps
        is_edge = len(self._step_times) == 1 or message.step == total
        if not (is_edge or self._screen.is_live_due()):
            return
        step = step_text(
            message.step, total, loss=message.loss, per_s=message.tokens_per_s, unit=message.unit
        )
        self._screen.live(
            f"{step}  {self._left(total - message.step):>7} left"
            f"  ranks {progress.num_alive}/{progress.num_ranks}"
        )

    def note(self, text: str) -> None:
        """What the command did itself."""
        self._line(f"{time.strftime('%H:%M:%S')}  {text}")

    def event(self, event: log.AnyEvent) -> None:
        """An event that a person wants to see."""
        if not self._is_open:
            self._open()
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
        if isinstance(event, log.TrainingStarted) and self._trains_since is None:
            self._trains_since = event.at
        if isinstance(event, log.RunFinished):
            self._finished = event

    def closing(self, state: State, report: Path | None, why_not: str | None) -> None:
        """How it ended. The report's path is the last line."""
        row = read_row(self._run.path)
        step = self._finished.step if self._finished is not None else state.step
        steps = f"step {step} of {self._job.spec.train.steps}"
        restarts = counted(row.restarts, "restart")
        self._line("")
        took = f"ran for {format_seconds(row.ran_s)}"
        if self._finished is not None and self._trains_since is not None and self._before is None:
            starts_s = max(0.0, row.ran_s - (self._finished.at - self._trains_since))
            took += f" (start-up {format_seconds(starts_s)})"
        self._line(f"{state.outcome}    {steps}, {restarts}, {took}")
        events = log.read_events(self._run.events_file)
        if state.exactness != "bitwise":
            self._line(f"exactness   {exactness_text(state.exactness, events)}")
        if self._early is not None and state.outcome == "finished":
            self._line(f"early       {early_text(self._early)}")
        if state.reason:
            self._line(f"why         {state.reason}")
        if state.outcome == "failed":
            self._line(f"logs        {_short(self._run.logs)}")
        for event in events:
            if isinstance(event, log.PlanChanged):
                self._line(f"changed     {', '.join(event.settings)}: {event.reason}")
        for text in summarise_alerts(events):
            self._line(f"alerts      {text}")
        self._line_of_losses()
        self._line_of_time(row.step_s)
        self._line_of_state(state)
        if state.outcome == "finished" and state.unsaved:
            saved = self._finished.saved_step if self._finished is not None else None
            self._line(f"NOT SAVED   the last state; the newest checkpoint is of step {saved}")
        if state.outcome == "interrupted":
            self._line(f"resume      paceline run --resume {_short(self._run.path)}")
        if report is not None:
            self._line(f"report      {_short(report)}")
        else:
            self._line(f"no report   {why_not}")

    def _line_of_losses(self) -> None:
        if not self._held_out:
            return
        unit = " nats per token" if self.plan.decoder is not None else ""
        (first_step, first), (last_step, last) = self._held_out[0], self._held_out[-1]
        text = f"eval loss   {loss_text(last)}{unit} after step {last_step}"
        if len(self._held_out) > 1:
            text += f", {loss_text(first)} after step {first_step}"
        if self._baseline is not None:
            text += f"; baseline ({self._baseline.name}) {self._baseline.loss:.4f}"
        self._line(text)

    def _line_of_time(self, step_s: float | None) -> None:
        """The recorded step beside the estimated one, and whether it was expected. When steps are
        heard of is no measure: a controller that comes back hears of many at once."""
        price = self.plan.estimate
        if step_s is None:
            return
        text = f"time        {format_seconds(step_s)} a step measured (median)"
        if price.step_s is not None:
            text += f", {format_seconds(price.step_s)} estimated"
        if price.step_low_s is not None and price.step_high_s is not None:
            low, high = format_seconds(price.step_low_s), format_seconds(price.step_high_s)
            if not price.step_low_s <= step_s <= price.step_high_s:
                slower = "slower" if step_s > price.step_high_s else "faster"
                text += f": {slower} than expected ({low} to {high})"
        self._line(text)

    def _line_of_state(self, state: State) -> None:
        kept = [entry.path.name for entry in list_checkpoints(self._run.checkpoints)]
        if kept:
            self._line(f"checkpoints {', '.join(reversed(kept))}")
        records = [slot.completed for slot in state.slots if slot.completed is not None]
        if not records:
            return
        most = most_bytes(record.peak_bytes for record in records)
        seen = (
            "not measured" if most is None else f"{format_bytes(most)} measured on the fullest rank"
        )
        predicted = self.plan.estimate.memory.total_bytes
        digest = records[0].state_digest
        hashed = "not hashed (recovery.final_digest: false)"
        hashed = hashed if digest is None else f"sha256 {digest} (of the final state)"
        self._line(f"state       {hashed}")
        asked = f", {format_bytes(predicted)} estimated" if predicted is not None else ""
        self._line(f"memory      {seen}{asked}")

    def _left(self, steps: int) -> str:
        if len(self._step_times) < 2:
            return "?"
        span = self._step_times[-1] - self._step_times[0]
        return format_seconds(span / (len(self._step_times) - 1) * steps)


def _short(path: Path) -> str:
    """Relative to here where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
