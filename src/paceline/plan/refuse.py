"""What to say when nothing fits: where the memory goes, and what would make it fit."""

from collections.abc import Iterator, Sequence
from typing import Literal

from paceline.errors import PlanError, Problem
from paceline.estimate import Estimate, estimate_memory
from paceline.parallel import Layout
from paceline.plan.choose import HEAD_ROOM, limit_bytes
from paceline.profile import ModelProfile
from paceline.spec import Job
from paceline.topology import Cluster
from paceline.units import format_bytes

_MAX_TIMES_RANKS = 2**12


def nothing_fits(
    job: Job,
    cluster: Cluster,
    profile: ModelProfile,
    layouts: Sequence[Layout],
    estimates: Sequence[Estimate],
    precision: Literal["fp32", "bf16"],
) -> PlanError:
    """P001, with the leanest layout's memory by part and what would make it fit."""
    limit = limit_bytes(cluster.usable_bytes)
    priced = zip(layouts, estimates, strict=True)
    layout, price = min(priced, key=lambda pair: pair[1].memory.known_bytes)
    memory = price.memory
    parts = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in sorted(memory.parts.items(), key=lambda part: -(part[1] or 0))
        if size
    )
    ways = list(_ways_to_fit(job, cluster, profile, precision, limit))
    return PlanError(
        Problem(
            code="P001",
            what=f"no layout fits on {cluster.name}: the leanest, {layout.name} in micro-batches "
            f"of {layout.micro_batch}, needs {format_bytes(memory.known_bytes)} a rank; "
            f"{format_bytes(limit)} may be used ({1 - HEAD_ROOM:.0%} of "
            f"{format_bytes(cluster.usable_bytes)}). It is {parts}",
            where=job.where("cluster"),
            fix="; or ".join(ways) or "use a smaller model or accelerators with more memory",
        )
    )


def _ways_to_fit(
    job: Job,
    cluster: Cluster,
    profile: ModelProfile,
    precision: Literal["fp32", "bf16"],
    limit: int,
) -> Iterator[str]:
    """Changes that each make it fit by themselves, easiest first."""

    def needed(num_ranks: int, optimizer: Literal["adamw", "sgd"]) -> int:
        leanest = Layout(
            data=num_ranks,
            sharding="full",
            micro_batch=1,
            accumulation=2,
            reduce_every_micro_batch=True,
        )
        return estimate_memory(
            leanest, profile, cluster, precision=precision, optimizer=optimizer
        ).known_bytes

    spec = job.spec
    optimizer = spec.train.optimizer
    here = needed(cluster.num_ranks, optimizer)
    if here <= limit:
        fixed = [
            f"layout.{name}"
            for name in ("sharding", "micro_batch")
            if getattr(spec.layout, name) != "auto"
        ]
        yield f"leave {' and '.join(fixed)} at auto: fully sharded it needs {format_bytes(here)}"
        return
    more = next(
        (
            times * cluster.num_ranks
            for times in range(2, _MAX_TIMES_RANKS)
            if needed(times * cluster.num_ranks, optimizer) <= limit
        ),
        None,
    )
    shares_memory = cluster.accelerator == "cpu" and spec.cluster.memory == "auto"
    if more is not None and not shares_memory:
        nodes = more // cluster.ranks_per_node
        yield f"use {more} ranks, such as cluster.nodes {nodes} (fully sharded)"
    longest = _longest_seq_len(profile, here, limit, needed_overhead=cluster.overhead_bytes)
    if longest is not None:
        yield f"shorten data.seq_len from {profile.seq_len} to {longest}"
    if optimizer == "adamw" and needed(cluster.num_ranks, "sgd") <= limit:
        yield "set train.optimizer to sgd, which keeps half the state"
    if longest is None:
        yield f"use accelerators with at least {format_bytes(here / (1 - HEAD_ROOM))} each"


def _longest_seq_len(
    profile: ModelProfile, here: int, limit: int, *, needed_overhead: int
) -> int | None:
    """Tokens a sample may have so that one fits; activations grow in proportion to them."""
    if profile.seq_len is None or profile.activation_bytes is None:
        return None
    for mode in ("bf16-sharded", "fp32"):
        saved = profile.activation_bytes[mode]
        per_sample = profile.num_blocks * saved.block + saved.outside + saved.loss_peak
        rest = here - per_sample
        if needed_overhead <= rest < limit:
            shorter = int(profile.seq_len * (limit - rest) / per_sample)
            return shorter // 64 * 64 or None
    return None
