"""Choose one of the priced layouts, and say why each other one lost."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.estimate import Estimate
from paceline.parallel import Layout
from paceline.plan.decision import Rejected
from paceline.units import format_bytes, format_seconds

HEAD_ROOM = 0.1
"""Share of the usable memory that is left free. A guess that stands for fragmentation: reserved
memory was 1.03 to 1.09 times the allocated (design/planner.md 3.1.6)."""

SIMPLER_MARGIN = 0.05
"""A simpler layout is taken when it is at most this much slower: less than the estimate's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen layout, why, and the others."""

    layout: Layout
    estimate: Estimate
    sharding_reason: str
    micro_batch_reason: str
    rejected: tuple[Rejected, ...]
    """Those that fit, best first, then those that do not, least memory first."""


def limit_bytes(usable_bytes: int) -> int:
    """Memory that a plan may use of what is usable on a rank."""
    return int(usable_bytes * (1 - HEAD_ROOM))


def choose(
    layouts: Sequence[Layout], estimates: Sequence[Estimate], *, usable_bytes: int
) -> Choice | None:
    """The fastest layout that fits, or a simpler one within a margin; None when nothing fits.

    Simpler is DDP before FSDP2, then one reduction a step before many. Among equals the largest
    micro-batch wins: fewer, larger matrix multiplications. An unknown part of the memory counts
    as nothing here, and the plan shows it as unknown.
    """
    limit = limit_bytes(usable_bytes)
    priced = list(zip(layouts, estimates, strict=True))
    fitting = [pair for pair in priced if pair[1].memory.known_bytes <= limit]
    if not fitting:
        return None
    times = [each.step_s for _, each in fitting if each.step_s is not None]
    fastest_s = min(times, default=None)
    fitting.sort(key=lambda pair: _rank(pair[0], pair[1], fastest_s))
    (layout, chosen), *losers = fitting
    too_large = [pair for pair in priced if pair[1].memory.known_bytes > limit]
    too_large.sort(key=lambda pair: pair[1].memory.known_bytes)
    rejected = [
        Rejected(layout=other, estimate=price, reason=_why_lost(other, price, layout, chosen))
        for other, price in losers
    ] + [
        Rejected(layout=other, estimate=price, reason=_why_too_large(price, limit))
        for other, price in too_large
    ]
    return Choice(
        layout=layout,
        estimate=chosen,
        sharding_reason=_why_sharding(layout, chosen, fitting, too_large, fastest_s),
        micro_batch_reason=_why_micro_batch(layout, chosen, too_large, limit),
        rejected=tuple(rejected),
    )


def _rank(
    layout: Layout, price: Estimate, fastest_s: float | None
) -> tuple[bool, float, bool, bool, int]:
    """Sorts best first: those within the margin by simplicity, the others by time."""
    late = (
        fastest_s is not None
        and price.step_s is not None
        and price.step_s > fastest_s * (1 + SIMPLER_MARGIN)
    )
    seconds = price.step_s if late and price.step_s is not None else 0.0
    return (
        late,
        seconds,
        layout.sharding == "full",
        layout.reduce_every_micro_batch,
        layout.accumulation,
    )


def _why_lost(other: Layout, price: Estimate, layout: Layout, chosen: Estimate) -> str:
    """Why a layout that fits lost against the chosen one."""
    if price.step_s is not None and chosen.step_s is not None:
        share = price.step_s / chosen.step_s - 1
        if share > SIMPLER_MARGIN:
            return (
                f"{share:.0%} slower: {format_seconds(price.step_s)} a step, "
                f"not {format_seconds(chosen.step_s)}"
            )
        times = "as fast" if abs(share) < 0.005 else f"{abs(share):.1%} "
        times += "" if abs(share) < 0.005 else ("slower" if share > 0 else "faster")
    else:
        times = "time unknown"
    if other.sharding != layout.sharding:
        return f"{times}, and {layout.name} is simpler"
    if other.reduce_every_micro_batch != layout.reduce_every_micro_batch:
        return f"{times}, and reduces {other.accumulation} times a step instead of once"
    return f"{times}, in smaller micro-batches ({other.micro_batch}, not {layout.micro_batch})"


def _why_too_large(price: Estimate, limit: int) -> str:
    needed = price.memory.known_bytes
    return (
        f"does not fit: needs {format_bytes(needed)}, "
        f"{format_bytes(needed - limit)} over the {format_bytes(limit)} allowed"
    )


_Priced = tuple[Layout, Estimate]


def _why_sharding(
    layout: Layout,
    chosen: Estimate,
    fitting: Sequence[_Priced],
    too_large: Sequence[_Priced],
    fastest_s: float | None,
) -> str:
    others = [pair for pair in (*fitting, *too_large) if pair[0].sharding != layout.sharding]
    if not others:
        return "one rank has nothing to share" if layout.num_ranks == 1 else "fixed by the job"
    fit_of_others = [pair for pair in fitting if pair[0].sharding != layout.sharding]
    if not fit_of_others:
        other, price = min(others, key=lambda pair: pair[1].memory.known_bytes)
        return f"{other.name} needs at least {format_bytes(price.memory.known_bytes)} a rank"
    if fastest_s is None or chosen.step_s is None:
        return "the simpler one that fits; times are unknown"
    best_other = min(price.step_s for _, price in fit_of_others if price.step_s is not None)
    other_name = fit_of_others[0][0].name
    share = best_other / chosen.step_s - 1
    if abs(share) < 0.005:
        return f"fits, is as fast as {other_name}, and is simpler"
    if share > 0:
        return f"fits, and {other_name} is estimated {share:.1%} slower"
    return f"simpler, and at most {SIMPLER_MARGIN:.0%} slower than {other_name}"


def _why_micro_batch(
    layout: Layout, chosen: Estimate, too_large: Sequence[_Priced], limit: int
) -> str:
    larger = [
        pair
        for pair in too_large
        if pair[0].sharding == layout.sharding
        and pair[0].reduce_every_micro_batch == layout.reduce_every_micro_batch
        and pair[0].micro_batch > layout.micro_batch
    ]
    if larger:
        other, price = min(larger, key=lambda pair: pair[0].micro_batch)
        return (
            f"the largest that fits: {other.micro_batch} needs "
            f"{format_bytes(price.memory.known_bytes)} of {format_bytes(limit)}"
        )
    if chosen.memory.activations_bytes is None:
        return "a rank's whole share at once; whether it fits is unknown for your own model"
    if layout.accumulation == 1:
        return "a rank's whole share fits at once"
    return "fewest gathers and reductions for its memory"
