"""The balancing loss of routed experts: transformers' own for each sample, in every layout."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.runtime.equality import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    alone_layout,
    deviation,
    layout_of,
    train,
)
from tests.runtime.test_expert import family
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.parallel.layout import Layout
from paceline.plan.loss import ROUTER_LOSS_KINDS
from paceline.runtime import strategy
from paceline.runtime.strategy import IGNORED
from paceline.runtime.strategy.expert.balance import balance_routers, balanced

SCALE, COEFFICIENT = 0.37, 0.1
ALONE = Layout(data=1, sharding="none", micro_batch=3, accumulation=1)


@pytest.fixture(scope="module")
def meshes() -> Iterator[strategy.Meshes]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield strategy.make_meshes(ALONE, "cpu")
    dist.destroy_process_group()


def batch() -> tuple[Tensor, Tensor]:
    """Three samples: all targets, some between others missing, and one with padding after it."""
    tokens = torch.randint(0, 32, (3, 9), generator=torch.Generator().manual_seed(3))
    targets = tokens[:, 1:].clone()
    targets[1, :3] = IGNORED
    targets[2, 5:] = IGNORED
    return tokens[:, :-1], targets


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(model.parameters(), found, strict=True)
    ]


def expected(model: Any, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """The gradients that transformers' function gives, sample by sample."""
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    config, total = model.config, torch.zeros((), dtype=torch.float64)
    num_experts = getattr(config, "num_local_experts", None) or config.num_experts
    for row, wanted in zip(inputs, targets, strict=True):
        mask = torch.ones(1, len(row))
        mask[0, int((wanted != IGNORED).nonzero().max()) + 1 :] = 0
        logits = model(row[None], output_router_logits=True).router_logits
        one = function(tuple(logits), num_experts, config.num_experts_per_tok, mask)
        total = total + SCALE * COEFFICIENT * (wanted != IGNORED).sum() * one
    return gradients(model, total)


@pytest.mark.parametrize("kind", ROUTER_LOSS_KINDS)
def test_each_sample_has_the_balancing_loss_of_transformers(
    kind: str, meshes: strategy.Meshes
) -> None:
    model = family(kind)
    inputs, targets = batch()
    want = expected(model, inputs, targets)
    plain = gradients(model, model(inputs).logits.square().sum())
    balance_routers(model, ALONE, meshes, COEFFICIENT)
    with balanced(model, targets, SCALE):
        found = gradients(model, model(inputs).logits.square().sum())
    added = torch.cat([(a - b).flatten() for a, b in zip(found, plain, strict=True)])
    wanted = torch.cat([each.flatten() for each in want])
    assert float(wanted.norm()) > 1e-4
    assert float((added - wanted).norm() / wanted.norm()) < 1e-5


def test_outside_of_training_nothing_is_added(meshes: strategy.Meshes) -> None:
    model = family("mixtral")
    inputs, targets = batch()
    before = gradients(model, model(inputs).logits.square().sum())
    balance_routers(model, ALONE, meshes, COEFFICIENT)
    after = gradients(model, model(inputs).logits.square().sum())
    with balanced(model, targets, SCALE), torch.no_grad():
        model(inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_model_without_known_routers_is_refused(meshes: strategy.Meshes) -> None:
    with pytest.raises(PlanError, match=r"L045.*routers are not known"):
        balance_routers(nn.Linear(2, 2), ALONE, meshes, COEFFICIENT)


CELLS: dict[str, dict[str, Any]] = {
    "EP x TP": EXPERT_LAYOUTS["EP x TP"],
    "EP x CP": EXPERT_LAYOUTS["EP x CP"] | {"recompute": "full"},
}
MORE: dict[str, dict[str, Any]] = {
    "EP 4 x DDP": EXPERT_LAYOUTS["EP 4 x DDP"],
    "EP x TP without SP": EXPERT_LAYOUTS["EP x TP"] | {"sequence_parallel": False},
    "EP 2 x FSDP2": EXPERT_LAYOUTS["EP 2 x FSDP2"],
    "DDP": LAYOUTS["DDP"],
    "TP x FSDP2": LAYOUTS["TP x FSDP2"],
    "TP without SP": LAYOUTS["TP without SP"],
    "CP ring": LAYOUTS["CP ring"],
}
BALANCED, PLAIN = strategy.Options(router_loss=0.5), strategy.Options()


def train_in(rank: int, world: int, cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        name: train(layout_of(fields, {}), "mixtral", options=BALANCED)
        for name, fields in cells.items()
    }


def train_alone(rank: int, world: int) -> list[dict[str, Any]]:
    return [train(alone_layout(), "mixtral", options=each) for each in (BALANCED, PLAIN)]


@pytest.mark.ranks
@pytest.mark.parametrize("cells", [CELLS, pytest.param(MORE, marks=pytest.mark.slow)])
def test_each_layout_trains_with_the_balancing_loss_as_one_device_does(
    cells: dict[str, dict[str, Any]],
) -> None:
    alone, without = run_ranks(train_alone, 1)[0]
    assert deviation([without], alone) > 1e-4
    ranks = run_ranks(train_in, 4, cells)
    found = {name: deviation([rank[name] for rank in ranks], alone) for name in cells}
    assert not {name: each for name, each in found.items() if each > 1e-10}
