"""A person's own module, which nothing of ours knows, split by its structure alone."""

from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import PlanError
from paceline.parallel.layout import Layout
from paceline.runtime import strategy
from paceline.runtime.state import named_parameters

WIDTH, HEADS, VOCAB = 32, 4, 48

ROUNDING = 1e-12
"""As in test_layouts.py."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = (-1, WIDTH // HEADS)
        q, k, v = (
            each(hidden).unflatten(-1, heads).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = strategy.attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mixer(self.before(hidden))
        return hidden + self.mlp(self.between(hidden))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.final = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) if not tokens.is_floating_point() else tokens
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.final(hidden))


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 4)


def gradients(layout: Layout) -> dict[str, Any]:
    torch.manual_seed(0)
    meshes = strategy.make_meshes(layout, "cpu")
    model = strategy.apply(Own().double(), layout, meshes, precision="fp32")
    tokens = torch.randint(0, VOCAB, (4, 17), generator=torch.Generator().manual_seed(1))
    size = layout.micro_batch
    rows = tokens[meshes.place.data * 4 // layout.data :][: 4 // layout.data]
    batches = [(each[:, :-1], each[:, 1:]) for each in rows.split(size)]
    strategy.forward_backward(model, meshes, batches, precision="fp32")
    found = {}
    for name, parameter in named_parameters(model).items():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = whole.detach().clone().numpy()
    return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"data": 1, "sharding": "none", "tensor": 2},
    "tensor without sequence": {
        "data": 1,
        "sharding": "none",
        "tensor": 2,
        "sequence_parallel": False,
    },
    "context": {"data": 1, "sharding": "full", "context": 2},
    "pipeline": {"data": 1, "sharding": "none", "pipeline": 2},
    "ZeRO-1": {"data": 2, "sharding": "zero1"},
}


def layout_of(fields: dict[str, Any]) -> Layout:
    return Layout(micro_batch=1, accumulation=4 // fields["data"], **fields)


def all_gradients(rank: int, world: int) -> dict[str, Any]:
    return {name: gradients(layout_of(fields)) for name, fields in LAYOUTS.items()}


def alone(rank: int, world: int) -> dict[str, Any]:
    return gradients(Layout(data=1, sharding="none", micro_batch=4, accumulation=1))


def test_a_module_nobody_knows_has_one_devices_gradients_in_every_layout():
    (expected,) = run_ranks(alone, 1)
    ranks = run_ranks(all_gradients, 2)
    for name in LAYOUTS:
        found = {key: value for rank in ranks for key, value in rank[name].items()}
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=ROUNDING, abs=ROUNDING), (name, key)


def refusal(rank: int, world: int) -> str:
    layout = layout_of(LAYOUTS["tensor"])
    with pytest.raises(PlanError) as caught:
        strategy.apply(NoBlocks(), layout, strategy.make_meshes(layout, "cpu"), precision="fp32")
    return str(caught.value)


def test_a_module_without_blocks_is_refused_by_name():
    assert all("NoBlocks" in told for told in run_ranks(refusal, 2))


class ResidualOutside(Own):
    """Adds to the hidden states itself, which every stage would do for every block."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) if not tokens.is_floating_point() else tokens
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.final(hidden))


def refused_in_a_pipeline(rank: int, world: int) -> str:
    layout = layout_of(LAYOUTS["pipeline"])
    meshes = strategy.make_meshes(layout, "cpu")
    with pytest.raises(PlanError) as caught:
        strategy.apply(ResidualOutside(), layout, meshes, precision="fp32")
    return str(caught.value)


def test_a_forward_that_does_more_than_call_its_blocks_is_refused_in_a_pipeline():
    for told in run_ranks(refused_in_a_pipeline, 2):
        assert "L030" in told
        assert "without blocks it does not hand on what it is given" in told
