"""What the controller knows, what can happen to it, and what it can want done.

Values only; how one follows from the other is in `core.py` and the modules it names.

A worker is a process; a slot is a rank of the layout, which a worker takes. Workers without a slot
are spares. A generation is one set of workers in the slots. The run goes through these phases:

    gathering   agents are starting               -> every agent is there
    forming     the ranks of the last generation are interrupted, and let out of its groups when
                all have answered; every slot gets a worker that waits for the next one: the one
                that had it, a spare, or a new process -> every slot has one
    joining     they meet and bring back the state -> every rank has finished a step
    training    steps are being finished          -> every rank has a completion record
                -> a worker is lost: forming, with the next generation
    clearing    every worker is ended, to start again from a checkpoint -> none lives: forming
    over
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from paceline.choices import BatchPolicy
from paceline.control import messages as say
from paceline.control.adaptive_timeouts import MEET_S, meet_limit_s
from paceline.control.policy import History, Rules
from paceline.control.stragglers import LossOutliers, Stragglers
from paceline.errors import RunError
from paceline.parallel.layout import Layout
from paceline.parallel.shrink import Part
from paceline.record import events as log

Phase = Literal["gathering", "forming", "joining", "training", "clearing", "over"]
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
    arithmetic: dict[str, Any] = field(default_factory=dict)
    """As `RunStarted` has it."""

    changes: tuple[log.ExactnessChanged, ...] = ()
    """What this part of the run takes from the promise of the parts before it."""

    errors_from: int | None = None
    """The last step before PowerSGD carries errors, which no replica and no checkpoint has; None
    without it."""

    heartbeat_s: float = 5.0
    """Silence after which a node is lost that nothing speaks for."""

    in_order: bool = True
    """Whether every rank does its micro-batches one after the other; not so in a pipeline."""

    peers: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks that do the same work, whose speeds can be compared."""

    evict_stragglers: bool = False
    """Whether a rank that is slower than its peers is replaced when that pays."""

    on_oom: Literal["stop", "refit"] = "stop"
    poison: Literal["stop", "skip"] = "stop"
    """What is done with a batch that no process gets through."""

    node_strikes: int = 3
    """Failures of a node after which its lost ranks go to other nodes."""

    strike_window_s: float = 3600.0
    """How long a failure of a node counts."""

    skipped: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Steps that earlier parts of the run left out, and the samples on whose account."""

    split: Layout | None = None
    """The layout; None where a world of another size is never formed."""

    shrink: bool = True
    """Whether the run goes on with fewer ranks when one cannot be filled."""

    least_ranks: int = 1
    """With fewer it does not go on: a rank's share of the state would not fit into memory."""

    batch: BatchPolicy = "keep"
    """What happens to the global batch then."""

    replace_timeout_s: float = 60.0
    """How long a rank may stay empty before the run goes on without it."""

    tolerance: float | None = None
    """What a step's loss may differ by, relatively, once the batch is added up in another order."""

    exactness: log.Exactness = "bitwise"
    """What can be promised of the run's end when it starts: an earlier part of it may have added up
    its batches in another order, or had smaller ones."""

    num_spares: int = 0
    """Warm spares that are kept."""

    first_generation: int = 1
    """One more than the last of the run's record, when it is resumed."""

    park_timeout_s: float = 5.0
    """How long an interrupted worker may take to leave its groups before it is fenced, until it is
    known how long a step takes. A guess: milliseconds, unless it is busy computing or stopped."""

    meet_timeout_s: float = MEET_S
    """How long two ranks may take to meet before one that has not is replaced: whoever waits there
    waits for ever if nobody ends it. See `meet_limit_s` for many ranks."""

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

    def meet_limit_s(self, num_ranks: int) -> float:
        """How long this many ranks may take to meet."""
        return meet_limit_s(num_ranks, self.meet_timeout_s)

    @property
    def rules(self) -> Rules:
        """The part that the policy goes by."""
        return Rules(
            max_restarts=self.max_restarts,
            on_oom=self.on_oom,
            poison=self.poison,
            node_strikes=self.node_strikes,
            strike_window_s=self.strike_window_s,
        )

    def node_of(self, rank: int) -> int:
        """Where a rank's first worker runs."""
        return rank // self.ranks_per_node


@dataclass(slots=True, kw_only=True)
class Worker:
    """A process that lives, or that an agent was told to start."""

    node: int
    pid: int | None = None
    rank: int | None = None
    """The slot it has, or is meant for."""

    local_rank: int = 0
    """Its accelerator on its node, once it has a slot."""

    generation: int = 0
    """The one it was last told to join; 0 is none yet."""

    waits: bool = False
    """Whether it is ready for the next generation."""

    store: tuple[str, int] | None = None
    """Where it serves a rendezvous store."""

    is_fenced: bool = False
    """Whether it was told to die."""

    part: Part | None = None
    """What it held when it last joined."""

    holds: bool = False
    """Whether it holds a state of that part: it has restored one, and was not in an update when it
    last parked."""

    leaves: bool = False
    """Whether it was told by its node that it will be taken away."""

    fence_by_s: float | None = None
    """When its agent is ended, if it has not ended this worker by then."""


@dataclass(slots=True, kw_only=True)
class Slot:
    """What is known of one rank in the current generation."""

    worker: int | None = None
    met: say.Met | None = None
    restored: say.Restored | None = None
    last_step: int = 0
    """Last step finished in this generation; 0 is none."""

    completed: say.Completed | None = None

    @property
    def step(self) -> int:
        """Last step this rank has finished, or had finished when it was restored."""
        before = self.restored.first_step - 1 if self.restored is not None else 0
        return max(self.last_step, before)


@dataclass(slots=True, kw_only=True)
class Failure:
    """A failure being recovered from, with the times its phases ended (monotonic seconds)."""

    rank: int
    how: str
    happened_at: float | None
    """When the fault was injected, where that is known."""

    known_at: float
    after_step: int
    """Last step every rank had finished."""

    exit_code: int = RunError.exit_code
    """Exit code of the command, should this end the run."""

    formed_at: float | None = None
    met_at: float | None = None
    restored_at: float | None = None


@dataclass(frozen=True, slots=True)
class Symptom:
    """A survivor notices a lost peer before the kernel tells of its end: sockets close first."""

    rank: int
    reason: str
    since_s: float


@dataclass(slots=True, kw_only=True)
class Inquiry:
    """Every agent was asked what is to be seen of its ranks, as some rank is late."""

    asked_s: float
    seen: dict[int, say.Seen] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class State:
    """Everything the controller knows. `core.decide` alone changes it."""

    setup: Setup
    phase: Phase = "gathering"
    generation: int = 0
    """The one that is forming or at work."""

    epoch: int = 1
    """How many controllers this part of the run has had; orders of older ones are refused."""

    agents: set[int] = field(default_factory=set)
    workers: dict[int, Worker] = field(default_factory=dict)
    """Those that live, by number."""

    slots: list[Slot] = field(default_factory=list)
    empty: set[int] = field(default_factory=set)
    """Ranks without a worker. `rank_assignment.py` keeps it."""

    unranked: set[int] = field(default_factory=set)
    """Workers without a rank, by number. `rank_assignment.py` keeps it."""

    witness: dict[str, int] = field(default_factory=dict)
    """A rank that was still waited for, by what for: where to look first."""

    num_started: int = 0
    """Workers started so far: the next one's number."""

    num_spares_started: int = 0
    faults: tuple[str, ...] = ()
    """Faults of the drill that have not fired."""

    waiting_faults: list[tuple[int, str]] = field(default_factory=list)
    """Ranks that stand at the place of a fault which waits for a spare."""

    fault_at: float | None = None
    """When a fault was last carried out, until its failure is known."""

    furthest_step: int = 0
    """Highest step that every rank has finished, in any generation."""

    num_at_step: dict[int, int] = field(default_factory=dict)
    """How many ranks of this generation have finished a step, of the steps that some have not."""

    exactness: log.Exactness = "bitwise"
    """What is promised of the end, as steps were split so far."""

    restarts: int = 0
    """Generations after the first."""

    history: History = field(default_factory=History)
    """What went wrong before and still counts."""

    split: Layout | None = None
    """The layout of a world that is smaller than what was planned; None at full size."""

    regroup: Layout | None = None
    """What all ranks were asked to leave this generation for, at a step boundary."""

    away_until_s: dict[int, float] = field(default_factory=dict)
    """Nodes that a drill keeps away, and until when."""

    num_resizes: int = 0
    """How often the world changed its size."""

    short_since_s: float | None = None
    """Since when a rank has been empty with nobody to fill it."""

    leaving: set[int] = field(default_factory=set)
    """Nodes that will be taken away."""

    interrupted: int = 0
    """The last generation whose workers were interrupted; 0 is none."""

    unheard: set[int] | None = None
    """Workers that were interrupted and have not answered, by number; None once all were let out of
    their groups."""

    failure: Failure | None = None
    symptom: Symptom | None = None
    """A rank that only says that another one went away, while the cause is looked for."""

    inquiry: Inquiry | None = None
    """While it is found out for whom the ranks wait."""

    stragglers: Stragglers | None = None
    """How fast the ranks are; None before the first step."""

    own_losses: dict[int, dict[int, float | None]] = field(default_factory=dict)
    """Step -> rank -> mean loss over its own samples, of steps that some ranks still do."""

    loss_outliers: LossOutliers | None = None
    """The ranks' losses; None before the first step."""

    own_times: dict[int, dict[int, float]] = field(default_factory=dict)
    """Step -> rank -> seconds in which it was not waiting, of steps that some ranks still do."""

    step_done_s: float | None = None
    """When all ranks had finished their last step."""

    step_s: float | None = None
    """How long after the one before."""

    stop_by: str | None = None
    stops: int = 0
    form_deadline_s: float | None = None
    """When patience ends with workers that do not park."""

    in_doubt_s: dict[int, float] = field(default_factory=dict)
    """Until when a rank may still have a worker that nobody can reach, by rank."""

    agents_due_s: dict[int, float] = field(default_factory=dict)
    """When patience ends with an agent that was started and has not reported, by node."""

    stop_deadline_s: float | None = None
    """When patience ends with workers that do not stop."""

    outcome: Outcome | None = None
    reason: str | None = None

    @property
    def exit_code(self) -> int:
        """What the command that runs this ends with; see `errors.EXIT_CODES`."""
        if self.outcome == "finished" and self.unsaved:
            return 6
        if self.outcome == "failed":
            return self.failure.exit_code if self.failure is not None else RunError.exit_code
        return 130 if self.outcome == "interrupted" else 0

    @property
    def unsaved(self) -> bool:
        """Whether the last state of the run is on no disk."""
        records = [slot.completed for slot in self.slots if slot.completed is not None]
        return any(record.saved_step < record.step for record in records)

    @property
    def num_alive(self) -> int:
        """Slots that have a worker."""
        return len(self.slots) - len(self.empty)

    @property
    def step(self) -> int:
        """Last step that every rank has finished, or had finished when it was restored."""
        return min((slot.step for slot in self.slots), default=0)


# What happens to the controller, besides what agents say. All of it goes into the journal.


class Event(msgspec.Struct, frozen=True, tag_field="type"):
    """What every one of them has: a name of its own."""


class Begin(Event, frozen=True, tag=True):
    """Take charge."""


class TookOver(Event, frozen=True, tag=True):
    """Go on in the place of a controller that died."""

    away_s: float
    """For how long nobody was in charge."""


class AgentJoined(Event, frozen=True, tag=True):
    node: int
    incarnation: str = ""
    """Which of this node's agents, one after the other."""

    pid: int = 0


class AgentLost(Event, frozen=True, tag=True):
    node: int
    in_doubt_s: float = 0.0
    """For how long its workers may live on; 0 when they are surely gone."""


class StopWanted(Event, frozen=True, tag=True):
    """Somebody pressed Ctrl-C or sent SIGTERM. The second time means at once."""

    by: str


class Tick(Event, frozen=True, tag=True):
    """Time has passed."""


Happening = (
    Begin
    | TookOver
    | AgentJoined
    | AgentLost
    | StopWanted
    | Tick
    | say.Started
    | say.Exited
    | say.Said
    | say.FaultDone
    | say.Stuck
    | say.Seen
    | say.ForRecord
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
