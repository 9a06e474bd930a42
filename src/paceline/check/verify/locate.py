"""The first place where a layout departs from the single device: step, module or parameter, ranks.

Everything after the first wrong number is wrong too, so only the first is named: the first step;
in it the first module of the forward pass whose output is off; if all are right, the first
parameter of the backward pass whose gradient is; if those are right, what an update left.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.check.verify.tolerance import Tolerance, reading_is_off
from paceline.parallel.layout import Layout
from paceline.record.verification import Deviation, Facts, Reading, ReferenceStep, StepFacts

_SAME = 1e-6
"""Share below which a factor fits: float64's rounding is far below, chance far above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Where it begins."""

    step: int
    kind: Literal["forward", "gradient", "update"]
    name: str
    ranks: tuple[int, ...]
    """On which it is seen; all that have it, where that cannot be told."""

    off: float
    """How far off it is, relative."""

    looks_like: str
    fix: str

    @property
    def where(self) -> str:
        """For people."""
        what = {
            "forward": "output of",
            "gradient": "gradient of",
            "update": "update of",
        }[self.kind]
        ranks = ", ".join(map(str, self.ranks))
        return f"step {self.step}, {what} {self.name}, rank{'s' * (len(self.ranks) > 1)} {ranks}"


def locate(facts: Facts, tolerance: Tolerance, run: str) -> Fault | None:
    """The first fault of a run in float64; None when all of it is right."""
    for index, truth in enumerate(facts.reference.wide):
        steps = {
            rank.rank: rank.runs[run].steps[index]
            for rank in facts.ranks
            if run in rank.runs and len(rank.runs[run].steps) > index
        }
        if not steps:
            return None
        found = (
            _forward_fault(index + 1, steps, truth, tolerance)
            or _gradient_fault(facts, index + 1, steps, tolerance)
            or _update_fault(facts, index + 1, steps, tolerance)
        )
        if found is not None:
            return found
    return None


def _forward_fault(
    step: int, steps: Mapping[int, StepFacts], truth: ReferenceStep, tolerance: Tolerance
) -> Fault | None:
    allowed = tolerance.forward(step)
    for name, right in truth.modules.items():
        parts = {rank: each.modules[name] for rank, each in steps.items() if name in each.modules}
        off = reading_of_ranks(parts, right, allowed)
        if off is None or off <= 1:
            continue
        inputs = {rank: each.inputs[name] for rank, each in steps.items() if name in each.inputs}
        given = truth.inputs.get(name)
        came_in = None if given is None else reading_of_ranks(inputs, given, allowed)
        looks, fix = _words_of_forward(name, has_input=given is not None, came_in=came_in)
        return Fault(
            step=step,
            kind="forward",
            name=name,
            ranks=tuple(sorted(parts)),
            off=off * allowed,
            looks_like=looks,
            fix=fix,
        )
    return None


def _words_of_forward(name: str, *, has_input: bool, came_in: float | None) -> tuple[str, str]:
    if came_in is not None and came_in > 1:
        looks = "what goes into it is wrong, and no module before it gives anything wrong: "
        looks += "something between modules is, in the one that calls it"
        return looks, f"look at what {_parent(name)} does before it calls {name}"
    if not has_input:
        looks = "only token ids go into it: the samples are others, or its parameters are"
        return looks, "see the samples, and whether all ranks begin with the same weights"
    looks = "what goes into it is right: its parameters, or how the layout splits it, are wrong"
    return looks, f"look at the way of {name}, and at its parameters in this step"


def reading_of_ranks(parts: Mapping[int, Reading], truth: Reading, allowed: float) -> float | None:
    """How far all ranks' readings together are off, in multiples of what is allowed; None where
    they cannot be put together.

    Ranks may hold parts, copies, or copies of parts: together they have a whole number of wholes.
    """
    count = sum(part.count for part in parts.values())
    if not parts or not truth.count or count % truth.count:
        return None
    copies = count // truth.count
    whole = Reading(
        count=truth.count,
        total=sum(part.total for part in parts.values()) / copies,
        squares=sum(part.squares for part in parts.values()) / copies,
        largest=max(part.largest for part in parts.values()),
    )
    return reading_is_off(whole, truth, allowed)


def _gradient_fault(
    facts: Facts, step: int, steps: Mapping[int, StepFacts], tolerance: Tolerance
) -> Fault | None:
    for name in reversed(facts.reference.shapes):
        lacking = tuple(rank for rank, each in steps.items() if name in each.missing)
        off = {
            rank: each.gradients[name]
            for rank, each in steps.items()
            if name in each.gradients
            and not tolerance.off(each.gradients[name], "gradients", step)
            <= tolerance.gradient(step, name)
        }
        if not off and not lacking:
            continue
        if not off:
            looks, fix = "it has no gradient at all", "look at what is reduced, and when"
        else:
            all_off = _all_off(step, steps, tolerance)
            looks, fix = _pattern(facts, name, off, all_off)
        return Fault(
            step=step,
            kind="gradient",
            name=name,
            ranks=tuple(off) or lacking,
            off=max((tolerance.off(each, "gradients", step) for each in off.values()), default=1.0),
            looks_like=looks,
            fix=fix,
        )
    return None


def _all_off(
    step: int, steps: Mapping[int, StepFacts], tolerance: Tolerance
) -> dict[str, list[Deviation]]:
    found: dict[str, list[Deviation]] = {}
    for each in steps.values():
        for name, deviation in each.gradients.items():
            if not tolerance.off(deviation, "gradients", step) <= tolerance.gradient(step, name):
                found.setdefault(name, []).append(deviation)
    return found


def _pattern(
    facts: Facts,
    name: str,
    off: Mapping[int, Deviation],
    all_off: Mapping[str, Sequence[Deviation]],
) -> tuple[str, str]:
    layout, first = facts.case.layout, next(iter(off.values()))
    shares = {rank: each.like_share for rank, each in off.items() if each.like_share is not None}
    how_many = f"{len(all_off)} of {len(facts.reference.shapes)} parameters are wrong"
    if shares:
        ranks = ", ".join(
            f"rank {rank} has that of data rank {share}'s samples" for rank, share in shares.items()
        )
        looks = f"it is the gradient of some samples alone ({ranks}): "
        looks += f"the sum over the data ranks is missing; {how_many}"
        fix = "let every gradient be reduced once a step, after its last micro-batch"
        return looks, fix
    ratio, beside = first.ratio, first.beside_ratio
    if ratio is not None and beside is not None and beside < _SAME:
        hints = [text for each, text in _factors(layout) if abs(ratio - each) < _SAME]
        same = all(
            each.ratio is not None and abs(each.ratio - ratio) < _SAME
            for deviations in all_off.values()
            for each in deviations
        )
        told = f", {' or '.join(hints)}" if hints else ""
        return (
            f"it is {ratio:.6g} x the right one{told}: wrong scaling; {how_many}"
            + (", all by this factor" if same and len(all_off) > 1 else ""),
            "look at what multiplies or divides the loss or the gradients",
        )
    return (
        (
            f"no factor fits ({ratio if ratio is not None else float('nan'):.3g} comes nearest); "
            f"{how_many}"
        ),
        f"look at the backward pass of {_parent(name)} and at what is reduced there",
    )


def _factors(layout: Layout) -> Iterator[tuple[float, str]]:
    """Factors that a slip gives, and the slip. Several may give the same."""
    dp_cp = layout.data * layout.context
    if dp_cp > 1:
        ranks = f"the {dp_cp} data and context ranks"
        yield float(dp_cp), f"as if summed over {ranks} and not divided"
        yield 1 / dp_cp, f"as if divided by {ranks} once too often"
    if layout.tensor > 1:
        yield float(layout.tensor), f"as if summed over the {layout.tensor} tensor ranks twice"
    if layout.accumulation > 1:
        batches = f"the {layout.accumulation} micro-batches"
        yield float(layout.accumulation), f"as if not divided by {batches}"
        yield 1 / layout.accumulation, f"as if divided by {batches} twice"
    yield 0.0, "it is zero"


def _update_fault(
    facts: Facts, step: int, steps: Mapping[int, StepFacts], tolerance: Tolerance
) -> Fault | None:
    for name in reversed(facts.reference.shapes):
        here = {
            rank: each.parameters[name] for rank, each in steps.items() if name in each.parameters
        }
        off = {
            rank: each
            for rank, each in here.items()
            if not tolerance.off(each, "parameters", step) <= tolerance.parameter(step, name)
        }
        if not off:
            continue
        some = len(off) < len(here)
        return Fault(
            step=step,
            kind="update",
            name=name,
            ranks=tuple(off),
            off=max(tolerance.off(each, "parameters", step) for each in off.values()),
            looks_like="its gradient is right and its value is not"
            + (
                ": other ranks' copies are right, so this one was not updated, or changed after"
                if some
                else " on any rank: the optimizer, the clipping or the learning rate is wrong"
            ),
            fix="give every rank's optimizer all of its parameters, and change them nowhere else"
            if some
            else "compare the optimizer's options with the single device's",
        )
    return None


def first_difference(
    one: Sequence[StepFacts], other: Sequence[StepFacts]
) -> Iterator[tuple[int, str]]:
    """Steps and parameters whose bits differ on a rank, the first ones first."""
    after = {each.step: each for each in other}
    for each in one:
        if each.step in after:
            yield from (
                (each.step, name)
                for name, digest in each.digests.items()
                if after[each.step].digests.get(name) != digest
            )


def _parent(name: str) -> str:
    return name.rpartition(".")[0] or "the model"
