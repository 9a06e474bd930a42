"""What worker, agent and controller say to each other: JSON lines, one tagged message each.

A worker talks to its agent over a socket pair it inherits; an agent talks to the controller
over TCP on 127.0.0.1. Everything from or to a worker carries the generation of that worker, so
that nothing late from an older one is ever taken for news.
"""

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every message has: a name of its own."""


# From a worker.


class StoreListening(Message, frozen=True, kw_only=True, tag=True):
    """Rank 0 serves the rendezvous store here."""

    host: str
    port: int


class Met(Message, frozen=True, kw_only=True, tag=True):
    """The process group stands."""

    world_size: int
    backend: str


class Restored(Message, frozen=True, kw_only=True, tag=True):
    """Model and optimizer are built and hold the state to go on from."""

    first_step: int
    checkpoint: str | None
    refused: list[tuple[str, str]]
    """Checkpoints passed over, and why."""


class StepDone(Message, frozen=True, kw_only=True, tag=True):
    """A step is finished on this rank."""

    step: int
    loss: float | None
    """None when it is not finite, which JSON cannot say."""

    tokens_per_s: float
    unit: str
    """What `tokens_per_s` counts: `tokens` or `samples`."""


class EvaluationDone(Message, frozen=True, kw_only=True, tag=True):
    """Rank 0 has the held-out loss of all ranks."""

    step: int
    loss: float | None
    seconds: float


class BaselineDone(Message, frozen=True, kw_only=True, tag=True):
    """Rank 0 has the held-out loss of a simple model, to compare with."""

    name: str
    loss: float


class NoteMade(Message, frozen=True, kw_only=True, tag=True):
    """Rank 0 has something to say about how the run is carried out."""

    text: str


class SaveDone(Message, frozen=True, kw_only=True, tag=True):
    """A checkpoint is committed."""

    step: int
    checkpoint: str
    num_bytes: int
    stall_s: float
    write_s: float


class SaveError(Message, frozen=True, kw_only=True, tag=True):
    """A checkpoint could not be written; training goes on."""

    step: int
    reason: str


class StepVotedDown(Message, frozen=True, kw_only=True, tag=True):
    """All ranks refused a step."""

    step: int
    reason: str


class FaultDue(Message, frozen=True, kw_only=True, tag=True):
    """The worker stands where a drill wants it dead, and waits."""

    fault: str


class Completed(Message, frozen=True, kw_only=True, tag=True):
    """The completion record: the only proof of success; an exit code is none."""

    outcome: Literal["finished", "interrupted"]
    step: int
    saved_step: int
    """Step of the newest checkpoint that was committed; 0 is none."""

    world_size: int
    state_digest: str | None
    held_out_loss: float | None
    baseline_bytes: int
    peak_bytes: int


class Crashed(Message, frozen=True, kw_only=True, tag=True):
    """An exception ended the worker."""

    kind: str
    message: str
    where: str
    """Last frames of the traceback."""

    peer_lost: bool
    """Whether it only says that another rank went away."""

    retry: bool
    """Whether starting again could help."""

    exit_code: int
    """What `paceline run` exits with if this ends the run; see `errors.EXIT_CODES`."""


FromWorker = (
    StoreListening
    | Met
    | Restored
    | StepDone
    | EvaluationDone
    | BaselineDone
    | NoteMade
    | SaveDone
    | SaveError
    | StepVotedDown
    | FaultDue
    | Completed
    | Crashed
)

# To a worker.


class Rendezvous(Message, frozen=True, kw_only=True, tag=True):
    """Where to meet."""

    host: str
    port: int


class StopAtBoundary(Message, frozen=True, kw_only=True, tag=True):
    """Finish the step, save, and end."""


ToWorker = Rendezvous | StopAtBoundary

# From an agent.


class AgentReady(Message, frozen=True, kw_only=True, tag=True):
    """An agent is there."""

    node: int
    token: str
    pid: int


class Started(Message, frozen=True, kw_only=True, tag=True):
    """A worker process runs."""

    generation: int
    rank: int
    pid: int


class Exited(Message, frozen=True, kw_only=True, tag=True):
    """A worker process is gone."""

    generation: int
    rank: int
    pid: int
    returncode: int
    """As in `subprocess`: negative is the signal."""

    fenced: bool
    """Whether this agent killed it on the controller's word."""


class Said(Message, frozen=True, kw_only=True, tag=True):
    """A worker said something."""

    generation: int
    rank: int
    message: FromWorker


class FaultDone(Message, frozen=True, kw_only=True, tag=True):
    """A drill's fault is carried out."""

    generation: int
    rank: int
    pid: int
    fault: str
    monotonic_s: float
    """When, on the machine's monotonic clock, which local agents and controller share."""


FromAgent = AgentReady | Started | Exited | Said | FaultDone

# To an agent.


class StartWorker(Message, frozen=True, kw_only=True, tag=True):
    """Start the process of one rank."""

    generation: int
    rank: int
    faults: list[str]
    """Faults of the drill that have not fired yet."""


class Tell(Message, frozen=True, kw_only=True, tag=True):
    """Pass a message on to one rank."""

    generation: int
    rank: int
    message: ToWorker


class KillWorkers(Message, frozen=True, kw_only=True, tag=True):
    """Kill every worker of this generation and older ones."""

    generation: int


class InjectFault(Message, frozen=True, kw_only=True, tag=True):
    """Kill one worker with SIGKILL, as the drill asks."""

    generation: int
    rank: int
    fault: str


class Leave(Message, frozen=True, kw_only=True, tag=True):
    """The run is over: end."""


ToAgent = StartWorker | Tell | KillWorkers | InjectFault | Leave


def encode(message: Message) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


from_worker = msgspec.json.Decoder(FromWorker).decode
to_worker = msgspec.json.Decoder(ToWorker).decode
from_agent = msgspec.json.Decoder(FromAgent).decode
to_agent = msgspec.json.Decoder(ToAgent).decode


_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "connection was lost",
    "Connection refused",
    "NCCL communicator was aborted",
    "remote process exited",
    "failed to recv, got 0 bytes",
    "Connection was likely closed",
    "closed the connection",
)
"""What gloo and NCCL say when another rank goes away (torch 2.13, gloo's transport/tcp/pair.cc and
ProcessGroupNCCL.cpp)."""


def names_lost_peer(text: str) -> bool:
    """Whether an error is of a rank that is gone, and so not this rank's own."""
    return any(phrase in text for phrase in _PEER_LOST)
