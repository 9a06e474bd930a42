"""Models that are built to have other weights put in."""

import torch
from torch import nn

from paceline.runtime.recovery.undrawn import Undrawn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.embedding = nn.Embedding(100, 64)
        self.norm = nn.LayerNorm(64)
        self.register_buffer(
            "positions", torch.randn(8, generator=torch.Generator().manual_seed(3))
        )


def test_nothing_random_is_drawn_and_all_else_is_as_always():
    drawn = Model()
    before = torch.get_rng_state()
    with Undrawn():
        undrawn = Model()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(undrawn.norm.weight, torch.ones(64))
    assert torch.equal(undrawn.positions, drawn.positions)
    shapes = {name: value.shape for name, value in drawn.state_dict().items()}
    assert {name: value.shape for name, value in undrawn.state_dict().items()} == shapes


def test_afterwards_weights_are_drawn_again():
    with Undrawn():
        pass
    before = torch.get_rng_state()
    Model()
    assert not torch.equal(torch.get_rng_state(), before)
