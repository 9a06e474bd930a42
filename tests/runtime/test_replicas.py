"""`parallel.replicas_of` against what lies on each rank."""

import hashlib
from itertools import groupby
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime import equality
from tests.runtime.tiny import build, fake_rank, layout_of, train_steps

from paceline.parallel.layout import Layout
from paceline.parallel.replicas import replicas_of
from paceline.runtime import strategy
from paceline.runtime.state import Stored, boxes_of, named_state

ALL = {**equality.LAYOUTS, **equality.EXPERT_LAYOUTS}

OF_EIGHT: dict[str, dict[str, Any]] = {
    "DDP": {"data": 8, "sharding": "none"},
    "DDP x TP x PP": {"data": 2, "sharding": "none", "tensor": 2, "pipeline": 2},
    "DDP x CP": {"data": 4, "sharding": "none", "context": 2},
    "ZeRO-1": {"data": 8, "sharding": "zero1"},
    "FSDP2 x TP": {"data": 4, "sharding": "full", "tensor": 2},
    "HSDP 2": {"data": 8, "sharding": "hybrid", "shard": 2},
    "HSDP 4": {"data": 8, "sharding": "hybrid", "shard": 4},
    "HSDP x CP": {"data": 4, "sharding": "hybrid", "shard": 4, "context": 2},
    "HSDP x TP": {"data": 4, "sharding": "hybrid", "shard": 2, "tensor": 2},
    "HSDP x PP": {"data": 4, "sharding": "hybrid", "shard": 2, "pipeline": 2},
    "EP 2 x DDP": {"data": 8, "sharding": "none", "expert": 2},
    "EP 4 x DDP": {"data": 8, "sharding": "none", "expert": 4},
    "EP 2 x HSDP 4": {"data": 8, "sharding": "hybrid", "shard": 4, "expert": 2},
    "EP 2 x HSDP 2": {"data": 8, "sharding": "hybrid", "shard": 2, "expert": 2},
    "EP 4 x HSDP 2": {"data": 8, "sharding": "hybrid", "shard": 2, "expert": 4},
    "EP 2 x FSDP2": {"data": 8, "sharding": "full", "expert": 2},
}


@pytest.mark.slow
def test_replicas_of_eight_ranks_hold_the_same_numbers_of_a_model_and_no_others_do():
    for name, fields in OF_EIGHT.items():
        layout = Layout(micro_batch=1, accumulation=2, **fields)
        held = [_held_at_the_start(layout, rank) for rank in range(layout.num_ranks)]
        assert _groups(held) == set(replicas_of(layout)), name


def _held_at_the_start(layout: Layout, rank: int) -> str:
    """Of a model in which no two numbers are the same, on one rank of a world that is pretended."""
    model = equality.make_model("mixtral" if layout.expert > 1 else "built-in").double()
    with torch.no_grad():
        start = 0
        for parameter in model.parameters():
            parameter.copy_(torch.arange(start, start + parameter.numel()).view_as(parameter))
            start += parameter.numel()
    with fake_rank(layout, rank):
        meshes = strategy.make_meshes(layout, "cpu")
        part = strategy.apply(model, layout, meshes, precision="fp32")
        optimizer = torch.optim.SGD(part.parameters(), lr=0.0)
        return _digest(part, optimizer)


def train_and_tell(rank: int, world: int, fields: dict[str, Any], model: str) -> str:
    """What this rank holds after three steps."""
    trainer = equality.Trainer(equality.layout_of(fields, {}), model, torch.float32)
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2)
    for number in range(3):
        trainer.step(number)
    return _digest(trainer.model, trainer.optimizer)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("PP 1F1B x DDP", "gpt2"),
        ("HSDP", "gpt2"),
        ("EP x TP", "mixtral"),
        *(
            pytest.param(name, "built-in", marks=pytest.mark.slow)
            for name in ("DDP", "TP x DDP", "CP ring", "FSDP2")
        ),
    ],
)
def test_replicas_hold_the_same_bytes_after_three_steps_of_adam(name: str, model: str):
    layout = equality.layout_of(ALL[name], {})
    held = run_ranks(train_and_tell, 4, ALL[name], model)
    assert _groups(held) == set(replicas_of(layout))


def train_tiny(rank: int, world: int) -> dict[str, str]:
    """What a replica holds after ten steps of each optimizer."""
    held = {}
    for optimizer in ("adamw", "sgd", "muon", "adafactor", "adamw-8bit"):
        layout = layout_of(world, "none")
        model, updates = build(layout, optimizer=optimizer)
        train_steps(model, updates, layout, rank, range(10))
        held[optimizer] = _digest(model, updates)
    return held


@pytest.mark.ranks
def test_replicas_of_every_optimizer_stay_the_same_to_the_bit():
    first, *others = run_ranks(train_tiny, 4)
    assert len(set(first.values())) == len(first)
    assert others == [first] * 3


def _groups(held: list[str]) -> set[tuple[int, ...]]:
    ranks = sorted(range(len(held)), key=lambda rank: (held[rank], rank))
    return {tuple(group) for _, group in groupby(ranks, key=lambda rank: held[rank])}


def _digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    told = hashlib.sha256()
    for name, value in sorted(named_state(model, optimizer).items()):
        assert isinstance(value, Stored)
        for box in boxes_of(value):
            told.update(f"{name} {box.offset}".encode())
            told.update(box.tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return told.hexdigest()
