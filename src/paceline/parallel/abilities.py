"""Which ways to split an engine has, so that nothing is planned that its files cannot express.

Those of our own runtime are what `runtime/strategy` does, tested. Those of engines that Paceline
writes files for are what `render/` writes, held to it by `tests/render/test_random_plans.py`. The
others are written from their documentation in 2026, neither tried nor checked against the source.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np

from paceline.catalog.engines import Engine
from paceline.choices import Attention, ContextKind, Offload, Recompute, Schedule, Sharding
from paceline.parallel.layout import Layout
from paceline.parallel.recomputes import ONE_BACKWARD
from paceline.parallel.schedules import SPLIT_BACKWARD
from paceline.parallel.table import (
    CONTEXT_KINDS,
    OFFLOADS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    WORDS,
    Column,
    Layouts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """Choices that an engine has each and not together."""

    when: Mapping[str, Sequence[str] | Sequence[bool] | None]
    """Field of a layout -> its words; None is a number above 1."""

    why: str
    """The reason, with the engine's version."""

    def mask(self, layouts: Layouts) -> Column:
        """Where layouts have all of it."""
        found: Any = np.True_
        for name, words in self.when.items():
            column = getattr(layouts, name)
            known = WORDS.get(name)
            if words is None:
                found = found & (column > 1)
            elif known is None:
                found = found & np.isin(column, np.asarray(words))
            else:
                found = found & np.isin(column, [known.index(str(word)) for word in words])
        return found

    def asks(self, fixed: Any) -> bool:
        """Whether a job fixes all of it."""
        values = {name: getattr(fixed, name) for name in self.when}
        return all(
            values[name] in words if words is not None else _is_several(values[name])
            for name, words in self.when.items()
        )


def _is_several(value: object) -> bool:
    return isinstance(value, int) and value > 1


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

    offloads_alone: tuple[Sharding, ...] = ()
    """Shardings with which one rank, which shares with nobody, offloads its state."""

    copies_kv_head: bool = True
    """Whether the only key and value head of a model is held by every tensor rank."""

    experts_by_tensor: bool = False
    """Whether routed experts that no expert ranks share are divided among the tensor ranks."""

    equal_stages: bool = False
    """Whether every pipeline stage has as many blocks as the others."""

    recomputes_some: bool = True
    """Whether full recompute may be of one block in several."""

    halves_samples: bool = False
    """Whether Ulysses, too, takes samples of 2 x context equal parts."""

    hybrid_in_node: bool = False
    """Whether the groups of hybrid sharding are the nodes, and no other size."""

    offloads_parameters: tuple[bool, ...] = (False,)
    """What goes with offloaded optimizer state: nothing, parameters and gradients, or as wanted."""

    asked_only: tuple[str, ...] = ()
    """Ways to split that are planned where the job fixes them, and not proposed: a program has to
    bring them itself, or their time is not known."""

    precisions: tuple[str, ...] | None = None
    """None is every one that the accelerator has."""

    optimizers: tuple[str, ...] | None = None
    """None is every one: the program makes its own."""

    attentions: tuple[Attention, ...] = ()
    """Kernels of attention that its files can ask for."""

    excluded: tuple[Excluded, ...] = ()
    """What it has each and not together."""

    holds: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the engine that the files set otherwise than the runs that `engines.toml` is of."""


_ZERO1: tuple[Sharding, ...] = ("none", "zero1")
_FSDP: tuple[Sharding, ...] = ("none", "zero2", "full", "hybrid")
_STAGED: tuple[Schedule, ...] = ("1f1b", "interleaved")
_WITH_FSDP = ("zero2", "full", "hybrid")

OURS = Abilities(
    pipeline_shardings=("none", "zero1", "full", "hybrid"),
    offloads=("none", "cpu"),
    reduces_each_in_pipeline=False,
    chunked_zero_bubble=True,
    equal_rounds=True,
    selective_split_backward=False,
    offloads_whole=False,
    offloads_parameters=(True,),
    copies_kv_head=False,
    experts_by_tensor=True,
)
"""What `paceline run` itself executes: `runtime/strategy`. In a pipeline torch's schedules gather a
stage's parameters and reduce its gradients once a step: ZeRO-2 would hold what ZeRO-1 holds.
Offloading is FSDP2's `CPUOffloadPolicy`, which moves parameters and gradients as well."""

_MEGATRON = Abilities(
    shardings=_ZERO1,
    pipeline_shardings=_ZERO1,
    schedules=_STAGED,
    offloads=("none", "cpu"),
    halves_samples=True,
    precisions=("fp32", "bf16", "fp16", "fp8"),
    optimizers=("adamw", "sgd"),
    excluded=tuple(
        Excluded(
            when={"sharding": ("none",), "offload": ("cpu",), ranks: None},
            why="Megatron's offloaded optimizer is its distributed one",
        )
        for ranks in ("data", "context")
    ),
)
_OLD_MEGATRON = replace(_MEGATRON, context_kinds=(), expert=False, offloads=("none",))
_ONLY_DATA = Abilities(
    schedules=(),
    context_kinds=(),
    offloads=("none", "cpu"),
    offloads_whole=False,
    offloads_parameters=(True,),
    tensor=False,
    expert=False,
)
_TORCHTITAN = Abilities(
    shardings=_FSDP,
    context_kinds=("ring",),
    offloads=("none", "cpu"),
    offloads_whole=False,
    offloads_parameters=(True,),
    reduces_each=True,
    reduces_each_in_pipeline=False,
    recomputes_some=False,
    expert=False,
    precisions=("fp32", "bf16"),
    optimizers=("adamw",),
    excluded=(
        Excluded(
            when={"sharding": ("none",), "context": None},
            why="torchtitan 0.3 shards parameters over the context ranks",
        ),
    ),
)
_FSDP_RECOMPUTES = (
    Excluded(
        when={"sharding": _WITH_FSDP, "recompute": ("selective",)},
        why="under FSDP Accelerate 1.15 itself recomputes, whole blocks",
    ),
    Excluded(
        when={"sharding": _WITH_FSDP, "recompute_every": None},
        why="under FSDP Accelerate 1.15 recomputes all blocks or none",
    ),
)

ABILITIES: Mapping[str, Abilities] = {
    "paceline": OURS,
    "megatron": replace(_MEGATRON, attentions=get_args(Attention)),
    "megatron-bridge": _MEGATRON,
    "megatron-2021": _OLD_MEGATRON,
    "deepspeed": Abilities(
        shardings=("none", "zero1", "zero2", "full"),
        pipeline_shardings=("zero1",),
        schedules=("1f1b",),
        context_kinds=(),
        recomputes=("none", "full"),
        offloads_whole=False,
        # docs/_tutorials/zero-offload.md: a model of 10 billion parameters on one GPU.
        offloads_alone=("zero1", "zero2", "full"),
        offloads_parameters=(False, True),
        tensor=False,
        expert=False,
        reduces_each=True,
        # `data_types.grad_accum_dtype` (runtime/zero/stage_1_and_2.py, `grad_accum`, 0.19).
        holds={"gradient_bytes": 4},
        equal_stages=True,
        precisions=("fp32", "tf32", "bf16", "fp16"),
        optimizers=("adamw", "sgd"),
        excluded=(
            Excluded(
                when={"sharding": ("zero1", "zero2"), "offload": ("nvme",)},
                why="DeepSpeed offloads to nvme from ZeRO stage 3 on",
            ),
            Excluded(
                when={"sharding": ("zero1", "zero2"), "offload_parameters": (True,)},
                why="DeepSpeed offloads parameters from ZeRO stage 3 on",
            ),
            Excluded(
                when={"pipeline": None, "offload": ("cpu", "nvme")},
                why="offloading was not tried with DeepSpeed's PipelineEngine",
            ),
            Excluded(
                when={"pipeline": None, "recompute_every": None},
                why="PipelineModule recomputes every block or none",
            ),
        ),
    ),
    "megatron-deepspeed": replace(
        _OLD_MEGATRON, shardings=("none", "zero1", "zero2", "full"), schedules=("1f1b",)
    ),
    "automodel": replace(
        _TORCHTITAN, expert=True, recomputes_some=True, precisions=None, optimizers=None
    ),
    "torchtitan": _TORCHTITAN,
    "fsdp1": replace(
        _ONLY_DATA,
        shardings=_FSDP,
        reduces_each=None,
        hybrid_in_node=True,
        excluded=_FSDP_RECOMPUTES,
    ),
    "torchtune": replace(
        _ONLY_DATA,
        shardings=("zero2", "full", "hybrid"),
        context_kinds=("ring",),
        tensor=True,
        reduces_each=True,
    ),
    "accelerate": replace(
        _ONLY_DATA,
        shardings=_FSDP,
        context_kinds=("ring",),
        tensor=True,
        asked_only=("tensor", "context"),
        # With `mixed_precision` Accelerate 1.15 makes every trained parameter float32
        # (utils/fsdp_utils.py, "upcast"); without FSDP autocast keeps narrow copies.
        holds={
            "weight_bytes": 4,
            "sharded_bytes": 4,
            "gradient_bytes": 4,
            "step_bytes": 4,
            "cast_bytes": 2,
        },
        excluded=(
            *_FSDP_RECOMPUTES,
            Excluded(
                when={"sharding": ("none",), "context": None},
                why="Accelerate 1.15 reduces gradients over context ranks with sharded parameters "
                "only",
            ),
            Excluded(
                when={"sharding": ("none",), "tensor": None, "data": None},
                why="Accelerate 1.15 reduces gradients over data ranks beside tensor ranks with "
                "sharded parameters only",
            ),
        ),
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


def planned_engine(engine: Engine) -> Engine:
    """An engine of the catalog as Paceline's files run it."""
    return replace(engine, **abilities_of(engine.name).holds)


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
    if layout.pipeline > 1 and splits_backward and layout.recompute in ONE_BACKWARD:
        yield f"{layout.recompute} recompute in a {layout.schedule} pipeline"
    small, large = sorted((layout.shard_degree, layout.expert))
    if large % small:
        yield f"{layout.shard_degree} shards with {layout.expert} expert ranks: neither divides"
