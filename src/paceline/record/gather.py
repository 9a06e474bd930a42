"""Everything a run's folder says, read at once: what its page is made from.

Works at any time: a run that goes on, has just begun or was torn off reads like any other, with
what is not there yet left out.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.errors import JobError
from paceline.job import JobSpec
from paceline.plan import Plan
from paceline.record.checkpoints import list_checkpoints
from paceline.record.events import AnyEvent, read_events
from paceline.record.follow import Follower
from paceline.record.machines import MachineSample, decode_machine, machine_files
from paceline.record.metrics import StepMetrics, read_all_metrics
from paceline.record.outputs import Outputs, read_outputs
from paceline.record.ownership import is_held
from paceline.record.run import RunFolder
from paceline.record.script_profile import ScriptProfile, read_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as it stands on the disk."""

    name: str
    folder: str
    created_at: float
    """Seconds since 1970 (UTC)."""

    job: JobSpec | None
    """What was asked; None for a script of your own."""

    job_text: str
    plan: Plan | None
    """None when there is none that this version can read."""

    events: tuple[AnyEvent, ...]
    metrics: tuple[StepMetrics, ...]
    """Every whole line in the order written, also of steps that were repeated."""

    kept: tuple[str, ...]
    """Names of the complete checkpoints that are on the disk."""

    is_running: bool
    """Whether a process holds the run now."""

    outputs: Outputs | None = None
    """What its model made of `evaluate.prompts`."""

    machines: tuple[MachineSample, ...] = ()
    """Samples of all nodes, each node's in the order written."""

    profile: ScriptProfile | None = None
    """Where the time of a script's steps went, if it was measured."""

    data_padding: float | None = None
    """Share of a batch that is padding, where the data were prepared."""

    @property
    def spec(self) -> JobSpec:
        """What was asked, of a run that is no script of your own."""
        assert self.job is not None
        return self.job


def gather(run: RunFolder) -> RunRecord:
    """Read a run's folder, as much of it as there is."""
    info, script = run.info(), run.script()
    return RunRecord(
        name=info.name,
        folder=str(run.path),
        created_at=info.created_at,
        job=run.job().spec if script is None else None,
        job_text=run.job_file.read_text(encoding="utf-8"),
        plan=_plan(run),
        events=tuple(read_events(run.events_file)),
        metrics=tuple(read_all_metrics(run.metrics_file)),
        data_padding=info.data_padding,
        profile=read_profile(run.path),
        machines=tuple(
            sample
            for path in machine_files(run.path)
            for sample in Follower(path, decode_machine).look().lines
        ),
        kept=tuple(
            entry.path.name for entry in list_checkpoints(run.checkpoints) if entry.is_complete
        ),
        is_running=is_held(run.path),
        outputs=read_outputs(run.path),
    )


def write_page(path: Path, text: str) -> Path:
    """Put a page in place, whole or not at all."""
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return path


def _plan(run: RunFolder) -> Plan | None:
    try:
        return run.plan()
    except (JobError, msgspec.MsgspecError):
        return None
