"""A model of one's own with dropout, and how it may be split: for the tests of `verify`."""

import torch
from torch import Tensor, nn

from paceline.runtime.strategy import Ways


class FeedForward(nn.Module):
    """Drops some of its hidden features, of which tensor ranks have different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(32, 16)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        return self.down(self.dropout(torch.relu(self.up(hidden_BSH))))


class Block(nn.Module):
    """Drops some of its output, which tensor ranks all have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.ffn = FeedForward()
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        return hidden_BSH + self.dropout(self.ffn(self.norm(hidden_BSH)))


class Model(nn.Module):
    paceline_ways = Ways(
        blocks="blocks",
        first=("embedding",),
        last=("head",),
        tensor={"*.ffn.up": "column", "*.ffn.down": "row"},
    )

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        hidden_BSH = self.embedding(tokens_BS)
        for block in self.blocks:
            hidden_BSH = block(hidden_BSH)
        return self.head(hidden_BSH)


def make() -> nn.Module:
    return Model()
