"""A copy of a rank's state is that state, for every optimizer, and training resumes from it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.runtime.tiny import build, layout_of, train_steps
from torch import Tensor, nn

from paceline.parallel.replicas import replicas_of
from paceline.runtime import loop
from paceline.runtime.recovery.heal import adopt, receive, receive_tensors, send, send_tensors
from paceline.runtime.recovery.held import Held
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.recovery.newest import RecoveryPlan, Route

OPTIMIZERS = [
    # Muon holds a momentum for hidden matrices and AdamW's state for the rest.
    *(pytest.param(kind, marks=pytest.mark.repeat) for kind in ("adamw", "sgd")),
    *("muon", "adafactor", "adamw-8bit"),
]


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
    assert run_ranks(heal_second_copy, 4, kind) == [(True, True, 3)] * 4


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


def heal_on_two_devices(rank: int, world: int, folder: Path) -> tuple[list[str], bool, bool]:
    """AdamW counts on the host, its moments lie on the device: where each tensor is, and whether
    the second rank has what the first one has, now and a step later."""
    from tests.sim import backend, device

    backend.install()
    dist.destroy_process_group()
    store = f"file://{folder}/mixed"
    dist.init_process_group(backend.MIXED, init_method=store, rank=rank, world_size=world)
    torch.manual_seed(rank)
    model = nn.Linear(3, 5).to(device.NAME)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()

    def is_same() -> bool:
        mine = {name: tensor.cpu() for name, tensor in LiveState(model, optimizer).tensors()}
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        return same(*everyone)

    if rank == 0:
        step()
        send(1, model, optimizer, {})
    else:
        receive(0, model, optimizer)
        device.synchronize()
    healed = is_same()
    step()
    lies = [f"{n} {t.device.type}" for n, t in LiveState(model, optimizer).tensors()]
    return [each for each in lies if "bias" in each], healed, is_same()


@pytest.mark.ranks
def test_what_lies_on_the_host_and_what_lies_on_the_device_is_healed_to_where_it_lay(tmp_path):
    lies = ["model/bias sim"]
    lies += [f"optimizer/bias/{key}" for key in ("exp_avg sim", "exp_avg_sq sim", "step cpu")]
    assert run_ranks(heal_on_two_devices, 2, tmp_path) == [(lies, True, True)] * 2


@pytest.mark.parametrize("breaks", ["receive", "settle"])
def test_a_rank_whose_healing_broke_off_has_no_state(monkeypatch, breaks: str):
    """A second failure comes while the state of a replica does."""
    model = nn.Linear(2, 2)
    held, loaded = Held(), []
    held.model, held.optimizer = model, torch.optim.SGD(model.parameters())

    def may_break(name: str) -> Any:
        def called(*_: object) -> dict[str, Any]:
            if name == breaks:
                raise ConnectionError(name)
            return {}

        return called

    monkeypatch.setattr(loop, "receive", may_break("receive"))
    here = SimpleNamespace(
        held=held,
        place=SimpleNamespace(rank=1),
        settle=may_break("settle"),
        state=SimpleNamespace(load_state_dict=loaded.append),
    )
    one: Any = SimpleNamespace(_here=here, _model=model, _optimizer=held.optimizer)
    with pytest.raises(ConnectionError, match=breaks):
        loop.Loop._exchange(one, RecoveryPlan(step=4, routes=(Route(1, 0),)))
    held.leave(None)
    assert not loaded
    assert held.standing(4).applied == -1
