"""Why each other layout lost, and why each field of the chosen one has its value.

Leaves out: the choice itself (`choose.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from paceline.choices.pipeline_schedules import PLAIN
from paceline.estimate import TERM_NAMES, Estimate, price, price_one
from paceline.parallel import Layout, abilities_of, table_of
from paceline.parallel.degrees import divisors
from paceline.parallel.table import RECOMPUTES, SHARDINGS
from paceline.plan.choose import AXES, NUM_RUNNERS_UP, SAME, Choice, order_of, way_of
from paceline.plan.decision import Rejected
from paceline.plan.search import Priced
from paceline.units import bytes_apart, format_bytes, format_seconds

_NUM_TOO_LARGE = 3

_LEAST_TERM = 0.01
"""A term that differs by less than this share of the step is not named."""

_LITTLE_ROOM = "leaves little room in memory"
_LATER = "likely faster, but slower at the slow end of the estimate, which decides"

_MOST_TERMS = 4
"""Terms of a step that are named; the others are added up."""


def rejected_of(choice: Choice) -> tuple[Rejected, ...]:
    """The others with why each lost: all of a small space, a diverse few of a large one. Those that
    fit come first, by step time."""
    fitting = list(choice.fitting)
    too_large = list(choice.too_large)
    if not choice.is_whole:
        fitting = diverse(fitting, choice.layout, NUM_RUNNERS_UP)
        first: dict[str, tuple[Layout, Estimate]] = {}
        for pair in too_large:
            first.setdefault(pair[0].sharding, pair)
        too_large = list(first.values())[:_NUM_TOO_LARGE]
    fitting.sort(key=lambda pair: pair[1].step_s or 0.0)
    return (
        *(
            Rejected(
                layout=layout,
                estimate=price,
                reason=why_lost(layout, price, choice),
                passed_over=_passed_over(layout, price, choice),
            )
            for layout, price in fitting
        ),
        *(
            Rejected(
                layout=layout,
                estimate=price,
                reason=_why_too_large(price, choice.limit_bytes),
                passed_over="does not fit",
            )
            for layout, price in too_large
        ),
    )


def diverse(
    priced: Sequence[tuple[Layout, Estimate]], chosen: Layout, most: int
) -> list[tuple[Layout, Estimate]]:
    """The best of each kind of splitting first, then the best of the rest."""

    def kind(layout: Layout) -> tuple[object, ...]:
        return (
            *(getattr(layout, axis) > 1 for axis in AXES),
            layout.sharding in ("full", "hybrid"),
        )

    def seconds(pair: tuple[Layout, Estimate]) -> float:
        return pair[1].step_high_s or 0.0

    ordered = sorted(priced, key=seconds)
    seen = {kind(chosen)}
    firsts: list[tuple[Layout, Estimate]] = []
    for pair in ordered:
        if kind(pair[0]) not in seen:
            seen.add(kind(pair[0]))
            firsts.append(pair)
    # Half of the list is for other kinds, half for the best whatever their kind.
    taken = firsts[: most // 2]
    for pair in ordered + firsts:
        if len(taken) < most and pair not in taken:
            taken.append(pair)
    return taken


def why_lost(other: Layout, price: Estimate, choice: Choice) -> str:
    """Why a layout that fits lost against the chosen one, by the terms that differ."""
    layout, chosen = choice.layout, choice.estimate
    share, pace = _pace(price, choice)
    if share > choice.margin or (share > SAME and way_of(other) != way_of(layout)):
        return f"{pace}: {_terms_that_differ(price, chosen)}"
    if way_of(other) != way_of(layout):
        needs, allowed = bytes_apart(price.memory.known_bytes, choice.limit_bytes)
        is_full = _passed_over(other, price, choice) == _LITTLE_ROOM
        return f"{pace}; needs {needs} of the {allowed} allowed" if is_full else pace
    if other.reduce_every_micro_batch != layout.reduce_every_micro_batch:
        return f"{pace}; reduces gradients {other.accumulation} times a step, not once"
    if other.micro_batch == layout.micro_batch:
        return pace if share >= -SAME else f"{pace}, within the margin of the chosen one"
    return f"{pace}; micro-batches of {other.micro_batch}, not {layout.micro_batch}"


def _passed_over(other: Layout, price: Estimate, choice: Choice) -> str:
    """What keeps a layout from being chosen that is no slower, or not by more than the margin."""
    share, _ = _pace(price, choice)
    if share > SAME or way_of(other) == way_of(choice.layout):
        return ""
    if _at_slow_end(price, choice) > SAME:
        return _LATER if share < -SAME else ""
    if not _is_simpler(choice, other):
        return _LITTLE_ROOM
    pace = "as fast" if share > -SAME else "faster"
    if pace == "faster":
        pace += f" by less than {choice.margin:.0%} (plan.simpler_margin)"
    return f"{pace}, but more complex"


def _is_simpler(choice: Choice, other: Layout) -> bool:
    """Whether the chosen layout is simpler than another one."""
    two = table_of([choice.layout, other])
    alike = Priced(layouts=two, step_s=np.ones(2), memory_bytes=np.zeros(2))
    return bool(order_of(alike, np.inf, np.inf)[0] == 0)


def _at_slow_end(price: Estimate, choice: Choice) -> float:
    """By what share a layout is slower than the chosen one at the slow ends of their ranges."""
    chosen = choice.estimate
    its_s, mine_s = (each.step_high_s or each.step_s or 0.0 for each in (price, chosen))
    return its_s / mine_s - 1 if mine_s else 0.0


def _pace(price: Estimate, choice: Choice) -> tuple[float, str]:
    """By what share a layout is slower than the chosen one, and in words: a faster one with the
    slow end of its range, where that is why it lost."""
    chosen = choice.estimate
    if not price.step_s or not chosen.step_s:
        return 0.0, "time unknown"
    share, late = price.step_s / chosen.step_s - 1, _at_slow_end(price, choice)
    if share >= -SAME or (share >= -choice.margin and late <= SAME):
        return share, _slower(share)
    worst = _slower(late).removesuffix(" faster")
    return share, f"{_slower(share)} ({worst} at the slow end of both ranges)"


def _slower(share: float) -> str:
    if abs(share) < SAME:
        return "as fast"
    digits = 0 if share > 0.05 else 1
    return f"{abs(share):.{digits}%} {'slower' if share > 0 else 'faster'}"


def _terms_that_differ(price: Estimate, chosen: Estimate) -> str:
    """The terms that differ most, those that cost more first, and all others in one, so that they
    add up to the difference."""
    assert price.step_s is not None
    assert chosen.step_s is not None
    apart_s = price.step_s - chosen.step_s
    least_s = _LEAST_TERM * chosen.step_s
    more = {
        TERM_NAMES.get(name, name): seconds - chosen.terms.get(name, 0.0)
        for name, seconds in price.terms.items()
    }
    far = sorted(more, key=lambda name: -abs(more[name]))[:_MOST_TERMS]
    named = {name: more[name] for name in far if abs(more[name]) > least_s}
    if not named:
        return f"{format_seconds(abs(apart_s))} a step {'more' if apart_s > 0 else 'less'}"
    rest_s = apart_s - sum(named.values())
    ordered = sorted(named.items(), key=lambda term: -term[1])
    if abs(rest_s) >= least_s / 10:
        ordered.append(("other", rest_s))
    return ", ".join(
        f"{name} {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
        for name, seconds in ordered
    )


def _why_too_large(price: Estimate, limit: int) -> str:
    needed = price.memory.known_bytes
    needs, allowed = bytes_apart(needed, limit)
    return f"needs {needs} of {allowed}, {format_bytes(needed - limit)} too much"


def too_much(needed_bytes: float, limit_bytes: float) -> str:
    """A need in bytes beside the limit that it exceeds.

    >>> too_much(2**33, 2**32)
    'needs 8 GiB, more than the 4 GiB that a rank may use'
    """
    needs, most = bytes_apart(needed_bytes, limit_bytes)
    return f"needs {needs}, more than the {most} that a rank may use"


def reasons_of(choice: Choice) -> Iterator[tuple[str, str, str]]:
    """Field, value and reason of every way to split that was open."""
    layout = choice.layout
    why = _why_sharding(choice)
    yield "sharding", layout.sharding, f"{why}{_lowest_that_fits(choice, why)}"
    for axis in AXES:
        degree = getattr(layout, axis)
        if degree > 1:
            yield axis, str(degree), _why_axis(choice, axis)
    if layout.pipeline > 1:
        chunks = f", {layout.chunks} virtual stages" if layout.chunks > 1 else ""
        yield "schedule", f"{layout.schedule}{chunks}", _why_schedule(choice)
    yield "micro_batch", str(layout.micro_batch), _why_micro_batch(choice)
    if not choice.is_whole:
        yield "recompute", _recompute_of(layout), _why_recompute(choice)
    if layout.offload != "none":
        moved = ", with the parameters" if layout.offload_parameters else ""
        yield "offload", layout.offload + moved, _why_offload(choice)


def _recompute_of(layout: Layout) -> str:
    every = f", every {layout.recompute_every} blocks" if layout.recompute_every > 1 else ""
    return f"{layout.recompute}{every}"


def _why_offload(choice: Choice) -> str:
    alone, case = choice.fastest_alone, choice.case
    if alone is not None and (its_s := price_one(alone, case).step_s):
        taken = format_seconds(its_s)
        return f"the fastest without offload, {case.named(alone)}, takes {taken} a step"
    return "no layout fits on the accelerators alone"


def _why_sharding(choice: Choice) -> str:
    if not choice.is_whole:
        return _why_sharding_alone(choice)
    layout, chosen = choice.layout, choice.estimate
    degrees = way_of(layout)[:-1]
    fitting = [p for p in choice.fitting if p[0].sharding != layout.sharding]
    same = [p for p in fitting if way_of(p[0])[:-1] == degrees]
    too_large = [
        p
        for p in choice.too_large
        if p[0].sharding != layout.sharding and way_of(p[0])[:-1] == degrees
    ]
    if why := _why_nothing_shared(layout):
        return why
    if not fitting and not too_large:
        return "fixed by the job"
    if not same:
        if not too_large:
            return "the only sharding that is possible with these degrees"
        other, price = too_large[0]
        needed = format_bytes(price.memory.known_bytes)
        return f"{choice.case.named(other)} needs at least {needed} a rank"
    if chosen.step_s is None:
        return "the simplest layout that fits; step times are unknown"
    other, price = min(same, key=lambda pair: pair[1].step_s or 0.0)
    share, pace = _pace(price, choice)
    if share < -SAME:
        return _despite(choice, other, price, pace)
    if share > SAME:
        return f"fits; {choice.case.named(other)} is estimated {pace}"
    return f"fits, is as fast as {choice.case.named(other)}, and is simpler"


def _despite(choice: Choice, other: Layout, price: Estimate, pace: str) -> str:
    """Why another layout lost, though it is faster."""
    named = _named(choice, other)
    if _at_slow_end(price, choice) > SAME:
        return f"{named} is {pace}; the slow end decides"
    if _is_simpler(choice, other):
        return f"simpler than {named}, which is {pace} (plan.simpler_margin: {choice.margin:.0%})"
    needs, allowed = bytes_apart(price.memory.known_bytes, choice.limit_bytes)
    return f"{named} is {pace}, but leaves little room: it needs {needs} of the {allowed} allowed"


def _why_nothing_shared(layout: Layout) -> str:
    """Reason for the sharding of a layout in which no two ranks hold the same part of the model;
    empty where others offload it in another way."""
    if layout.data * layout.context > 1 or (layout.keeps_shards and layout.offload_parameters):
        return ""
    if layout.num_ranks == 1:
        return "one rank has nothing to share"
    return "no sharding: data and context are 1, so no two ranks hold the same part"


def _lowest_that_fits(choice: Choice, why: str) -> str:
    """The end of a reason: the lowest ZeRO stage that fits at the chosen degrees and what it costs
    in time, where it is not the chosen one and the reason does not have it yet."""
    case, degrees = choice.case, way_of(choice.layout)[:-1]
    for kind in SHARDINGS[: min(SHARDINGS.index(choice.layout.sharding), SHARDINGS.index("full"))]:
        same = [each for each, _ in choice.fitting if way_of(each) == (*degrees, kind)]
        other = choice.best_with(kind) if choice.best is not None else next(iter(same), None)
        if other is not None:
            named = _named(choice, other)
            if case.named(other).partition(" over ")[0] in why:
                return ""
            pace = _pace(price_one(other, case), choice)[1]
            return f"; the least sharding that fits, {named}, is {pace}"
    return ""


def _why_sharding_alone(choice: Choice) -> str:
    """Against the leanest layouts of the same degrees with simpler things shared, if none of them
    fits, or against the best layout of each other sharding."""
    layout, limit = choice.layout, choice.limit_bytes
    if why := _why_nothing_shared(layout):
        return why
    able = abilities_of(choice.case.engine.name)
    apart = {"hybrid", layout.sharding} | ({"none"} if layout.data * layout.context == 1 else set())
    kinds = [k for k in SHARDINGS if k in able.shardings and k not in apart]
    if layout.pipeline > 1:
        kinds = [kind for kind in kinds if kind in able.pipeline_shardings]
    simpler = kinds[: sum(SHARDINGS.index(k) < SHARDINGS.index(layout.sharding) for k in kinds)]
    least = {kind: choice.least_bytes(kind) for kind in simpler}
    known = {kind: size for kind, size in least.items() if size is not None}
    if known and min(known.values()) > limit:
        kind, size = list(known.items())[-1]
        name = replace(layout, sharding=kind).way(choice.case.engine.full_sharding)
        ways = (f"{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1)
        degrees = " x ".join(ways)
        with_them = f"with {degrees}" if degrees else "on data ranks only (no other parallelism)"
        return f"the least sharding that fits {with_them}: {name} {too_much(size, limit)}"
    beside = [other for kind in simpler if (other := choice.best_with(kind)) is not None]
    if beside:
        return _against_best(choice, [(other, price_one(other, choice.case)) for other in beside])
    return _against_best(choice, [p for p in choice.fitting if p[0].sharding != layout.sharding])


def _against_best(choice: Choice, others: Sequence[tuple[Layout, Estimate]]) -> str:
    """Compare with the best layout among the shardings that fit, but the chosen one's."""
    chosen_s = choice.estimate.step_s
    timed = [pair for pair in others if pair[1].step_s is not None]
    if not timed or not chosen_s:
        return "the only way to share that fits" if not others else "times are unknown"
    other, price = min(timed, key=lambda pair: pair[1].step_s or 0.0)
    share, pace = _pace(price, choice)
    named = _named(choice, other)
    if abs(share) < SAME:
        return f"fits; {named} is as fast{_leaner(choice, price)}"
    if share < 0:
        return _despite(choice, other, price, pace)
    if not (lead := _lead(choice)):
        return f"fits; {named} is estimated {pace}"
    return f"{lead}; {named.replace(f' over {other.num_ranks} ranks', '')}: {pace}"


def _lead(choice: Choice) -> str:
    """What a layout has before faster ones; empty where none is."""
    passed = [
        _pace(price, choice)[0]
        for other, price in choice.fitting
        if _passed_over(other, price, choice).startswith("faster")
    ]
    if not passed and any(_passed_over(*pair, choice) == _LATER for pair in choice.fitting):
        return "takes the least time at the slow end of the estimate (see others)"
    most = _slower(min(passed, default=0.0))
    return f"more complex: up to {most}" if passed else ""


def _named(choice: Choice, other: Layout) -> str:
    """Another layout's name, with its recompute and micro-batch where they differ."""
    parts = [choice.case.named(other)]
    if other.recompute != choice.layout.recompute:
        parts.append(f"{'no' if other.recompute == 'none' else other.recompute} recompute")
    if other.micro_batch != choice.layout.micro_batch:
        parts.append(f"micro-batch {other.micro_batch}")
    return ", ".join(parts)


def _leaner(choice: Choice, price: Estimate) -> str:
    """Which of two equally fast layouts needs less memory."""
    mine, its = choice.estimate.memory.known_bytes, price.memory.known_bytes
    if mine < its * (1 - SAME):
        return f" and needs {' instead of '.join(bytes_apart(its, mine))}"
    return ""


def _why_axis(choice: Choice, axis: str) -> str:
    """Against the best layout that does not split this way."""
    without = [pair for pair in choice.fitting if getattr(pair[0], axis) == 1]
    chosen_s = choice.estimate.step_s
    if not without:
        return f"no layout with {axis} 1 fits in {format_bytes(choice.limit_bytes)}"
    layout, price = min(without, key=lambda pair: pair[1].step_s or 0.0)
    if chosen_s is None or price.step_s is None:
        return "times are unknown"
    share, pace = _pace(price, choice)
    best = f"the best layout with {axis} 1, {choice.case.named(layout)}"
    if abs(share) < SAME:
        leaner = _leaner(choice, price)
        if leaner:
            return f"{best}, is as fast{leaner}"
        if _num_axes(choice.layout) <= _num_axes(layout):
            return f"as fast as {best}, and no more kinds of parallelism"
        return f"within half a percent of {best}"
    return f"{best}, is {pace}"


def _num_axes(layout: Layout) -> int:
    return sum(getattr(layout, axis) > 1 for axis in AXES)


def _why_schedule(choice: Choice) -> str:
    layout = choice.layout
    idle = choice.estimate.terms.get("pipeline")
    whole = choice.estimate.step_s
    if idle is None or not whole:
        return "times are unknown"
    takes = f"pipeline bubble and p2p take {idle / whole:.1%} of the step"
    if layout.schedule == PLAIN:
        return takes
    plain = price_one(replace(layout, schedule=PLAIN, chunks=1), choice.case)
    return f"{takes}; with {PLAIN} {plain.terms['pipeline'] / (plain.step_s or 1):.1%}"


def _why_recompute(choice: Choice) -> str:
    layout = choice.layout
    if layout.recompute == "none":
        return "all activations fit"
    leaner = RECOMPUTES[: RECOMPUTES.index(layout.recompute)]
    tried = [
        price_one(replace(layout, recompute=kind, recompute_every=1), choice.case)
        for kind in leaner
    ]
    too_large = [each for each in tried if each.memory.known_bytes > choice.limit_bytes]
    if too_large:
        index = tried.index(too_large[-1])
        needs = too_much(too_large[-1].memory.known_bytes, choice.limit_bytes)
        kind = leaner[index]
        return f"{'without' if kind == 'none' else f'with {kind}'} recompute the layout {needs}"
    return "it makes room for what saves more time elsewhere"


def _why_micro_batch(choice: Choice) -> str:
    layout, limit = choice.layout, choice.limit_bytes
    larger = _larger_micro_batches(layout)
    if larger:
        prices = price(table_of(larger), choice.case)
        sizes = np.broadcast_to(prices.memory_bytes, len(larger))
        over = [index for index, size in enumerate(sizes) if size > limit]
        if over and over[0] == 0:
            needs = too_much(float(sizes[0]), limit)
            every = f" every {layout.recompute_every} blocks" if layout.recompute_every > 1 else ""
            kept = f"with {layout.recompute} recompute{every}"
            if layout.recompute == "none":
                kept = "without recompute"
            return f"the largest that fits {kept}; micro-batch {larger[0].micro_batch} {needs}"
    if choice.estimate.memory.parts["activations"] is None:
        return "a rank's whole share at once; whether it fits is unknown for your own model"
    if layout.accumulation == 1:
        return "a rank's whole share fits at once"
    if layout.pipeline > 1:
        return f"{layout.accumulation} of them keep the {layout.pipeline} stages busy"
    return "fewest gathers and reductions for its memory"


def _larger_micro_batches(layout: Layout) -> list[Layout]:
    """Variants of a layout with fewer and larger micro-batches, the next larger first."""
    samples = layout.micro_batch * layout.accumulation
    sizes = [n for n in divisors(samples)[::-1] if n > layout.micro_batch]
    return [
        replace(
            layout,
            micro_batch=size,
            accumulation=samples // size,
            reduce_every_micro_batch=layout.reduce_every_micro_batch and size < samples,
        )
        for size in sizes
        if samples // size >= layout.pipeline or layout.pipeline == 1
    ]
