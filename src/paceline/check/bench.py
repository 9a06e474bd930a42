"""What a bench says: each number of ranks in one row, and what limits the largest, in order.

Only arithmetic on what was measured; what a change would bring is priced by the planner's estimate,
taken relative to its own estimate of what was measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.check.bench_row import Row, caution_of, row_of
from paceline.choices.recomputes import WHOLE_BLOCKS
from paceline.errors import PacelineError
from paceline.estimate import price_one
from paceline.estimate.estimate import mfu_at
from paceline.estimate.schedule import bubble_share
from paceline.parallel import Layout
from paceline.plan import Plan
from paceline.plan.case import case_of_plan
from paceline.record.bench import Measured, Scaling
from paceline.units import counted, format_bytes, format_seconds

Limit = Literal[
    "cores", "bubble", "communication", "data", "memory", "optimizer", "overhead", "compute"
]
"""What keeps more ranks, or a step, from being faster."""

_SHOWN = 0.05
"""Share of a step below which nothing is advised about a part of it. A guess."""

_WILD = 3.0
"""95th over 5th percentile of a step's time above which nothing is concluded. A guess: on a quiet
machine it is about 1.1."""

_TOLD = 1.5
"""Upper over lower end of a speed-up's interval above which none is given: that is "scales well"
and "scales badly" in one. A guess."""

_MOST_EFFICIENT = 1.05
"""Efficiency above which a comparison is refused: so many ranks cannot do more than as many times
the work. A guess at what smaller shares gain from caches."""

_FULL, _ROOMY = 0.9, 0.5
"""Shares of a rank's memory: little room left, and enough to keep what was computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change, and what it would bring."""

    limit: Limit
    what: str
    """What was seen, in numbers."""

    change: str
    gain: float | None
    """Share of the samples a second that it would add; None is unknown."""

    how: Literal["measured", "estimated", "bound", "unknown"]
    """How the gain is known. `bound`: no more than that, if the part took no time at all."""

    share: float = 0.0
    """Share of a step that the limit takes; 0 where it takes no time of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The rows, and what they mean."""

    scaling: Scaling
    rows: tuple[Row, ...]
    best_ranks: int
    """With which the most samples a second were seen."""

    limits: Limit | None
    """What takes the largest share of a step on the most ranks, computing aside; None where the
    times are refused."""

    communication: str | None
    """The share of a step that communication holds a rank up on the most ranks, with its band:
    below 20 %, 20 to 40 %, above 40 %. None where none was measured, or the times are refused."""

    sentence: str
    refused: str | None
    """Why nothing is concluded from the times; None when it is."""

    caution: str | None
    """Why the numbers are not to be trusted much."""

    advice: tuple[Advice, ...]
    """The largest gain first, what is unknown last; each change once."""


def judge_bench(measured: Sequence[Measured], scaling: Scaling) -> Verdict:
    """The verdict on some numbers of ranks, fewest first."""
    rows: list[Row] = []
    for each in measured:
        rows.append(row_of(each, rows[0] if rows else None))
    best = max(rows, key=lambda row: row.samples_per_s)
    refused = _impossible(rows, measured) or _noise(rows)
    advice = _once(sorted(_advice(rows, measured[-1]), key=_order))
    if refused is not None:
        timeless = [each for each in advice if each.limit in ("cores", "memory")]
        advice = [replace(each, gain=None, how="unknown") for each in timeless]
    limits: Limit | None = None if refused else "compute"
    if advice:
        limits = max(advice, key=lambda each: each.share).limit
    return Verdict(
        scaling=scaling,
        rows=tuple(rows),
        best_ranks=best.num_ranks,
        limits=limits,
        communication=None if refused else communication_band(rows[-1]),
        sentence=f"no verdict: {refused}" if refused else _sentence(rows, best, limits),
        refused=refused,
        caution=caution_of(
            {counted(row.num_ranks, "rank"): row.step_high_s / row.step_low_s for row in rows}
        ),
        advice=tuple(advice),
    )


def _impossible(rows: Sequence[Row], measured: Sequence[Measured]) -> str | None:
    """What no machine does: the first of the measurements that must be wrong."""
    for row, each in zip(rows, measured, strict=True):
        mfu = mfu_at(each.plan.estimate, row.step_s)
        if mfu is not None and mfu > 1 and row.device != "cpu":
            return (
                f"a step of {format_seconds(row.step_s)} on {counted(row.num_ranks, 'rank')} "
                f"is {mfu:.0%} of "
                f"the peak of {row.device}: not all of the work was done, or the peak is wrong"
            )
        if row.efficiency > _MOST_EFFICIENT and _is_same_work(each.plan, measured[0].plan):
            first = rows[0]
            most = row.num_ranks / first.num_ranks
            return (
                f"{row.num_ranks} ranks measured {row.speedup:.2f} times as fast as "
                f"{first.num_ranks}, and cannot be more than {most:g} times: something slowed the "
                f"run of {counted(first.num_ranks, 'rank')} down; measure again on a quiet "
                "machine, with a higher --steps"
            )
    return None


def _noise(rows: Sequence[Row]) -> str | None:
    """Why the steps tell nothing: they vary many times over, or their medians are too unsure."""
    again = "measure again on a quiet machine, with a higher --steps"
    wildest = max(rows, key=lambda row: row.step_high_s / row.step_low_s)
    if wildest.step_high_s > _WILD * wildest.step_low_s:
        return (
            f"steps on {counted(wildest.num_ranks, 'rank')} vary "
            f"{wildest.step_high_s / wildest.step_low_s:.1f} times (p5 to p95, n "
            f"{wildest.num_steps}): {again}"
        )
    first, row = rows[0], rows[-1]
    if row is first:
        return None
    between = speedup_interval(row, first)
    if between is None:
        return (
            f"{row.num_steps} timed steps are too few for a 95 % interval: set --steps to 6 or more"
        )
    if between[1] > _TOLD * between[0]:
        return (
            f"{row.num_ranks} ranks are {between[0]:.2f} to {between[1]:.2f} times as fast as "
            f"{first.num_ranks} (95 % intervals of the medians, n {row.num_steps}): {again}"
        )
    return None


def speedup_interval(row: Row, first: Row) -> tuple[float, float] | None:
    """Speed-up between the ends of both medians' 95 % intervals; None where a median has none."""
    if row.median_s is None or first.median_s is None:
        return None
    more = row.global_batch / first.global_batch
    return more * first.median_s[0] / row.median_s[1], more * first.median_s[1] / row.median_s[0]


def _is_same_work(plan: Plan, first: Plan) -> bool:
    """Whether a sample costs the same: memory may force one of them to compute something twice."""
    ours, its = plan.layout, first.layout
    same = (ours.recompute, ours.recompute_every, ours.offload)
    return same == (its.recompute, its.recompute_every, its.offload)


def _once(advice: Sequence[Advice]) -> list[Advice]:
    """Each change where it brings the most: a larger batch helps against several limits."""
    first: dict[str, Advice] = {}
    for each in advice:
        first.setdefault(each.change.partition(":")[0], each)
    return list(first.values())


def _order(advice: Advice) -> tuple[bool, float]:
    """Too many ranks for the cores spoils all other numbers, so it comes first."""
    gain = -1.0 if advice.gain is None else advice.gain
    return (advice.limit != "cores", -gain)


def _advice(rows: Sequence[Row], last: Measured) -> Iterator[Advice]:
    row, best = rows[-1], max(rows, key=lambda each: each.samples_per_s)
    yield from _cores(row, best)
    yield from _bubble(row, last.plan)
    yield from _communication(row, last)
    yield from _data(row)
    yield from _memory(row, last.plan)
    yield from _optimizer(row, last.plan)
    yield from _overhead(row, last.plan)
    yield from _compute(row, last.plan)


def _cores(row: Row, best: Row) -> Iterator[Advice]:
    """Ranks that share a core take turns: they cannot scale, whatever the layout."""
    if row.device != "cpu" or row.cores_per_rank is None or row.cores_per_rank >= 1:
        return
    cores = round(row.cores_per_rank * row.num_ranks)
    yield Advice(
        limit="cores",
        what=f"{row.num_ranks} ranks share {counted(cores, 'core')}: they take "
        "turns, so this number says nothing about as many machines",
        change=f"no more than {counted(cores, 'rank')} on this machine",
        gain=best.samples_per_s / row.samples_per_s - 1 if best is not row else None,
        how="measured" if best is not row else "unknown",
        share=1.0,
    )


def _bubble(row: Row, plan: Plan) -> Iterator[Advice]:
    """More micro-batches fill a pipeline's schedule; uneven stages they do not."""
    if row.bubble is None or row.bubble < _SHOWN:
        return
    layout = plan.layout
    twice = replace(layout, accumulation=2 * layout.accumulation)
    yield Advice(
        limit="bubble",
        what=f"stages wait for each other for {row.bubble:.0%} of a step; the schedule's bubble is "
        f"{row.ideal_bubble:.0%}",
        change=f"train.global_batch={twice.global_batch}: {twice.accumulation} micro-batches "
        f"instead of {layout.accumulation}",
        gain=(1 - bubble_share(twice)) / (1 - bubble_share(layout)) - 1,
        how="estimated",
        share=row.bubble,
    )


def _exposed_s(row: Row) -> float:
    """Seconds of a step that communication holds a rank up, other stages of its pipeline aside."""
    return max(0.0, (row.exposed_s or 0.0) - (row.bubble or 0.0) * row.step_s)


_BANDS = (
    (0.2, "below 20 %: nothing to gain there first"),
    (0.4, "20 to 40 %: worth larger batches, fewer ranks that share, or a faster network"),
)
"""Largest share of a step -> its band. Source: the bands of the coordinator's benchmarks."""

_MOST_BAND = "above 40 %: more ranks will hardly help before this does"


def communication_band(row: Row) -> str | None:
    """The exposed share of a step and its band; None where communication was not measured.

    Nothing of it is other stages of a pipeline, where the bubble is known.
    """
    if row.exposed_s is None:
        return None
    share = _exposed_s(row) / row.step_s
    band = next((words for most, words in _BANDS if share <= most), _MOST_BAND)
    aside = "" if row.bubble is None else " (the bubble not included)"
    return f"{share:.0%} of a step{aside}, {band}"


def _communication(row: Row, last: Measured) -> Iterator[Advice]:
    """What holds a rank up besides other stages of its pipeline."""
    exposed = _exposed_s(row)
    if exposed < _SHOWN * row.step_s:
        return
    layout = last.plan.layout
    is_known = layout.pipeline == 1 or row.bubble is not None
    bubble = ", waiting for other stages included"
    if is_known:
        bubble = "" if row.bubble is None else ", waiting for other stages not included"
    what = (
        f"collectives hold a rank up for {format_seconds(exposed)} of a step, "
        f"{exposed / row.step_s:.0%}{bubble}"
    )
    most, share = exposed / max(row.step_s - exposed, 0.1 * row.step_s), exposed / row.step_s
    yield Advice(
        limit="communication",
        what=what,
        change="hide all of it behind computation",
        gain=most,
        how="bound",
        share=share,
    )
    others = [
        (other.layout, f"the layout {other.layout.name}{_batches(other.layout)}")
        for other in last.plan.rejected
        if other.layout.name != layout.name and _fits(other.layout, last.plan)
    ]
    if layout.data * layout.context > 1:
        twice = replace(layout, accumulation=2 * layout.accumulation)
        batch = f"train.global_batch={twice.global_batch}: gradients are reduced half as often"
        for each in _priced(last.plan, "communication", what, [(twice, batch)], share):
            yield replace(each, gain=min(each.gain or 0.0, most))
    yield from _priced(last.plan, "communication", what, others, share)


def _data(row: Row) -> Iterator[Advice]:
    seconds = row.phases_s.get("data", 0.0)
    share = min(row.share(seconds), 0.99)
    if share < _SHOWN:
        return
    yield Advice(
        limit="data",
        what=f"reading data takes {format_seconds(seconds)} of a step, {share:.0%}",
        change="read the data in another process, or from memory",
        gain=share / (1 - share),
        how="bound",
        share=share,
    )


def _overhead(row: Row, plan: Plan) -> Iterator[Advice]:
    """What is done once a step, whatever the batch. In the vote a rank waits for the slowest one,
    which is exposed communication already."""
    voted = max(0.0, row.phases_s.get("agree", 0.0) - _exposed_s(row))
    seconds = voted + row.phases_s.get("bookkeeping", 0.0)
    share = row.share(seconds)
    if share < _SHOWN:
        return
    twice = replace(plan.layout, accumulation=2 * plan.layout.accumulation)
    yield Advice(
        limit="overhead",
        what=f"gradient norm, vote and bookkeeping take {format_seconds(seconds)} of a step, "
        f"{share:.0%}",
        change=f"train.global_batch={twice.global_batch}: they are done half as often",
        gain=1 / (1 - share / 2) - 1,
        how="estimated",
        share=share,
    )


def _memory(row: Row, plan: Plan) -> Iterator[Advice]:
    if row.peak_bytes is None:
        return
    share, layout = row.peak_bytes / max(row.limit_bytes, 1), plan.layout
    used = (
        f"the fullest rank held {format_bytes(row.peak_bytes)} of {format_bytes(row.limit_bytes)}"
    )
    if share > _FULL:
        is_whole = layout.recompute in WHOLE_BLOCKS
        leaner = "a smaller micro_batch" if is_whole else f"layout.recompute={WHOLE_BLOCKS[0]}"
        yield Advice(limit="memory", what=used, change=leaner, gain=None, how="unknown")
    elif share < _ROOMY and layout.recompute != "none":
        plain = replace(layout, recompute="none", recompute_every=1)
        change = "layout.recompute=none: there is room to keep what is computed again"
        yield from _priced(plan, "memory", used, [(plain, change)])


def _optimizer(row: Row, plan: Plan) -> Iterator[Advice]:
    seconds, layout = row.phases_s.get("optimizer", 0.0), plan.layout
    share = row.share(seconds)
    if share < 2 * _SHOWN:
        return
    what = f"the update takes {format_seconds(seconds)} of a step, {share:.0%}"
    options = []
    if layout.sharding == "none" and layout.data > 1:
        sharded = replace(layout, sharding="zero1")
        options.append((sharded, "layout.sharding=zero1: each rank updates its share"))
    twice = replace(layout, accumulation=2 * layout.accumulation)
    options.append((twice, f"train.global_batch={twice.global_batch}: half as many updates"))
    yield from _priced(plan, "optimizer", what, options, share)


def _compute(row: Row, plan: Plan) -> Iterator[Advice]:
    """What is left when nothing else takes much: the device's own speed."""
    busy = row.phases_s.get("forward", 0.0) + row.phases_s.get("backward", 0.0)
    busy -= min(row.exposed_s or 0.0, busy)
    if row.share(busy) < 0.5:
        return
    what = f"forward and backward passes compute for {row.share(busy):.0%} of a step"
    faster = "bf16" in plan.cluster.peak_flops_per_s and plan.precision == "fp32"
    if faster and plan.cluster.accelerator != "cpu":
        change = "train.precision=bf16"
    elif plan.layout.recompute in WHOLE_BLOCKS:
        change = "layout.recompute=selective, where there is memory for it"
    else:
        change = "more devices, or faster ones: that is the work itself"
    yield Advice(limit="compute", what=what, change=change, gain=None, how="unknown")


def _priced(
    plan: Plan, limit: Limit, what: str, options: Sequence[tuple[Layout, str]], share: float = 0.0
) -> Iterator[Advice]:
    """The best of some layouts, by the planner's estimate of it over its estimate of this one."""
    found = []
    for layout, change in options:
        gain = estimated_gain(plan, layout)
        if gain is not None and gain > 0.01:
            found.append(
                Advice(
                    limit=limit,
                    what=what,
                    change=change,
                    gain=gain,
                    how="estimated",
                    share=share,
                )
            )
    yield from sorted(found, key=_order)[:2]


def estimated_gain(plan: Plan, layout: Layout) -> float | None:
    """By how much the planner expects more samples a second of another layout; None is unknown."""
    try:
        case = case_of_plan(plan)
        now, then = price_one(plan.layout, case).step_s, price_one(layout, case).step_s
    except (PacelineError, KeyError):
        return None
    if not now or not then:
        return None
    return (layout.global_batch / then) / (plan.layout.global_batch / now) - 1


def _fits(layout: Layout, plan: Plan) -> bool:
    total = next(
        each.estimate.memory.total_bytes for each in plan.rejected if each.layout == layout
    )
    return total is not None and total <= plan.limit_bytes


def _batches(layout: Layout) -> str:
    return f", {layout.accumulation} x {layout.micro_batch} samples a rank"


_WORDS: dict[Limit, str] = {
    "cores": "more ranks than cores",
    "bubble": "stages that wait for each other",
    "communication": "waiting for communication",
    "data": "reading data",
    "memory": "memory",
    "optimizer": "the optimizer's update",
    "overhead": "what is done once a step",
    "compute": "computing",
}


def _sentence(rows: Sequence[Row], best: Row, limits: Limit | None) -> str:
    """The answer for somebody who reads one line."""
    row, first = rows[-1], rows[0]
    what = _WORDS[limits or "compute"]
    if row is first:
        return f"{counted(row.num_ranks, 'rank')}: limited by {what}"
    how = (
        "scales well"
        if row.efficiency >= 0.9
        else "scales"
        if row.efficiency >= 0.7
        else "scales badly"
        if row.speedup > 1.05
        else "does not scale"
    )
    low, high = speedup_interval(row, first) or (row.speedup, row.speedup)
    text = (
        f"{how}: {row.num_ranks} ranks are {row.speedup:.2f} times as fast as {first.num_ranks} "
        f"({row.efficiency:.0%}; {low:.2f} to {high:.2f} times by the medians' 95 % intervals), "
        f"limited by {what}"
    )
    if best is not row:
        text += f"; {best.num_ranks} rank{'s are' if best.num_ranks > 1 else ' is'} the fastest"
    return text
