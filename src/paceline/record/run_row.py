"""One run in a row: how it stands and what came of it, read from the files in its folder.

All events are read, the end of the metrics, and a few fields of plan and job; nothing that takes
long to import. Whether a run lives is not in its files: its locks are asked each time, by
`standing_now`. docs/reference/run-fields.md is generated from the texts below.
"""

import shlex
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.record.history import History
from paceline.record.ownership import is_held
from paceline.record.run_files import Planned, RunFiles, Start, Step

OVER = ("finished", "interrupted", "failed")
"""States that a run ends in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """How one run stands. What is not known is None."""

    run: str
    """Name of its folder."""

    name: str
    """`name` of the job."""

    folder: str
    """Absolute path."""

    state: str
    """`running`, `finished`, `interrupted`, `failed`, `crashed` (it recorded no end: its controller
    was killed, or its machine went down), `new` (not started yet) or `damaged`."""

    damage: str | None
    """Which file cannot be read, and where; None where all can."""

    created_at: float
    """When its folder was made, in seconds since 1970 (UTC)."""

    started_at: float | None = None
    """When it was first started."""

    seen_at: float | None = None
    """Newest line of its record."""

    ran_s: float = 0.0
    """Seconds between each start and its end, all starts together."""

    step: int = 0
    """Newest step."""

    num_steps: int = 0
    """Steps that the job asks for; 0 where that is not known."""

    loss: float | None = None
    """Training loss of the newest step."""

    eval_loss: float | None = None
    """Newest evaluation loss, also while the run goes on."""

    eval_step: int | None = None
    """Step of it."""

    best_eval_loss: float | None = None
    """Lowest evaluation loss."""

    grad_norm: float | None = None
    """Gradient norm of the newest step."""

    tokens_per_s: float | None = None
    """Median of the newest steps. For a script that counts no tokens, samples per second."""

    step_s: float | None = None
    """Median of the newest steps, in seconds."""

    planned_step_s: float | None = None
    """What the plan predicted."""

    mfu: float | None = None
    """Median of the newest steps: share of the ranks' peak that useful FLOPs used."""

    memory_bytes: int | None = None
    """Highest memory of any rank; while the run goes on, of rank 0."""

    planned_memory_bytes: int | None = None
    """What the plan predicted for the fullest rank."""

    usd: float | None = None
    """Cost so far, at the price in the plan."""

    usd_per_h: float | None = None
    """That price, all instances together."""

    restarts: int = 0
    """How often training started again after a failure."""

    steps_lost: int = 0
    """Finished steps that failures made it repeat."""

    downtime_s: float = 0.0
    """Seconds that recoveries took."""

    exactness: str = "unknown"
    """`bitwise` (the state equals an undisturbed run's to the bit), `numeric` (to rounding: the
    layout changed, or `train.deterministic` is off), `different` (of another
    training: steps of fewer ranks had smaller batches, the run was resumed with settings that would
    have changed the steps before, such as a longer schedule of the learning rate, or PowerSGD lost
    the errors that it carries) or `unknown`."""

    state_digest: str | None = None
    """SHA-256 of parameters and optimizer state at its end."""

    reason: str | None = None
    """Why it failed."""

    layout: str = "unknown"
    """The newest layout; for a script, its processes and command."""

    engine: str | None = None
    """Software that runs the steps."""

    ranks: int | None = None
    nodes: int | None = None
    accelerator: str | None = None
    place: str = "local"
    """Where it runs: `local`, `slurm`, `ssh` and so on."""

    job_id: str | None = None
    """The queue's id of it."""

    checkpoint_step: int | None = None
    """Step of the newest saved checkpoint."""

    host: str | None = None
    """Machine of the command that started it last."""

    command: str | None = None
    """That command."""

    commit: str | None = None
    """Git commit of the code that it was last started with."""

    dirty: bool | None = None
    """Whether that code differed from the commit; `code-*.diff` in the folder has how."""

    diff: str | None = None
    """SHA-256 of that difference."""


def read_row(folder: Path) -> RunRow:
    """How a run stands now; `damaged` where a file of it cannot be read."""
    return standing_now(read_files(folder)[0], time.time())


def standing_now(row: RunRow, now_s: float) -> RunRow:
    """The row with what its files do not show: whether a process holds the run."""
    if row.state in OVER or not is_held(Path(row.folder)):
        return row
    return running_since(row, now_s)


def running_since(row: RunRow, now_s: float | None = None) -> RunRow:
    """The row of a run that goes on, though its files have had no news since."""
    now_s = time.time() if now_s is None else now_s
    since_s = max(0.0, now_s - row.seen_at) if row.seen_at is not None else 0.0
    ran_s = row.ran_s + since_s if row.started_at is not None else 0.0
    return replace(row, state="running", ran_s=ran_s, usd=_usd(row.usd_per_h, ran_s))


def read_files(folder: Path) -> tuple[RunRow, dict[str, Any]]:
    """What the files of a run's folder show, and the settings of its job, by dotted name.

    A run that is not over counts as crashed: see `standing_now`.
    """
    files = RunFiles(folder)
    info, settings, plan, place = files.info(), files.settings(), files.plan(), files.place()
    start, newest = files.last_start(), files.newest_steps()
    history = History(is_script="command" in settings)
    for event in files.events():
        history.add(event)
    if newest and history.started_at is None:
        files.miss("events.jsonl has no start of the run, and metrics.jsonl has steps of it")
    seen = [at for at in (history.seen_at, newest[-1].at if newest else 0.0) if at]
    ran_s = history.ran_s(max(seen, default=0.0))
    row = RunRow(
        run=folder.name,
        name=info.name or folder.name,
        folder=str(folder),
        state="damaged" if files.damage is not None else history.state,
        damage=files.damage,
        created_at=info.created_at or files.made_at(),
        started_at=history.started_at,
        seen_at=max(seen, default=None),
        ran_s=ran_s,
        step=newest[-1].step if newest else history.last_step,
        num_steps=_num_steps(history, settings, newest),
        eval_loss=history.eval_loss,
        eval_step=history.eval_step,
        best_eval_loss=min(history.eval_losses.values(), default=None),
        restarts=history.restarts,
        steps_lost=history.steps_lost,
        downtime_s=history.downtime_s,
        exactness=history.exactness(is_deterministic=_is_deterministic(settings, plan)),
        state_digest=history.state_digest,
        reason=history.reason,
        layout=_layout(history, settings, files),
        ranks=history.num_ranks,
        nodes=history.num_nodes,
        place=place.place,
        job_id=place.job_id,
        checkpoint_step=history.checkpoint_step,
        **_of_steps(newest, history.peak_bytes),
        **_of_plan(plan, ran_s),
        **_of_start(start),
    )
    return row, settings


def _of_steps(newest: Sequence[Step], peak_bytes: int | None) -> dict[str, Any]:
    last = newest[-1] if newest else None
    return {
        "loss": _last(newest, "loss"),
        "grad_norm": _last(newest, "grad_norm"),
        "tokens_per_s": _median(line.tokens_per_s for line in newest),
        "step_s": _median(line.step_s for line in newest),
        "mfu": _median(line.mfu for line in newest),
        "memory_bytes": peak_bytes or (last.memory_bytes if last is not None else None),
    }


def _last(newest: Sequence[Step], name: str) -> float | None:
    """A number of the newest step; for a script, of the newest that it printed this of."""
    for line in reversed(newest):
        value: float | None = getattr(line, name)
        if value is not None or line.not_finite is None or name in line.not_finite:
            return value
    return None


def _of_plan(plan: Planned, ran_s: float) -> dict[str, Any]:
    cost, memory = plan.cost, plan.estimate.memory.parts
    known = [part for part in memory.values() if part is not None]
    per_h = cost.per_instance_hour_usd * cost.num_instances if cost is not None else None
    return {
        "planned_step_s": plan.estimate.step_s,
        "planned_memory_bytes": int(sum(known)) if known and len(known) == len(memory) else None,
        "usd_per_h": per_h,
        "usd": _usd(per_h, ran_s),
        "engine": plan.engine,
        "accelerator": plan.cluster.accelerator,
    }


def _of_start(start: Start | None) -> dict[str, Any]:
    if start is None:
        return {}
    code = start.code
    return {
        "host": start.host,
        "command": shlex.join(start.command),
        "commit": code.commit if code is not None else None,
        "dirty": code.is_dirty if code is not None else None,
        "diff": code.diff_sha256 if code is not None else None,
    }


def _usd(per_h: float | None, ran_s: float) -> float | None:
    return None if per_h is None else per_h * ran_s / 3600


def _num_steps(history: History, settings: Mapping[str, Any], newest: Sequence[Step]) -> int:
    """Steps of the job; for a script, as many as it has printed that it does."""
    asked = settings.get("train.steps")
    if isinstance(asked, int) and asked:
        return asked
    return history.num_steps or next((n for s in reversed(newest) if (n := s.num_steps)), 0)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _is_deterministic(settings: Mapping[str, Any], plan: Planned) -> bool:
    """As asked; left open, on CPUs alone (`plan.is_deterministic`)."""
    asked = settings.get("train.deterministic", "auto")
    return plan.cluster.accelerator == "cpu" if asked == "auto" else bool(asked)


def _layout(history: History, settings: Mapping[str, Any], files: RunFiles) -> str:
    if history.is_script:
        command = settings.get("command")
        words = command if isinstance(command, list) else [command]
        return f"{settings.get('processes', 1)} x {' '.join(map(str, words))}"[:60]
    return history.layout or files.layout_name()
