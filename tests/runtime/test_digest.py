import pytest
import torch
from torch import nn

from paceline.runtime.digest import state_digest


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
