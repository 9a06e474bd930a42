"""What is known of pipeline schedules and recompute policies, for columns of layouts."""

import numpy as np

from paceline.choices.pipeline_schedules import LOOPED, SCHEDULE_FACTS
from paceline.choices.recomputes import ONE_BACKWARD, WHOLE_BLOCKS
from paceline.parallel.table import RECOMPUTES, SCHEDULES
from paceline.profile.block import Column

_IN_ORDER = [SCHEDULE_FACTS[word] for word in SCHEDULES]
_IS_TWO = np.array([facts.chunks == "two" for facts in _IN_ORDER])
_IS_ANY = np.array([facts.chunks == "any" for facts in _IN_ORDER])
_SPLITS = np.array([facts.splits_backward for facts in _IN_ORDER])
_ROUNDS = np.array([facts.in_rounds for facts in _IN_ORDER])
_FORWARDS = np.array([facts.forwards_first for facts in _IN_ORDER])
_LOOPS = np.array([word in LOOPED for word in SCHEDULES])
_LEAST = np.array([facts.least_rounds for facts in _IN_ORDER])

_IS_WHOLE = np.array([word in WHOLE_BLOCKS for word in RECOMPUTES])
_IS_ONCE = np.array([word in ONE_BACKWARD for word in RECOMPUTES])


def is_in_v(schedule: Column, chunks: Column) -> Column:
    """Where a pipeline's stages go down the ranks and up again, for columns of layouts.

    ZB-V holds half of what a loop of two chunks does. Source: arXiv:2401.10241, section 6.
    """
    return _IS_TWO[schedule] | (_IS_ANY[schedule] & (np.asarray(chunks) == 2))


def splits_backward(schedule: Column) -> Column:
    """Where gradients of inputs and of matrices are computed apart."""
    return _SPLITS[schedule]


def forwards_first(schedule: Column) -> Column:
    """Where every micro-batch has gone forward before the first goes backward."""
    return _FORWARDS[schedule]


def recomputes_whole(recompute: Column) -> Column:
    """Where whole blocks are recomputed, which then go backward once whatever the schedule."""
    return _IS_WHOLE[recompute]


def takes_rounds(schedule: Column, chunks: Column) -> Column:
    """Where chunks in a loop take the micro-batches in equal rounds."""
    return _ROUNDS[schedule] & ~is_in_v(schedule, chunks)


def loops(schedule: Column) -> Column:
    """Where ranks take turns at several stages in a loop, forward and backward by turns."""
    return _LOOPS[schedule]


def least_rounds(schedule: Column) -> Column:
    """Micro-batches that are needed, for each rank of the pipeline."""
    return _LEAST[schedule]


def stages_each(schedule: Column, chunks: Column) -> Column:
    """Stages of each rank, for columns of layouts."""
    return np.where(_IS_TWO[schedule], 2, chunks)


def goes_backward_once(recompute: Column) -> Column:
    """Where torch lets a block go backward once only, for columns of layouts."""
    return _IS_ONCE[recompute]


def share_recomputed(every: Column, num_blocks: Column) -> Column:
    """Share of so many blocks that every such block from the first on is: 2 of 6 for every 4th (our
    own runtime's recompute.py, Megatron's `recompute_num_layers`).

    >>> share_recomputed(4, 8).item(), round(share_recomputed(4, 6).item(), 3)
    (0.25, 0.333)
    """
    number = np.maximum(np.asarray(num_blocks, float), 1)
    return np.asarray(np.ceil(number / every) / number)


def share_untouched(recompute: Column, every: Column, num_blocks: Column) -> Column:
    """Share of the blocks of which nothing is recomputed, for columns of layouts."""
    whole = 1 - share_recomputed(every, num_blocks)
    return np.where(_IS_WHOLE[recompute], whole, 1.0 * (np.asarray(recompute) == 0))
