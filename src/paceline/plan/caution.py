"""What a plan does not refuse and a person should know: cautions, and the units that full sharding
gathers.

Leaves out: what is refused (`infeasible.py`), what was chosen (`choose.py`) and why (`reasons.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from math import inf
from typing import Any

from paceline.catalog import Catalog, accelerator_named
from paceline.catalog.efficiencies import Efficiencies
from paceline.catalog.mig import split_slice
from paceline.choices import COMPRESSION_RISKS
from paceline.estimate import Case, Estimate, price_one
from paceline.estimate.estimate import case_holdings
from paceline.estimate.memory import gathered_in_blocks
from paceline.job import Job, LayoutSpec
from paceline.job.engine import ENGINE_NAMES, is_newer_patch
from paceline.parallel import Layout, Space
from paceline.parallel.abilities import check_accelerator, check_has_files
from paceline.parallel.table import table_of
from paceline.plan.choose import best_of
from paceline.plan.decision import Caution, Unit
from paceline.plan.host import host_limit_bytes, is_host_assumed
from paceline.plan.pods import pods_over_tcp
from paceline.plan.search import estimates_of
from paceline.profile import ModelProfile, resolve_config
from paceline.profile.block import dense_parameters, expert_parameters
from paceline.topology import Cluster
from paceline.units import format_bytes, format_seconds, with_article

MOST_BUBBLE = 0.2
"""Share of a step that a pipeline may stand still without a word. Source: four micro-batches a
stage, above which GPipe finds the bubble negligible (arXiv:1811.06965, section 2.3), are 20 %."""

_MOST_TIMES = 32
"""Batches up to so many times as large are priced."""

MOST_OF_MEMORY = 0.02
"""Share of a rank's usable memory that one gathered unit may take without a word. A guess: a unit
is there twice, with its gradients, while it is reduced."""

_MODEL_AXES = ("tensor", "pipeline", "context")

_ALONE: Mapping[str, Any] = {
    "data": "auto",
    "tensor": 1,
    "pipeline": 1,
    "context": 1,
    "schedule": "auto",
    "chunks": "auto",
}
"""What data parallelism alone asks for; what else the job fixes stays."""

_ALL_ALONE: Mapping[str, Any] = {
    **{each.name: "auto" for each in fields(LayoutSpec) if each.name != "offload_path"},
    **_ALONE,
}

_WITHIN: Mapping[str, Any] = {"tensor": "auto", "data": "auto"}
_ALL_WITHIN: Mapping[str, Any] = {**_ALL_ALONE, **dict.fromkeys(_ALONE, "auto")}


def cautions_of(
    job: Job,
    space: Space,
    case: Case,
    layout: Layout,
    price: Estimate,
    *,
    limit_bytes: int,
    takes: Callable[[str], bool],
) -> Iterator[Caution]:
    """What is likely to be slower or larger than it had to be.

    Args:
        job: As read; what it fixes is named.
        space: Where the layout was looked for.
        case: What it was priced with.
        layout: The chosen one.
        price: Its estimate.
        limit_bytes: Of a rank.
        takes: Whether another engine takes the job as it is.
    """
    yield from _runs_elsewhere(case, takes)
    yield from _slices_of_nodes(case.cluster)
    yield from pods_over_tcp(job, case.cluster)
    yield from _newer_patch(case)
    yield from _assumed_length(job)
    yield from _compression(job)
    yield from _bubble(job, space, case, layout, price, limit_bytes)
    yield from _tensor_across_nodes(job, space, case, layout, price, limit_bytes)
    yield from _data_parallel_alone(job, space, case, layout, price, limit_bytes)
    yield from _uneven_batch(job, space, case, layout, price, limit_bytes)
    yield from _large_units(job, space, case, layout, price, limit_bytes)


def _runs_elsewhere(case: Case, takes: Callable[[str], bool]) -> Iterator[Caution]:
    """A plan that nothing of Paceline's carries out: another engine's, or other accelerators'."""
    name = case.engine.name
    problem = check_has_files(name, case.engine.version, case.cluster, takes)
    if problem is not None:
        unchecked = f"; whether {name} trains {case.profile.name} was not checked"
        yield Caution(about="files", what=problem.what + unchecked, fix=problem.fix)
    problem = check_accelerator(name, case.cluster)
    if problem is not None:
        yield Caution(about="accelerator", what=problem.what, fix=problem.fix)


def _slices_of_nodes(cluster: Cluster) -> Iterator[Caution]:
    """Slices (MIG) that reach each other over a network. Source: NVIDIA/nccl#1716."""
    card, profile = split_slice(cluster.accelerator)
    if profile is not None and cluster.num_nodes > 1:
        yield Caution(
            about="cluster",
            what=f"{cluster.num_nodes} slices (MIG) train together: NCCL has that as an experiment "
            "from 2.32 on, without peer-to-peer, and was not tried",
            fix=f"set cluster.accelerator to {card}, undivided (nvidia-smi -mig 0)",
        )


def _newer_patch(case: Case) -> Iterator[Caution]:
    name, version = case.engine.name, case.engine.version
    if is_newer_patch(name, version):
        planned = ENGINE_NAMES[name].planned
        yield Caution(
            about="version",
            what=f"{name} {version} is planned as {planned} is, the last with known facts",
            fix=f"train with {name} {planned}, or compare its release notes",
        )


def _compression(job: Job) -> Iterator[Caution]:
    """What a compression of gradients costs besides rounding."""
    if (risk := COMPRESSION_RISKS.get(job.spec.train.gradient_compression)) is not None:
        yield Caution(
            about="gradients",
            what=risk,
            fix="set train.gradient_compression to bf16, or leave it out",
        )


def _assumed_length(job: Job) -> Iterator[Caution]:
    """A published model takes longer samples than a job has that gives no length."""
    if resolve_config(job) is None or ("data", "seq_len") in job.lines:
        return
    yield Caution(
        about="sample length",
        what="data.seq_len is not given: memory and time are those of samples of "
        f"{job.spec.data.seq_len} tokens",
        fix="set data.seq_len to the length that you train with",
    )


def assumed_shape(
    job: Job, catalog: Catalog, cluster: Cluster, layout: Layout
) -> Iterator[Caution]:
    """What is taken for granted of declared nodes that the catalog does not have so."""
    known, spec = accelerator_named(cluster.accelerator, catalog.accelerators), job.spec.cluster
    if cluster.is_local or known is None:
        return
    per_node, taken, fixes = cluster.ranks_per_node, [], []
    if per_node > known.num_per_node and cluster.num_nodes > 1 and spec.network == "auto":
        rate = (cluster.network_bytes_per_s or 0) * 8e-9
        taken.append(f"all {per_node} share the {rate:.4g} Gb/s network of {known.num_per_node}")
        fixes.append(
            "set cluster.network to what all NICs of a node carry together, such as "
            f"{per_node}x{rate / known.num_per_node:.4g}Gb/s"
        )
    around = next((each for each in cluster.levels if each.size == per_node), None)
    if per_node > known.num_per_node and spec.topology is None and around is not None:
        taken.append(f"{around.link or around.name} joins them inside the node")
        fixes.append("set cluster.topology to a file with what nvidia-smi topo -m prints there")
    if taken:
        yield Caution(
            about="cluster",
            what=f"the catalog has no node of {per_node} {known.name}, but of "
            f"{known.num_per_node}; it is assumed that {' and that '.join(taken)}",
            fix="; ".join(fixes),
        )
    if layout.offload == "cpu" and is_host_assumed(cluster, "cpu"):
        yield Caution(
            about="host memory",
            what=f"a node is assumed to have {format_bytes(host_limit_bytes(cluster, 'cpu'))} of "
            "host memory: as much for each accelerator as a DGX H100",
            fix="set cluster.host_memory to what a node has",
        )


def _bubble(
    job: Job, space: Space, case: Case, layout: Layout, price: Estimate, limit_bytes: int
) -> Iterator[Caution]:
    share = _idle_share(price)
    if share <= MOST_BUBBLE:
        return
    network = ["take a faster network (cluster.network): most of it is waiting for messages"]
    fixes = [
        *(network if waits_for_messages(case, layout, price) else []),
        *_fuller(job, space, case, price, limit_bytes),
        *_larger_batch(case, layout, limit_bytes),
    ]
    yield Caution(
        about="bubble",
        what=f"{layout.pipeline} pipeline stages with {layout.accumulation} micro-batches stand "
        f"still or send for {share:.0%} of the step",
        fix="; or ".join(fixes)
        or f"nothing that was priced is faster, nor a batch up to {_MOST_TIMES} times as large "
        "that fits: take accelerators with more memory, and fewer stages",
    )


def waits_for_messages(case: Case, layout: Layout, price: Estimate) -> bool:
    """Whether most of the time that stages stand still is the network's between nodes."""
    if case.rates is None or len(case.rates.levels) < 2:
        return False
    *inner, network = case.rates.levels
    at_once = replace(network, all_to_all_bytes_per_s=inf, latency_s=0.0)
    rates = replace(case.rates, levels=(*inner, at_once))
    idle_s = price_one(layout, replace(case, rates=rates)).terms["pipeline"]
    return idle_s < price.terms["pipeline"] / 2


def _idle_share(price: Estimate) -> float:
    """Share of a step that stages stand still or send, as the plan's time line has it; 0 where the
    time is unknown."""
    return price.terms["pipeline"] / price.step_s if price.step_s else 0.0


_FREED = (("schedule", "chunks"), ("micro_batch",), ("pipeline", "data", "schedule", "chunks"))
"""Fields that are left open together, what changes least first."""


def _fuller(job: Job, space: Space, case: Case, price: Estimate, limit_bytes: int) -> Iterator[str]:
    """The first of what the job fixes that, left open, gives a faster step with less idle."""
    for names in _FREED:
        fixed = [name for name in names if getattr(job.spec.layout, name) != "auto"]
        opened = dict.fromkeys(names, "auto")
        found = _planned(job, space, case, limit_bytes, **opened) if fixed else None
        if found is None or not _is_clearly_faster(job, found[1], price):
            continue
        if _idle_share(found[1]) < _idle_share(price):
            yield (
                f"leave {_listed([f'layout.{name}' for name in fixed])} at auto "
                f"({case.named(found[0])}: {_idle_share(found[1]):.0%}, "
                f"{format_seconds(found[1].step_s or 0)} a step, not "
                f"{format_seconds(price.step_s or 0)})"
            )
            return


def _larger_batch(case: Case, layout: Layout, limit_bytes: int) -> Iterator[str]:
    """The least multiple of the batch that fills the same stages."""
    times = range(2, _MOST_TIMES + 1)
    larger = [replace(layout, accumulation=layout.accumulation * each) for each in times]
    for other, its in estimates_of(table_of(larger), case):
        if _idle_share(its) <= MOST_BUBBLE and its.memory.known_bytes <= limit_bytes:
            yield (
                f"set train.global_batch to {other.global_batch} ({other.accumulation} "
                f"micro-batches: {_idle_share(its):.0%})"
            )
            return


def _planned(
    job: Job, space: Space, case: Case, limit_bytes: int, **changes: Any
) -> tuple[Layout, Estimate] | None:
    """What is planned when some of what the job fixes is different; None where nothing fits."""
    other = replace(space, fixed=replace(space.fixed, **changes))
    margin = job.spec.plan.simpler_margin
    choice = best_of(other, case, limit_bytes=limit_bytes, margin=margin)
    return None if choice is None else (choice.layout, choice.estimate)


def _tensor_across_nodes(
    job: Job, space: Space, case: Case, layout: Layout, price: Estimate, limit_bytes: int
) -> Iterator[Caution]:
    """Only where the job fixes it: the search never leaves the domain. Names the fastest layout
    that does not, with the rest of what the job fixes where one fits so."""
    if job.spec.layout.tensor == "auto" or space.domain % layout.tensor == 0:
        return
    seconds = price.terms.get("tensor")
    takes = (
        ""
        if not seconds or not price.step_s
        else (
            f", which takes {format_seconds(seconds)} of a step of {format_seconds(price.step_s)}"
        )
    )
    tried = (_planned(job, space, case, limit_bytes, **opened) for opened in (_WITHIN, _ALL_WITHIN))
    other = next(filter(None, tried), None)
    fix = (
        f"no layout with tensor ranks inside {space.domain} fits: take more or larger accelerators"
    )
    if other is not None:
        is_slower = (other[1].step_s or 0) > (price.step_s or 0)
        fix = (
            f"leave {_listed(_in_the_way(job, other[0]))} at auto: {case.named(other[0])}, "
            f"{format_seconds(other[1].step_s or 0)} a step"
            f"{', is the fastest that does not' if is_slower else ''}"
        )
    yield Caution(
        about="tensor",
        what=f"the {layout.tensor} tensor ranks are on several nodes of {space.domain}: every "
        f"block is summed over the network{takes}",
        fix=fix,
    )


def _data_parallel_alone(
    job: Job, space: Space, case: Case, layout: Layout, price: Estimate, limit_bytes: int
) -> Iterator[Caution]:
    """Where the job fixes model parallelism, and the same ranks without it would be faster."""
    fixed = [axis for axis in _MODEL_AXES if getattr(layout, axis) > 1 and _is_fixed(job, axis)]
    if not fixed or price.step_high_s is None:
        return
    others = (_planned(job, space, case, limit_bytes, **each) for each in (_ALONE, _ALL_ALONE))
    better = (found for found in others if found and _is_clearly_faster(job, found[1], price))
    if (found := next(better, None)) is None:
        return
    other, its = found
    named = " and ".join(f"layout.{axis} {getattr(layout, axis)}" for axis in fixed)
    verb = "is" if len(fixed) == 1 else "are"
    batches = f"{other.accumulation} x micro-batch {other.micro_batch}"
    yield Caution(
        about="data parallel",
        what=f"{named} {verb} fixed by the job; data parallelism alone "
        f"({case.named(other)}, {batches}) fits and is estimated at "
        f"{format_seconds(its.step_s or 0)} a step, not {format_seconds(price.step_s or 0)}",
        fix=f"leave {_listed(_in_the_way(job, other))} at auto",
    )


def _uneven_batch(
    job: Job, space: Space, case: Case, layout: Layout, price: Estimate, limit_bytes: int
) -> Iterator[Caution]:
    """Where only the batch keeps data parallelism alone, which fits and trains more samples a
    second, from being possible."""
    batch, ranks = space.global_batch, space.num_ranks
    is_open = not any(_is_fixed(job, axis) for axis in ("data", *_MODEL_AXES))
    if batch % ranks == 0 or batch < ranks or not is_open or price.step_s is None:
        return
    even = replace(space, global_batch=batch // ranks * ranks)
    found = _planned(job, even, case, limit_bytes, **_ALONE)
    if found and (found[1].step_s or inf) / even.global_batch < price.step_s / batch:
        yield Caution(
            about="data parallel",
            what=f"{batch} samples do not divide over {ranks} data ranks: {case.named(found[0])} "
            "was not possible",
            fix=f"set train.global_batch to {even.global_batch} or {even.global_batch + ranks}",
        )


def _is_clearly_faster(job: Job, other: Estimate, than: Estimate) -> bool:
    """Even by the slow ends of both ranges, and by more than a simpler layout may be slower."""
    if other.step_high_s is None or than.step_high_s is None:
        return False
    return other.step_high_s * (1 + job.spec.plan.simpler_margin) <= than.step_high_s


def _in_the_way(job: Job, other: Layout) -> list[str]:
    """Fields that the job fixes to something else than another layout has."""
    asked = job.spec.layout
    names = [each.name for each in fields(asked) if getattr(asked, each.name) not in ("auto", None)]
    useless = [name for name in names if name in ("schedule", "chunks") and other.pipeline == 1]
    return [
        f"layout.{name}"
        for name in names
        if name in useless or getattr(asked, name) != getattr(other, name, getattr(asked, name))
    ]


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _is_fixed(job: Job, axis: str) -> bool:
    asked = job.spec.layout
    implies = axis == "pipeline" and (asked.schedule != "auto" or asked.chunks != "auto")
    return getattr(asked, axis) != "auto" or implies


def units_of(case: Case, layout: Layout) -> tuple[Unit, ...]:
    """What full sharding gathers at a time, the largest first; empty where it gathers no block,
    and with an engine whose units are not known (`wraps` in engines.toml)."""
    profile, wraps = case.profile, case.engine.wraps
    gathers = layout.sharding in ("full", "hybrid") and layout.pipeline == 1
    if not gathers or not wraps or not profile.num_blocks:
        return ()
    holdings = case_holdings(table_of([layout]), case)
    ends, inside = (
        float(each) / layout.tensor
        for each in (holdings.gathered_bytes, gathered_in_blocks(holdings))
    )
    counts: Counter[tuple[str, int, int]] = Counter()
    for block in profile.blocks:
        if block.measured is None:
            apart = round(inside * layout.tensor / layout.expert * expert_parameters(block))
            named = f"{block.name} block"
            counts[named, round(inside * dense_parameters(block)), apart] += int(block.count)
    for name, number in _ends(profile, wraps):
        counts[name, round(ends * number), 0] += 1
    units = [
        Unit(name=name, count=count, num_bytes=num_bytes, apart_bytes=apart)
        for (name, num_bytes, apart), count in counts.items()
    ]
    return tuple(sorted(units, key=lambda unit: -unit.num_bytes))


def _ends(profile: ModelProfile, wraps: str) -> Iterator[tuple[str, int]]:
    """Units that are no block, and their parameters."""
    if profile.tied:
        yield "embedding (also the output matrix)", profile.num_root_parameters
    elif wraps == "blocks":
        yield "embedding + output matrix", profile.num_root_parameters
    else:
        yield "embedding", profile.num_embedding_parameters
        yield "final norm + output matrix", profile.num_head_parameters


def _large_units(
    job: Job, space: Space, case: Case, layout: Layout, price: Estimate, limit_bytes: int
) -> Iterator[Caution]:
    units = units_of(case, layout)
    most = MOST_OF_MEMORY * case.cluster.usable_bytes
    parts = [
        (num_bytes, unit.count, name)
        for unit in units
        for num_bytes, name in (
            (unit.num_bytes, unit.name),
            (unit.apart_bytes, f"{_EXPERTS} {unit.name}"),
        )
        if num_bytes
    ]
    largest, _, name = max(parts, default=(0, 0, ""))
    if largest <= most:
        return
    others = [f"{part}: {format_bytes(size)}" for size, _, part in parts if part != name]
    beside = f" ({', '.join(others)})" if others else ""
    other = None
    if job.spec.layout.sharding != "auto":
        other = _planned(job, space, case, limit_bytes, sharding="auto", shard="auto")
    if other is not None and other[0].sharding not in ("full", "hybrid"):
        fix = f"leave layout.sharding at auto: {case.named(other[0])} fits and gathers no units"
    else:
        apart = case.engine.wraps == "blocks" and not case.profile.tied and "embedding" in name
        fixes: list[str] = []
        twice = 2 * layout.tensor
        if name.startswith(_EXPERTS):  # tensor ranks do not split what is routed
            fixes.append(
                "expert ranks split the experts: engine: megatron"
                if not space.abilities.expert
                else f"set layout.expert to {layout.expert * 2}, which halves the experts (steps "
                "may be slower)"
            )
        elif not space.abilities.tensor:
            fixes.append("an engine with tensor ranks (engine: megatron) splits each unit")
        elif (split := _planned(job, space, case, limit_bytes, tensor=twice)) is not None and split[
            1
        ].memory.known_bytes < price.memory.known_bytes:
            fixes.append(
                f"set layout.tensor to {twice}, which halves every all-gather (steps may be slower)"
            )
        elif not apart:
            fixes.append("take accelerators with more memory: tensor ranks do not save any here")
        fixes += [_WRAP_ENDS] if apart else []
        fix = "; or ".join(fixes)
    yield Caution(
        about="gather",
        what=f"one all-gather, of {name}, takes {format_bytes(largest)}{beside}. The plan fits; "
        "smaller all-gathers would leave more room",
        fix=fix,
    )


_EXPERTS = "the experts of"

_WRAP_ENDS = (
    "in a script of your own, call fully_shard (FSDP1: FullyShardedDataParallel) on the embedding "
    "and on the output matrix, so that each is gathered alone"
)


def assumed_efficiency(efficiencies: Efficiencies, case: Case) -> Iterator[Caution]:
    """Where no training run on this accelerator, or in this precision, stands behind the rates."""
    accelerator, precision = case.cluster.accelerator, case.precision
    source = efficiencies.source_of(accelerator, precision)
    trained, family = efficiencies.trained["on"], efficiencies.family_of(accelerator)
    is_measured = source == accelerator or (source == family and accelerator in trained)
    if case.rates is None or case.cluster.backend == "gloo" or is_measured:
        return
    families = {"other": "H100"} | {name: name for name in map(efficiencies.family_of, trained)}
    known = with_article(families.get(source, source))
    whose = f"{known} reaches" if source in families else f"is often quoted for {known}"
    yield Caution(
        about="efficiency",
        what=f"no run on {accelerator} in {precision} was measured: it is assumed to reach the "
        f"share of its peak that {whose}",
        fix="measure it on one such accelerator: paceline calibrate",
    )
