"""Flipped bits of one of several ranks, which here are copies in one process."""

import copy
import random

import pytest
import torch
from tests.runtime.recovery.test_fingerprint import flip
from torch import nn

from paceline.choices import Sharding
from paceline.parallel.layout import Layout
from paceline.runtime.recovery.guard import Guard, interval
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.recovery.verdict import Verdict, differing

CPU = torch.device("cpu")


class Ranks:
    """A small model on every rank, trained on the same numbers, each with its guard."""

    def __init__(self, num: int, sharding: Sharding = "none", every: int = 1) -> None:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
        self.models = [copy.deepcopy(first) for _ in range(num)]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in self.models]
        layout = Layout(data=num, sharding=sharding, micro_batch=1, accumulation=1)
        both = zip(self.models, self.optimizers, strict=True)
        self.states = [LiveState(model, optimizer) for model, optimizer in both]
        self.guards = [Guard(layout, rank, s, CPU) for rank, s in enumerate(self.states)]
        for guard in self.guards:
            guard.every = every

    def update(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(p.shape, generator=generator) for p in self.models[0].parameters()]
        for model, optimizer, guard in zip(self.models, self.optimizers, self.guards, strict=True):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            guard.after_update(step)

    def check(self, step: int) -> Verdict | None:
        totals = sum(guard.ballot(step) for guard in self.guards)
        assert isinstance(totals, torch.Tensor)
        verdicts = [guard.verdict(step, totals.tolist()) for guard in self.guards]
        assert all(verdict == verdicts[0] for verdict in verdicts)
        return verdicts[0]

    def tensors(self, rank: int) -> list[tuple[str, torch.Tensor]]:
        found = self.states[rank].tensors()
        return [(name, tensor) for name, tensor in found if "buffers" not in name]


@pytest.mark.parametrize(("num", "sharding"), [(2, "none"), (3, "none"), (4, "none"), (2, "full")])
def test_a_flipped_bit_while_nothing_writes_is_found_and_its_rank_and_tensor_named(
    num: int, sharding: Sharding
):
    ranks, draw = Ranks(num, sharding), random.Random(num)
    for step in range(1, 41):
        ranks.update(step)
        assert ranks.check(step) is None
        ranks.update(step)  # so that what was written is remembered again
        rank = draw.randrange(num)
        name, tensor = draw.choice(ranks.tensors(rank))
        bit = draw.randrange(tensor.nbytes * 8)
        flip(tensor, bit)
        found = ranks.check(step)
        assert found is not None
        assert found.odd == (rank,)
        evidence = [guard.evidence() for guard in ranks.guards]
        told = differing(found, [e[0] for e in evidence], [e[1] for e in evidence])
        assert told == {rank: (name,)}
        flip(tensor, bit)
        assert ranks.guards[0].certified_step == step


def test_a_bit_that_was_wrong_when_written_makes_both_of_two_suspects():
    ranks = Ranks(2)
    ranks.update(1)
    assert ranks.check(1) is None
    flip(ranks.tensors(1)[0][1], 77)
    ranks.update(2)
    found = ranks.check(2)
    assert found is not None
    assert found.suspects == (0, 1)


def test_a_bit_flipped_between_checks_is_found_at_the_next_one():
    ranks = Ranks(3, every=5)
    for step in range(1, 13):
        ranks.update(step)
        if step == 7:
            flip(ranks.tensors(2)[3][1], 5)
        if ranks.guards[0].is_due(step):
            found = ranks.check(step)
            assert (found is None) == (step != 10)
    assert ranks.guards[0].certified_step == 5


def test_a_program_that_writes_its_parameters_on_every_rank_is_not_accused():
    ranks = Ranks(2)
    for step in range(1, 4):
        ranks.update(step)
        for model in ranks.models:
            with torch.no_grad():
                next(iter(model.parameters())).mul_(0.5)
        assert ranks.check(step) is None


def test_batch_norms_averages_may_differ_while_a_step_is_computed():
    ranks = Ranks(2)
    ranks.update(1)
    ranks.models[1](torch.randn(4, 16))
    assert ranks.check(1) is None


def test_checks_are_due_after_every_so_many_steps_and_at_once():
    guard = Ranks(2, every=4).guards[0]
    assert [step for step in range(3, 13) if guard.is_due(step)] == [3, 4, 8, 12]
    guard.forget()
    assert guard.is_due(13)
    never = Ranks(2, every=0).guards[0]
    assert not any(never.is_due(step) for step in range(10))


def test_the_interval_keeps_the_cost_below_its_share_and_is_never_longer_than_the_longest():
    assert interval(0.0, 1.0) == 1
    assert interval(0.00149, 1.0) == 1
    assert interval(0.00151, 1.0) == 2
    assert interval(1.0, 0.0) == 100
