"""What to say when nothing fits: where the memory goes, and what would make it fit.

Every way is tried by the search itself before it is named.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from paceline.catalog import load_accelerators
from paceline.catalog.engines import as_asked
from paceline.choices import Offload
from paceline.errors import PacelineError, PlanError, Problem
from paceline.estimate import PART_NAMES, Case
from paceline.job import Job, LayoutSpec, PlanSpec
from paceline.parallel import Space, grids
from paceline.parallel.layout import Layout
from paceline.plan.host import (
    host_limit_bytes,
    host_limit_source,
    is_host_assumed,
    over_host_bytes,
)
from paceline.plan.search import Found, estimates_of, fastest, grid_bytes
from paceline.profile import resolve_profile
from paceline.topology import Cluster, find_cluster
from paceline.units import bytes_apart, counted, format_bytes, format_seconds

_MOST_DOUBLINGS = 12
"""Clusters up to this many times twice as large are tried."""

_SEQ_LEN_STEP = 64
"""Shorter sequences are looked for in multiples of this."""

_DESKTOPS = ("GB10",)
"""Machines that stand on a desk, one or two together: not proposed in place of several nodes."""

_LEANER_OPTIMIZERS = {
    "adamw-8bit": "which keeps two bytes for each parameter instead of eight",
    "sgd": "which keeps half the state",
}


def offloads_of(job: Job, cluster: Cluster) -> tuple[Offload, ...]:
    """Where optimizer state may go when nothing fits on the accelerators: to a disk only where the
    job names a folder on it, nowhere where the ranks compute in the host's memory."""
    if not cluster.has_host:
        return ()
    return ("cpu", "nvme") if job.spec.layout.offload_path is not None else ("cpu",)


def nothing_fits(
    job: Job,
    space: Space,
    case: Case,
    found: Found,
    limit_bytes: int,
    *,
    engines: Iterable[str] | None,
) -> PlanError:
    """P001, with the leanest layout's memory by part and what would make it fit.

    Args:
        job: As read.
        space: Where layouts were looked for.
        case: What they were priced with.
        found: What there was.
        limit_bytes: Of a rank.
        engines: Changes of the engine that make it fit, tried by a plan each; None: no change of
            any kind is looked for, and the memory that lacks is all that is named.
    """
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
    if engines is None:
        ways = [_more_memory(job, cluster, needed)]
    else:
        asked = _Asked(job=job, space=space, case=case, limit_bytes=limit_bytes, engines=engines)
        ways = _ways_to_fit(asked, needed)
    error = PlanError.of(
        code="P001",
        what=f"no layout fits on {cluster.name}: the smallest of {found.num_layouts:,} layouts "
        f"needs {needs} a rank, {limit} may be used ({share:.0%} of {usable})"
        f"{_over_host(case, found)}\n  smallest: {case.named(layout)}{layout.recomputed}"
        f"{_OFFLOADED[layout.offload]}, micro-batch {layout.micro_batch}{parts}",
        where=job.where("cluster"),
        fix=join_ways(ways),
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
class _Asked:
    """A job that does not fit, of which one thing at a time is changed."""

    job: Job
    space: Space
    case: Case
    limit_bytes: int
    engines: Iterable[str]

    def fitting(self, space: Space, case: Case, limit_bytes: float | None = None) -> Layout | None:
        """The leanest layout of the first grid that has one that fits."""
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        for grid in grids(space):
            memory = np.where(grid.is_possible, grid_bytes(grid.layouts, case), np.inf)
            if memory.min() > limit:
                continue
            over = over_host_bytes(grid.layouts, case)
            if over is not None:
                memory = np.where(np.isfinite(over), np.inf, memory)
            cell = int(memory.argmin())
            if memory.flat[cell] <= limit:
                return grid.layouts.row(cell)
        return None

    @property
    def open_space(self) -> Space:
        """With nothing fixed, and optimizer state wherever there is room."""
        offloads = offloads_of(self.job, self.case.cluster)
        return replace(self.space, fixed=LayoutSpec(), offloads=("none", *offloads))


def _ways_to_fit(asked: _Asked, needed_bytes: int) -> list[str]:
    """Changes that each make it fit, easiest first; what the job fixed is let go before."""
    if (absurd := _absurd_memory(asked)) is not None:
        return [absurd]
    if (less := _less_head_room(asked)) is not None:
        return [less]
    fixed = [
        f"layout.{name}"
        for name, value in vars(LayoutSpec()).items()
        if getattr(asked.job.spec.layout, name) != value
    ]
    freed = f"leave {' and '.join(fixed)} at auto" if fixed else ""
    if fixed and (layout := asked.fitting(asked.open_space, asked.case)) is not None:
        again = f", {layout.recompute} recompute" if layout.recompute != "none" else ""
        name = asked.case.named(layout)
        moved = f", {layout.offloaded} on {layout.offload}" if layout.offload != "none" else ""
        return [f"{freed}: {name}, in micro-batches of {layout.micro_batch}{again}{moved}, fits"]
    ways = [
        *_on_disk(asked),
        *asked.engines,
        *_quantised(asked),
        *_more_ranks(asked),
        *_narrower_states(asked),
        *_leaner_optimizer(asked),
        *_shorter_samples(asked),
        *_other_accelerators(asked),
    ] or [_more_memory(asked.job, asked.case.cluster, needed_bytes)]
    return [f"{freed}, and {way}" if freed else way for way in ways]


def _absurd_memory(asked: _Asked) -> str | None:
    """Less memory than a process takes before the model."""
    declared, cluster = asked.job.spec.cluster.memory, asked.case.cluster
    if declared == "auto" or cluster.memory_bytes > cluster.overhead_bytes:
        return None
    return (
        f"cluster.memory is {format_bytes(cluster.memory_bytes)} a rank, less than the "
        f"{format_bytes(cluster.overhead_bytes)} that a process takes before any model: give what "
        "a rank has, such as 80 GiB, or leave it out"
    )


def _less_head_room(asked: _Asked) -> str | None:
    """The default's head-room, where the job asks for more and it fits with the default's."""
    wanted, usual = asked.job.spec.plan.head_room, PlanSpec().head_room
    if wanted <= usual:
        return None
    limit = asked.case.cluster.usable_bytes * (1 - usual)
    layout = asked.fitting(asked.space, asked.case, limit)
    if layout is None:
        return None
    return f"set plan.head_room from {wanted:g} to {usual:g}: {asked.case.named(layout)} then fits"


def _on_disk(asked: _Asked) -> Iterator[str]:
    """Optimizer state on a disk, where the engine has it and the job names no folder."""
    is_known = "nvme" in offloads_of(asked.job, asked.case.cluster)
    if is_known or "nvme" not in asked.space.abilities.offloads or not asked.case.cluster.has_host:
        return
    space = replace(asked.open_space, offloads=("nvme",))
    if asked.fitting(space, asked.case) is not None:
        yield (
            "set layout.offload to nvme and layout.offload_path to a folder on each node's own disk"
        )


def _quantised(asked: _Asked) -> Iterator[str]:
    """Adapters beside a model in 4 bits."""
    spec = asked.job.spec
    adapter = spec.train.adapter
    if adapter is None or adapter.kind != "lora" or spec.model.factory is not None:
        return
    train = replace(spec.train, adapter=replace(adapter, kind="qlora"))
    profile = resolve_profile(replace(asked.job, spec=replace(spec, train=train)))
    case = asked.case.again(profile=profile)
    if asked.fitting(replace(asked.open_space, profile=profile), case) is not None:
        yield "set train.adapter.kind to qlora, which keeps the frozen model in 4 bits"


def _more_memory(job: Job, cluster: Cluster, needed_bytes: int) -> str:
    rank_bytes = needed_bytes / (1 - job.spec.plan.head_room)
    if cluster.accelerator != "cpu":
        size = format_bytes(rank_bytes)
        enough = sorted(
            (known.memory_bytes, name)
            for name, known in load_accelerators().items()
            if known.backend == cluster.backend and (known.memory_bytes or 0) >= rank_bytes
        )
        if enough:
            named = " or ".join(name for _, name in enough[:2])
            return f"use accelerators with at least {size} each, such as {named}"
        return (
            f"no accelerator of the catalog has the {size} that each would need: split the model "
            "over more ranks (cluster.nodes), or take a smaller one or shorter samples"
        )
    ranks = cluster.num_ranks if cluster.is_local else cluster.ranks_per_node
    return (
        f"it takes a machine with {format_bytes(rank_bytes * ranks)} for its "
        f"{counted(ranks, 'rank')}"
    )


def _more_ranks(asked: _Asked) -> Iterator[str]:
    """Not where this machine is the cluster: it has no more nodes, and its CPU's ranks share its
    memory."""
    cluster = asked.case.cluster
    if cluster.accelerator == "cpu" or cluster.is_local:
        return
    is_slow = False
    for doublings in range(1, _MOST_DOUBLINGS):
        times = 2**doublings
        nodes = times * cluster.num_nodes
        larger = replace(cluster, num_nodes=nodes)
        with suppress(PacelineError):  # with the network between its nodes, where it is known
            spec = replace(asked.job.spec.cluster, nodes=nodes, per_node=cluster.ranks_per_node)
            larger = find_cluster(spec, asked.job)
        space = replace(asked.open_space, num_ranks=larger.num_ranks)
        case = asked.case.again(cluster=larger)
        way = f"set cluster.nodes to {nodes} ({larger.num_ranks} ranks)"
        alone = replace(space, offloads=("none",))
        is_enough = asked.fitting(alone, case) is not None
        if is_slow and not is_enough:
            continue
        tried = alone if is_enough else space
        for layout, price in fastest(tried, case, limit_bytes=asked.limit_bytes, count=1):
            pace = f", {format_seconds(price.step_s)} a step, estimated" if price.step_s else ""
            offload = f": it fits only with offload ({layout.offloaded})"
            if is_enough:
                offload = ": it fits without offload" if is_slow else ""
            yield f"{way}{offload}{pace}"
            is_slow = True
        if is_enough:
            return


def _narrower_states(asked: _Asked) -> Iterator[str]:
    train = asked.job.spec.train
    is_open = train.states == "auto" and train.precision in ("auto", "bf16")
    if not is_open or "bf16" not in asked.space.abilities.states:
        return
    engine = as_asked(asked.case.engine, states="bf16")
    case = replace(asked.case, engine=engine, precision="bf16")
    if asked.fitting(asked.open_space, case) is not None:
        yield "set train.states to bf16, which keeps parameters, gradients and moments in two bytes"


def _leaner_optimizer(asked: _Asked) -> Iterator[str]:
    now, known = asked.case.optimizer, asked.space.abilities.optimizers
    for name, why in _LEANER_OPTIMIZERS.items():
        if now != "adamw" or (known is not None and name not in known):
            continue
        if asked.fitting(asked.open_space, replace(asked.case, optimizer=name)) is not None:
            yield f"set train.optimizer to {name}, {why}"
            return


def _shorter_samples(asked: _Asked) -> Iterator[str]:
    """Everything that is saved for the backward pass grows in proportion to the tokens."""
    profile = asked.case.profile
    if profile.seq_len is None or profile.num_blocks == 0:
        return

    def fits(seq_len: int) -> bool:
        shorter = replace(profile, seq_len=seq_len)
        case = replace(
            asked.case, profile=shorter, model=replace(asked.case.model, seq_len=seq_len)
        )
        return asked.fitting(replace(asked.open_space, profile=shorter), case) is not None

    shortest, longest = 0, (profile.seq_len - 1) // _SEQ_LEN_STEP
    if not longest or not fits(_SEQ_LEN_STEP):
        return
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        if fits(middle * _SEQ_LEN_STEP):
            shortest = middle
        else:
            longest = middle - 1
    if shortest:
        yield f"shorten data.seq_len from {profile.seq_len} to {shortest * _SEQ_LEN_STEP}"


def _other_accelerators(asked: _Asked) -> Iterator[str]:
    """As many of the accelerator with the least memory in which it fits, of those that a node
    has as many of; desktop machines are no nodes."""
    cluster = asked.case.cluster
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
    clusters: list[tuple[str, Cluster]] = []
    for _, name in larger:
        spec = replace(
            asked.job.spec.cluster,
            accelerator=name,
            memory="auto",
            network="auto",
            per_node=cluster.ranks_per_node,
        )
        with suppress(PacelineError):
            clusters.append((name, find_cluster(spec, asked.job)))

    def fits(named: tuple[str, Cluster]) -> bool:
        other = named[1]
        limit = other.usable_bytes * (1 - asked.job.spec.plan.head_room)
        return asked.fitting(asked.open_space, asked.case.again(cluster=other), limit) is not None

    for name, other in clusters[bisect_left(clusters, True, key=fits) :][:1]:
        yield f"use {other.num_ranks} {name} ({format_bytes(other.memory_bytes)} each)"
