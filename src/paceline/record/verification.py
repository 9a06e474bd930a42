"""What `paceline verify` asks of the ranks, and the facts they write down.

`launch/verify.py` starts the ranks with a `Case`, `runtime/verify/` fills in the facts, and
`check/verify/` judges them: recorded facts are enough to judge again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.choices import Compression
from paceline.errors import Problem
from paceline.parallel.layout import Layout
from paceline.profile import DecoderShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training of a few steps on all ranks."""

    name: str
    """Unique in the case; `check/verify/` knows what each is for."""

    layout: Layout
    precision: str
    """`fp64`, or the job's."""

    steps: int
    """Last step; the first is 1, or the one after the checkpoint it starts from."""

    watched: bool = False
    """Whether every module's output is read, and every gradient and parameter compared."""

    compared: bool = False
    """Whether gradients and parameters are compared, without modules' outputs."""

    save_after: int | None = None
    """Step after which a checkpoint is written."""

    load: str | None = None
    """Run whose checkpoint it starts from."""

    compression: Compression = "none"
    """Compression of gradients on the wire."""

    dropout: bool = False
    """Whether dropout is on: its masks are then written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything a rank needs to know."""

    job: str
    folder: str
    """Folder that the job's names start from."""

    source: str
    decoder: DecoderShape | None
    """The built-in decoder's sizes, made small."""

    config: dict[str, Any] | None
    """Fields of a config.json, made small and without dropout; None without."""

    dropout: dict[str, float]
    """Fields of that config which are shares of dropout, as they were."""

    layout: Layout
    precision: str
    vocab: int
    """Tokens are below it."""

    seq_len: int
    steps: int
    device: Literal["cpu", "cuda"]
    threads: int
    """Threads of each rank on a CPU."""

    num_samples: int
    """In the data set that the sampler is asked about: two epochs are gone through."""

    runs: tuple[Run, ...]
    predicted: dict[str, int] | None = None
    """Bytes of parameters, gradients and optimizer state on the fullest rank; None is unknown."""

    notes: tuple[str, ...] = ()
    """What was made smaller, and what is therefore not covered."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is kept of a module's output in one step: sums over all its numbers, in float64.

    Readings of parts of a tensor add up to the whole's.
    """

    count: int
    total: float
    squares: float
    largest: float
    """Largest magnitude; not finite if any number is not."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How one tensor differs from the same one on a single device."""

    squares: float
    of: float
    count: int
    largest: float
    most: float
    ratio: float | None = None
    """The factor that comes nearest to the single device's."""

    beside_ratio: float | None = None
    """What is then left, as a share: 0 is exactly that factor."""

    like_share: int | None = None
    """The data rank whose samples alone give this gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a parameter that a rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    count: int
    itemsize: int
    part: str
    """Names the part: ranks with the same one hold copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One optimizer step on one rank."""

    step: int
    loss_sum: float
    """Sum over this rank's targets; 0 on ranks that repeat another's."""

    num_targets: int
    grad_norm: float
    ids: tuple[int, ...]
    modules: dict[str, Reading] = field(default_factory=dict)
    """In the order of the forward pass."""

    inputs: dict[str, Reading] = field(default_factory=dict)
    gradients: dict[str, Deviation] = field(default_factory=dict)
    parameters: dict[str, Deviation] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """Parameters without a gradient that have one on a single device."""

    digests: dict[str, str] = field(default_factory=dict)
    """Parameter -> SHA-256 of what this rank holds of it, after the step."""

    masks: dict[str, str] = field(default_factory=dict)
    """Dropout module -> SHA-256 of the random state it draws from; only with `Run.dropout`."""

    mask_counts: dict[str, int] = field(default_factory=dict)
    """Dropout module -> numbers that went through it here."""

    loss_scale: float = 1.0
    """Loss scale of fp16 that the step was applied with."""

    num_overflows: int = 0
    """Times the step was refused before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes of tensor storage that a rank holds after a step."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A collective that adds up, as it was seen in one step."""

    kind: str
    dtype: str
    ranks: tuple[int, ...]
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run on one rank."""

    name: str
    steps: tuple[StepFacts, ...] = ()
    pieces: dict[str, Piece] = field(default_factory=dict)
    held: Bytes | None = None
    loaded: str | None = None
    """SHA-256 of the whole state, as it was loaded; the same in every layout."""

    saved: str | None = None
    """SHA-256 of the whole state, as it was saved; the same in every layout."""

    ended: str | None = None
    """SHA-256 of the whole state at the end."""

    reductions: tuple[Reduction, ...] = ()
    refused: str | None = None
    """Why it was not run: the layout is not possible."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Everything one rank saw."""

    rank: int
    world_size: int
    """As an all-reduce of ones counts it."""

    device: str
    host: str
    pid: int
    tensor: int
    context: int
    data: int
    pipeline: int
    """Its place on every axis, as its meshes say."""

    sampler: tuple[tuple[int, ...], ...] = ()
    """Samples it reads in each epoch of `Case.num_samples`."""

    runs: dict[str, RunFacts] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """What a person can fix; nothing else is there then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """One step on a single device."""

    loss: float
    grad_norm: float
    modules: dict[str, Reading] = field(default_factory=dict)
    inputs: dict[str, Reading] = field(default_factory=dict)
    gradients: dict[str, Deviation] = field(default_factory=dict)
    """Deviation of the narrow run from the wide one: the rounding of a single device."""

    parameters: dict[str, Deviation] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The single device: what every layout must equal."""

    wide: tuple[ReferenceStep, ...]
    narrow: tuple[ReferenceStep, ...]
    shapes: dict[str, tuple[int, ...]]
    longest_sum: int
    """Most numbers that one element of an output or a gradient adds up."""

    num_chained: int
    """Operations that follow one another, forward and backward."""

    has_dropout: bool
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The whole record of a verification."""

    case: Case
    reference: Reference
    ranks: tuple[RankFacts, ...]
