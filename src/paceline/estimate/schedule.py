"""How a pipeline's schedule fills its stages: idle time, and micro-batches held at once.

    schedule      idle, in micro-batches' time             held by rank r of p
    gpipe         p - 1                                    m
    1f1b          p - 1                                    min(m, p - r)
    interleaved   (p - 1) / v                              min(m, (2 (p-r-1) + (v-1) p + 1) / v)
    zero-bubble   (p - 1) / v x late                       min(m, p)
    dualpipe-v    (p - 1) / 2 x late                       min(m, p + 1/2)

m micro-batches, v chunks of each rank; zero-bubble of two chunks is ZB-V. F, B and W are the
seconds of the forward pass, of the gradients of the inputs, and of the gradients of the matrices;
`late` is max(F, B, F + B - W) / (F + B + W). What is held is held until W.

Source: GPipe arXiv:1811.06965; 1F1B arXiv:2006.09503; interleaved arXiv:2104.04473, section 2.2;
held: Korthikanti et al., arXiv:2205.05198, appendix C; zero-bubble (ZB-H1) arXiv:2401.10241, table
2. All but GPipe and 1F1B were counted in torch 2.13's own orders (`pipeline_order`) of 2 to 8 ranks
and 4 to 32 micro-batches: with F = B = W exactly as here, ZB-V and DualPipe-V up to a tenth of a
micro-batch and rank from it where B is 1.3 times F.
"""

from typing import NamedTuple

import numpy as np

from paceline.parallel.layout import Layout
from paceline.parallel.stages import num_chunks
from paceline.parallel.table import code_of
from paceline.profile.block import Column, Value

_GPIPE = code_of("schedule", "gpipe")
_1F1B = code_of("schedule", "1f1b")
_INTERLEAVED = code_of("schedule", "interleaved")
_ZERO_BUBBLE = code_of("schedule", "zero-bubble")
_DUALPIPE = code_of("schedule", "dualpipe-v")


def idle_share(pipeline: Value, chunks: Value, schedule: Value, weight_share: Value) -> Column:
    """Idle time of a stage in a step, in the time of one micro-batch on that stage.

    Args:
        pipeline: Stages.
        chunks: Virtual stages of each.
        schedule: Place in `SCHEDULES`.
        weight_share: Gradients of matrices as a share of a micro-batch's whole time, about 1/3.

    >>> float(idle_share(8, 2, code_of("schedule", "interleaved"), 1 / 3))
    3.5
    """
    p, v = np.asarray(pipeline, float), np.maximum(chunks, 1)
    s = np.asarray(schedule)
    w = np.asarray(weight_share)
    # F + B + W is 1, so F + B - W is 1 - 2 W; F and B are taken to be equal, half of 1 - W.
    late = np.maximum(1 - 2 * w, (1 - w) / 2)
    in_chunks = (s == _INTERLEAVED) | (s == _ZERO_BUBBLE)
    parts = np.where(s == _DUALPIPE, 2.0, np.where(in_chunks, v, 1.0))
    return (p - 1) / parts * np.where((s == _ZERO_BUBBLE) | (s == _DUALPIPE), late, 1.0)


class Messages(NamedTuple):
    """What stages wait for messages in a step, in the time of one over the slowest link between two
    stages: the longer of two bounds."""

    each: Column
    """Messages of a micro-batch, beside its whole compute."""

    away: Column
    """Part of those that the rank with the head does not wait for."""

    ends: Column
    """Messages of the step, beside those: while the pipeline fills and drains."""

    link_each: Column
    """Messages of a micro-batch, where messages set the pace and compute goes on beside them."""

    link_ends: Column
    beside: Column
    """Part of a micro-batch's compute that comes between those all the same."""


def messages_of(
    pipeline: Value, chunks: Value, schedule: Value, weight_share: Value, together: Value
) -> Messages:
    """How many messages a pipeline waits for.

    In 1F1B a stage takes up the next pass when what it sends and what it receives are both there
    (Megatron Core 0.16, pipeline_parallel/p2p_communication.py, `_communicate`; torch 2.13,
    distributed/pipelining/schedules.py, `Schedule1F1B`). Other orders leave work to do meanwhile,
    as long as micro-batches that are under way last: counted in torch 2.13's own orders of 2 to 8
    ranks and 8 to 64 micro-batches, F = B = W, where messages take 0.02 to 20 micro-batches. Sends
    one after another fill a link; a rank of two has one link for both directions of a loop.

    Args:
        pipeline: Stages.
        chunks: Virtual stages of each.
        schedule: Place in `SCHEDULES`.
        weight_share: Gradients of matrices as a share of a micro-batch's whole time.
        together: Consecutive ranks of a pipeline that reach each other without the slowest link.

    >>> [float(messages_of(p, 1, code_of("schedule", "1f1b"), 0.3, 1).each) for p in (2, 4, 8)]
    [1.0, 2.0, 2.0]
    """
    p, v, s = np.asarray(pipeline, float), np.maximum(chunks, 1), np.asarray(schedule)
    near = np.clip(together, 1, p)
    crossed = np.ceil(p / near) - 1
    both = (near == 1) & (p > 2)  # the links to both neighbours are slow
    trip, far = 2 * (v * crossed + v - 1), 2 * (p - near)
    in_cycle = v * (1 + both * (1 - 2 / p))
    kinds = [s == _1F1B, s == _GPIPE, s == _INTERLEAVED, (s == _ZERO_BUBBLE) & (v == 2)]
    kinds += [s == _ZERO_BUBBLE, s == _DUALPIPE]

    def of_kind(*counts: Column) -> Column:
        return np.asarray(np.select(kinds, np.broadcast_arrays(*counts)))

    late = np.maximum(p - near, 2 * crossed - 1)
    several = p > 2
    in_loop = np.where(several, (v - 1) * p + far - 1, 1)
    split = 1 - np.asarray(weight_share) * (1 - 1 / np.maximum(p, 1))
    each = of_kind(1.0 + both, 0, 0, 0, 0, in_cycle / 2)
    beside = of_kind(1.0, 0.0, np.where(several, 0.55 * both, 0.17), 1 / 3, 0.0, 0.0)
    return Messages(
        each=each,
        away=several * each / (1 + both),
        ends=of_kind(
            np.where(both, 2 * p - 5, late),
            2 * crossed, trip, 5 * crossed, 2 * trip, both * 4 * (p - 2),
        ),
        link_each=of_kind(0, 2, np.where(several, v, 2 * v - 1), 2, in_cycle, in_cycle),
        link_ends=of_kind(
            0, 2 * crossed, in_loop, far + both * 2 * (p - 2), 2 * (p - 2) / near, far
        ),
        beside=np.where(kinds[4] & ~kinds[3] | kinds[5], split, beside),
    )  # fmt: skip


class Launches(NamedTuple):
    """Seconds in which the device waits for the host to launch; 0 where the host waits for a
    message itself, and so launches nothing before it is there."""

    stage: Column
    """In a step, on the stage that sets the pace."""

    passed: Column
    """One micro-batch, on what it passes while the pipeline fills and drains, of one rank."""

    first: Column
    """Before the first stage has sent something."""


def bubble_s(
    turns: Column,
    passed_s: Column,
    forward_share: Column,
    launches: Launches,
    waits_s: tuple[Column, Column] = (0.0, 0.0),
) -> Column:
    """Seconds that a stage stands still in a step.

    All hosts launch from the start of a step, so each has launched what a message brings before the
    message comes: idle time is the device's. Filling the pipeline takes its forward passes, and
    what the first micro-batch waits for; behind it hosts launch on, and where they are slower than
    the device they are still at it when the fill has been made up for. Draining takes its backward
    passes, which were launched by then. Hosts launch on as well while a stage waits for messages.

    Args:
        turns: Idle time in micro-batches (`idle_share`).
        passed_s: A micro-batch on what it passes while the pipeline fills and drains, of one rank,
            with what it waits for launches.
        forward_share: Of the device's time.
        launches: Their part of it.
        waits_s: For messages, by either bound (`messages_of`).

    >>> float(bubble_s(3.0, 2.0, 1 / 3, Launches(0.0, 0.0, 0.0)))
    6.0
    >>> float(bubble_s(3.0, 5.0, 1 / 3, Launches(16.0, 2.0, 1.0)))
    6.0
    """
    device = turns * (passed_s - launches.passed)
    fill = forward_share * device + launches.first * (np.asarray(turns) > 0)
    idle = (1 - forward_share) * device + fill
    hidden = np.minimum(launches.stage, fill)
    return np.maximum(idle - hidden, idle - launches.stage + np.maximum(*waits_s))


def bubble_share(layout: Layout, weight_share: float = 1 / 3) -> float:
    """Share of a step that each stage of equal ones stands still; 0 without a pipeline.

    >>> layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=16, pipeline=4)
    >>> round(bubble_share(layout), 3)
    0.158
    """
    schedule = code_of("schedule", layout.schedule)
    idle = float(idle_share(layout.pipeline, num_chunks(layout), schedule, weight_share))
    return idle / (layout.accumulation + idle)


def held_micro_batches(
    stage: Value, pipeline: Value, chunks: Value, accumulation: Value, schedule: Value
) -> Column:
    """Micro-batches whose activations a stage holds at its fullest, as a share of all its blocks.

    >>> float(held_micro_batches(0, 8, 1, 32, code_of("schedule", "1f1b")))
    8.0
    >>> round(float(held_micro_batches(0, 8, 3, 32, code_of("schedule", "interleaved"))), 3)
    10.333
    """
    r, p = np.asarray(stage, float), np.asarray(pipeline, float)
    m, v, s = np.asarray(accumulation, float), np.maximum(chunks, 1), np.asarray(schedule)
    waiting = np.minimum(m, p - r)
    held = np.where(s == _INTERLEAVED, np.minimum(m, _started(r, p, v, m) / v), waiting)
    held = np.where(s == _GPIPE, m, held)
    held = np.where(s == _ZERO_BUBBLE, np.minimum(m, p), held)
    return np.where(s == _DUALPIPE, np.minimum(m, p + 0.5), held)


def _in_round(p: Column, m: Column) -> Column:
    """Micro-batches that each chunk of a loop takes in a row (torch 2.13, `Interleaved1F1B`)."""
    return m / np.maximum(np.floor(m / p), 1)


def _started(r: Column, p: Column, v: Column, m: Column) -> Column:
    """Warm-up of an interleaved rank, 2 (p - r - 1) + (v - 1) p chunks, and the one it computes."""
    return 2 * (p - r - 1) + (v - 1) * _in_round(p, m) + 1


class ChunkBlocks(NamedTuple):
    """Blocks of a rank's stages in a loop."""

    each: Column
    """Blocks of each of its first stages."""

    more: Column
    """How many stages before the last have one more: those just before it."""

    last: Column


def held_in_loop(
    stage: Value, pipeline: Value, chunks: Value, accumulation: Value, blocks: ChunkBlocks
) -> Column:
    """Blocks of micro-batches that an interleaved rank holds at its fullest, where its stages have
    different numbers of them.

    It holds as many chunks all the time, but of other stages: fewest of the last one when that has
    gone backward through a round and goes forward through none.

    >>> float(held_in_loop(1, 4, 2, 8, ChunkBlocks(3, 0, 2)))
    26.0
    >>> float(held_in_loop(1, 4, 2, 8, ChunkBlocks(2, 0, 2)))
    18.0
    """
    p, v = np.asarray(pipeline, float), np.asarray(chunks, float)
    m, q = np.asarray(accumulation, float), _in_round(p, np.asarray(accumulation, float))
    started = _started(np.asarray(stage, float), p, v, m)

    def forward(number: Column, first: Column, count: Column) -> Column:
        """How many of `number` chunks in order are of the `count` stages from `first` on."""
        rounds = np.floor(number / (q * v))
        more = np.maximum(number - rounds * q * v - first * q, 0)
        return count * q * rounds + np.minimum(more, count * q)

    held = []
    for gone in (0.0, q):
        begun = np.minimum(started + gone, m * v)
        more = forward(begun, v - 1 - blocks.more, blocks.more)
        last = forward(begun, v - 1, 1.0) - gone
        held.append(blocks.each * (begun - gone) + more + (blocks.last - blocks.each) * last)
    return np.asarray(np.maximum(*held))


def deferred_micro_batches(
    stage: Value, pipeline: Value, chunks: Value, accumulation: Value, schedule: Value
) -> Column:
    """Micro-batches between the two halves of a split backward pass, at most, as a share of all
    blocks of a rank: the gradients of its matrices' outputs wait for the second half.

    Counted in the same orders: of rank r (r + 1) / v in a loop, r + 1/2 in ZB-V, (r + 1) / 2 in
    DualPipe-V; 0 where the backward pass is not split.

    >>> float(deferred_micro_batches(3, 4, 1, 16, code_of("schedule", "zero-bubble")))
    4.0
    """
    r, m = np.asarray(stage, float), np.asarray(accumulation, float)
    s, v = np.asarray(schedule), np.maximum(chunks, 1)
    in_v = np.asarray(v) == 2
    most = np.where(s == _ZERO_BUBBLE, np.where(in_v, r + 0.5, (r + 1) / v), 0.0)
    most = np.where(s == _DUALPIPE, (r + 1) / 2, most)
    return np.where(np.asarray(pipeline) > 1, np.minimum(m, most), 0.0)
