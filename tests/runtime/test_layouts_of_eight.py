"""The equality matrix's layouts that need eight ranks, against one rank, in float64."""

from typing import Any

import pytest
from tests.ranks import run_ranks
from tests.runtime.equality import alone_layout, deviation, layout_of, train

from paceline.parallel.layout import Layout

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROUNDING = 1e-12
"""As in `test_layouts.py`: sums of up to 4,096 terms in another order, over three steps."""

HSDP = {"data": 4, "sharding": "hybrid", "shard": 2}
THREE = {"data": 1, "context": 2, "pipeline": 2, "tensor": 2}
HYBRID: dict[str, dict[str, Any]] = {
    "HSDP x PP": {**HSDP, "pipeline": 2},
    "HSDP x PP zero-bubble": {**HSDP, "pipeline": 2, "schedule": "zero-bubble", "chunks": 2},
    "HSDP x TP": {**HSDP, "tensor": 2},
    "HSDP x CP": {**HSDP, "context": 2},
}
TRIPLE: dict[str, dict[str, Any]] = {
    "CP x PP x TP": {**THREE, "sharding": "none"},
    "CP x PP x TP x FSDP2": {**THREE, "sharding": "full"},
    "TP x PP x FSDP2": {"data": 2, "sharding": "full", "tensor": 2, "pipeline": 2},
}


def train_all(rank: int, world: int, layouts: dict[str, Layout]) -> dict[str, Any]:
    return {name: train(layout) for name, layout in layouts.items()}


@pytest.mark.parametrize("fields_of", [HYBRID, TRIPLE], ids=["hybrid", "three ways"])
def test_layouts_that_need_eight_ranks_train_as_one_device_does(fields_of):
    layouts = {name: layout_of(fields, {}) for name, fields in fields_of.items()}
    alone = run_ranks(train_all, 1, {"alone": alone_layout()})[0]["alone"]
    ranks = run_ranks(train_all, 8, layouts)
    found = {name: deviation([rank[name] for rank in ranks], alone) for name in layouts}
    assert {name: each for name, each in found.items() if not each <= ROUNDING} == {}
