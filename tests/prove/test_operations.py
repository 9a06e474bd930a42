"""What one recorded operation reads, writes and takes."""

from dataclasses import replace

import pytest
import torch
from tests.prove.cases import MIXTRAL, layout, request
from tests.prove.test_prove import RATES

from paceline.prove.collectives import Issued
from paceline.prove.proof import ModelRequest
from paceline.prove.prove import trace_rank
from paceline.prove.rates import collective_seconds, operation_seconds
from paceline.prove.trace import READ, Operation, Tracer


def recorded(act):
    tracer = Tracer()
    with tracer:
        act()
    return {each.name: each for each in tracer.trace.operations}


def lists(count, elements=1024):
    return [[torch.ones(elements) for _ in range(2)] for _ in range(count)]


def test_scaling_gradients_in_place_reads_and_writes_each_once():
    (gradients,) = lists(1)
    found = recorded(lambda: torch._foreach_mul_(gradients, 0.5))
    assert found["_foreach_mul_"].num_bytes == 2 * (2 * 1024 * 4)


def test_a_fused_adamw_reads_gradients_and_writes_all_but_them():
    parameters, gradients, first, second = lists(4)
    steps = [torch.tensor(1.0) for _ in parameters]
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}
    found = recorded(
        lambda: torch._fused_adamw_(parameters, gradients, first, second, [], steps, **options)
    )
    scalars = 2 * 4
    assert found["_fused_adamw_"].num_bytes == 7 * (2 * 1024 * 4) + scalars


def test_a_copy_between_lists_reads_one_and_writes_the_other():
    to, source = lists(2)
    found = recorded(lambda: torch._foreach_copy_(to, source))
    assert found["_foreach_copy_"].num_bytes == 2 * (2 * 1024 * 4)


def test_experts_in_one_kernel_are_launched_once():
    seconds = operation_seconds(RATES)

    def of(count):
        return Operation("_grouped_mm", 1, 0, (256, 512, 512, count), 0, False, False)

    one, two, three = (seconds(of(count)) for count in (2, 4, 6))
    assert three - two == pytest.approx(two - one)
    assert 2 * one - two == pytest.approx(RATES.matmul.launch_s)


def test_a_message_crosses_the_network_where_its_two_ranks_are_on_two_nodes():
    """Stages of 4 ranks on nodes of 8: every second boundary is one of nodes."""
    seconds = collective_seconds(RATES, 4)
    inside, across, next_inside = (
        seconds(Issued("send", 10**9, (rank, rank + 4), True)) for rank in (0, 4, 8)
    )
    assert across > 2 * inside
    assert next_inside == inside


def test_in_a_loop_the_last_stage_sends_as_fast_as_any_other():
    """It took as long as if all 12 ranks between the two sent at once: a node has NICs for 8."""
    spare = replace(RATES.levels[-1], spare=8.0)
    seconds = collective_seconds(replace(RATES, levels=(*RATES.levels[:-1], spare)), 4)
    across, back = (seconds(Issued("send", 10**9, ranks, True)) for ranks in ((4, 8), (12, 0)))
    assert back == across


@pytest.mark.parametrize(("expert", "expected"), [(1, 0), (2, 3)])
def test_ranks_that_share_experts_read_their_counts_in_every_block(expert, expected):
    asked = request(layout(expert=expert), model=ModelRequest(config=MIXTRAL))
    trace = trace_rank(asked, 0, None)
    assert sum(kind == READ for kind, _, _ in trace.events[trace.start :]) == expected
