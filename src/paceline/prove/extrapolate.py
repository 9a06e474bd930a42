"""From a step of a model with few blocks to the step of one with many.

Blocks that are alike do alike work, so the stretches of one block in the middle stand for those of
any other in the middle: they are repeated as often as blocks are missing, in every pass. What lies
outside the blocks (the optimizer over all parameters, the norm) grows evenly with the number of
blocks, and two depths say how. Whether that holds is checked: the step made in this way must equal
the one traced at a third depth, stretch for stretch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from paceline.prove.segments import (
    Compute,
    Issue,
    Parts,
    Segment,
    Step,
    Work,
    find_peak,
    sum_compute,
)
from paceline.prove.trace import Stream

TOLERANCE = 1e-3
"""Largest relative difference of a peak that counts as equal."""


class Depth(NamedTuple):
    """A step, and how many blocks the rank's stages had in it, first stage first."""

    blocks: tuple[int, ...]
    step: Step


def extend(small: Depth, larger: Depth, blocks: tuple[int, ...], period: int) -> Step | None:
    """The step of a rank whose stages have so many blocks; None when the depths do not fit.

    Args:
        small: Traced.
        larger: Traced with `period` more blocks on every stage.
        blocks: Wanted, for each stage.
        period: Blocks after which the same kinds of block come again.
    """
    total, more = sum(blocks) - sum(small.blocks), sum(larger.blocks) - sum(small.blocks)
    if more <= 0:
        return None
    share = total / more
    passes, wider = _passes(small.step), _passes(larger.step)
    if [key for key, _ in passes] != [key for key, _ in wider]:
        return None
    # Between two stages, and before the first, a rank is at the stage that it left, or at none.
    stages = sorted({key[2] for key, runs in passes if runs[-1].block is not None})
    if len(stages) != len(blocks):
        return None
    wanted = dict(zip(stages, blocks, strict=True))
    have = dict(zip(stages, small.blocks, strict=True))
    made: list[Segment] = []
    for (key, runs), (_, wide) in zip(passes, wider, strict=True):
        num_blocks = sum(run.block is not None for run in runs)
        if num_blocks == 0:
            made += _grown(_joined(runs), _joined(wide), share)
            continue
        missing = wanted[key[2]] - have[key[2]]
        repeated = _repeated(runs, missing, period)
        if repeated is None:
            return None
        made += repeated
    resting = _along(small.step.resting, larger.step.resting, share)
    return Step(resting, made)


def is_equal(made: Step, traced: Step) -> bool:
    """Whether a step that was made is the traced one: its peak, its parts, its collectives."""
    one, other = find_peak(made), find_peak(traced)
    if abs(one.num_bytes - other.num_bytes) > TOLERANCE * other.num_bytes:
        return False
    if one.segment.place.phase != other.segment.place.phase:
        return False
    parts = {*one.parts, *other.parts}
    if any(
        abs(one.parts.get(part, 0.0) - other.parts.get(part, 0.0)) > TOLERANCE * other.num_bytes
        for part in parts
    ):
        return False
    return _sent(made) == _sent(traced) and _close(_flops(made), _flops(traced))


def repeat_micro_batches(step: Step, missing: int) -> Step | None:
    """The step with more micro-batches like the second of three.

    None unless that leaves memory as it found it, but for a few numbers such as its loss.
    """
    if missing == 0:
        return step
    middle = [s for s in step.segments if s.place.micro_batch == 2]
    change = sum(sum(segment.delta.values()) for segment in middle)
    if abs(change) > TOLERANCE * find_peak(step).num_bytes:
        return None
    end = max(i for i, s in enumerate(step.segments) if s.place.micro_batch == 2) + 1
    segments = [*step.segments[:end], *(middle * missing), *step.segments[end:]]
    return Step(step.resting, segments)


class _Run(NamedTuple):
    """One block's stretches in a pass, with what follows them outside of any block."""

    block: int | None
    segments: list[Segment]


_Key = tuple[str, int, int]


def _passes(step: Step) -> list[tuple[_Key, list[_Run]]]:
    """Stretches by pass, and inside a pass by block."""
    found: list[tuple[_Key, list[_Run]]] = []
    for key, segments in groupby(step.segments, key=lambda segment: segment.key[:3]):
        runs: list[_Run] = []
        for segment in segments:
            block = segment.place.block
            if runs and (block is None or block == runs[-1].block):
                runs[-1].segments.append(segment)
            else:
                runs.append(_Run(block, [segment]))
        found.append((key, runs))
    return found


def _repeated(runs: Sequence[_Run], missing: int, period: int) -> list[Segment] | None:
    """A pass with the blocks in its middle repeated."""
    places = [index for index, run in enumerate(runs) if run.block is not None]
    if missing % period or len(places) < period:
        return None
    first = (len(places) - period) // 2  # between the first block and the last, which differ
    at = places[first : first + period]
    middle = [runs[index] for index in at] * (missing // period)
    longer = [*runs[: at[0]], *middle, *runs[at[0] :]]
    numbers = [run.block for run in runs if run.block is not None]
    number, by = min(numbers), 1
    if numbers[0] > numbers[-1]:  # a backward pass
        number, by = min(numbers) + len(numbers) + missing - 1, -1
    out: list[Segment] = []
    for run in longer:
        if run.block is None or run.block == number:
            out += run.segments
        else:
            out += [renumbered(segment, number) for segment in run.segments]
        number += by * (run.block is not None)
    return out


def renumbered(segment: Segment, number: int) -> Segment:
    """Copy of a segment as the same stretch of another block."""
    old = segment.place.block
    if old is None:
        return segment

    def renamed(module: str) -> str:
        return f"{module}.".replace(f".{old}.", f".{number}.", 1).removesuffix(".")

    module = renamed(segment.place.module)
    place = segment.place._replace(block=number, module=module)
    return replace(segment, place=place, peak_module=renamed(segment.peak_module))


def _joined(runs: Iterable[_Run]) -> list[Segment]:
    return [segment for run in runs for segment in run.segments]


def _grown(small: list[Segment], larger: list[Segment], share: float) -> list[Segment]:
    """Stretches outside the blocks at another depth: along a line through two of them."""
    if len(small) != len(larger):
        return small
    return [_grown_one(a, b, share) for a, b in zip(small, larger, strict=True)]


def _grown_one(a: Segment, b: Segment, share: float) -> Segment:
    return Segment(
        place=a.place,
        delta=_along(a.delta, b.delta, share),
        peak=a.peak + (b.peak - a.peak) * share,
        peak_parts=_along(a.peak_parts, b.peak_parts, share),
        peak_module=a.peak_module,
        work=_grown_work(a.work, b.work, share),
        flops=_along(a.flops, b.flops, share),
    )


def _grown_work(a: list[Work], b: list[Work], share: float) -> list[Work]:
    """The work at another depth; kernels in one piece where their number differs."""
    if [type(each) for each in a] != [type(each) for each in b]:
        first, second = (
            {stream: sum_compute(each) for stream, each in _by_stream(work)} for work in (a, b)
        )
        others: list[Work] = [each for each in a if not isinstance(each, Compute)]
        grown = [_grown_compute(first[s], second[s], share) for s in first if s in second]
        return [*grown, *others]
    out: list[Work] = []
    for one, other in zip(a, b, strict=True):
        if isinstance(one, Compute) and isinstance(other, Compute):
            out.append(_grown_compute(one, other, share))
        elif isinstance(one, Issue) and isinstance(other, Issue):
            size = one.what.num_bytes + (other.what.num_bytes - one.what.num_bytes) * share
            out.append(Issue(one.what._replace(num_bytes=round(size))))
        else:
            out.append(one)
    return out


def _by_stream(work: Iterable[Work]) -> Iterator[tuple[Stream, list[Compute]]]:
    kernels = [each for each in work if isinstance(each, Compute)]
    for stream in dict.fromkeys(each.stream for each in kernels):
        yield stream, [each for each in kernels if each.stream == stream]


def _grown_compute(a: Compute, b: Compute, share: float) -> Compute:
    seconds = a.seconds + (b.seconds - a.seconds) * share
    num_kernels = a.num_kernels + (b.num_kernels - a.num_kernels) * share
    host_s = a.host_s + (b.host_s - a.host_s) * share
    return Compute(seconds, num_kernels, a.stream, host_s)


def _along(a: Parts, b: Parts, share: float) -> Parts:
    return {
        part: a.get(part, 0.0) + (b.get(part, 0.0) - a.get(part, 0.0)) * share
        for part in {**a, **b}
    }


def _sent(step: Step) -> dict[tuple[str, int], tuple[int, int]]:
    """Kind and group size -> number of collectives and their bytes."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for segment in step.segments:
        for each in segment.work:
            if isinstance(each, Issue):
                key = (each.what.kind, len(each.what.ranks))
                count, size = found.get(key, (0, 0))
                found[key] = count + 1, size + each.what.num_bytes
    return found


def _flops(step: Step) -> float:
    return sum(sum(segment.flops.values()) for segment in step.segments)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1.0)
