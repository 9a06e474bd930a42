"""Which blocks are on which stage of a pipeline: the planner prices what the runtime does.

A rank holds one stage, or several (`chunks`) that are not next to each other:

    loop    rank r holds stages r, r + p, r + 2 p ...      interleaved, zero-bubble
    v       rank r holds stages r and 2 p - 1 - r          zero-bubble of 2 chunks, dualpipe-v

So the last stage, and with it the head, is on the last rank in a loop and on the first in a v.
"""

import numpy as np

from paceline.choices.pipeline_schedules import SCHEDULE_FACTS
from paceline.parallel.layout import Layout
from paceline.parallel.table import code_of
from paceline.parallel.word_columns import is_in_v
from paceline.profile.block import Column


def num_chunks(layout: Layout) -> int:
    """Stages of each rank. Some schedules have two, whatever the layout says."""
    return 2 if SCHEDULE_FACTS[layout.schedule].chunks == "two" else layout.chunks


def num_stages(layout: Layout) -> int:
    """Stages of the whole pipeline, every rank's chunks together."""
    return layout.pipeline * num_chunks(layout)


def is_v_shaped(layout: Layout) -> bool:
    """Whether the stages go down the ranks and up again."""
    in_v = is_in_v(code_of("schedule", layout.schedule), layout.chunks)
    return layout.pipeline > 1 and bool(in_v)


def torch_class(layout: Layout) -> str:
    """The schedule's class in `torch.distributed.pipelining`."""
    facts = SCHEDULE_FACTS[layout.schedule]
    return (is_v_shaped(layout) and facts.torch_class_in_v) or facts.torch_class


def rank_of_head(pipeline: Column, schedule: Column, chunks: Column) -> Column:
    """The pipeline's rank with the last stage, for columns of layouts: the first one in a v."""
    return np.where(is_in_v(schedule, chunks), 0, np.asarray(pipeline) - 1)


def stages_of_rank(layout: Layout, rank: int) -> tuple[int, ...]:
    """The stages that a rank of the pipeline holds, in the order they are computed.

    >>> layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=8, pipeline=4,
    ...     schedule="interleaved", chunks=2)
    >>> stages_of_rank(layout, 1)
    (1, 5)
    """
    if is_v_shaped(layout):
        return rank, 2 * layout.pipeline - 1 - rank
    return tuple(rank + chunk * layout.pipeline for chunk in range(num_chunks(layout)))


def blocks_of_stages(
    layout: Layout,
    num_blocks: int,
    head_in_blocks: float,
    *,
    may_be_bare: bool = True,
    is_balanced: bool = True,
) -> tuple[range, ...]:
    """The blocks of each stage, first stage first.

    The rank with the head has as many blocks as `blocks_of_slowest` says, the others share the
    rest; where it does not divide, earlier ranks, which hold more micro-batches, have the fewer.
    A rank's blocks are shared among its chunks in the same way, balanced.

    Args:
        layout: Its pipeline, schedule and chunks are read.
        num_blocks: Of the model, at least one for every stage.
        head_in_blocks: Time of what comes after the last block, in blocks.
        may_be_bare: Whether the last stage may have the head alone. A head that is not trained,
            beside adapters, would leave it nothing to train.
        is_balanced: Whether ranks may be uneven where the blocks divide.

    >>> layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=8, pipeline=2)
    >>> blocks_of_stages(layout, 5, 1.2)
    (range(0, 3), range(3, 5))
    """
    ranks, chunks = layout.pipeline, num_chunks(layout)
    assert num_blocks >= ranks * chunks, f"{num_blocks} blocks on {ranks * chunks} stages"
    bare = int(may_be_bare)
    of_ranks = _shared(
        num_blocks,
        ranks,
        head_in_blocks,
        least=chunks,
        with_head=chunks - bare,
        is_balanced=is_balanced,
    )
    with_head = 0 if is_v_shaped(layout) else ranks - 1
    others = iter(of_ranks[:-1])
    counts = [0] * (ranks * chunks)
    for rank in range(ranks):
        has_head = rank == with_head
        blocks = of_ranks[-1] if has_head else next(others)
        head = head_in_blocks if has_head and is_balanced else 0.0
        shared = _shared(blocks, chunks, head, least=1, with_head=1 - bare * has_head)
        for stage, count in zip(stages_of_rank(layout, rank), shared, strict=True):
            counts[stage] = count
    ends = np.cumsum(counts)
    return tuple(range(int(end) - count, int(end)) for end, count in zip(ends, counts, strict=True))


def _shared(
    num_blocks: int,
    parts: int,
    head: float,
    *,
    least: int,
    with_head: int,
    is_balanced: bool = True,
) -> list[int]:
    """Blocks of each part, the one with the head last: at least `with_head`, `least` in others."""
    if parts == 1:
        return [num_blocks]
    _, slow = blocks_of_slowest(num_blocks, parts, head, is_balanced=is_balanced, least=with_head)
    last = min(int(slow), num_blocks - (parts - 1) * least)
    each, more = divmod(num_blocks - last, parts - 1)
    return [each] * (parts - 1 - more) + [each + 1] * more + [last]


def blocks_of_slowest(
    num_blocks: Column,
    pipeline: Column,
    extra: Column,
    *,
    is_balanced: Column,
    least: Column = 0,
) -> tuple[Column, Column]:
    """Blocks of the fullest stage, and of the last stage, which also has the head.

    Balanced: the last stage gets fewer blocks, so that the slowest stage is as fast as whole blocks
    allow. Otherwise every stage has the same number; where that does not divide but would with two
    blocks more, embedding and head each take the place of one, as Megatron's
    `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split` do
    (megatron-core 0.16, transformer_block.py, `get_num_layers_to_build`). Else the last stage has
    so many fewer, as `num_layers_in_last_pipeline_stage` can say, that its head makes it no slower.

    Args:
        pipeline: Stages, times chunks where those are not next to each other.
        extra: Time of the head in blocks.
        is_balanced: Whether stages may be uneven.
        least: Blocks that the last stage has at least, where they may be.

    >>> [int(x) for x in blocks_of_slowest(32, 4, 2.5, is_balanced=True)]
    [9, 6]
    >>> [int(x) for x in blocks_of_slowest(126, 8, 0.7, is_balanced=False)]  # Llama-3.1-405B
    [16, 15]
    >>> [int(x) for x in blocks_of_slowest(61, 16, 1.5, is_balanced=False)]  # DeepSeek-V3
    [4, 2]
    """
    n, p = np.asarray(num_blocks, float), np.asarray(pipeline, float)
    if np.all(is_balanced):
        slow, last = _balanced(n, p, extra, least)
    else:
        slow, last = _equal(n, p, extra)
        if np.any(is_balanced):
            both = zip(_balanced(n, p, extra, least), (slow, last), strict=True)
            slow, last = (np.where(is_balanced, ours, theirs) for ours, theirs in both)
    return np.where(p == 1, n, slow), np.where(p == 1, n, last)


def _equal(n: Column, p: Column, head: Column) -> tuple[Column, Column]:
    slow = np.ceil(n / p)
    rest = np.clip(np.floor(slow - head), np.maximum(n - slow * (p - 1), 1), np.floor(n / p))
    return slow, np.where(n % p == 0, slow, np.where((n + 2) % p == 0, slow - 1, rest))


def _balanced(n: Column, p: Column, head: Column, least: Column) -> tuple[Column, Column]:
    slow, last, seconds = np.ceil(n / p), np.ceil(n / p), np.full(np.shape(n / p), 1e30)
    fair = np.floor((n - (p - 1) * head) / p)
    for more in (0, 1, 2):
        fewer = np.minimum(np.maximum(fair + more, least), n)
        others = np.ceil((n - fewer) / np.maximum(p - 1, 1))
        time = np.maximum(others, fewer + head)
        is_better = time < seconds - 1e-9
        slow = np.where(is_better, others, slow)
        last = np.where(is_better, fewer, last)
        seconds = np.minimum(time, seconds)
    return slow, last
