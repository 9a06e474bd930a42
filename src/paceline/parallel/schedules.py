"""What each pipeline schedule needs and does, one row a schedule, the simplest first.

A new schedule is its word in `choices.py`, a row here, its times in `estimate/schedule.py`, and its
class in `runtime/strategy/pipeline/schedules.py`; engines that have it say so in `abilities.toml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.choices import Schedule
from paceline.parallel.table import SCHEDULES, Column


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """One schedule, as torch 2.13 and the papers in `estimate/schedule.py` have it."""

    chunks: Literal["one", "two", "several", "any"]
    """Stages of each rank. `two`: whatever the layout says, in a v. `any`: as the layout says, and
    two of them in a v. The others are in a loop."""

    splits_backward: bool = False
    """Whether gradients of inputs and of matrices are computed apart."""

    in_rounds: bool = False
    """Whether chunks in a loop take the micro-batches in equal rounds."""

    least_rounds: int = 0
    """Micro-batches that torch needs, for each rank of the pipeline; 0 is one in all."""

    ends_at_once: bool = False
    """Whether the last stage goes backward through a micro-batch right after its forward pass."""


SCHEDULE_FACTS: Mapping[Schedule, ScheduleFacts] = {
    "1f1b": ScheduleFacts(chunks="one", least_rounds=1, ends_at_once=True),
    "gpipe": ScheduleFacts(chunks="one"),
    "interleaved": ScheduleFacts(chunks="several", in_rounds=True, ends_at_once=True),
    "zero-bubble": ScheduleFacts(chunks="any", in_rounds=True, splits_backward=True),
    "dualpipe-v": ScheduleFacts(chunks="two", splits_backward=True, least_rounds=2),
}

SPLIT_BACKWARD = tuple(word for word, facts in SCHEDULE_FACTS.items() if facts.splits_backward)

_IN_ORDER = [SCHEDULE_FACTS[word] for word in SCHEDULES]
_IS_TWO = np.array([facts.chunks == "two" for facts in _IN_ORDER])
_IS_ANY = np.array([facts.chunks == "any" for facts in _IN_ORDER])
_SPLITS = np.array([facts.splits_backward for facts in _IN_ORDER])
_ROUNDS = np.array([facts.in_rounds for facts in _IN_ORDER])
_LEAST = np.array([facts.least_rounds for facts in _IN_ORDER])


def is_in_v(schedule: Column, chunks: Column) -> Column:
    """Where a pipeline's stages go down the ranks and up again, for columns of layouts.

    ZB-V holds half of what a loop of two chunks does. Source: arXiv:2401.10241, section 6.
    """
    return _IS_TWO[schedule] | (_IS_ANY[schedule] & (np.asarray(chunks) == 2))


def splits_backward(schedule: Column) -> Column:
    """Where gradients of inputs and of matrices are computed apart."""
    return _SPLITS[schedule]


def takes_rounds(schedule: Column, chunks: Column) -> Column:
    """Where chunks in a loop take the micro-batches in equal rounds."""
    return _ROUNDS[schedule] & ~is_in_v(schedule, chunks)


def least_rounds(schedule: Column) -> Column:
    """Micro-batches that are needed, for each rank of the pipeline."""
    return _LEAST[schedule]


def stages_each(schedule: Column, chunks: Column) -> Column:
    """Stages of each rank, for columns of layouts."""
    return np.where(_IS_TWO[schedule], 2, chunks)
