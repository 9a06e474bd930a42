"""What to say when nothing fits: where the memory goes, and what would make it fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import PlanError, Problem
from paceline.estimate import Estimate, estimate_memory
from paceline.parallel import Layout
from paceline.plan.choose import HEAD_ROOM, limit_bytes
from paceline.profile import ActivationBytes, ModelProfile
from paceline.spec import Job
from paceline.topology import Cluster
from paceline.units import format_bytes

_MAX_TIMES_RANKS = 2**12
"""Clusters up to this many times as large are tried."""

_SEQ_LEN_STEP = 64
"""Shorter sequences are looked for in multiples of this."""


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
    parts = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in sorted(price.memory.parts.items(), key=lambda part: -(part[1] or 0))
        if size
    )
    case = _Case(job=job, cluster=cluster, profile=profile, precision=precision)
    return PlanError(
        Problem(
            code="P001",
            what=f"no layout fits on {cluster.name}: the leanest, {layout.name} in micro-batches "
            f"of {layout.micro_batch}, needs {format_bytes(price.memory.known_bytes)} a rank; "
            f"{format_bytes(limit)} may be used ({1 - HEAD_ROOM:.0%} of "
            f"{format_bytes(cluster.usable_bytes)}). It is {parts}",
            where=job.where("cluster"),
            fix="; or ".join(_ways_to_fit(case, limit)),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A job that does not fit, of which one thing at a time is changed."""

    job: Job
    cluster: Cluster
    profile: ModelProfile
    precision: Literal["fp32", "bf16"]

    def needed_bytes(
        self,
        *,
        num_ranks: int | None = None,
        optimizer: Literal["adamw", "sgd"] | None = None,
        profile: ModelProfile | None = None,
    ) -> int:
        """Memory of the leanest layout there is, whatever the job fixed."""
        leanest = Layout(
            data=num_ranks or self.cluster.num_ranks,
            sharding="full",
            micro_batch=1,
            accumulation=2,
            reduce_every_micro_batch=True,
        )
        return estimate_memory(
            leanest,
            profile or self.profile,
            self.cluster,
            precision=self.precision,
            optimizer=optimizer or self.job.spec.train.optimizer,
        ).known_bytes


def _ways_to_fit(case: _Case, limit: int) -> list[str]:
    """Changes that each make it fit, easiest first; what the job fixed is let go before."""
    fixed = [
        f"layout.{name}"
        for name in ("sharding", "micro_batch")
        if getattr(case.job.spec.layout, name) not in ("auto", "full", 1)
    ]
    freed = f"leave {' and '.join(fixed)} at auto" if fixed else ""
    here = case.needed_bytes()
    if fixed and here <= limit:
        return [f"{freed}: sharded, in micro-batches of 1, it needs {format_bytes(here)}"]
    ways = [
        *_more_ranks(case, limit),
        *_shorter_samples(case, limit),
        *_smaller_optimizer(case, limit),
    ] or [_more_memory(case, round(here / (1 - HEAD_ROOM)))]
    return [f"{freed}, and {way}" if freed else way for way in ways]


def _more_memory(case: _Case, rank_bytes: int) -> str:
    if case.cluster.accelerator != "cpu":
        return f"use accelerators with at least {format_bytes(rank_bytes)} each"
    ranks = case.cluster.num_ranks if case.cluster.is_local else case.cluster.ranks_per_node
    return f"it takes a machine with {format_bytes(rank_bytes * ranks)} for its {ranks} ranks"


def _more_ranks(case: _Case, limit: int) -> Iterator[str]:
    """Not on this machine's CPU, where more ranks have the same memory."""
    if case.cluster.accelerator == "cpu":
        return
    now, batch = case.cluster.num_ranks, case.job.spec.train.global_batch
    for times in range(2, _MAX_TIMES_RANKS):
        if batch % (times * now) == 0 and case.needed_bytes(num_ranks=times * now) <= limit:
            nodes = times * case.cluster.num_nodes
            yield f"set cluster.nodes to {nodes}, which is {times * now} ranks"
            return


def _shorter_samples(case: _Case, limit: int) -> Iterator[str]:
    """Everything that is saved for the backward pass grows in proportion to the tokens."""
    profile = case.profile
    if profile.seq_len is None or profile.activation_bytes is None:
        return
    shortest, longest = 0, profile.seq_len // _SEQ_LEN_STEP
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        shorter = _with_seq_len(profile, middle * _SEQ_LEN_STEP)
        if case.needed_bytes(profile=shorter) <= limit:
            shortest = middle
        else:
            longest = middle - 1
    if shortest:
        yield f"shorten data.seq_len from {profile.seq_len} to {shortest * _SEQ_LEN_STEP}"


def _with_seq_len(profile: ModelProfile, seq_len: int) -> ModelProfile:
    assert profile.seq_len is not None
    assert profile.activation_bytes is not None
    old = profile.seq_len

    def shorter(each: ActivationBytes) -> ActivationBytes:
        return ActivationBytes(
            block=each.block * seq_len // old,
            outside=each.outside * seq_len // old,
            loss_peak=each.loss_peak * seq_len // old,
            block_peak=each.block_peak * seq_len // old,
        )

    saved = {mode: shorter(each) for mode, each in profile.activation_bytes.items()}
    return replace(profile, seq_len=seq_len, activation_bytes=saved)


def _smaller_optimizer(case: _Case, limit: int) -> Iterator[str]:
    is_adamw = case.job.spec.train.optimizer == "adamw"
    if is_adamw and case.needed_bytes(optimizer="sgd") <= limit:
        yield "set train.optimizer to sgd, which keeps half the state"
