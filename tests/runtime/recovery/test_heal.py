"""A copy of a rank's state is that state, for every optimizer, and training goes on from it."""

from dataclasses import replace

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime.tiny import build, layout_of, train_steps
from torch import Tensor

from paceline.parallel.replicas import replicas_of
from paceline.runtime.recovery.heal import adopt, receive, receive_tensors, send, send_tensors
from paceline.runtime.recovery.live import LiveState

OPTIMIZERS = ["adamw", "sgd", "muon", "adafactor", "adamw-8bit"]


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in LiveState(model, optimizer).tensors()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def heal_second_copy(rank: int, world: int, kind: str) -> tuple[bool, bool, int]:
    """Ranks of the second copy of the model are new: what they get, and what comes of it."""
    layout = replace(layout_of(world, "hybrid"), shard=2)
    model, optimizer = build(layout, optimizer=kind)
    train_steps(model, optimizer, layout, rank, range(3))
    before = held(model, optimizer)
    (source, to) = next(group for group in replicas_of(layout) if rank in group)
    newer = build(layout, optimizer=kind, seed=7)
    facts = {}
    if rank == source:
        send(to, model, optimizer, {"last_step": 3})
        adopt((model, optimizer), newer)
    else:
        facts = receive(source, *newer)
    is_same = same(held(*newer), before)
    train_steps(*newer, layout, rank, range(3, 6))
    undisturbed = build(layout, optimizer=kind)
    train_steps(*undisturbed, layout, rank, range(6))
    return is_same, same(held(*newer), held(*undisturbed)), facts.get("last_step", 3)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_healed_rank_and_one_that_moved_its_state_go_on_to_the_bit(kind: str):
    assert run_ranks(heal_second_copy, 4, kind, limit_s=120) == [(True, True, 3)] * 4


def send_odd_ones(rank: int, world: int) -> bool:
    """Numbers of every size, none of which begins at a multiple of the next one's size."""
    types = [torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.uint8, torch.float64]
    there = [torch.arange(3, dtype=dtype) for dtype in types] + [torch.tensor(7)]
    if rank == 0:
        send_tensors(1, there)
        return True
    here = [torch.zeros_like(tensor) for tensor in there]
    receive_tensors(0, here)
    return all(torch.equal(*pair) for pair in zip(here, there, strict=True))


@pytest.mark.ranks
def test_tensors_of_every_type_arrive_whatever_lies_before_them():
    assert run_ranks(send_odd_ones, 2) == [True, True]
