"""How a pipeline's schedule fills its stages: idle time, and micro-batches held at once.

    schedule      idle, in micro-batches' time              held by stage r of p
    gpipe         p - 1                                     m
    1f1b          p - 1                                     min(m, p - r)
    interleaved   (p - 1) / v                               min(m, p - r - 1 + (p - r - 1 ...)) / v
    zero-bubble   (p - 1) (F + B - 2 W) / (F + B + W)       min(m, p - r)
    dualpipe-v    (p - 1) / 2 of the same                   p + 1/2, two chunks a stage

F, B and W are the seconds of the forward pass, of the gradients of the inputs, and of the gradients
of the matrices.

Source: GPipe arXiv:1811.06965; 1F1B arXiv:2006.09503; interleaved arXiv:2104.04473, section 2.2;
held: Korthikanti et al., arXiv:2205.05198, appendix C; zero-bubble arXiv:2401.10241, table 1
(ZB-H1); DualPipeV: github.com/deepseek-ai/DualPipe.
"""

from typing import Any

import numpy as np

from paceline.parallel.table import code_of
from paceline.profile.block import Value

Column = Any
"""An array with one entry a row, as it broadcasts; numpy's types cannot say it."""

_GPIPE = code_of("schedule", "gpipe")
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
    idle = (p - 1) / np.where(s == _INTERLEAVED, v, 1.0)
    # F + B + W is 1, so F + B - 2 W is 1 - 3 W; the three are seldom quite equal.
    late = np.maximum(1 - 3 * np.asarray(weight_share), 0.0)
    idle = np.where(s == _ZERO_BUBBLE, (p - 1) * late, idle)
    return np.where(s == _DUALPIPE, (p - 1) / 2 * late, idle)


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
    # Warm-up of an interleaved stage: 2 (p - r - 1) + (v - 1) p chunks, and the one it computes.
    started = (2 * (p - r - 1) + (v - 1) * p + 1) / v
    held = np.where(s == _INTERLEAVED, np.minimum(m, started), waiting)
    held = np.where(s == _GPIPE, m, held)
    return np.where(s == _DUALPIPE, np.minimum(m, p + 0.5), held)
