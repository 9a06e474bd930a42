"""Which blocks are on which stage, against the planner's own numbers."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel import stages
from paceline.parallel.layout import Layout
from paceline.parallel.stages import (
    blocks_of_slowest,
    blocks_of_stages,
    num_stages,
    stages_of_rank,
)

KINDS = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero-bubble", 1),
    ("zero-bubble", 2),
    ("zero-bubble", 3),
    ("dualpipe-v", 1),
)


def layout_of(pipeline: int, schedule: str, chunks: int) -> Layout:
    return Layout(
        data=1,
        sharding="none",
        micro_batch=1,
        accumulation=8,
        pipeline=pipeline,
        schedule=schedule,
        chunks=chunks,
    )


def of_ranks(layout: Layout, num_blocks: int, head: float, is_balanced: bool = True) -> list[int]:
    blocks = blocks_of_stages(layout, num_blocks, head, is_balanced=is_balanced)
    return [
        sum(len(blocks[stage]) for stage in stages_of_rank(layout, rank))
        for rank in range(layout.pipeline)
    ]


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(stages).failed == 0


@given(
    kind=st.sampled_from(KINDS),
    pipeline=st.integers(1, 16),
    more=st.integers(0, 120),
    head=st.floats(0, 9),
)
def test_every_block_is_on_one_stage_and_only_the_last_may_have_none(kind, pipeline, more, head):
    layout = layout_of(pipeline, *kind)
    num_blocks = num_stages(layout) + more
    blocks = blocks_of_stages(layout, num_blocks, head)
    assert [block for each in blocks for block in each] == list(range(num_blocks))
    assert len(blocks) == num_stages(layout)
    assert all(len(each) > 0 for each in blocks[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_not_trained_does_not_stand_alone(kind):
    layout = layout_of(4, *kind)
    for more in range(9):
        stages_each = [
            blocks_of_stages(layout, num_stages(layout) + more, 99.0, may_be_bare=bare)
            for bare in (True, False)
        ]
        assert [len(each[-1]) for each in stages_each] == [0, 1]
        assert all(stages_each[1])
        of_head = sum(len(stages_each[1][n]) for n in _stages_of_head(layout))
        least = num_stages(layout) // 4
        priced = blocks_of_slowest(
            num_stages(layout) + more, 4, 99.0, is_balanced=True, least=least
        )
        assert of_head == priced[1]


def _stages_of_head(layout: Layout) -> tuple[int, ...]:
    held = (stages_of_rank(layout, rank) for rank in range(layout.pipeline))
    return next(each for each in held if num_stages(layout) - 1 in each)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_balanced", [True, False])
@pytest.mark.parametrize(
    ("num_blocks", "head"), [(32, 1.2), (80, 1.2), (126, 0.66), (61, 0.4), (17, 1.2), (30, 2.7)]
)
def test_s1_7_ranks_have_the_blocks_the_planner_prices(kind, num_blocks, head, is_balanced):
    layout = layout_of(4, *kind)
    slowest, with_head = blocks_of_slowest(num_blocks, 4, head, is_balanced=is_balanced)
    counts = of_ranks(layout, num_blocks, head, is_balanced)
    is_v = stages_of_rank(layout, 0)[-1] == num_stages(layout) - 1
    assert counts[0 if is_v else -1] == with_head
    assert max(counts[1:] if is_v else counts[:-1]) == slowest


def test_a_v_has_its_first_and_last_stage_on_the_first_rank():
    assert stages_of_rank(layout_of(4, "dualpipe-v", 1), 0) == (0, 7)
    assert stages_of_rank(layout_of(4, "zero-bubble", 2), 3) == (3, 4)
    assert stages_of_rank(layout_of(4, "zero-bubble", 1), 3) == (3,)


@pytest.mark.parametrize(
    ("num_blocks", "pipeline", "head", "counts"),
    [
        (80, 8, 0.9, [10] * 8),
        # Megatron Bridge's Llama-3.1-405B and Qwen3-235B: embedding and loss count as blocks.
        (126, 8, 0.7, [15] + [16] * 6 + [15]),
        (94, 8, 2.7, [11] + [12] * 6 + [11]),
        # DeepSeek-V3's: its head takes as long as one block and a half.
        (61, 16, 1.5, [3] + [4] * 14 + [2]),
        (5, 4, 0.5, [1, 1, 2, 1]),
    ],
)
def test_an_engine_with_equal_stages_has_fewer_blocks_at_the_ends_where_they_do_not_divide(
    num_blocks, pipeline, head, counts
):
    assert of_ranks(layout_of(pipeline, "1f1b", 1), num_blocks, head, is_balanced=False) == counts
