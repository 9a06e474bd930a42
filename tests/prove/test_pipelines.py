"""Pipelines put together from the stages that differ, beside the trace of every micro-batch."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from tests.prove.cases import SHAPE, layout, request

from paceline.prove.proof import ModelRequest
from paceline.prove.prove import prove

pytestmark = pytest.mark.filterwarnings("ignore")

DEEP = ModelRequest(decoder=replace(SHAPE, layers=8))
BARE = {"data": 1, "sharding": "none"}
COMPOSED = {
    "GPipe over 2": layout(**BARE, pipeline=2, schedule="gpipe", accumulation=6),
    "1F1B over 4": layout(**BARE, pipeline=4, accumulation=8),
    "1F1B over 2 x FSDP2 x tensor": layout(tensor=2, pipeline=2, accumulation=6, recompute="full"),
    "interleaved over 4 x FSDP2": layout(
        pipeline=4, schedule="interleaved", chunks=2, accumulation=8
    ),
    "zero-bubble over 4": layout(**BARE, pipeline=4, schedule="zero-bubble", accumulation=8),
}
ANY = {
    **COMPOSED,
    "ZB-V over 2 x FSDP2": layout(pipeline=2, schedule="zero-bubble", chunks=2, accumulation=6),
    "DualPipe-V over 2": layout(
        **BARE, pipeline=2, schedule="dualpipe-v", chunks=2, accumulation=6
    ),
}


QUICK = ("interleaved over 4 x FSDP2",)
"""The one with most to put together; the others are marked slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ANY]
)
def test_every_rank_holds_and_sends_what_the_trace_of_all_micro_batches_says(name):
    asked = request(ANY[name], model=DEEP)
    proof, whole = prove(asked), prove(replace(asked, whole=True))
    for composed, traced in zip(proof.stages, whole.stages, strict=True):
        assert composed.peak_bytes == pytest.approx(traced.peak_bytes, rel=1e-3)
        assert composed.resting_bytes == traced.resting_bytes
        assert sum(composed.flops.values()) == pytest.approx(sum(traced.flops.values()))
        assert totals(composed) == totals(traced)
    if name in COMPOSED:
        assert not any(stage.how.startswith("every block traced") for stage in proof.stages)


def test_a_deep_pipeline_of_replicas_is_extended_from_a_few_blocks_of_each_stage():
    """It ended in a KeyError; and the sum over replicas, which grows, was taken for a block's."""
    deep = ModelRequest(decoder=replace(SHAPE, layers=28))
    asked = request(layout(sharding="none", pipeline=2, accumulation=2), model=deep)
    proof, whole = prove(asked), prove(replace(asked, whole=True))
    for extended, traced in zip(proof.stages, whole.stages, strict=True):
        assert "14 computed from these" in extended.how
        assert extended.peak_bytes == pytest.approx(traced.peak_bytes, rel=1e-3)
        assert totals(extended) == totals(traced)


@cache
def flops(schedule):
    of = layout(**BARE, pipeline=2, schedule=schedule, accumulation=4, recompute="full")
    proof = prove(request(of, model=ModelRequest(decoder=replace(SHAPE, layers=4))))
    return sum(sum(stage.flops.values()) for stage in proof.stages)


@pytest.mark.parametrize("schedule", ["zero-bubble", "dualpipe-v"])
def test_blocks_are_recomputed_once_where_a_schedule_goes_backward_in_two(schedule):
    """Torch recomputes a block anew for each of its parameters then: zero-bubble with full
    recompute took 2.7 times as long as now, and twice the memory."""
    assert flops(schedule) == flops("1f1b")


def test_the_last_stage_keeps_nothing_of_micro_batches_that_are_done():
    """Torch keeps every micro-batch's loss, and so what the stage received for it and its gradient:
    a third of the stage's memory with 32 micro-batches of 4,096 tokens, 2,048 wide."""
    few, many = (
        prove(request(layout(**BARE, pipeline=2, accumulation=count))).stages[-1].peak_bytes
        for count in (8, 16)
    )
    tokens = 2 * 64
    assert (many - few) / 8 <= tokens * 8 + 64  # its own tokens, and its loss


def totals(stage):
    found = Counter()
    for each in stage.collectives:
        found[each.kind, each.ranks, "count"] += each.count
        found[each.kind, each.ranks, "bytes"] += each.num_bytes
    return found
