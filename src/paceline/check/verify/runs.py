"""Which runs show that a layout equals a single device."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.choices import Compression
from paceline.choices.pipeline_schedules import SCHEDULE_FACTS
from paceline.choices.recomputes import WHOLE_BLOCKS
from paceline.parallel.layout import Layout
from paceline.parallel.stages import num_chunks
from paceline.record.verification import Run

WIDE, JOB, AGAIN, RESUMED = "float64", "job", "again", "resumed"
WHOLE_BATCH, RECOMPUTE, DROPOUT = "whole batch", "recompute", "dropout"
ELSEWHERE, SCHEDULE, COMPRESSED = "elsewhere", "schedule", "compressed"
"""Names of runs. The last three are followed by what is different: `compressed bf16`."""


def runs_of(
    layout: Layout, precision: str, steps: int, compression: Compression = "none"
) -> tuple[Run, ...]:
    """Every run of a case, in an order in which checkpoints are there before they are loaded.

    Args:
        compression: That the job asks for: it is run beside those that are always run.
        steps: Of the long runs, two at least: a checkpoint is written in their middle.
    """
    middle = steps // 2
    other_recompute = WHOLE_BLOCKS[0] if layout.recompute == "none" else "none"
    job = Run(name=JOB, layout=layout, precision=precision, steps=steps, compared=True)
    return (
        Run(name=WIDE, layout=layout, precision="fp64", steps=steps, watched=True),
        replace(job, save_after=middle),
        replace(job, name=AGAIN, compared=False),
        replace(job, name=RESUMED, compared=False, load=JOB),
        *_others(layout, steps),
        *(
            replace(job, name=f"{ELSEWHERE} {other.name}", layout=other, steps=middle, load=JOB)
            for other in _other_layouts(layout)
        ),
        replace(
            job,
            name=RECOMPUTE,
            compared=False,
            layout=replace(layout, recompute=other_recompute, recompute_every=1),
        ),
        *(
            replace(job, name=f"{COMPRESSED} {kind}", compression=kind)
            for kind in _compressions(layout, compression)
        ),
        Run(name=DROPOUT, layout=layout, precision="fp32", steps=1, dropout=True),
    )


def _others(layout: Layout, steps: int) -> Iterator[Run]:
    if layout.pipeline == 1 and layout.accumulation > 1:
        whole = replace(
            layout, micro_batch=layout.micro_batch * layout.accumulation, accumulation=1
        )
        yield Run(name=WHOLE_BATCH, layout=whole, precision="fp64", steps=1, compared=True)
    if layout.pipeline > 1 and num_chunks(layout) == 1:
        plain = (word for word, facts in SCHEDULE_FACTS.items() if facts.chunks == "one")
        other = next(word for word in reversed([*plain]) if word != layout.schedule)
        scheduled = replace(layout, schedule=other)
        name = f"{SCHEDULE} {other}"
        yield Run(name=name, layout=scheduled, precision="fp64", steps=steps, compared=True)


def _other_layouts(layout: Layout) -> Iterator[Layout]:
    """Layouts of as many ranks, to load the same checkpoint into: all sharded, or none."""
    ranks, batch = layout.num_ranks, layout.global_batch
    if batch % ranks:
        return
    plain = Layout(data=ranks, sharding="none", micro_batch=batch // ranks, accumulation=1)
    for sharding in ("none", "full"):
        if (layout.data, layout.sharding) != (ranks, sharding):
            yield replace(plain, sharding=sharding)


def _compressions(layout: Layout, asked: Compression) -> tuple[Compression, ...]:
    """What gradients can be squeezed into on the wire: only DDP has a hook for it."""
    is_plain = layout.tensor * layout.pipeline * layout.expert == 1
    if layout.sharding != "none" or layout.data * layout.context == 1 or not is_plain:
        return ()
    more: tuple[Compression, ...] = () if asked == "none" else (asked,)
    return tuple(dict.fromkeys((*more, "bf16", "powersgd")))
