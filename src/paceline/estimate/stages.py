"""Which blocks are on which stage, for one layout of one case: what is priced, rendered and run."""

from paceline.estimate.estimate import Case
from paceline.estimate.on_stage import head_in_blocks, may_be_bare
from paceline.parallel.layout import Layout
from paceline.parallel.stages import blocks_of_stages, num_stages


def blocks_by_stage(layout: Layout, case: Case) -> tuple[range, ...]:
    """The blocks of each stage, first stage first: what is priced, and the same as `paceline run`
    cuts a model into. Of fewer blocks than stages, the first stages have one."""
    count, stages = case.profile.num_blocks, num_stages(layout)
    if count < stages:
        return tuple(range(min(stage, count), min(stage + 1, count)) for stage in range(stages))
    return blocks_of_stages(
        layout,
        count,
        float(head_in_blocks(case.model)),
        may_be_bare=bool(may_be_bare(case.model)),
        is_balanced=case.engine.balances_stages,
    )


def stage_sizes(layout: Layout, case: Case) -> tuple[int, ...]:
    """How many blocks are on each stage, first stage first; none without a pipeline."""
    return tuple(map(len, blocks_by_stage(layout, case))) if layout.pipeline > 1 else ()
