"""Which ways to split an engine has, so that nothing is planned that its files cannot express: the
rows of `abilities.toml`.

Those of our own runtime are what `runtime/strategy` does, tested. Those of engines that Paceline
writes files for are what `render/` writes, held to it by `tests/render/test_random_plans.py`. The
others are written from their documentation in 2026, neither tried nor checked against the source.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from paceline.catalog.accelerator import Backend
from paceline.catalog.engines import Engine
from paceline.catalog.load import read_rows
from paceline.choices import (
    Attention,
    Compression,
    ContextKind,
    Fp8Recipe,
    Offload,
    Recompute,
    Schedule,
    Sharding,
)
from paceline.choices.pipeline_schedules import SPLIT_BACKWARD
from paceline.choices.recomputes import ONE_BACKWARD
from paceline.errors import Problem
from paceline.job.engine import ENGINE_NAMES, has_files
from paceline.parallel.layout import Layout
from paceline.parallel.table import (
    CONTEXT_KINDS,
    OFFLOADS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    WORDS,
    Layouts,
)
from paceline.profile.block import Column
from paceline.topology import Cluster
from paceline.units import with_article


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """Choices that an engine has each and not together."""

    when: Mapping[str, tuple[str | bool | int, ...] | Literal["several"]]
    """Field of a layout -> its words, or `several`: a number above 1."""

    why: str
    """The reason, with the engine's version."""

    def mask(self, layouts: Layouts) -> Column:
        """Where layouts have all of it."""
        found: Any = np.True_
        for name, words in self.when.items():
            column = getattr(layouts, name)
            known = WORDS.get(name)
            if words == "several":
                found = found & (column > 1)
            elif known is None:
                found = found & np.isin(column, np.asarray(words))
            else:
                found = found & np.isin(column, [known.index(str(word)) for word in words])
        return found

    def asks(self, fixed: Any) -> bool:
        """Whether a job fixes all of it: never where a field is not its to fix."""
        values = {name: getattr(fixed, name, None) for name in self.when}
        return all(
            _is_several(values[name]) if words == "several" else values[name] in words
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
    """Schedules of pipelines; empty is no pipelines."""

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

    shards_over_context: bool = False
    """Whether a group of shards is whole groups of context ranks: data ranks' times context."""

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

    backends: tuple[Backend, ...] = ("nccl", "gloo")
    """Libraries of collectives that it trains over: GPUs and CPUs."""

    fp8_recipes: tuple[Fp8Recipe, ...] = ()
    """Ways to scale fp8 that its files can ask for."""

    deletes_checkpoints: bool = True
    """Whether old checkpoints go; otherwise all that are written stay."""

    saves_in_background: bool = False
    """Whether training goes on while its files write a checkpoint."""

    all_reduce_asks: tuple[str, ...] = ()
    """Fields of `train` that its files hand to an all-reduce of whole gradients."""

    states: tuple[str, ...] = ()
    """Types of parameters, gradients and optimizer state that its files can ask for."""

    untried: Mapping[str, str] = field(default_factory=dict)
    """Library of collectives -> why the engine is not planned over it, though it has it."""

    mlx_backends: tuple[str, ...] = ()
    """What ranks of MLX can talk through without RDMA."""

    compiles: bool = False
    """Whether its files can have torch.compile compile the blocks."""

    compressions: tuple[Compression, ...] = ()
    """Ways to send whole gradients that its files can ask for, besides as they are."""

    async_tensor: bool = False
    """Whether its files can ask for tensor parallelism hidden behind its matrices."""

    token_dispatchers: tuple[str, ...] = ()
    """Ways to send tokens to routed experts that its files can ask for."""

    deepep_on: tuple[str, ...] = ()
    """Accelerators, or first digits of a compute capability, with which alone it takes DeepEP."""

    async_expert: bool = False
    """Whether its files can ask for that exchange hidden behind another micro-batch."""

    optimizer_in_backward: bool = False
    """Whether it can be asked to step the optimizer in the backward pass."""

    unasked: Mapping[str, str] = field(default_factory=dict)
    """Field of the job -> why the engine is not asked for it, though it has it."""

    excluded: tuple[Excluded, ...] = ()
    """What it has each and not together."""

    beside_adapters: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are otherwise where the job trains an adapter."""

    holds: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the engine that the files set otherwise than the runs that `engines.toml` is of;
    `ways` besides its own."""


ABILITIES: Mapping[str, Abilities] = read_rows("abilities.toml", Abilities, key=None)
"""Engine of the catalog -> what it has."""

OURS = ABILITIES["paceline"]

_OWN_PROGRAM = (
    "bring your own script: TRAIN_SCRIPT of the launch.sh that "
    "`paceline render --for torchrun` writes"
)

EXAMPLES_OVER = ("nccl", "gloo", "mlx")
"""Libraries of collectives that the programs among the rendered files train over; over any other,
TRAIN_SCRIPT has to name one's own."""


def abilities_of(engine: str) -> Abilities:
    """What an engine can run; one that is not known, everything."""
    return ABILITIES.get(engine, Abilities())


def engines_over(backend: str | None) -> list[str]:
    """Engines that train over a library of collectives.

    >>> engines_over("xla"), engines_over("hccl")
    (['maxtext'], [])
    """
    return [name for name, able in ABILITIES.items() if backend in able.backends]


def check_accelerator(engine: str, cluster: Cluster) -> Problem | None:
    """What to report where an engine does not train on a cluster's accelerators."""
    if cluster.backend in abilities_of(engine).backends:
        return None
    whose = "Paceline's own runtime" if engine == "paceline" else engine
    why = f"whose collectives go through {cluster.backend}"
    why = abilities_of(engine).untried.get(cluster.backend, why)
    return Problem(
        code="R015",
        what=f"{whose} does not train on {cluster.accelerator}, {why}",
        where="cluster.accelerator, in the job",
        fix=what_trains_on(cluster),
    )


def what_trains_on(cluster: Cluster) -> str:
    """The fix where an engine does not train on a cluster's accelerators: one that does, or a
    program of one's own."""
    others = engines_over(cluster.backend)
    able = [name for name in others if name == "paceline" or has_files(name, "")]
    if "paceline" in able:
        return f"leave engine out: Paceline's own runtime trains there; or {_OWN_PROGRAM}"
    if able:
        return f"set engine to {' or '.join(able)}, which trains there; or {_OWN_PROGRAM}"
    estimated = f" (engine: {' or '.join(others)} is estimated there, without files)"
    return (
        f"no engine that Paceline writes files for trains on {cluster.accelerator}: {_OWN_PROGRAM}"
        f"{estimated if others else ''}"
    )


_OTHERS = ("accelerate", "deepspeed", "megatron", "torchtitan")
"""Engines with files, tried in this order where the nearest one does not take a job."""


def check_has_files(
    engine: str,
    version: str,
    cluster: Cluster | None = None,
    takes: Callable[[str], bool] | None = None,
) -> Problem | None:
    """What to report of an engine that is estimated and no files are written for: `render` and
    `run` refuse it, `plan` warns.

    Args:
        version: Its release; empty is the one that is planned.
        cluster: Where the engine that is named has to train, too.
        takes: Whether an engine takes the job, asked before one is named; left out, the nearest is.
    """
    if engine == "paceline" or has_files(engine, version):
        return None
    row = ENGINE_NAMES[engine]
    nearest = f"{engine} {row.files[1]}" if row.files else row.instead
    able = [
        name
        for name in dict.fromkeys((nearest, *_OTHERS))
        if cluster is None or cluster.backend in abilities_of(name.partition(" ")[0]).backends
    ]
    named = next(filter(takes, able), "") if takes else nearest if nearest in able else ""
    other = (
        "no engine whose files it writes takes this job as it is"
        if nearest in able
        else f"{nearest}, whose files it writes, does not train there"
    )
    return Problem(
        code="R015",
        what=f"Paceline estimates {f'{engine} {version}'.rstrip()} and does not write its files",
        where="engine, in the job",
        fix=f"set engine to {named}, whose files it writes; or {_OWN_PROGRAM}"
        if named
        else f"{other}: {_OWN_PROGRAM}",
    )


def planned_engine(engine: Engine) -> Engine:
    """An engine of the catalog as Paceline's files run it; as it is where they are for others of
    its releases."""
    if not has_files(engine.name, engine.version):
        return engine
    holds = abilities_of(engine.name).holds
    ways = (*engine.ways, *holds.get("ways", ()))
    return replace(engine, **{**holds, "ways": ways})


def reasons_ours_cannot(layout: Layout) -> Iterator[str]:
    """What in a layout our own runtime does not have, one phrase each.

    >>> layout = Layout(data=2, sharding="zero1", micro_batch=1, accumulation=8, pipeline=2,
    ...     schedule="zero-bubble", recompute="selective", offload="nvme")
    >>> list(reasons_ours_cannot(layout))
    ['offload nvme', 'selective recompute in a zero-bubble pipeline']
    """
    if layout.offload not in OURS.offloads:
        yield f"offload {layout.offload}"
    elif layout.offload != "none" and not layout.keeps_shards:
        yield f"offload {layout.offload} of a state that is not sharded"
    splits_backward = layout.schedule in SPLIT_BACKWARD
    if layout.pipeline > 1 and splits_backward and layout.recompute in ONE_BACKWARD:
        yield f"{layout.recompute} recompute in {with_article(layout.schedule)} pipeline"
    small, large = sorted((layout.shard_degree, layout.expert))
    if large % small:
        yield f"{layout.shard_degree} shards with {layout.expert} expert ranks: neither divides"
