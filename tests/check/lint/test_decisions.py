"""How sure lint is that ranks decide differently: by what the condition was computed from."""

import pytest
from tests.check.lint.marked_cases import lint_program

from paceline.check.finding import Severity
from paceline.check.lint.context import Context

PROGRAM = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from helpers import Handler, Loss, agreed

def main(model, loader, controller, keys):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler, criterion = Handler(), Loss()
    total, num_seen, info = 0.0, 0, {{}}
    for batch in loader:
        output = model(batch)
        loss = criterion(output, batch)
        info = agreed(info, output)
        total += output.sum().item()
        num_seen += len(batch)
        if {condition}:
            continue
        optimizer.zero_grad()
        (loss / 2).backward()
        optimizer.step()
"""


def severities(condition: str) -> list[Severity]:
    text = PROGRAM.format(condition=condition)
    found = lint_program("train.py", text, Context())
    return [one.severity for one in found if one.id == "rank-divergent-decision"]


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param("output.mean() > 3", id="the model's output"),
        pytest.param("torch.isnan(loss)", id="a loss that is differentiated, whoever computes it"),
        pytest.param("total / num_seen > 3", id="a mean: its sum, not how many samples it is of"),
    ],
)
def test_a_value_of_this_rank_in_code_that_is_read_is_a_hint(condition):
    assert severities(condition) == [Severity.INFO]


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param("len(batch) == 0", id="how many samples"),
        pytest.param("batch['ids'].shape[1] > 4096", id="how long they are"),
        pytest.param("batch['ids'].size(1) > 4096", id="how long they are, by a method"),
        pytest.param("keys[0] not in batch", id="which keys they have"),
        pytest.param("batch.get(keys[0]) is None", id="which keys they have, by a method"),
    ],
)
def test_what_samples_there_are_and_how_they_look_is_a_hint(condition):
    assert severities(condition) == [Severity.INFO]


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param("agreed(info, batch)", id="a function"),
        pytest.param("agreed(handler, info)", id="a function that is given what another gave"),
        pytest.param("handler.stops(output)", id="a method"),
        pytest.param("controller.stops(output.mean())", id="a method of what is passed"),
    ],
)
def test_what_code_gave_that_is_not_read_may_be_equal_and_is_a_hint(condition):
    assert severities(condition) == [Severity.INFO]
