"""What worker, agent and controller say to each other: JSON lines, one tagged message each.

A worker talks to its agent over a socket pair it inherits; an agent talks to the controller
over TCP. A worker is a process, with a number that no other one of the run ever has.
It takes a rank in one generation after the other. What it says carries the generation it is in, so
that nothing late from an older one is ever taken for news.
"""

from typing import Literal

import msgspec

from paceline.control.slots import Phase
from paceline.parallel.layout import Layout
from paceline.record import events as log


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every message has: a name of its own."""


# From a worker.


class Ready(Message, frozen=True, kw_only=True, tag=True):
    """All is done that can be done without a rank: a worker without one is a warm spare now."""

    host: str
    """Where it serves a rendezvous store, should one be needed there."""

    port: int


class Met(Message, frozen=True, kw_only=True, tag=True):
    """The process group stands."""

    world_size: int
    backend: str


Source = Literal["own", "replica", "memory", "checkpoint", "initial"]
"""Where a rank's state comes from: it was never lost; a rank that holds the same; host
memory that outlived the process; the disk; the seed."""


class Restored(Message, frozen=True, kw_only=True, tag=True):
    """Model and optimizer are built and hold the state to resume from."""

    first_step: int
    source: Source
    checkpoint: str | None
    refused: list[tuple[str, str]]
    """Checkpoints passed over, and why."""


class StepDone(Message, frozen=True, kw_only=True, tag=True):
    """A step is finished on this rank."""

    step: int
    loss: float | None
    """None when it is not finite, which JSON cannot express."""

    tokens_per_s: float
    unit: str
    """What `tokens_per_s` counts: `tokens` or `samples`."""

    own_s: float | None = None
    """Seconds of the step in which this rank was not waiting; None when it cannot be told."""

    own_loss: float | None = None
    """Mean loss over this rank's own samples; None where it computes none, or it is not finite."""


class ForRecord(Message, frozen=True, kw_only=True, tag=True):
    """Something for the run's record: what a worker or an agent has found out."""

    event: log.Reported


class FaultDue(Message, frozen=True, kw_only=True, tag=True):
    """The worker stands where a drill wants a fault, and waits for the word."""

    fault: str


class Heard(Message, frozen=True, kw_only=True, tag=True):
    """The answer to `Interrupt`: nothing that comes over this generation's groups from now on is
    acted on."""

    generation: int


class PeerLost(Message, frozen=True, kw_only=True, tag=True):
    """The worker lost the connection to another rank. It stays in its groups until `Abort`."""

    reason: str


At = tuple[int, int]
"""Numbers of the last collective that a rank has called in a group and of the last that ended."""


class Collectives(Message, frozen=True, kw_only=True, tag=True):
    """The answer to `ReportCollectives`, for the worker's agent."""

    groups: dict[str, At]
    """By the group's name and ranks, such as `0 nccl|0,1,2`: several have the same ranks."""


class Parked(Message, frozen=True, kw_only=True, tag=True):
    """The worker has left the process groups of its generation and waits for the next one."""

    applied_step: int
    """Last step that it applied; -1 when it holds no state, or half of one."""

    planned: bool = False
    """Whether it left at a step boundary with all others, as it was asked to."""


class Completed(Message, frozen=True, kw_only=True, tag=True):
    """The completion record: the only proof of success; an exit code is none."""

    outcome: Literal["finished", "interrupted"]
    step: int
    saved_step: int
    """Step of the newest checkpoint that was committed; 0 is none."""

    world_size: int
    state_digest: str | None
    held_out_loss: float | None
    baseline_bytes: int | None
    peak_bytes: int | None


class Crashed(Message, frozen=True, kw_only=True, tag=True):
    """An exception ended the worker, or this try of it: then it stays in its groups until
    `Abort`."""

    kind: str
    message: str
    where: str
    """Last frames of the traceback."""

    retry: bool
    """Whether starting again could help."""

    parks: bool
    """Whether the process is sound and waits for another try; otherwise it ends."""

    step: int | None
    """The step it was in, if it was in one."""

    samples: list[int]
    """Ids of the samples of the micro-batch it was at, if it was at one."""

    exit_code: int
    """What `paceline run` exits with if this ends the run; see `errors.EXIT_CODES`."""


class LeaveWanted(Message, frozen=True, kw_only=True, tag=True):
    """The worker was told by its machine, with SIGTERM, that it will be taken away."""

    with_node: bool = False
    """Whether its agent was told so, for all of its workers: none is to be started there."""


FromWorker = (
    LeaveWanted
    | Ready
    | Met
    | Restored
    | StepDone
    | ForRecord
    | FaultDue
    | Heard
    | Collectives
    | PeerLost
    | Parked
    | Completed
    | Crashed
)

# To a worker.


class Join(Message, frozen=True, kw_only=True, tag=True):
    """Take a rank: who it is now, and where to meet the others."""

    generation: int
    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int
    faults: list[str]
    """Faults of the drill that have not fired yet."""

    layout: Layout | None = None
    """How the work is split in this generation; None as planned."""

    skipped: dict[int, list[int]] = {}
    """Steps that every rank leaves out, and the samples on whose account."""

    is_first: bool = False
    """Whether the run, or its resumption, begins with this generation."""


class Interrupt(Message, frozen=True, kw_only=True, tag=True):
    """This generation is over: answer `Heard`, act on nothing that comes over its groups, and stay
    in them until `Abort`."""

    generation: int


class Abort(Message, frozen=True, kw_only=True, tag=True):
    """Every rank that lives has heard of the interruption: leave the process groups of this
    generation, whatever waits in them, and park."""

    generation: int


class ReportCollectives(Message, frozen=True, kw_only=True, tag=True):
    """Answer with `Collectives`."""


class RegroupAtBoundary(Message, frozen=True, kw_only=True, tag=True):
    """Finish the step, and leave this generation with all others, for one of another size or with
    other workers."""

    generation: int
    save: bool
    """Whether to save a checkpoint first: what a rank that leaves holds is nowhere else."""


class SaveAtBoundary(Message, frozen=True, kw_only=True, tag=True):
    """Finish the step, and save a checkpoint after it."""


class StopAtBoundary(Message, frozen=True, kw_only=True, tag=True):
    """Finish the step, save, and end."""


class Exit(Message, frozen=True, kw_only=True, tag=True):
    """The run is over for this worker."""


class Fire(Message, frozen=True, kw_only=True, tag=True):
    """The fault that you wait for is due: do it, if it is one that you do yourself, and go on."""

    fault: str


ToWorker = (
    Join
    | Interrupt
    | Abort
    | ReportCollectives
    | RegroupAtBoundary
    | SaveAtBoundary
    | StopAtBoundary
    | Exit
    | Fire
)


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says, as it is on the wire."""

    generation: int
    """That it is in; 0 before its first."""

    message: FromWorker


# From an agent.


class AgentReady(Message, frozen=True, kw_only=True, tag=True):
    """An agent is there."""

    node: int
    token: str
    pid: int
    incarnation: str = ""
    """Which of this node's agents, one after the other."""

    is_known: bool = False
    """Whether a controller has welcomed it before, so that it may have workers."""

    epoch: int = 0
    """The highest that it has obeyed."""

    probe_port: int = 0
    """UDP port of its host on which it answers by a thread of its own; 0 is none."""


class Beat(Message, frozen=True, kw_only=True, tag=True):
    """The agent is there and at its work; five times a second, always the same bytes."""


class Started(Message, frozen=True, kw_only=True, tag=True):
    """A worker process runs."""

    worker: int
    pid: int


class Exited(Message, frozen=True, kw_only=True, tag=True):
    """A worker process is gone."""

    worker: int
    pid: int
    returncode: int
    """As in `subprocess`: negative is the signal."""

    fenced: bool
    """Whether this agent killed it on the controller's word."""

    out_of_memory: bool = False
    """Whether it was killed by SIGKILL while the kernel's out-of-memory killer was at work."""


class Said(Message, frozen=True, kw_only=True, tag=True):
    """A worker said something."""

    worker: int
    generation: int
    message: FromWorker


class FaultDone(Message, frozen=True, kw_only=True, tag=True):
    """A drill's fault is carried out."""

    worker: int
    pid: int
    fault: str
    monotonic_s: float
    """When, on the monotonic clock of its machine."""

    machine: str = ""
    """Which machine that is; see `holding.machine`."""


Kind = Literal["stopped", "gil held", "looping", "waiting"]
"""The ways to be stuck: nothing in the process runs; somebody keeps its interpreter; its training
thread burns a core; its training thread sleeps."""


class Seen(Message, frozen=True, kw_only=True, tag=True):
    """What an agent sees of one of its workers."""

    worker: int
    generation: int
    kind: Kind
    is_certain: bool
    """Whether the kernel says that it is stopped."""

    phase: Phase
    step: int
    micro_batch: int
    waited_s: float
    """Seconds without a change of place that were watched."""

    limit_s: float | None
    """None while it waits for orders, as it may for ever."""

    is_late: bool
    """Whether it has stood still for longer than its phase may take."""

    in_collective: bool | None = None
    """Whether its training thread's traceback ends in a collective; None when there is none."""

    stacks: str = ""
    """What the kernel says of its threads, and their tracebacks; cut to the last part."""

    collectives: dict[str, At] | None = None
    """How far it is in each of its process groups, by their ranks; None when it did not answer."""


class Stuck(Message, frozen=True, kw_only=True, tag=True):
    """A worker has stood still for longer than its phase may take; said again while it lasts."""

    seen: Seen


FromAgent = AgentReady | Beat | Started | Exited | Said | FaultDone | Stuck | Seen | ForRecord

# To an agent.


class StartWorker(Message, frozen=True, kw_only=True, tag=True):
    """Start a worker's process."""

    worker: int
    rank: int | None
    """That it is meant for; None for a spare."""


class Tell(Message, frozen=True, kw_only=True, tag=True):
    """Pass a message on to one worker."""

    worker: int
    message: ToWorker


class KillWorker(Message, frozen=True, kw_only=True, tag=True):
    """Fence one worker: SIGKILL."""

    worker: int


class KillWorkers(Message, frozen=True, kw_only=True, tag=True):
    """Kill every worker of this node."""


class Look(Message, frozen=True, kw_only=True, tag=True):
    """Say what is to be seen of every worker, with tracebacks."""


class InjectFault(Message, frozen=True, kw_only=True, tag=True):
    """Carry out a drill's fault: on the worker or the node from outside, or by the worker."""

    worker: int
    fault: str


class Leave(Message, frozen=True, kw_only=True, tag=True):
    """The run is over: let the workers exit, and end."""


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """The agent is known, or known again; what it says and was not heard comes once more."""

    lease_s: float
    """Silence after which it stops its workers."""


ToAgent = StartWorker | Tell | KillWorker | KillWorkers | Look | InjectFault | Leave


def encode(message: Message | Word) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


from_worker = msgspec.json.Decoder(Word).decode
to_worker = msgspec.json.Decoder(ToWorker).decode
