"""Which ways to split an engine has, so that nothing is planned that it cannot run.

Those of our own runtime are what `runtime/strategy` does, tested. The others are written from what
is known of each engine's documentation in 2026, neither tried nor checked against its source: what
is not listed is taken to do everything, and of which combinations they have only sharding in a
pipeline is told.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from paceline.choices import ContextKind, Offload, Recompute, Schedule, Sharding
from paceline.parallel.layout import Layout
from paceline.parallel.schedules import SPLIT_BACKWARD
from paceline.parallel.table import CONTEXT_KINDS, OFFLOADS, RECOMPUTES, SCHEDULES, SHARDINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The ways to split that an engine has; left out, all of them."""

    shardings: tuple[Sharding, ...] = SHARDINGS
    pipeline_shardings: tuple[Sharding, ...] = SHARDINGS
    """Those that go together with a pipeline."""

    schedules: tuple[Schedule, ...] = SCHEDULES
    """Of pipelines; empty is no pipelines."""

    context_kinds: tuple[ContextKind, ...] = CONTEXT_KINDS
    """Empty is no splitting of one sample."""

    recomputes: tuple[Recompute, ...] = RECOMPUTES
    offloads: tuple[Offload, ...] = OFFLOADS
    tensor: bool = True
    expert: bool = True
    reduces_each: bool | None = None
    """Whether full sharding reduces after each micro-batch: always, never, or (None) as wanted."""

    reduces_each_in_pipeline: bool = True
    """Whether it can do so in a pipeline."""

    chunked_zero_bubble: bool = False
    """Whether zero-bubble has several stages a rank: two in a v (ZB-V), or three and more."""

    equal_rounds: bool = False
    """How many micro-batches interleaved and looped zero-bubble pipelines take: any number that
    divides into rounds of at least one a rank, or (False) multiples of the ranks, interleaved
    only."""

    selective_split_backward: bool = True
    """Whether selective recompute goes with a backward pass in two, as zero-bubble has it."""

    offloads_whole: bool = True
    """Whether optimizer state that is not sharded can be offloaded."""

    copies_kv_head: bool = True
    """Whether the only key and value head of a model is held by every tensor rank."""

    experts_by_tensor: bool = False
    """Whether routed experts that no expert ranks share are divided among the tensor ranks."""


_ZERO1: tuple[Sharding, ...] = ("none", "zero1")
_FSDP: tuple[Sharding, ...] = ("none", "zero2", "full", "hybrid")
_STAGED: tuple[Schedule, ...] = ("1f1b", "interleaved")

OURS = Abilities(
    pipeline_shardings=("none", "zero1", "full", "hybrid"),
    offloads=("none", "cpu"),
    reduces_each_in_pipeline=False,
    chunked_zero_bubble=True,
    equal_rounds=True,
    selective_split_backward=False,
    offloads_whole=False,
    copies_kv_head=False,
    experts_by_tensor=True,
)
"""What `paceline run` itself executes: `runtime/strategy`. In a pipeline torch's schedules gather a
stage's parameters and reduce its gradients once a step: ZeRO-2 would hold what ZeRO-1 holds."""

_MEGATRON = Abilities(
    shardings=_ZERO1, pipeline_shardings=_ZERO1, schedules=_STAGED, offloads=("none", "cpu")
)
_OLD_MEGATRON = replace(_MEGATRON, context_kinds=(), expert=False, offloads=("none",))
_ONLY_DATA = Abilities(
    schedules=(), context_kinds=(), offloads=("none", "cpu"), tensor=False, expert=False
)

ABILITIES: Mapping[str, Abilities] = {
    "paceline": OURS,
    "megatron": _MEGATRON,
    "megatron-bridge": _MEGATRON,
    "megatron-2021": _OLD_MEGATRON,
    "deepspeed": Abilities(
        shardings=("none", "zero1", "zero2", "full"),
        pipeline_shardings=_ZERO1,
        schedules=("1f1b",),
        context_kinds=("ulysses",),
    ),
    "megatron-deepspeed": replace(
        _OLD_MEGATRON, shardings=("none", "zero1", "zero2", "full"), schedules=("1f1b",)
    ),
    "automodel": Abilities(
        shardings=_FSDP, context_kinds=("ring",), offloads=("none", "cpu"), reduces_each=True
    ),
    "torchtitan": Abilities(
        shardings=_FSDP, context_kinds=("ring",), offloads=("none", "cpu"), reduces_each=True
    ),
    "torchtune": replace(
        _ONLY_DATA,
        shardings=("zero2", "full", "hybrid"),
        context_kinds=("ring",),
        tensor=True,
        reduces_each=True,
    ),
    "fsdp1": replace(_ONLY_DATA, shardings=_FSDP, reduces_each=True),
    "accelerate": replace(
        _ONLY_DATA, shardings=_FSDP, context_kinds=("ring",), tensor=True, reduces_each=True
    ),
    "nanotron": Abilities(
        shardings=_ZERO1,
        pipeline_shardings=_ZERO1,
        schedules=("gpipe", "1f1b"),
        context_kinds=(),
        offloads=("none",),
    ),
    "internevo": Abilities(
        shardings=_ZERO1,
        pipeline_shardings=_ZERO1,
        schedules=("1f1b", "interleaved", "zero-bubble"),
        offloads=("none", "cpu"),
    ),
    "maxtext": Abilities(
        shardings=("none", "full", "hybrid"),
        schedules=("gpipe", "interleaved"),
        offloads=("none", "cpu"),
    ),
}
"""Engine of the catalog -> what it has. Sources: megatron-core 0.14 `arguments.py` (distributed
optimizer, 1F1B and interleaved, context parallel p2p and a2a); DeepSpeed docs: pipelines exclude
ZeRO-2 and 3; torchtitan `distributed/pipeline_parallel.py`; torchtune 0.7
`recipes/full_finetune_distributed.py`; Accelerate `FullyShardedDataParallel`
and `ParallelismConfig`; nanotron README; InternEvo docs; MaxText `configs/base.yml`."""


def abilities_of(engine: str) -> Abilities:
    """What an engine can run; one that is not known, everything."""
    return ABILITIES.get(engine, Abilities())


def reasons_ours_cannot(layout: Layout) -> Iterator[str]:
    """What in a layout our own runtime does not have, one phrase each.

    >>> layout = Layout(data=2, sharding="zero1", micro_batch=1, accumulation=8, pipeline=2,
    ...     schedule="zero-bubble", recompute="selective", offload="nvme")
    >>> list(reasons_ours_cannot(layout))
    ['offload nvme', 'selective recompute in a zero-bubble pipeline']
    """
    if layout.offload not in OURS.offloads:
        yield f"offload {layout.offload}"
    elif layout.offload != "none" and layout.shard_degree == 1:
        yield f"offload {layout.offload} of a state that is not sharded"
    splits_backward = layout.schedule in SPLIT_BACKWARD
    if layout.pipeline > 1 and splits_backward and layout.recompute == "selective":
        yield f"selective recompute in a {layout.schedule} pipeline"
    small, large = sorted((layout.shard_degree, layout.expert))
    if large % small:
        yield f"{layout.shard_degree} shards with {layout.expert} expert ranks: neither divides"
