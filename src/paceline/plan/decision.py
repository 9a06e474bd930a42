"""What was chosen: a `Plan`, every decision with its reason, and the case against the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.catalog.engines import load_engines
from paceline.choices import Objective, Precision
from paceline.estimate import Estimate, MemoryEstimate
from paceline.estimate.cost import RunCost
from paceline.estimate.goodput import Goodput
from paceline.estimate.recovery import StatePlan
from paceline.job import Length
from paceline.parallel import Layout
from paceline.profile import DecoderShape, ModelProfile
from paceline.topology import Cluster
from paceline.units import bytes_apart, dollars_apart, seconds_apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One thing that was left open and is now decided."""

    field: str
    """Dotted field of the job, such as `layout.micro_batch`."""

    value: str
    """What was decided, for people."""

    reason: str
    """Why, in the job's own numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A layout that was considered and lost."""

    layout: Layout
    estimate: Estimate
    reason: str
    """Why it lost, in numbers."""

    passed_over: str = ""
    """What those have in common that are not slower: they do not fit, or are less simple."""

    @property
    def why(self) -> str:
        """The whole reason, where it stands alone."""
        if self.passed_over.startswith(self.reason):
            return self.passed_over
        return f"{self.passed_over}: {self.reason}" if self.passed_over else self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A layout that no other one beats in time and in memory."""

    layout: Layout
    step_s: float | None
    memory_bytes: int
    usd: float | None
    """Price of the whole run at the plan's provider; None without a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What the job may cost, take or need, against what is expected."""

    name: Literal["budget", "deadline", "memory"]
    limit: float
    """Dollars, seconds or bytes."""

    expected: float | None
    """Expected dollars, seconds or bytes; None is unknown."""

    @property
    def is_kept(self) -> bool | None:
        """Whether what is expected is inside; None when it is unknown."""
        return None if self.expected is None else self.expected <= self.limit

    @property
    def texts(self) -> list[str]:
        """What is expected, where it is known, and the limit; unequal ones do not look equal."""
        apart = {"budget": dollars_apart, "deadline": seconds_apart, "memory": bytes_apart}
        known = [] if self.expected is None else [self.expected]
        return apart[self.name](*known, self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    """One thing that the plan allows and a person should know."""

    about: Literal[
        "files",
        "accelerator",
        "version",
        "bubble",
        "tensor",
        "data parallel",
        "gather",
        "cluster",
        "host memory",
        "network",
        "efficiency",
        "sample length",
        "gradients",
        "checkpoint",
        "collective",
    ]
    what: str
    """What was seen, in the job's own numbers."""

    fix: str
    """The change that removes it."""

    @property
    def keeps_from_running(self) -> bool:
        """Whether nothing that Paceline writes or starts carries the plan out."""
        return self.about in ("files", "accelerator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that full sharding gathers at once."""

    name: str
    count: int
    """Units alike."""

    num_bytes: int
    """Gathered bytes of one unit on one rank."""

    apart_bytes: int = 0
    """Gathered bytes of its routed experts, which are a unit of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen layout of one job on one cluster, and why."""

    cluster: Cluster
    profile: ModelProfile
    decoder: DecoderShape | None
    """Sizes of the built-in decoder; None for a model that it is not."""

    layout: Layout
    estimate: Estimate
    precision: Precision
    """Type of the matrix multiplications."""

    checkpoint_every: int
    """Steps between checkpoints."""

    evaluate_every: int
    """Steps between evaluations."""

    decisions: tuple[Decision, ...]
    """Everything the job left open."""

    rejected: tuple[Rejected, ...]
    """The others: all of a small space; of a large one the best of other ways to split, and the
    simplest that do not fit. Those that fit come first, by step time; the others by memory."""

    length: Length | None = None
    """What `train.steps` was made of: epochs and samples, or tokens; None where the job gives
    steps."""

    engine: str = "paceline"
    """Name in the catalog of the software that runs the steps."""

    engine_version: str = ""
    """The release that the plan is for; empty where the engine has none of its own."""

    is_compiled: bool = False
    """Whether the engine was asked to compile the model (`train.compile`)."""

    states: str = "auto"
    """Type of parameters, gradients and moments that the engine was asked for (`train.states`)."""

    attention: str = "auto"
    """Kernel that the engine was asked for (`train.attention`)."""

    mlx_backend: str = "auto"
    """What MLX's ranks talk through, as asked for (`cluster.mlx_backend`)."""

    fp8_recipe: str = "auto"
    async_tensor: bool = False
    token_dispatcher: str = "auto"
    async_expert: bool = False
    optimizer_in_backward: bool = False

    optimizer: str = "adamw"
    loss_chunk: int = 0
    """Tokens whose logits exist at a time in the loss; 0 is all of a micro-batch."""

    measured_rates: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Constants of a catalog file of the person's own, by accelerator; empty where all are those
    that Paceline ships."""

    router_loss: float = 0.0
    """What the balancing loss of routed experts is multiplied by; 0 is none."""

    objective: Objective = "time"
    head_room: float = 0.1
    """Share of the usable memory that is left free."""

    host_bytes: int = 0
    """Optimizer state off the accelerators, of all ranks of the fullest node."""

    space_size: int = 0
    """Layouts that were priced."""

    num_fitting: int = 0
    """Layouts that were priced and fit."""

    search_s: float = field(default=0.0, compare=False)
    """How long that took. Measured, so no part of the plan: its JSON leaves it out."""

    stages: tuple[MemoryEstimate, ...] = ()
    """Memory of one rank of every pipeline stage, first to last."""

    data_checked: str | None = None
    """What `paceline data check` found in the job's files, or that they were not checked; None
    where it was not asked or no file is here."""

    pareto: tuple[Point, ...] = ()
    """Layouts that none is both faster and leaner than, fastest first."""

    cost: RunCost | None = None
    """Cost of the whole run at the cheapest provider that the job allows; None without a price."""

    costs: tuple[RunCost, ...] = ()
    """Cost of the whole run at the three cheapest providers on demand and the three cheapest spot,
    the cheapest first."""

    why_no_cost: str | None = None
    """Why a declared cluster's run has no cost."""

    goodput: Goodput | None = None
    """What failures and checkpoints leave of the time; None on this machine, where nobody knows
    how often it fails, or when a step's time is unknown."""

    state: StatePlan | None = None
    """Where a lost rank's state is kept besides the checkpoint, and what the other places would be
    worth; None when a step's time is unknown."""

    wall_s: float | None = None
    """Seconds of the whole run, failures included where they are known of."""

    limits: tuple[Limit, ...] = ()
    """Budget, deadline and memory, as far as the job has them."""

    stage_blocks: tuple[int, ...] = ()
    """Blocks of every pipeline stage, in the order they are computed; empty without a pipeline."""

    cautions: tuple[Caution, ...] = ()
    """What the plan allows and a person should know."""

    units: tuple[Unit, ...] = ()
    """What full sharding gathers at a time, the largest first."""

    parallelize: Mapping[str, str] = field(default_factory=dict)
    """Module -> how its matrices are split over the tensor ranks; empty without them."""

    @property
    def layout_name(self) -> str:
        """The chosen layout in the engine's words."""
        return self.named(self.layout)

    def named(self, layout: Layout) -> str:
        """A layout in the engine's words: full sharding is ZeRO-3 in DeepSpeed."""
        return layout.named(self.full_sharding)

    @property
    def full_sharding(self) -> str:
        """What the engine calls full sharding."""
        return load_engines()[self.engine].full_sharding

    @property
    def engine_name(self) -> str:
        """The engine with its release, where it has one: `torchtitan 0.3.0`."""
        return f"{self.engine} {self.engine_version}".rstrip()

    @property
    def limit_bytes(self) -> int:
        """Memory that a rank may use."""
        return int(self.cluster.usable_bytes * (1 - self.head_room))
