"""The equality matrix: every way to split, and pairs of them, against the same model on one rank.

In float64, where a right layout differs from one device by rounding alone, and a wrong one (a
factor, a missing sum, a stale shard) by many orders of magnitude more.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch.distributed.tensor import DTensor

from paceline.parallel.layout import Layout
from paceline.profile import DecoderShape
from paceline.runtime import strategy
from paceline.runtime.decoder import Decoder
from paceline.runtime.sampling import rank_slots
from paceline.runtime.state import named_parameters

SHAPE = DecoderShape(
    layers=4, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=64, tied_embeddings=False
)
SEQ_LEN, GLOBAL_BATCH, STEPS = 16, 8, 3

ROUNDING = 1e-12
"""Allowed relative difference after 3 steps of SGD: sums of up to 4,096 terms in another order
differ by at most 4,096 x 2^-53 = 5e-13 (Higham, Accuracy and Stability, section 4.2), each step
builds on the last, and a loss has curvature; a wrong layout differs by more than 1e-3."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"data": 4, "sharding": "none"},
    "ZeRO-1": {"data": 4, "sharding": "zero1"},
    "ZeRO-2": {"data": 4, "sharding": "zero2"},
    "FSDP2": {"data": 4, "sharding": "full"},
    "HSDP": {"data": 4, "sharding": "hybrid", "shard": 2},
    "TP 4": {"data": 1, "sharding": "none", "tensor": 4},
    "TP x DDP": {"data": 2, "sharding": "none", "tensor": 2},
    "TP x FSDP2": {"data": 2, "sharding": "full", "tensor": 2},
    "TP without SP": {"data": 2, "sharding": "full", "tensor": 2, "sequence_parallel": False},
    "CP ring": {"data": 1, "sharding": "none", "context": 4},
    "CP ring x FSDP2": {"data": 2, "sharding": "full", "context": 2},
    "CP ulysses x FSDP2": {
        "data": 2,
        "sharding": "full",
        "context": 2,
        "context_kind": "ulysses",
    },
    "CP x TP": {"data": 1, "sharding": "full", "context": 2, "tensor": 2},
    "PP gpipe": {"data": 1, "sharding": "none", "pipeline": 4, "schedule": "gpipe"},
    "PP 1F1B": {"data": 1, "sharding": "none", "pipeline": 4, "schedule": "1f1b"},
    "PP 1F1B x DDP": {"data": 2, "sharding": "none", "pipeline": 2},
    "PP 1F1B x FSDP2": {"data": 2, "sharding": "full", "pipeline": 2},
    "PP 1F1B x ZeRO-1": {"data": 2, "sharding": "zero1", "pipeline": 2},
    "PP x TP": {"data": 1, "sharding": "none", "pipeline": 2, "tensor": 2},
    "PP x CP": {"data": 1, "sharding": "none", "pipeline": 2, "context": 2},
    "PP interleaved x FSDP2": {
        "data": 2,
        "sharding": "full",
        "pipeline": 2,
        "schedule": "interleaved",
        "chunks": 2,
    },
    "PP zero-bubble": {
        "data": 2,
        "sharding": "full",
        "pipeline": 2,
        "schedule": "zero-bubble",
        "chunks": 2,
    },
    "PP DualPipeV": {
        "data": 2,
        "sharding": "full",
        "pipeline": 2,
        "schedule": "dualpipe-v",
        "chunks": 2,
    },
}

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


def layout_of(fields: dict[str, Any], variant: dict[str, Any]) -> Layout:
    micro_batch = 1 if fields.get("pipeline", 1) > 1 else 2
    layout = Layout(**{"micro_batch": micro_batch, "accumulation": 1, **fields, **variant})
    return replace(layout, accumulation=GLOBAL_BATCH // layout.data // layout.micro_batch)


def train(layout: Layout) -> dict[str, Any]:
    torch.manual_seed(0)
    meshes = strategy.make_meshes(layout, "cpu")
    model = strategy.apply(Decoder(SHAPE, SEQ_LEN).double(), layout, meshes, precision="fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, SHAPE.vocab, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = strategy.IGNORED
        slots = rank_slots(meshes.place.data, layout.data, GLOBAL_BATCH, layout.micro_batch)
        batches = [(tokens[s.start : s.stop, :-1], targets[s.start : s.stop]) for s in slots]
        seen = strategy.forward_backward(model, meshes, batches, precision="fp32")
        total = torch.stack([seen.loss_sum, seen.num_targets])
        dist.all_reduce(total)
        mean = seen.expected_targets / float(total[1])
        norm = float(strategy.gradient_norm(model, meshes)) * mean
        strategy.scale_gradients(model, mean * strategy.clip_factor(norm, 0.8))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total[0] / total[1]))
        norms.append(norm)
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in named_parameters(model).items()
    }
    return {
        "losses": losses,
        "norms": norms,
        "state": {name: value.detach().numpy().copy() for name, value in whole.items()},
    }


def train_all(rank: int, world: int, names: list[str], variant: str) -> dict[str, Any]:
    return {name: train(layout_of(LAYOUTS[name], VARIANTS[variant])) for name in names}


def train_alone(rank: int, world: int) -> dict[str, Any]:
    return train(Layout(data=1, sharding="none", micro_batch=GLOBAL_BATCH, accumulation=1))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(train_alone, 1)[0]


def deviation(seen: list[dict[str, Any]], alone: dict[str, Any]) -> float:
    """Largest relative difference of any loss, norm or parameter of any rank."""
    state = {key: value for each in seen for key, value in each["state"].items()}
    assert state.keys() == alone["state"].keys()
    pairs = [(state[key], value) for key, value in alone["state"].items()]
    pairs += [(each[key], alone[key]) for each in seen for key in ("losses", "norms")]
    return max(
        float(np.abs(np.subtract(a, b)).max() / np.abs(np.asarray(b)).max()) for a, b in pairs
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_trains_as_one_device_does(variant: str, alone: dict[str, Any]):
    names = layouts_of(variant)
    ranks = run_ranks(train_all, 4, names, variant, limit_s=240)
    found = {name: deviation([rank[name] for rank in ranks], alone) for name in names}
    assert not {name: each for name, each in found.items() if each > ROUNDING}
