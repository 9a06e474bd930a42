"""What to say when nothing fits: where the memory goes, and what would make it fit.

Every way is planned before it is named, and named with its plan.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from paceline.catalog import load_accelerators
from paceline.choices import Offload, Optimizer
from paceline.errors import PacelineError, PlanError, Problem
from paceline.estimate import PART_NAMES, Case
from paceline.job import Job, LayoutSpec, PlanSpec
from paceline.job.data_rules import objective_of
from paceline.parallel import grids
from paceline.parallel.abilities import check_accelerator
from paceline.plan.decision import Plan
from paceline.plan.host import (
    host_limit_bytes,
    host_limit_source,
    is_host_assumed,
    over_host_bytes,
)
from paceline.plan.search import Found, estimates_of, grid_bytes
from paceline.plan.search_inputs import Asked, case_of_asked, space_of
from paceline.profile import resolve_profile
from paceline.topology import Cluster, find_cluster
from paceline.units import bytes_apart, counted, format_bytes, format_seconds

_MOST_DOUBLINGS = 12
"""Clusters up to this many times twice as large are tried."""

_SEQ_LEN_STEP = 64
"""Shorter sequences are looked for in multiples of this."""

_DESKTOPS = ("GB10",)
"""Machines that stand on a desk, one or two together: not proposed in place of several nodes."""

_LEANER_OPTIMIZERS: tuple[Optimizer, ...] = ("adamw-8bit", "sgd")

_ENGINES = ("paceline", "deepspeed", "megatron", "torchtitan", "accelerate")
"""Those that are tried where nothing fits with the job's own: `paceline run` starts each."""

_PATH = "layout.offload_path to a folder on each node's own disk"
_A_DISK = "/disk"

Planned = Callable[[Asked], Plan | None]
"""The plan of a job on all ranks of its cluster; None where it has none."""


def offloads_of(job: Job, cluster: Cluster) -> tuple[Offload, ...]:
    """Where optimizer state may go when nothing fits on the accelerators: to a disk only where the
    job names a folder on it, nowhere where the ranks compute in the host's memory."""
    if not cluster.has_host:
        return ()
    return ("cpu", "nvme") if job.spec.layout.offload_path is not None else ("cpu",)


def nothing_fits(
    asked: Asked, case: Case, found: Found, limit_bytes: int, *, plan: Planned | None
) -> PlanError:
    """P001, with the leanest layout's memory by part and what would make it fit.

    Args:
        asked: The job that does not fit.
        case: What its layouts were priced with.
        found: What there was.
        limit_bytes: Of a rank.
        plan: Makes the plan of a changed job; None: no change of any kind is looked for, and the
            memory that lacks is all that is named.
    """
    job = asked.job
    if not len(found.leanest):
        return PlanError(_host_too_small(job, case, found.least_host_bytes or 0.0))
    row = int(np.argmin(found.leanest.memory_bytes))
    ((layout, price),) = estimates_of(found.leanest.layouts.take(np.array([row])), case)
    parts = "".join(
        f"\n    {PART_NAMES.get(name, name):<14}{format_bytes(size):>9}"
        for name, size in sorted(price.memory.parts.items(), key=lambda part: -(part[1] or 0))
        if size
    )
    cluster, share = case.cluster, 1 - job.spec.plan.head_room
    needed = price.memory.known_bytes
    needs, limit, usable = bytes_apart(needed, limit_bytes, cluster.usable_bytes)
    ways = [] if plan is None else ways_to_fit(asked, plan)
    error = PlanError.of(
        code="P001",
        what=f"no layout fits on {cluster.name}: the smallest of {found.num_layouts:,} layouts "
        f"needs {needs} a rank, {limit} may be used ({share:.0%} of {usable})"
        f"{_over_host(case, found)}\n  smallest: {case.named(layout)}{layout.recomputed}"
        f"{_OFFLOADED[layout.offload]}, micro-batch {layout.micro_batch}{parts}",
        where=job.where("cluster"),
        fix=join_ways(ways or [_more_memory(job, cluster, needed)]),
    )
    error.needed_bytes = needed
    return error


_OFFLOADED = {"none": "", "cpu": ", offloaded to host memory", "nvme": ", offloaded to disk"}

_OR = "; or "


def join_ways(ways: Iterable[str]) -> str:
    """Changes of which one is enough, as the fix of a problem."""
    return _OR.join(ways)


def ways_of(refused: Problem | None) -> list[str]:
    """The changes that make a refused job fit, each tried by the search; none where it fits.

    >>> ways_of(Problem(code="P001", what="", where="", fix=join_ways(["more ranks", "an A10"])))
    ['more ranks', 'an A10']
    """
    return [] if refused is None else refused.fix.split(_OR)


def _over_host(case: Case, found: Found) -> str:
    if found.least_host_bytes is None:
        return ""
    needs, has = bytes_apart(found.least_host_bytes, host_limit_bytes(case.cluster, "cpu"))
    return (
        f". With offload a node needs {needs} of host memory and has {has} "
        f"({host_limit_source(case.cluster, 'cpu')})"
    )


def _host_too_small(job: Job, case: Case, needed_bytes: float) -> Problem:
    offload = asked = job.spec.layout.offload
    beside = ""
    if offload == "nvme" and needed_bytes <= host_limit_bytes(case.cluster, offload):
        asked, beside = "cpu", " of memory, for gradients and buffers,"
    needs, has = bytes_apart(needed_bytes, host_limit_bytes(case.cluster, asked))
    place = "on disk" if offload == "nvme" else "in the host's memory"
    is_assumed = asked == "cpu" and is_host_assumed(case.cluster, asked)
    return Problem(
        code="P004",
        what=f"no layout fits with the optimizer {place}: a node needs at least "
        f"{needs}{beside or ' there'} and has {has} "
        f"({host_limit_source(case.cluster, asked)})",
        where=job.where("layout.offload"),
        fix="leave layout.offload out, share the optimizer (layout.sharding), or add nodes"
        + ("; or set cluster.host_memory, where a node has more" if is_assumed else ""),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """A job that does not fit, of which one thing at a time is changed."""

    asked: Asked
    plan: Planned

    def changed(self, **sections: Any) -> Asked | None:
        """The job with other sections; None where there is no such cluster or model."""
        asked = self.asked
        spec = replace(asked.job.spec, **sections)
        changed = replace(asked.job, spec=spec)
        cluster, profile = asked.cluster, asked.profile
        try:
            if spec.cluster != asked.job.spec.cluster:
                cluster = find_cluster(spec.cluster, changed)
            if spec.model.factory is None:
                profile = resolve_profile(changed)
        except PacelineError:
            return None
        return replace(asked, job=changed, cluster=cluster, profile=profile)

    def tried(self, words: str, changed: Asked | None) -> Iterator[tuple[str, Plan]]:
        """A change with the plan that the changed job has, where it has one."""
        if changed is None or not _may_fit(changed) or (plan := self.plan(changed)) is None:
            return
        if changed.job.spec.plan.objective != "time":  # on fewer ranks another layout is taken
            yield words, plan
        else:
            moved = f", {plan.layout.offloaded} on {plan.layout.offload},"
            offload = "" if plan.layout.offload == "none" else moved
            takes = (
                "step time unknown"
                if plan.estimate.step_s is None
                else f"{format_seconds(plan.estimate.step_s)} a step, estimated"
            )
            yield f"{words}: {plan.layout_name}{offload} fits ({takes})", plan


def _may_fit(asked: Asked) -> bool:
    """Whether a layout fits in memory, offloaded or not: a plan without its seconds."""
    space = space_of(asked.job, asked.cluster, asked.profile)
    offloads = offloads_of(asked.job, asked.cluster)
    case = case_of_asked(asked)
    limit = asked.cluster.usable_bytes * (1 - asked.job.spec.plan.head_room)
    for grid in grids(replace(space, offloads=("none", *offloads))):
        fits = grid.is_possible & (grid_bytes(grid.layouts, case) <= limit)
        if not fits.any():
            continue
        over = over_host_bytes(grid.layouts, case)
        if over is None or (fits & ~np.isfinite(over)).any():
            return True
    return False


def ways_to_fit(asked: Asked, plan: Planned) -> list[str]:
    """Changes that each make it fit, each with the plan that it then has, easiest first; what the
    job fixed is let go before."""
    if (absurd := _absurd_memory(asked)) is not None:
        return [absurd]
    spec = asked.job.spec
    ways = _Ways(asked=asked, plan=plan)
    for found in (_less_head_room(ways), _freed(ways)):
        if found:
            return found
    path = spec.layout.offload_path
    fixed = _fixed(spec.layout)
    freed = f"leave {fixed} at auto, and " if fixed else ""
    spec = replace(spec, layout=LayoutSpec(offload_path=path))
    open_ways = replace(ways, asked=replace(asked, job=replace(asked.job, spec=spec)))
    found = [
        way
        for kind in (
            _on_disk,
            _other_engines,
            _quantised,
            _more_ranks,
            _narrower_states,
            _leaner_optimizer,
            _shorter_samples,
            _other_accelerators,
        )
        for way, _ in kind(open_ways)
    ]
    return [f"{freed}{way}" for way in found]


def _fixed(layout: LayoutSpec) -> str:
    usual = vars(LayoutSpec())
    names = [name for name, value in vars(layout).items() if value != usual[name]]
    return " and ".join(f"layout.{name}" for name in names if name != "offload_path")


def _absurd_memory(asked: Asked) -> str | None:
    """Less memory than a process takes before the model."""
    declared, cluster = asked.job.spec.cluster.memory, asked.cluster
    if declared == "auto" or cluster.memory_bytes > cluster.overhead_bytes:
        return None
    return (
        f"cluster.memory is {format_bytes(cluster.memory_bytes)} a rank, less than the "
        f"{format_bytes(cluster.overhead_bytes)} that a process takes before any model: give what "
        "a rank has, such as 80 GiB, or leave it out"
    )


def _less_head_room(ways: _Ways) -> list[str]:
    """The default's head-room, where the job asks for more and it fits with the default's."""
    wanted, usual = ways.asked.job.spec.plan, PlanSpec().head_room
    if wanted.head_room <= usual:
        return []
    changed = ways.changed(plan=replace(wanted, head_room=usual))
    return [way for way, _ in ways.tried(f"set plan.head_room to {usual:g}", changed)]


def _freed(ways: _Ways) -> list[str]:
    """Nothing of the layout fixed."""
    layout = ways.asked.job.spec.layout
    if not (fixed := _fixed(layout)):
        return []
    changed = ways.changed(layout=LayoutSpec(offload_path=layout.offload_path))
    return [way for way, _ in ways.tried(f"leave {fixed} at auto", changed)]


_Found = Iterator[tuple[str, Plan]]


def _on_disk(ways: _Ways) -> _Found:
    """Optimizer state on a disk, where the engine has it and the job names no folder."""
    asked = ways.asked
    can = "nvme" in space_of(asked.job, asked.cluster, asked.profile).abilities.offloads
    if can and asked.job.spec.layout.offload_path is None and asked.cluster.has_host:
        changed = ways.changed(layout=LayoutSpec(offload_path=_A_DISK))
        yield from ways.tried(f"set {_PATH}", changed)


def _other_engines(ways: _Ways) -> _Found:
    """The fastest plan with another engine, on a disk only where nothing fits without; none for a
    model or a method that only Paceline's own runtime trains."""
    asked, spec = ways.asked, ways.asked.job.spec
    is_ours = spec.model.factory or spec.program or spec.train.adapter
    if asked.cluster.is_local or is_ours or asked.can_run is None:
        return
    if objective_of(spec) != "next_token":
        return
    found: list[tuple[str, Plan]] = []
    for engine in _ENGINES:
        if engine == spec.engine or check_accelerator(engine, asked.cluster) is not None:
            continue
        for path in dict.fromkeys((spec.layout.offload_path, _A_DISK)):
            layout = LayoutSpec(offload_path=path)
            changed = ways.changed(engine=engine, engine_version="", layout=layout)
            words = f"set engine to {engine}"
            if path != spec.layout.offload_path:
                words += f" and {_PATH}"
            plans = [
                (way, plan)
                for way, plan in ways.tried(words, changed)
                if changed is not None and asked.can_run(plan, changed.job)
            ]
            found += plans
            if plans:
                break
    yield from sorted(found, key=lambda each: each[1].estimate.step_high_s or inf)[:1]


def _quantised(ways: _Ways) -> _Found:
    """Adapters beside a model in 4 bits."""
    train = ways.asked.job.spec.train
    if train.adapter is not None and train.adapter.kind == "lora":
        changed = ways.changed(train=replace(train, adapter=replace(train.adapter, kind="qlora")))
        yield from ways.tried("set train.adapter.kind to qlora", changed)


def _more_memory(job: Job, cluster: Cluster, needed_bytes: int) -> str:
    rank_bytes = needed_bytes / (1 - job.spec.plan.head_room)
    if cluster.accelerator != "cpu":
        return f"use accelerators with at least {format_bytes(rank_bytes)} each, or a smaller model"
    ranks = cluster.num_ranks if cluster.is_local else cluster.ranks_per_node
    size = format_bytes(rank_bytes * ranks)
    return f"it takes a machine with {size} for its {counted(ranks, 'rank')}"


def _more_ranks(ways: _Ways) -> _Found:
    """Not where this machine is the cluster: it has no more nodes, and its CPU's ranks share its
    memory. The fewest with which it fits, and where those offload the fewest that need not."""
    cluster, spec = ways.asked.cluster, ways.asked.job.spec
    if cluster.accelerator == "cpu" or cluster.is_local:
        return
    is_first = True
    for doublings in range(1, _MOST_DOUBLINGS):
        nodes = 2**doublings * cluster.num_nodes
        ranks = nodes * cluster.ranks_per_node
        words, wanted = f"set cluster.nodes to {nodes} ({ranks} ranks)", spec.plan
        if wanted.max_ranks is not None:
            words = f"set cluster.nodes to {nodes} and plan.max_ranks to {ranks}"
            wanted = replace(wanted, max_ranks=ranks)
        changed = ways.changed(cluster=replace(spec.cluster, nodes=nodes), plan=wanted)
        for way, plan in ways.tried(words, changed):
            if is_first or plan.layout.offload == "none":
                yield way, plan
            if plan.layout.offload == "none":
                return
            is_first = False


def _narrower_states(ways: _Ways) -> _Found:
    asked, train = ways.asked, ways.asked.job.spec.train
    known = space_of(asked.job, asked.cluster, asked.profile).abilities.states
    if train.states == "auto" and train.precision in ("auto", "bf16") and "bf16" in known:
        changed = ways.changed(train=replace(train, states="bf16"))
        yield from ways.tried("set train.states to bf16", changed)


def _leaner_optimizer(ways: _Ways) -> _Found:
    train = ways.asked.job.spec.train
    for name in _LEANER_OPTIMIZERS if train.optimizer == "adamw" else ():
        changed = ways.changed(train=replace(train, optimizer=name))
        for found in ways.tried(f"set train.optimizer to {name}", changed):
            yield found
            return


def _shorter_samples(ways: _Ways) -> _Found:
    """Everything that is saved for the backward pass grows in proportion to the tokens."""
    spec, profile = ways.asked.job.spec, ways.asked.profile
    if profile.seq_len is None or profile.num_blocks == 0 or spec.model.factory is not None:
        return

    def shorter(steps: int) -> Asked | None:
        return ways.changed(data=replace(spec.data, seq_len=steps * _SEQ_LEN_STEP))

    def is_too_long(steps: int) -> bool:
        changed = shorter(steps)
        return changed is None or not _may_fit(changed)

    lengths = range(1, (profile.seq_len - 1) // _SEQ_LEN_STEP + 1)
    if longest := bisect_left(lengths, True, key=is_too_long):
        words = f"set data.seq_len to {longest * _SEQ_LEN_STEP}"
        yield from ways.tried(words, shorter(longest))


def _other_accelerators(ways: _Ways) -> _Found:
    """The accelerator with the least memory in which it fits, of those that a node has as many of;
    desktop machines are no nodes."""
    cluster, spec = ways.asked.cluster, ways.asked.job.spec.cluster
    if cluster.accelerator == "cpu" or cluster.is_local:
        return
    larger = sorted(
        (known.memory_bytes, name)
        for name, known in load_accelerators().items()
        if known.backend == cluster.backend
        and known.num_per_node >= cluster.ranks_per_node
        and (name not in _DESKTOPS or cluster.num_nodes == 1)
        and (known.memory_bytes or 0) > cluster.memory_bytes
    )
    leave = "" if spec.memory == "auto" else " and cluster.memory to auto"
    same = replace(spec, memory="auto", nodes=cluster.num_nodes, per_node=cluster.ranks_per_node)
    others = [
        (name, changed)
        for _, name in larger
        if (changed := ways.changed(cluster=replace(same, accelerator=name)))
    ]
    first = bisect_left(others, True, key=lambda other: _may_fit(other[1]))
    for name, changed in others[first:]:
        size = format_bytes(changed.cluster.memory_bytes)
        words = f"set cluster.accelerator to {name} ({size} each){leave}"
        if spec.per_node == "auto":
            words += f" and cluster.per_node to {cluster.ranks_per_node}"
        for found in ways.tried(words, changed):
            yield found
            return
