"""What is asked of a proof and what it says, as plain values that go through JSON.

Imports no torch: the command line reads a proof that a helper process has written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.choices import Compression
from paceline.estimate.rates import Rates
from paceline.parallel import Layout
from paceline.profile import DecoderShape
from paceline.profile.adapter import Adaptation

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "recomputed",
    "gathered",
    "reducing",
    "logits and loss",
    "temporaries",
    "inputs",
    "buffers",
)
"""What a living tensor is there for. `gathered`: whole parameters of FSDP units. `recomputed`:
activations computed again in the backward pass. `reducing`: gradients while they are reduced.
`inputs`: also what a pipeline's stage has received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """The model, in one of three ways."""

    decoder: DecoderShape | None = None
    """The built-in decoder."""

    config: Mapping[str, Any] | None = None
    """Fields of a Hugging Face config.json."""

    factory: str | None = None
    """`module:function`, imported from `folder`."""

    folder: str = "."

    adapters: Adaptation | None = None
    """What is put beside its linears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """What is offloaded moves with."""

    link_bytes_per_s: float
    """Between accelerator and what keeps the parameters: the host, or its disk."""

    state_bytes_per_s: float
    """Through the optimizer: a rank's share of the host's memory, or its disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One layout of one job, to be proved."""

    model: ModelRequest
    layout: Layout
    seq_len: int
    precision: str
    optimizer: str = "adamw"
    loss_chunk: int = 0
    """Tokens whose logits exist at a time in the loss; 0 is all."""

    router_loss: float = 0.0
    """What the balancing loss of routed experts is multiplied by; 0 is none."""

    compression: Compression = "none"
    """What is sent of the gradients that replicas all-reduce."""

    powersgd_rank: int = 4

    clip_norm: float | None = 1.0
    ranks_per_node: int = 8
    is_cuda: bool = True
    """Whether the ranks are CUDA devices: fused norms, and allocations in units of 512 bytes. The
    rest of CUDA's allocator (segments, fragmentation) is not part of a proof."""

    rates: Rates | None = None
    """The planner's rates, for the simulated time; None where they are unknown."""

    host: HostRates | None = None
    """What an offloading layout is timed with; None where that is unknown."""

    whole: bool = False
    """Trace every block, whatever it takes."""

    left_out: tuple[str, ...] = ()
    """What the job asks for and the dry run does not do, one phrase each."""

    wants_trace: bool = False
    """Whether the simulated step is returned as a Chrome trace as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When and where in a step something is."""

    phase: str
    """`forward`, `loss`, `backward` or `optimizer`."""

    micro_batch: int
    """From 1; 0 in the optimizer's phase."""

    module: str
    """Qualified name; empty for the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The peak of one stretch of the step."""

    at: float
    """Where in the step, from 0 to 1, counted in simulated time, or in stretches without it."""

    bytes: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """All collectives of one kind in one phase, in one group."""

    kind: str
    """`all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `broadcast`, `send` or
    `receive`."""

    phase: str
    where: str
    """`blocks`, or the module outside of them."""

    ranks: tuple[int, ...]
    """Ranks of this rank's own group; long ones are cut to the first eight."""

    group_size: int
    link: Literal["inside node", "between nodes"]
    count: int
    num_bytes: int
    """Bytes of all `count` collectives: the whole payload, what each rank has after a gather or
    before a scatter."""

    seconds: float | None
    """Seconds of all `count` collectives, without waiting for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProof:
    """One rank: the fullest of its pipeline stage, as all of a stage are alike or smaller."""

    stage: int
    rank: int
    peak_bytes: int
    """In living tensors, at the peak of a step."""

    parts: Mapping[str, int]
    """Part -> bytes at that instant, in the order of `PARTS`."""

    moment: Moment
    resting_bytes: int
    """Between two steps."""

    timeline: tuple[MemoryPoint, ...]
    collectives: tuple[Collective, ...]
    flops: Mapping[str, float]
    """Phase -> FLOPs of matrices and attention."""

    flops_by_module: Mapping[str, float]
    num_blocks: int
    how: str
    """What was traced and what was inferred from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The step in time, from the planner's rates and the order in which things were issued."""

    step_s: float
    compute_s: float
    """Seconds of kernels on the slowest stage."""

    communication_s: float
    """Seconds of collectives on the slowest stage, hidden or not."""

    exposed_s: float
    """Seconds that the slowest stage waits for collectives inside it."""

    bubble_s: float
    """Seconds that the slowest stage waits for other stages."""

    offload_s: float = 0.0
    """Seconds of the slowest stage's copies from and to the host, and of the host's work, hidden
    or not."""

    launch_s: float
    """Seconds that the slowest stage waits for the host to launch kernels."""

    fixed_s: float
    """Seconds of each step, whatever its size: data, logging, synchronisation. No rank issues it:
    it is the planner's."""

    stage: int
    """The one these numbers are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the runtime's own code does in a layout, by a dry run of it."""

    layout: Layout
    world_size: int
    stages: tuple[StageProof, ...]
    simulated: Simulated | None
    """The step in time; None where `untimed` gives the reason."""

    seconds: float
    """That the proof took."""

    untimed: str = ""
    """Why there is no simulated step."""

    notes: tuple[str, ...] = ()
    trace: tuple[Mapping[str, Any], ...] = ()
    """Events for chrome://tracing or Perfetto, when asked for."""

    versions: Mapping[str, str] = field(default_factory=dict)
    known: Literal["proved"] = "proved"

    @property
    def fullest(self) -> StageProof:
        """The stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)
