"""What differed, and how far it was from what is computed again."""

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime.recovery.test_fingerprint import flip
from torch import nn

from paceline.runtime.recovery.fingerprint import fingerprint
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.recovery.repair import Suspects, copy_from_replicas, far_apart, unequal
from paceline.runtime.recovery.verdict import Verdict


def test_what_is_not_finite_is_infinitely_far_from_what_is():
    nan, inf = float("nan"), float("inf")
    first, none = torch.tensor([0]), torch.tensor([], dtype=torch.int64)
    same = torch.tensor([1.0, nan, inf])
    assert far_apart(same, same.clone(), first) == (0, 0)
    assert far_apart(torch.tensor([1.0, nan]), torch.tensor([1.0, 0.0]), first) == (0, inf)
    assert far_apart(torch.tensor([-inf]), torch.tensor([inf]), first) == (inf, 0)
    assert far_apart(torch.tensor([3, 5], dtype=torch.uint8), torch.tensor([3, 9]), none) == (0, 4)


def test_numbers_of_which_a_bit_differs_are_found():
    a = torch.randn(100)
    b = a.clone()
    flip(b, 32 * 7 + 1)
    flip(b, 32 * 99 + 31)
    found = unequal(a.view(torch.uint8), b.view(torch.uint8), 4)
    assert found.tolist() == [7, 99]


def state_of(seed: int) -> LiveState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return LiveState(model, optimizer)


def repair(rank: int, world: int) -> tuple[bool, tuple[int, ...], list[int]]:
    """Rank 2's bits are wrong in two tensors; then one of ranks 0 and 1 is, nobody knows which."""
    state = state_of(0)
    clean = fingerprint(state.tensors()).by_name()
    names = ("model/1.weight", "optimizer/0.bias/exp_avg_sq")
    if rank == 2:
        for name in names:
            flip(dict(state.tensors())[name], 70)
    odd = Verdict(odd=(2,), source_of={2: 1})
    copy_from_replicas(state, odd, {2: names})
    is_same = fingerprint(state.tensors()).by_name() == clean

    tensor = dict(state.tensors())[names[0]]
    if rank == 1:
        flip(tensor, 16 * 5 + 14)
    pair = Verdict(undecided=((0, 1),), source_of={})
    suspects = Suspects(9, pair, {0: names[:1], 1: names[:1]}, state)
    kept = [place for places, _ in suspects._kept.values() for place in places.tolist()]
    if rank == 1:  # computed again, it is right
        flip(tensor, 16 * 5 + 14)
    return is_same, suspects.named(state), kept


@pytest.mark.ranks
def test_a_wrong_rank_gets_a_replicas_bits_and_of_two_suspects_the_farther_is_named():
    results = run_ranks(repair, 3)
    assert [is_same for is_same, _, _ in results] == [True, True, True]
    assert [named for _, named, _ in results] == [(1,), (1,), (1,)]
    assert [kept for _, _, kept in results] == [[5], [5], []]
