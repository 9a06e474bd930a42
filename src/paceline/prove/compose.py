"""The steps of all ranks of a pipeline from the stages that differ, each traced once.

Stages of the same blocks between the same ends do alike work on every rank. The first rank with a
new combination of stages is traced (`replay`); the others go through torch's schedule with nothing
in their stages, and play what was traced. So every rank has its own order of micro-batches, and
with it its own memory over time.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.parallel.layout import Layout
from paceline.parallel.rank_map import rank_of
from paceline.parallel.stages import num_stages, stages_of_rank
from paceline.prove import model as models
from paceline.prove.parts import classify
from paceline.prove.patches import dry_run, waits_for_sends
from paceline.prove.proof import Request
from paceline.prove.rates import operation_seconds
from paceline.prove.replay import NotAlikeError, Passage, Passages, Replay, is_steady
from paceline.prove.segments import Step, cut, find_peak
from paceline.prove.trace import Tracer
from paceline.prove.world import CUDA_ROUNDING, Kept, trace_rank, world
from paceline.runtime import strategy
from paceline.runtime._torch_private import FakeTensorMode
from paceline.runtime.strategy.pipeline.pipeline import Pipeline
from paceline.runtime.strategy.pipeline.stages import blocks_of
from paceline.runtime.strategy.ways.find import ways_of
from paceline.runtime.strategy.ways.generic import generic_ways


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a pipeline."""

    layout: Layout
    blocks: tuple[range, ...]
    """Blocks of each stage."""

    kinds: tuple[object, ...]
    """Equal for stages that do alike work."""

    def of_rank(self, position: int) -> tuple[int, ...]:
        """A rank's stages, first one first."""
        return tuple(sorted(stages_of_rank(self.layout, position)))

    def kinds_of_rank(self, position: int) -> tuple[object, ...]:
        """Equal for ranks that do alike work, if in another order."""
        return tuple(self.kinds[stage] for stage in self.of_rank(position))


def stages_of(model: nn.Module, layout: Layout) -> Stages | None:
    """What the stages of a model have in them; None when it cannot be cut so often."""
    ways = ways_of(model) or generic_ways(model, splits_tensors=layout.tensor > 1)
    signatures = models.signatures(model)
    if ways is None or len(signatures) < num_stages(layout):
        return None
    blocks = blocks_of(model, ways, layout)
    every, last = layout.recompute_every, len(blocks) - 1
    kinds = tuple(
        (stage == 0, stage == last, tuple((signatures[i], i % every == 0) for i in mine))
        for stage, mine in enumerate(blocks)
    )
    return Stages(layout, blocks, kinds)


@dataclass(slots=True)
class _Traced:
    """A rank that was run."""

    rank: int
    step: Step
    passages: dict[int, Passages]
    """Place among its own stages -> what they did."""

    tail: Passage
    stream: torch.dtype
    width: int


def composed_steps(
    request: Request,
    stages: Stages,
    kept: Kept | None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[tuple[Step, str]] | None:
    """The step of each rank of the pipeline, and how it was found.

    None when a micro-batch after the second is not like it: nothing stands for anything then.
    """
    try:
        return list(_steps(request, stages, kept, on_progress))
    except NotAlikeError:
        return None


def _steps(
    request: Request, stages: Stages, kept: Kept | None, on_progress: Callable[[str], None]
) -> Iterator[tuple[Step, str]]:
    known: dict[object, Passages] = {}
    traced: dict[object, _Traced] = {}
    for position in range(request.layout.pipeline):
        rank = rank_of(request.layout, pipeline=position)
        kinds = stages.kinds_of_rank(position)
        like = traced.get(kinds)
        if like is not None:
            step = _hollow_step(request, stages, position, rank, like)
            yield step, f"the stages of rank {like.rank}, in this rank's own order"
            continue
        on_progress(f"tracing rank {rank} (stage {position + 1} of {request.layout.pipeline})")
        found = _traced(request, stages, position, rank, kept, known)
        traced[kinds] = found
        for kind, passages in zip(kinds, found.passages.values(), strict=True):
            known.setdefault(kind, passages)
        yield found.step, _told(request.layout.accumulation)


def _told(num_micro_batches: int) -> str:
    if num_micro_batches <= 3:
        return "all micro-batches traced"
    return (
        f"micro-batch 2 is counted for {num_micro_batches - 1}; micro-batch 3 was traced too and "
        "is the same"
    )


def _traced(
    request: Request,
    stages: Stages,
    position: int,
    rank: int,
    kept: Kept | None,
    known: Mapping[object, Passages],
) -> _Traced:
    mine = stages.of_rank(position)
    given = {stage: known.get(stages.kinds[stage], {}) for stage in mine}
    first_blocks = {stage: stages.blocks[stage].start for stage in mine}
    replays: list[Replay] = []

    def make(tracer: Tracer) -> Replay:
        replays.append(Replay(tracer, rank, first_blocks, given))
        return replays[0]

    trace = trace_rank(request, rank, kept, make)
    (replay,) = replays
    seconds_of = operation_seconds(request.rates, request.host)
    assert replay.tail is not None, "the schedule has ended"
    for passage in (replay.tail, *(p for each in replay.recorded.values() for p in each.values())):
        passage.finish(seconds_of)
    step = cut(trace, seconds_of)
    peak = find_peak(step).num_bytes
    if not all(is_steady(passages, peak) for passages in replay.recorded.values()):
        raise NotAlikeError
    passages = {stage: {**given[stage], **replay.recorded[stage]} for stage in mine}
    return _Traced(rank, step, passages, replay.tail, replay.stream, replay.width)


def _hollow_step(request: Request, stages: Stages, position: int, rank: int, like: _Traced) -> Step:
    """The step of a rank that does what another did, in its own order."""
    layout, mine = request.layout, stages.of_rank(position)
    known = dict(zip(mine, like.passages.values(), strict=True))
    first_blocks = {stage: stages.blocks[stage].start for stage in mine}
    tracer = Tracer(round_to=CUDA_ROUNDING if request.is_cuda else 1)
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with world(rank, layout.num_ranks), dry_run(is_cuda=request.is_cuda):
            meshes = strategy.make_meshes(layout, "cpu")
            with FakeTensorMode(allow_non_fake_inputs=True), tracer:
                parts = [nn.Linear(1, 1, bias=False, dtype=like.stream) for _ in mine]
                order = stages_of_rank(layout, position)
                line = Pipeline(parts, order, meshes, like.width, {})
                shape = (layout.micro_batch, request.seq_len)
                batch: Any = tuple(torch.zeros(shape, dtype=torch.int64) for _ in range(2))
                replay = Replay(tracer, rank, first_blocks, known, tail=like.tail, is_hollow=True)
                tracer.begin_step()
                with replay.following(), waits_for_sends(tracer):
                    batches: Sequence[Any] = [batch] * layout.accumulation
                    precision: Any = request.precision
                    strategy.forward_backward(line, meshes, batches, precision=precision)
    finally:
        if was_collecting:
            gc.enable()
    classify(tracer.trace)
    step = cut(tracer.trace, operation_seconds(request.rates, request.host))
    return Step(like.step.resting, step.segments)
