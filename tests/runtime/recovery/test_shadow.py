"""A neighbour's copy that is moved on by gradients alone has the owner's bits."""

import hashlib
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.run.scene import Scene
from tests.runtime.test_session import session_in
from torch import Tensor, nn

from paceline.runtime.language_model import train
from paceline.runtime.optimizer.adafactor import Adafactor
from paceline.runtime.optimizer.adamw_8bit import AdamW8bit
from paceline.runtime.optimizer.muon import Muon
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.recovery.shadow import Outgoing, Shadow, draw, why_not
from paceline.runtime.step import Outcome


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of names, shapes, types and numbers, in their order."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def of_shadow(shadow: Shadow) -> str:
    return digest((entry.name, tensor) for entry, tensor in shadow.tensors())


def outcome(step: int, factor: float = 0.37, refused: str | None = None) -> Outcome:
    return Outcome(
        step=step,
        stop=False,
        loss=1.0,
        grad_norm=1.0,
        factor=factor,
        refused=refused,
        is_overflow=False,
    )


class Model(nn.Module):
    """A matrix that is large enough for 8 bits, vectors, a buffer, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(96, 64)
        self.norm = nn.BatchNorm1d(64)
        self.unused = nn.Linear(80, 64)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True),
    "adamw-plain": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw-8bit": lambda groups: AdamW8bit(groups, lr=0.01, betas=(0.9, 0.95)),
}


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    trained = [each for each in model.parameters() if each.requires_grad]
    return [
        {"params": [each for each in trained if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0, "lr": 0.005},
    ]


def step_both(
    number: int,
    model: Model,
    optimizer: torch.optim.Optimizer,
    outgoing: Outgoing,
    shadow: Shadow,
    decided: Outcome,
) -> None:
    """One step of the owner, and the same of its shadow by what the owner sends."""
    used = [*model.inner.parameters(), *model.norm.parameters()]
    for each in used:
        each.grad = torch.randn(each.shape)
    with torch.no_grad():
        model.norm.running_mean.add_(float(number))
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
    outgoing.fill()
    shadow.room.copy_(outgoing.flat)
    shadow.next_step = number
    if decided.refused is None:
        torch._foreach_mul_([each.grad for each in used], decided.factor)
        optimizer.step()
    else:
        with torch.no_grad():
            model.norm.running_mean.sub_(float(number))
    optimizer.zero_grad()
    shadow.take(decided)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_many_steps_every_bit_is_the_owners(name):
    torch.manual_seed(1)
    model = Model()
    optimizer = OPTIMIZERS[name](grouped(model))
    blueprint, numbers = draw(model, optimizer)
    shadow = Shadow(blueprint, [each.detach().clone() for each in numbers], step=0)
    outgoing = Outgoing(model, optimizer, blueprint)
    for number in range(1, 13):
        refused = "the loss is not finite" if number == 5 else None
        step_both(number, model, optimizer, outgoing, shadow, outcome(number, refused=refused))
    live = LiveState(model, optimizer)
    assert [entry for entry, _ in shadow.tensors()] == live.entries()
    assert of_shadow(shadow) == digest(live.tensors())
    assert shadow.step == 12


def test_a_shadow_of_a_state_that_has_moved_on_already_goes_on_with_it():
    torch.manual_seed(2)
    model = Model()
    optimizer = OPTIMIZERS["adamw-8bit"](grouped(model))
    for each in model.inner.parameters():
        each.grad = torch.randn(each.shape)
    optimizer.step()
    blueprint, numbers = draw(model, optimizer)
    shadow = Shadow(blueprint, [each.detach().clone() for each in numbers], step=1)
    step_both(2, model, optimizer, Outgoing(model, optimizer, blueprint), shadow, outcome(2))
    assert of_shadow(shadow) == digest(LiveState(model, optimizer).tensors())


def test_optimizers_that_need_the_other_shards_have_no_shadow():
    model = nn.Linear(8, 8)
    groups = [{"params": list(model.parameters()), "is_hidden": False}]
    for optimizer in (Muon(groups, lr=0.1, betas=(0.9, 0.95)), Adafactor(model.parameters())):
        reason = why_not(model, optimizer)
        assert reason == (
            f"{type(optimizer).__name__} is not known to update each number by itself"
        )
    assert why_not(model, torch.optim.SGD(model.parameters(), lr=0.1)) is None


TRAINED_QUICKLY = {("full", "adamw-8bit"), ("zero1", "adamw"), ("zero2", "sgd")}
"""Each sharding and each optimizer; the other pairs are marked slow."""


def train_shadowed(rank: int, world: int, folder: Path, *options: str) -> Any:
    """SHA-256 of this rank's state, and of the shadow that it keeps, by rank."""
    session, _ = session_in(folder, rank, world, "recovery.state=shadow", "train.steps=7", *options)
    train(session)
    model, optimizer = session.held.live()
    kept = {ward: of_shadow(shadow) for ward, shadow in session.shadows._kept.items()}
    return digest(LiveState(model, optimizer).tensors()), kept, dist.get_world_size()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sharding", "optimizer"),
    [
        pytest.param(*pair, marks=[] if pair in TRAINED_QUICKLY else [pytest.mark.slow])
        for pair in product(("full", "zero1", "zero2"), ("adamw", "sgd", "adamw-8bit"))
    ],
)
def test_trained_on_real_ranks_each_shadow_is_its_owners_shard_to_the_bit(
    tmp_path, sharding, optimizer
):
    Scene(tmp_path)
    options = (f"layout.sharding={sharding}", f"train.optimizer={optimizer}")
    told = run_ranks(train_shadowed, 2, tmp_path, *options, limit_s=200)
    own = [each for each, _, _ in told]
    assert own[0] != own[1]
    assert [kept for _, kept, _ in told] == [{1: own[1]}, {0: own[0]}]


@pytest.mark.ranks
def test_shards_of_a_tensor_split_have_shadows_too(tmp_path):
    Scene(tmp_path)
    options = ("layout.tensor=2", "layout.sharding=full", "layout.data=2")
    told = run_ranks(train_shadowed, 4, tmp_path, *options, limit_s=300)
    own = [each for each, _, _ in told]
    kept = {ward: seal for _, kept, _ in told for ward, seal in kept.items()}
    assert kept == dict(enumerate(own))
