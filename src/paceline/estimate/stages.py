"""Which blocks are on which stage, for one layout of one case: what is priced, rendered and run."""

import numpy as np

from paceline.estimate.estimate import Case
from paceline.estimate.step import head_in_blocks, may_be_bare
from paceline.parallel.layout import Layout
from paceline.parallel.stages import blocks_of_stages, num_stages


def blocks_by_stage(layout: Layout, case: Case) -> tuple[range, ...]:
    """The blocks of each stage, first stage first; the same as `paceline run` cuts a model into.

    An engine that does not balance has equal stages; where blocks do not divide, the last stages
    have one fewer.
    """
    count, stages = case.profile.num_blocks, num_stages(layout)
    if case.engine.balances_stages and count >= stages:
        head, bare = float(head_in_blocks(case.model)), bool(may_be_bare(case.model))
        return blocks_of_stages(layout, count, head, may_be_bare=bare)
    ends = np.cumsum([len(range(stage, count, stages)) for stage in range(stages)])
    starts = [0, *ends[:-1]]
    return tuple(range(int(start), int(end)) for start, end in zip(starts, ends, strict=True))


def stage_sizes(layout: Layout, case: Case) -> tuple[int, ...]:
    """How many blocks are on each stage, first stage first; none without a pipeline."""
    return tuple(map(len, blocks_by_stage(layout, case))) if layout.pipeline > 1 else ()
