"""What each recompute policy is, one row a policy.

A new policy is its word in `choices.py`, a row here, its bytes and seconds in
`estimate/recompute.py`, and its function in `runtime/strategy/recompute.py`; engines that have it
say so in `abilities.toml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.choices import Recompute
from paceline.parallel.table import RECOMPUTES, Column


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeFacts:
    """One policy."""

    whole_blocks: bool = False
    """Whether blocks are recomputed whole, one in every `layout.recompute_every`. Otherwise a part
    of every block is, or nothing."""

    one_backward: bool = False
    """Whether torch 2.13 lets a block go backward once only, not for inputs and weights apart."""


RECOMPUTE_FACTS: Mapping[Recompute, RecomputeFacts] = {
    "none": RecomputeFacts(),
    "selective": RecomputeFacts(one_backward=True),
    "full": RecomputeFacts(whole_blocks=True),
}

WHOLE_BLOCKS = tuple(word for word, facts in RECOMPUTE_FACTS.items() if facts.whole_blocks)
ONE_BACKWARD = tuple(word for word, facts in RECOMPUTE_FACTS.items() if facts.one_backward)

_IS_WHOLE = np.array([word in WHOLE_BLOCKS for word in RECOMPUTES])
_IS_ONCE = np.array([word in ONE_BACKWARD for word in RECOMPUTES])


def goes_backward_once(recompute: Column) -> Column:
    """Where torch lets a block go backward once only, for columns of layouts."""
    return _IS_ONCE[recompute]


def share_untouched(recompute: Column, every: Column) -> Column:
    """Share of the blocks of which nothing is recomputed, for columns of layouts."""
    return np.where(_IS_WHOLE[recompute], 1 - 1 / every, 1.0 * (np.asarray(recompute) == 0))
