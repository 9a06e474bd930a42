"""What each recompute policy is, one row a policy.

A new policy is its word and row here, its bytes and seconds in `estimate/recompute.py`, and its
function in `runtime/strategy/recompute.py`; engines that have it are listed in `abilities.toml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# What recomputes more comes later.
Recompute = Literal["none", "selective", "full"]


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
