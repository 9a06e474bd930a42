"""The equality matrix: every way to split, and pairs of them, against the same model on one rank.

In float64, where a right layout differs from one device by rounding alone, and a wrong one (a
factor, a missing sum, a stale shard) by many orders of magnitude more.
"""

from typing import Any

import pytest
from tests.ranks import run_ranks
from tests.runtime.equality import LAYOUTS, alone_layout, deviation, layout_of, train

ROUNDING = 1e-12
"""Allowed relative difference after 3 steps of SGD: sums of up to 4,096 terms in another order
differ by at most 4,096 x 2^-53 = 5e-13 (Higham, Accuracy and Stability, section 4.2), each step
builds on the last, and a loss has curvature; a wrong layout differs by more than 1e-3."""

SLOW = (
    *("ZeRO-2", "TP x DDP", "TP without SP", "CP ring x FSDP2", "PP 1F1B x DDP"),
    *("PP 1F1B x ZeRO-1", "PP gpipe"),
)
"""Pairs whose halves are each in another layout here; `test_strategy.py`, `test_shard.py`,
`test_tensor.py` and `test_pipeline.py` have them in part too."""

SHOWN = (*("CP x TP", "PP x TP", "PP x CP", "PP interleaved x FSDP2", "PP 1F1B x FSDP2", "TP 4"),)
"""Pairs of ways that are each in another layout of the first test, and tensor ranks alone, which
`test_tensor.py` has."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute, micro-batch 1": {"recompute": "full", "micro_batch": 1},
    "selective": {"recompute": "selective"},
}


def layouts_of(variant: str) -> list[str]:
    """Selective recompute is refused where a schedule goes backward through a block twice."""
    twice = ("zero-bubble", "dualpipe-v")
    has_it = variant == "selective"
    return [
        name for name, each in LAYOUTS.items() if not (has_it and each.get("schedule") in twice)
    ]


def train_all(rank: int, world: int, names: list[str], variant: str) -> dict[str, Any]:
    return {name: train(layout_of(LAYOUTS[name], VARIANTS[variant])) for name in names}


def train_alone(rank: int, world: int) -> dict[str, Any]:
    return train(alone_layout())


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(train_alone, 1)[0]


def check(names: list[str], variant: str, alone: dict[str, Any]) -> None:
    ranks = run_ranks(train_all, 4, names, variant)
    found = {name: deviation([rank[name] for rank in ranks], alone) for name in names}
    assert not {name: each for name, each in found.items() if each > ROUNDING}


def test_each_layout_trains_as_one_device_does(alone: dict[str, Any]):
    check([name for name in LAYOUTS if name not in (*SLOW, *SHOWN)], "plain", alone)


@pytest.mark.repeat
def test_each_layout_that_others_show_trains_as_one_device_does(alone: dict[str, Any]):
    check(list(SHOWN), "plain", alone)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_trains_as_one_device_does(variant: str, alone: dict[str, Any]):
    names = layouts_of(variant)
    check([name for name in names if name in SLOW or variant != "plain"], variant, alone)
