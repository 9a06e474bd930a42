"""What happened in a run: one JSON line an event, in `events.jsonl`.

Every line has `event` (the name of a class here), `at` (seconds since 1970, UTC) and
`generation` (how many times the workers have been started, from 1). The controller is the only
writer. What a worker or an agent finds out it sends as the event itself (`Reported`), and the
controller adds these two. docs/reference/events.md is generated from the texts below.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.record.lines import JsonLines, decoded


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """What every event has."""

    at: float = 0.0
    """When, in seconds since 1970 (UTC). The controller sets it, as it does the generation."""

    generation: int = 0
    """How many times the workers have been started, from 1."""


class RunStarted(Event, frozen=True, kw_only=True, tag=True):
    """The controller took charge of the run's folder: the first line, and again on a resume."""

    num_ranks: int
    num_nodes: int
    num_steps: int
    resumed: bool
    layout: str
    """The layout's name."""

    arithmetic: dict[str, Any] = {}
    """What decides in which order a step's numbers are added up, and how they are rounded: each
    field of the layout but recompute, the precision, the accelerator, torch's version. Where a
    resumed run has another value than before, its numbers go on equal to rounding, no longer to the
    bit. Empty in records of older versions, and of scripts."""

    versions: dict[str, str]
    """Version of Paceline, Python and, where it is installed, torch."""


class WorkerStarted(Event, frozen=True, kw_only=True, tag=True):
    """An agent started a worker's process."""

    rank: int | None
    """That it is meant for; None is a warm spare, which waits for one."""

    node: int
    pid: int


class TrainingStarted(Event, frozen=True, kw_only=True, tag=True):
    """All ranks met, agreed on the world they were asked for, and are about to train."""

    first_step: int
    """The next step to do; 1 in a new run."""

    checkpoint: str | None
    """Checkpoint folder the state came from; None where it came from no checkpoint."""

    source: str = "initial"
    """Where the state came from, of all ranks the last resort; see `Recovered`."""

    pids: list[int]
    """Process of each rank, by rank."""

    backend: str
    world_size: int


class CheckpointRefused(Event, frozen=True, kw_only=True, tag=True):
    """A checkpoint was not valid and was passed over."""

    checkpoint: str
    reason: str


class CheckpointSaved(Event, frozen=True, kw_only=True, tag=True):
    """A checkpoint is complete on disk."""

    step: int
    checkpoint: str
    """Its folder in `checkpoints/`; for your own script the path that it gave."""

    num_bytes: int | None = None
    stall_s: float | None = None
    """How long training stood still for it; None is unknown, as for your own script."""

    write_s: float | None = None
    """From the start of the save to its commit; None is unknown."""


class CheckpointFailed(Event, frozen=True, kw_only=True, tag=True):
    """A checkpoint could not be written. Training goes on; the last good one stays."""

    step: int
    reason: str


class CheckpointCopied(Event, frozen=True, kw_only=True, tag=True):
    """A checkpoint is complete in the other storage, `checkpoint.copy_to`."""

    step: int
    url: str
    """Where it is."""

    num_bytes: int
    """Bytes of the checkpoint."""

    stored_bytes: int
    """What it takes there: less, where it was compressed."""

    seconds: float
    """From the start of the copy to its COMMIT, beside training."""

    checked: str
    """How what arrived was compared with what was sent: `hash` of every byte, or `size`."""

    note: str
    """Why it was compressed, or was not."""


class CheckpointCopyFailed(Event, frozen=True, kw_only=True, tag=True):
    """A checkpoint could not be copied. Training goes on; the next save tries again."""

    step: int
    reason: str


class Evaluated(Event, frozen=True, kw_only=True, tag=True):
    """The evaluation loss after a step."""

    step: int
    loss: float | None
    """Mean over the held-out samples, in nats per token; None when it is not finite."""

    seconds: float | None = None
    """How long training stood still for it; None is unknown, as for your own script."""

    by_source: dict[str, float | None] = {}
    """Evaluation loss for each source, where there are several."""

    accuracy: float | None = None
    """Accuracy over the held-out pairs or texts, counted as the metrics' `accuracy`."""


class StoppedEarly(Event, frozen=True, kw_only=True, tag=True):
    """The run ended before its last step: `evaluate.patience` evaluations in a row were no
    improvement."""

    step: int
    """Its last step."""

    waited: int
    """Evaluations without an improvement."""

    best_step: int
    """Step with the lowest evaluation loss, whose checkpoint is kept; 0 is before training."""

    best_loss: float | None
    """That loss; None when none was finite."""


class BaselineEvaluated(Event, frozen=True, kw_only=True, tag=True):
    """The evaluation loss of a simple model, to compare with."""

    name: str
    loss: float
    """Mean over the held-out samples, in nats per token."""


class Noted(Event, frozen=True, kw_only=True, tag=True):
    """Something to know about how the run is carried out, such as the risk of what was asked."""

    text: str


class StepRefused(Event, frozen=True, kw_only=True, tag=True):
    """All ranks refused to apply a step, because something was not finite."""

    step: int
    reason: str


class CorruptionFound(Event, frozen=True, kw_only=True, tag=True):
    """Parameters or optimizer state of some ranks were found wrong, and made right."""

    step: int
    """Step after which they were compared."""

    ranks: list[int]
    """Ranks that were wrong; empty while nobody knows."""

    suspects: list[int]
    """Replicas that differ, of which nobody knows who is right. Once the steps are repeated,
    another event names them, or says that this does not tell."""

    tensors: list[str]
    """What was wrong, or differed, on any of them."""

    verdict: str
    """How it is known: `majority` (most replicas differ from it), `moved` (the rank's own bytes
    changed while nothing wrote them), `replay` (its numbers were farther from those that were
    computed again), `undecided`."""

    healed: str
    """Where the numbers are now from: a `replica`; or, on all ranks, `memory`, a `checkpoint` or
    the `initial` state; `recomputed` when all had gone back before."""

    goes_on_after: int
    """Last step that the state has now: those after it are repeated."""


class FaultInjected(Event, frozen=True, kw_only=True, tag=True):
    """A drill's fault was carried out."""

    fault: str
    """As the job file names it."""

    rank: int
    pid: int


SCRIPT_PHASE = "its own script"
"""The `phase` of a rank whose program is not ours."""


class WorkerStuck(Event, frozen=True, kw_only=True, tag=True):
    """A rank made no progress and the others waited for it: it is ended, and WorkerLost follows."""

    rank: int
    node: int
    pid: int | None
    kind: str
    """`stopped` (SIGSTOP, or frozen), `gil held` (one long call keeps the interpreter), `looping`
    (it burns a core and gets nowhere) or `waiting` (it sleeps: a lock, a file)."""

    phase: str
    """`forward`, `backward`, `vote`, `apply`, `save` and so on."""

    step: int
    """The step it was in; 0 before its first."""

    waited_s: float
    """Seconds without a change of place that its agent saw."""

    limit_s: float | None
    """How long that phase may take, as learned from how long it took before; None for a rank that
    may wait for ever and only waits with the others."""

    stacks: str
    """What the kernel says of its threads, and their tracebacks where it could still write them."""


class StragglerNamed(Event, frozen=True, kw_only=True, tag=True):
    """A rank computes slower than those that do the same work; all ranks wait for it."""

    rank: int
    node: int
    factor: float
    """Its own time of a step over the median of its peers'."""

    step: int
    num_steps: int
    """Steps it was judged by."""

    evicted: bool
    """Whether it is replaced by a spare, as the job asks for and the gain is worth."""


class LossOutlierNamed(Event, frozen=True, kw_only=True, tag=True):
    """The losses of a rank stay higher or lower than those of the ranks that do the same work: it
    reads other data, or computes with other weights."""

    rank: int
    node: int
    factor: float
    """Its mean loss over its own samples over its peers' median: above 1 is higher."""

    step: int
    num_steps: int
    """Steps it was judged by."""


class WorkerLost(Event, frozen=True, kw_only=True, tag=True):
    """A worker ended without a completion record. The first of a failure is its cause."""

    rank: int
    node: int
    pid: int | None = None
    how: str
    """`killed by SIGKILL`, `exited with 1`, `node 0 is lost`."""

    detail: str | None = None
    """The worker's own last words, when it had any."""

    last_step: int = 0
    """Last step this rank finished."""

    cause: str = "unknown"
    """Class of the loss: `program` (a person has to fix it), `data or software` (two processes
    raised the same in the same step), `exception`, `out of memory`, `accelerator`, `process`,
    `node`, `hang`, `network` or `slow`. Exceptions and a full memory are not held against the
    node."""


Exactness = Literal["bitwise", "numeric", "different", "unknown"]
"""`bitwise`: parameters and optimizer state end as they would have undisturbed, to the bit.
`numeric`: some steps added up their batch in another order, and so to rounding. `different`: the
end is that of another training: steps had a smaller batch (`recovery.batch: shrink`), the run was
resumed with settings that would have changed the steps before, or PowerSGD lost its errors.
`unknown`: of a program that does not use Paceline's runtime."""


class WorldChanged(Event, frozen=True, kw_only=True, tag=True):
    """The next generation has another number of ranks, at the same global batch unless
    `BatchChanged` follows."""

    num_ranks: int
    layout: str
    reason: str


class BatchChanged(Event, frozen=True, kw_only=True, tag=True):
    """From this step on the global batch has another size, as there are fewer data ranks, or again
    more. The job asks for this with `recovery.batch: shrink`."""

    step: int
    """The first step with it."""

    global_batch: int
    """Samples a step from here on."""

    before: int
    """Samples a step up to here."""

    samples: int
    """Read before this step: where the data goes on."""

    rate_factor: float
    """What the learning rates of the job's schedule are multiplied by from here on."""

    rule: str
    """How that follows from the batch: `linear` or `sqrt`."""


class PlanChanged(Event, frozen=True, kw_only=True, tag=True):
    """A rank ran out of memory, and the run resumes in a layout that needs less, at the same global
    batch. The job asks for this with `recovery.on_oom: refit`."""

    settings: list[str]
    """What changed, as `--set` takes it: `layout.micro_batch=2`."""

    layout: str
    micro_batch: int
    accumulation: int
    global_batch: int
    reason: str


class ExactnessChanged(Event, frozen=True, kw_only=True, tag=True):
    """What is promised of the end of the run is another from here on."""

    exactness: Exactness
    reason: str
    tolerance: float | None
    """Largest relative difference of the first such step's loss; None where it is not known."""


class NodeSetAside(Event, frozen=True, kw_only=True, tag=True):
    """A node failed too often: ranks that it loses go to other nodes, while there are any. The only
    node of a run keeps them."""

    node: int
    strikes: int
    """Failures of it that may be the hardware's."""

    window_s: float
    """Within how long."""

    is_only: bool = False
    """Whether the run has no other node."""


class GpuHealth(Event, frozen=True, kw_only=True, tag=True):
    """The driver says something new of a GPU. Where there is no NVML (the extra `gpu`)
    there is no such event, and a `Noted` gives the reason."""

    node: int
    gpu: str
    """Its UUID; its number, where the driver could not open it."""

    what: str
    """`lost` (the driver answers no question about it), `xid`, `uncorrected ecc errors`,
    `row remap pending`, `row remap failed`, `too hot`, `hardware slowdown`,
    `hardware thermal slowdown`, `software thermal slowdown`, `power brake`."""

    value: int
    """The number of the Xid, or of the errors since the driver was loaded; else 1 when it begins
    and 0 when it is over."""

    is_fatal: bool
    """Whether it counts against the node as a loss with the cause `accelerator` does."""


class BatchSkipped(Event, frozen=True, kw_only=True, tag=True):
    """A batch that no process gets through is left out from now on: every rank refuses its step.
    The job asks for this with `recovery.poison: skip`."""

    step: int
    samples: list[int]
    """Ids of the samples that it raised at."""


class Recovered(Event, frozen=True, kw_only=True, tag=True):
    """Every rank has finished a step again. The parts add up to `downtime_s`."""

    lost_rank: int
    failed_after_step: int
    """Last step that every rank had finished before the failure."""

    resumed_from_step: int
    """Last step that the state has; 0 is the initial state."""

    steps_lost: int
    """Finished steps that had to be repeated."""

    source: str
    """Where the state came from, of all ranks the last resort: `own` (nothing was lost), `replica`,
    `memory`, `checkpoint` or `initial`."""

    in_place: bool
    """Whether processes lived on with their state; otherwise all of them are new."""

    detect_s: float | None
    """From the kill to the controller knowing; None when nobody saw the kill."""

    fence_s: float
    """From knowing until every rank had a worker that waits: the others have left their process
    groups, and a spare or a new process takes the place of the lost one."""

    start_s: float
    """From there until they had met in new process groups."""

    restore_s: float
    """From there until the state was back on every rank."""

    first_step_s: float
    """From there until every rank had finished a step."""

    downtime_s: float
    """From the failure (or the controller knowing of it) until every rank had finished a step."""


class ControllerReplaced(Event, frozen=True, kw_only=True, tag=True):
    """The controller died, and another one took its place. Training went on meanwhile."""

    epoch: int
    """How many controllers there have been since the last start, with this one."""

    away_s: float
    """From the last thing that the dead one took note of."""


class AlertFired(Event, frozen=True, kw_only=True, tag=True):
    """An alert's rule holds."""

    rule: str
    """Its name."""

    condition: str
    """The rule as one expression."""

    metric: str
    """Name of the metric; for a rule on an event, the event's."""

    value: float | None
    """The metric's value; None when it is not finite, and for an event."""

    of: str = ""
    """The rank, GPU or node whose value it is: `rank 3`, `node 0 GPU 1`. Empty is the whole run."""

    step: int | None = None
    """The newest step then."""

    severity: Literal["critical", "warning", "info"] = "warning"
    action: str = ""
    """What to do about it, as the rule says."""

    to: list[str] = []
    """Targets that are sent a message."""

    on_alert: Literal["note", "checkpoint", "stop"] = "note"
    """What the run does about it."""


class AlertOver(Event, frozen=True, kw_only=True, tag=True):
    """A rule that had fired holds no longer."""

    rule: str
    metric: str
    value: float | None
    of: str = ""
    step: int | None = None
    severity: Literal["critical", "warning", "info"] = "warning"
    to: list[str] = []


class AlertNotSent(Event, frozen=True, kw_only=True, tag=True):
    """A message about an alert did not reach a target."""

    rule: str
    target: str
    """Its name in the job's `alerts.targets`."""

    reason: str
    """Why, without the address."""


class StopAsked(Event, frozen=True, kw_only=True, tag=True):
    """Somebody asked the run to stop at the next step boundary."""

    by: str
    """`SIGINT`, `SIGTERM`, `alert NAME`."""


class RunFinished(Event, frozen=True, kw_only=True, tag=True):
    """The end of the run, or of this part of it."""

    outcome: str
    """`finished`, `interrupted` or `failed`."""

    step: int
    """Last step finished by all ranks."""

    saved_step: int | None = None
    """Step of the newest committed checkpoint; None when no rank left a completion record."""

    state_digest: str | None = None
    """SHA-256 of parameters and optimizer state, the same on every rank; None unless finished,
    and with `recovery.final_digest: false`."""

    held_out_loss: float | None = None
    restarts: int
    reason: str | None
    """Why it failed."""

    exactness: Exactness = "bitwise"
    """What is promised of the state: see `ExactnessChanged`."""

    baseline_bytes: list[int | None] = []
    """Memory of each rank before the model was built, in rank order; None is what was not
    measured."""

    peak_bytes: list[int | None] = []
    """Highest memory of each rank, in rank order; None is what was not measured."""


Reported = (
    CheckpointSaved
    | CheckpointFailed
    | CheckpointCopied
    | CheckpointCopyFailed
    | Evaluated
    | StoppedEarly
    | BaselineEvaluated
    | Noted
    | StepRefused
    | CorruptionFound
    | GpuHealth
    | AlertFired
    | AlertOver
    | AlertNotSent
    | BatchChanged
)
"""What workers, agents and the watch over alerts report; the controller alone knows of the
others."""

AnyEvent = (
    Reported
    | RunStarted
    | WorkerStarted
    | TrainingStarted
    | CheckpointRefused
    | FaultInjected
    | WorkerStuck
    | StragglerNamed
    | LossOutlierNamed
    | WorkerLost
    | WorldChanged
    | PlanChanged
    | ExactnessChanged
    | NodeSetAside
    | BatchSkipped
    | Recovered
    | ControllerReplaced
    | StopAsked
    | RunFinished
)


EventLog = JsonLines[AnyEvent]


def event_log(path: Path) -> EventLog:
    """The writer of a run's `events.jsonl`. Every line is on disk before `write` returns, unless
    the disk is full: then as soon as it is not."""
    return EventLog(path, sync=True)


decode_event: Callable[[bytes], AnyEvent] = msgspec.json.Decoder(AnyEvent).decode


def read_events(path: Path) -> list[AnyEvent]:
    """Every whole event of a file; a torn last line is left out."""
    return list(decoded(path.read_bytes(), decode_event)) if path.is_file() else []
