"""What `paceline run` shows of a program that is not one of ours."""

import sys
import time
from pathlib import Path

import click

from paceline.control import foreign
from paceline.record import events as log
from paceline.record.run import RunFolder
from paceline.report.alert_text import describe_alert, summarise_alerts
from paceline.spec import Script
from paceline.units import format_seconds


class ScriptView:
    """Turns events into lines for a person."""

    def __init__(self, *, job: Script, run: RunFolder, to_stderr: bool) -> None:
        self._job = job
        self._run = run
        self._stream = sys.stderr if to_stderr else sys.stdout
        self._is_read = True
        self._began = time.monotonic()

    def opening(self) -> None:
        """What is started, and where everything is kept."""
        spec = self._job.spec
        self._line(f"program     {' '.join(spec.command)}")
        self._line(f"processes   {spec.processes}, started and ended together")
        self._line(f"run folder  {self._run.path}")

    def event(self, event: log.AnyEvent) -> None:
        """An event that a person wants to see."""
        text = _describe(event)
        if text is not None:
            self._line(f"{time.strftime('%H:%M:%S', time.localtime(event.at))}  {text}")

    def closing(self, state: foreign.State, report: Path | None, why_not: str | None) -> None:
        """How it ended. The report's path is the last line."""
        restarts = f"{state.restarts} restart{'' if state.restarts == 1 else 's'}"
        self._line("")
        took = format_seconds(time.monotonic() - self._began)
        self._line(f"{state.outcome}    {restarts}, {took}")
        if state.reason:
            self._line(f"why         {state.reason}")
        for text in summarise_alerts(log.read_events(self._run.events_file)):
            self._line(f"alerts      {text}")
        if state.outcome == "finished":
            self._line("proof       every process exited with 0; what it computed is its own word")
        self._line(f"logs        {self._run.logs}")
        if state.outcome == "interrupted":
            self._line(f"go on       paceline run --resume {self._run.path}")
        self._line(f"report      {report}" if report is not None else f"no report   {why_not}")

    def _line(self, text: str) -> None:
        """To a reader that may have left: the run goes on."""
        if self._is_read:
            try:
                click.echo(text, file=self._stream)
            except OSError:
                self._is_read = False


def _describe(event: log.AnyEvent) -> str | None:
    match event:
        case log.WorkerStarted():
            return f"rank {event.rank} is process {event.pid}, attempt {event.generation}"
        case log.WorkerLost():
            return f"rank {event.rank} lost ({event.cause}): {event.how}"
        case log.WorkerStuck():
            return f"rank {event.rank} (pid {event.pid}) stands at:\n{event.stacks}".rstrip()
        case log.Noted():
            return event.text
        case log.StopAsked():
            return f"{event.by}: SIGTERM to every process; again to end them at once"
        case _:
            return describe_alert(event)
