"""What the controller knows, what can happen to it, and what it can want done.

Values only; how one follows from the other is in `core.py`. A generation is one set of workers.
It goes through these phases:

    gathering   agents are starting           -> every agent is there
    starting    workers are starting          -> every rank has finished a step
    training    steps are being finished      -> every rank has a completion record
    fencing     a rank is lost: no worker of this generation may live on
                -> none does: gathering again with the next generation, or over
    over
"""

from dataclasses import dataclass
from typing import Literal

from paceline.control import messages as say
from paceline.errors import RunError
from paceline.record import events as log

Phase = Literal["gathering", "starting", "training", "fencing", "over"]
Outcome = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What does not change during a run."""

    num_nodes: int
    ranks_per_node: int
    num_steps: int
    max_restarts: int
    grace_s: float
    versions: dict[str, str]
    resumed: bool
    layout: str
    """Name of the layout, for the record."""

    first_generation: int = 1
    """One more than the last of the run's record, when it is resumed."""

    fence_timeout_s: float = 10.0
    """How long an agent may take to end its workers before it is ended itself; a guess, a hundred
    times what it takes here."""

    cause_timeout_s: float = 2.0
    """How long a survivor that lost its peer waits for the peer's own end to be reported. The end
    follows within milliseconds here; only a lost network needs the whole time."""

    agent_timeout_s: float = 60.0
    """How long an agent may take to report; a guess, ten times what one takes here."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What is known of one rank in the current generation."""

    alive: bool = False
    pid: int | None = None
    met: say.Met | None = None
    restored: say.Restored | None = None
    last_step: int = 0
    """Last step finished in this generation; 0 is none."""

    completed: say.Completed | None = None
    crashed: say.Crashed | None = None

    @property
    def step(self) -> int:
        """Last step this rank has finished, or had finished when it was restored."""
        before = self.restored.first_step - 1 if self.restored is not None else 0
        return max(self.last_step, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure being recovered from, with the times its phases ended (monotonic seconds)."""

    rank: int
    how: str
    detail: str | None
    retry: bool
    happened_at: float | None
    """When the fault was injected, where that is known."""

    known_at: float
    after_step: int
    """Last step every rank had finished."""

    fenced_at: float | None = None
    met_at: float | None = None
    restored_at: float | None = None


@dataclass(frozen=True, slots=True)
class Symptom:
    """A survivor notices a lost peer before the kernel tells of its end: sockets close first."""

    rank: int
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything the controller knows."""

    setup: Setup
    phase: Phase = "gathering"
    generation: int = 0
    agents: frozenset[int] = frozenset()
    ranks: tuple[Rank, ...] = ()
    faults: tuple[str, ...] = ()
    """Faults of the drill that have not fired."""

    fault_at: float | None = None
    """When the last fault was carried out in this generation."""

    furthest_step: int = 0
    """Highest step that every rank has finished, in any generation."""

    restarts: int = 0
    restarts_in_a_row: int = 0
    """Without getting further than before."""

    failed_at_step: int = -1
    """`furthest_step` at the last failure."""

    failure: Failure | None = None
    symptom: Symptom | None = None
    """A rank that only says that another one went away, while the cause is looked for."""

    stop_by: str | None = None
    stops: int = 0
    deadline_s: float | None = None
    """When patience ends: with agents that do not report, or workers that do not stop."""

    outcome: Outcome | None = None
    reason: str | None = None

    @property
    def exit_code(self) -> int:
        """What the command that runs this ends with; see `errors.EXIT_CODES`."""
        if self.outcome == "finished" and self.unsaved:
            return 6
        if self.outcome == "failed":
            rank = self.ranks[self.failure.rank] if self.failure and self.ranks else Rank()
            return rank.crashed.exit_code if rank.crashed is not None else RunError.exit_code
        return 130 if self.outcome == "interrupted" else 0

    @property
    def unsaved(self) -> bool:
        """Whether the last state of the run is on no disk."""
        records = [rank.completed for rank in self.ranks if rank.completed is not None]
        return any(record.saved_step < record.step for record in records)

    @property
    def num_alive(self) -> int:
        return sum(rank.alive for rank in self.ranks)

    @property
    def step(self) -> int:
        """Last step that every rank has finished, or had finished when it was restored."""
        return min((rank.step for rank in self.ranks), default=0)


# What happens to the controller, besides what agents say.


@dataclass(frozen=True, slots=True)
class Begin:
    """Take charge."""


@dataclass(frozen=True, slots=True)
class AgentJoined:
    node: int


@dataclass(frozen=True, slots=True)
class AgentLost:
    node: int


@dataclass(frozen=True, slots=True)
class StopWanted:
    """Somebody pressed Ctrl-C or sent SIGTERM. The second time means at once."""

    by: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Happening = (
    Begin
    | AgentJoined
    | AgentLost
    | StopWanted
    | Tick
    | say.Started
    | say.Exited
    | say.Said
    | say.FaultDone
)

# What the controller wants done.


@dataclass(frozen=True, slots=True)
class StartAgent:
    node: int


@dataclass(frozen=True, slots=True)
class KillAgent:
    """End an agent that does not answer, or whose connection is gone, with all its workers."""

    node: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the agent of a node."""

    node: int
    message: say.ToAgent


@dataclass(frozen=True, slots=True)
class Record:
    """Write an event."""

    event: log.AnyEvent


Action = StartAgent | KillAgent | Send | Record


@dataclass(frozen=True, slots=True)
class Clock:
    """The moment of an event."""

    monotonic_s: float
    unix_s: float
