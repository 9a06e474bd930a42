import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from paceline.runtime.digest import _hashers, _Held, _Task, state_digest


def trained(**changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_the_same_state_has_the_same_digest():
    assert state_digest(*trained()) == state_digest(*trained())


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: model[0].bias.data[1:2].view(torch.int32).bitwise_xor_(1),
        lambda model, optimizer: model[1].running_mean.add_(1),
        lambda model, optimizer: optimizer.state[model[0].weight]["exp_avg"][0].neg_(),
        lambda model, optimizer: optimizer.state[model[1].bias]["step"].add_(1),
        lambda model, optimizer: optimizer.state.clear(),
    ],
    ids=["one bit of a bias", "a saved buffer", "a moment", "a count of steps", "no moments"],
)
def test_any_change_of_the_state_changes_the_digest(change):
    model, optimizer = trained()
    before = state_digest(model, optimizer)
    change(model, optimizer)
    assert state_digest(model, optimizer) != before


def test_the_learning_rate_is_not_in_the_digest():
    model, optimizer = trained()
    before = state_digest(model, optimizer)
    optimizer.param_groups[0]["lr"] = 7.0
    assert state_digest(model, optimizer) == before


def test_compiling_or_tying_changes_no_names():
    model, optimizer = trained()
    wrapped = nn.ModuleDict({"_orig_mod": model})
    assert state_digest(wrapped, optimizer) == state_digest(model, optimizer)


class Split(nn.Module):
    """One matrix of 5 rows: on a mesh of 2 x 2, two copies of two uneven parts."""

    def __init__(self, rank: int, changed: int | None) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(15, dtype=torch.bfloat16).reshape(5, 3)
        weight = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        self.weight = nn.Parameter(weight)
        if rank == changed:
            self.weight.data.to_local()[0, 0] += 1


def digests_of_copies(rank, world):
    digests = [
        state_digest(model, torch.optim.SGD(model.parameters()))
        for model in (Split(rank, None), Split(rank, 3))
    ]
    plain = nn.Module()
    plain.weight = nn.Parameter(torch.arange(15, dtype=torch.bfloat16).reshape(5, 3))
    return (*digests, state_digest(plain, torch.optim.SGD(plain.parameters())))


@pytest.mark.ranks
def test_a_copy_that_differs_on_one_rank_gives_the_ranks_other_digests():
    same, changed, plain = zip(*run_ranks(digests_of_copies, 4), strict=True)
    assert set(same) == set(plain)
    assert len(set(same)) == 1
    assert len(set(changed)) > 1


def test_every_copy_is_hashed_by_a_rank_that_holds_it_and_bytes_are_shared_out():
    pairs = ((0, 1), (2, 3))
    everyone = [
        {
            _Task(f"t{index}", pair): _Held(size, (((0,), (1,)),))
            for index, size in enumerate((8, 5, 3))
            for pair in pairs
            if rank in pair
        }
        for rank in range(4)
    ]
    chosen = list(_hashers(everyone))
    assert [task for task, _ in chosen] == sorted(task for task, _ in chosen)
    assert all(hasher in task.holders for task, hasher in chosen)
    load = [
        sum(held[task].num_bytes for task, by in chosen if by == rank)
        for rank, held in enumerate(everyone)
    ]
    assert load == [8, 8, 8, 8]
