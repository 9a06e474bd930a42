"""An error of a branch by rank needs every step shown; else it is a hint."""

from textwrap import dedent

import pytest
from tests.check.lint.marked_cases import lint_program

from paceline.check.finding import Severity
from paceline.check.lint.context import Context

START = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from elsewhere import newest, share

dist.init_process_group("nccl")
rank = dist.get_rank()
"""


def severities(program: str) -> list[tuple[str, Severity]]:
    found = lint_program("train.py", START + dedent(program), Context())
    return [(one.id, one.severity) for one in found]


def test_a_barrier_on_one_rank_is_an_error():
    assert severities("if rank == 0:\n    dist.barrier()") == [
        ("collective-mismatch", Severity.ERROR)
    ]


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ("model = FSDP(model)", "waits there until the time-out: every rank has to call it"),
        ("fully_shard(model)", "saves its own shards alone"),  # 2 ranks, gloo, torch 2.13: no wait
    ],
)
def test_a_state_on_one_rank_waits_with_fsdp1_and_lacks_shards_with_fsdp2(shards, why):
    program = f"""
from torch.distributed.fsdp import fully_shard
model = torch.nn.Linear(8, 8)
{shards}
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
"""
    found = lint_program("train.py", START + program, Context())
    (finding,) = [one for one in found if one.id == "rank0-only-collective-save"]
    assert why in finding.what


CHOSEN = """
path = None
if rank == 0:
    path = newest()
path = share(path)
if path:
    dist.barrier()
"""
ENTERING_AND_LEAVING = """
class Staggered:
    def __enter__(self):
        if dist.get_rank() % 2 == 0:
            dist.barrier()

    def __exit__(self, *failure):
        if dist.get_rank() % 2 == 1:
            dist.barrier()
"""
ONE_OF_TWO = """
class Gathers:
    def search(self):
        dist.barrier()

class Alone:
    def search(self):
        return []

searcher = Gathers()
if newest():
    searcher = Alone() if rank == 0 else None
if rank == 0:
    searcher.search()
"""
WRAPPED_OR_NOT = """
model = torch.nn.Linear(2, 2)
if newest():
    model = FSDP(model)
else:
    model = DDP(model)
if rank == 0:
    model.state_dict()
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(CHOSEN, id="a value that all ranks may have been given"),
        pytest.param(ENTERING_AND_LEAVING, id="one half on entering, the other on leaving"),
        pytest.param(ONE_OF_TWO, id="a method of one of two classes"),
        pytest.param(WRAPPED_OR_NOT, id="a state dict of a model that may be DDP's"),
    ],
)
def test_what_is_not_shown_for_every_run_is_no_error(program):
    assert all(severity is Severity.INFO for _, severity in severities(program))


def test_whether_a_list_is_empty_does_not_depend_on_what_is_in_it():
    program = """
    model = DDP(torch.nn.Linear(2, 2))
    waiting = []
    for batch in torch.utils.data.DataLoader([1]):
        if waiting == []:
            dist.barrier()
        waiting.append(batch)
        model(batch).mean().backward()
    """
    assert Severity.WARNING not in dict(severities(program)).values()


@pytest.mark.parametrize(
    ("before", "after", "is_found"),
    [
        ("if rank == 1: continue", "pass", True),
        ("pass", "if rank == 1: break", True),
        ("pass", "if rank != 0: continue", False),  # the others make no joint call after it
    ],
)
def test_s3_4_a_rank_that_leaves_the_loop_before_the_others_backward_pass_is_a_hint(
    before, after, is_found
):
    program = f"""
    model = DDP(torch.nn.Linear(2, 2))
    for batch in torch.utils.data.DataLoader([1]):
        {before}
        model(batch).mean().backward()
        {after}
    """
    assert ("rank-divergent-decision" in dict(severities(program))) is is_found
