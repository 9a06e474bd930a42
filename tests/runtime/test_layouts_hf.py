"""The equality matrix of models of transformers, and of routed experts, against one rank.

Computed in float64, also where the models' own code asks for float32.
"""

from typing import Any

import pytest
from tests.ranks import run_ranks
from tests.runtime.equality import alone_layout, deviation, layout_of, train
from tests.runtime.tensor_models import compute_in_float64

from paceline.parallel.layout import Layout

pytestmark = pytest.mark.ranks

ROUNDING = 1e-12
"""As in `test_layouts.py`: sums of up to 4,096 terms in another order, over three steps."""

DENSE: dict[str, dict[str, Any]] = {
    "TP x FSDP2": {"data": 2, "sharding": "full", "tensor": 2},
    "PP x FSDP2": {"data": 2, "sharding": "full", "pipeline": 2},
    "PP x TP": {"data": 1, "sharding": "none", "pipeline": 2, "tensor": 2},
    "CP x FSDP2": {"data": 2, "sharding": "full", "context": 2},
    "CP ulysses": {"data": 2, "sharding": "none", "context": 2, "context_kind": "ulysses"},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "EP x DDP": {"data": 4, "sharding": "none", "expert": 2},
    "EP x FSDP2": {"data": 4, "sharding": "full", "expert": 2},
    "EP x HSDP": {"data": 4, "sharding": "hybrid", "shard": 2, "expert": 2},
    "EP x PP": {"data": 2, "sharding": "none", "expert": 2, "pipeline": 2},
    "EP x PP x FSDP2": {"data": 2, "sharding": "full", "expert": 2, "pipeline": 2},
    "EP x TP": {"data": 2, "sharding": "full", "expert": 2, "tensor": 2},
    "EP x CP": {"data": 2, "sharding": "full", "expert": 2, "context": 2},
    "EP over data and context": {"data": 2, "sharding": "full", "expert": 4, "context": 2},
}
MORE_EXPERTS: dict[str, dict[str, Any]] = {
    name: EXPERTS.pop(name) for name in ("EP x HSDP", "EP x PP x FSDP2", "EP over data and context")
}
MATRIX = {"mixtral": EXPERTS}
SLOW = {"llama": DENSE, "gpt2": DENSE, "mixtral": MORE_EXPERTS}


def train_all(rank: int, world: int, kind: str, layouts: dict[str, Layout]) -> dict[str, Any]:
    compute_in_float64()
    return {name: train(layout, kind) for name, layout in layouts.items()}


@pytest.mark.parametrize(
    ("kind", "of_kind"),
    [
        *MATRIX.items(),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW.items()),
    ],
    ids=[*MATRIX, "llama", "gpt2", "more of mixtral"],
)
def test_models_of_transformers_train_in_every_layout_as_on_one_device(
    kind: str, of_kind: dict[str, dict[str, Any]]
):
    layouts = {name: layout_of(fields, {}) for name, fields in of_kind.items()}
    alone = run_ranks(train_all, 1, kind, {"alone": alone_layout()})[0]["alone"]
    ranks = run_ranks(train_all, 4, kind, layouts)
    found = {name: deviation([rank[name] for rank in ranks], alone) for name in layouts}
    assert {name: each for name, each in found.items() if not each <= ROUNDING} == {}
