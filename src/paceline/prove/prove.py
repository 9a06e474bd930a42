"""Prove one layout: trace a rank of every pipeline stage, and say what it held, sent and computed.

    proof = prove(request)

Blocks that are alike are traced a few times and extended to all (`extrapolate`), checked at a third
depth; where the check fails, with more blocks, and at last with all of them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import lcm
from typing import Any, NamedTuple

import torch

from paceline.errors import JobError, PlanError, reason_of
from paceline.parallel.layout import Layout
from paceline.parallel.rank_map import num_nodes_of, rank_of
from paceline.parallel.stages import stages_of_rank
from paceline.prove import model as models
from paceline.prove.compose import Stages, composed_steps, stages_of
from paceline.prove.extrapolate import Depth, extend, is_equal, repeat_micro_batches
from paceline.prove.places import Place
from paceline.prove.proof import (
    PARTS,
    Collective,
    MemoryPoint,
    Moment,
    Proof,
    Request,
    Simulated,
    StageProof,
)
from paceline.prove.rates import collective_seconds, operation_seconds
from paceline.prove.segments import Issue, Step, cut, find_peak, levels
from paceline.prove.timeline import RankTime, WaitsForeverError, simulate
from paceline.prove.world import trace_rank, traced_layout
from paceline.runtime.strategy.pipeline.stages import blocks_of
from paceline.runtime.strategy.ways.find import ways_of
from paceline.runtime.strategy.ways.generic import generic_ways

_ENDS = 2
"""Blocks of the shallowest trace besides one period: the first and the last, which differ. Where
two depths do not predict a third, the next period is traced as well."""

WHOLE = "every block traced"
_MOST_POINTS = 400
_SHOWN_RANKS = 8


def prove(request: Request, on_progress: Callable[[str], None] = lambda _: None) -> Proof:
    """What the runtime's own code does in a layout.

    Raises:
        JobError: The model cannot be built, or its forward pass looks at values.
        PlanError: The layout does not go together with the model.
    """
    started = time.perf_counter()
    layout = request.layout
    ranks = [rank_of(layout, pipeline=stage) for stage in range(layout.pipeline)]
    model = models.build(request.model, request.seq_len)
    period = _period(models.signatures(model), layout)
    if layout.pipeline == 1:
        count = models.num_blocks(model)
        blocks: list[tuple[int, ...]] = [(count,)]
        del model
        on_progress(f"tracing rank {ranks[0]} (stage 1 of 1)")
        found = [_step_of_rank(request, ranks[0], blocks[0], period)]
    else:
        is_whole = request.whole or layout.offload_parameters
        stages_here = None if is_whole else stages_of(model, layout)
        blocks = _blocks_of_ranks(model, layout)
        del model
        found = _steps_of_pipeline(request, ranks, blocks, stages_here, period, on_progress)
    steps = [step for step, _ in found]
    hows = [how for _, how in found]
    times, untimed = _simulated(request, steps, ranks)
    each_time: list[RankTime | None] = [None] * len(ranks) if times is None else [*times]
    stages = [
        _stage(request, stage, rank, step, how, time_of, sum(mine))
        for stage, (rank, step, how, time_of, mine) in enumerate(
            zip(ranks, steps, hows, each_time, blocks, strict=True)
        )
    ]
    return Proof(
        layout=layout,
        world_size=layout.num_ranks,
        stages=tuple(stages),
        simulated=None if times is None else _slowest(request, times),
        untimed=untimed,
        seconds=time.perf_counter() - started,
        notes=tuple(_notes(request)),
        trace=tuple(event for each in times or () for event in each.events),
        versions={"torch": str(torch.__version__)},
    )


def _blocks_of_ranks(model: torch.nn.Module, layout: Layout) -> list[tuple[int, ...]]:
    """Blocks on each of a rank's stages, for a rank of every pipeline position."""
    count = models.num_blocks(model)
    if layout.pipeline == 1:
        return [(count,)]
    ways = ways_of(model) or generic_ways(model, splits_tensors=layout.tensor > 1)
    if count < layout.pipeline:  # `split_stages` says it better
        return [(0,)] * layout.pipeline
    stages = blocks_of(model, ways, layout)
    return [
        tuple(len(stages[stage]) for stage in sorted(stages_of_rank(layout, rank)))
        for rank in range(layout.pipeline)
    ]


def _period(signatures: list[object], layout: Layout) -> int | None:
    """Blocks after which the same kinds come again; None when they do not."""
    for period in range(1, 5):
        if all(a == b for a, b in zip(signatures, signatures[period:], strict=False)):
            return lcm(period, layout.recompute_every)
    return None


def _steps_of_pipeline(
    request: Request,
    ranks: list[int],
    blocks: list[tuple[int, ...]],
    stages: Stages | None,
    period: int | None,
    on_progress: Callable[[str], None],
) -> list[tuple[Step, str]]:
    """The step of each rank, and how it was found."""
    if stages is not None:
        found = _composed(request, stages, blocks, period, on_progress)
        if found is not None:
            return found
    why = "" if stages is None else ": its micro-batches are not alike"
    steps = []
    for number, rank in enumerate(ranks, start=1):
        on_progress(f"tracing rank {rank} (stage {number} of {len(ranks)}), whole{why}")
        steps.append((_traced(request, rank, None), WHOLE + why))
    return steps


def _composed(
    request: Request,
    stages: Stages,
    blocks: list[tuple[int, ...]],
    period: int | None,
    on_progress: Callable[[str], None],
) -> list[tuple[Step, str]] | None:
    """Put together from stages, with a few of their blocks where those are many."""

    def at(kept: Callable[[int], int] | None, why: str) -> list[tuple[Step, str]] | None:
        with _tracing(request):
            return composed_steps(request, stages, kept, lambda text: on_progress(text + why))

    few = _Few(period) if period is not None else None
    if few is None or not few.saves(min(map(min, blocks)), 3):
        return at(None, ", every block")
    traced = [
        at(few.kept(number), f", pass {number + 1} of 3, each with more blocks")
        for number in range(3)
    ]
    if None in traced:
        return None
    made = []
    for index, mine in enumerate(blocks):
        depths = [
            Depth(tuple(map(few.kept(number), mine)), each[index][0])
            for number, each in enumerate(traced)
            if each is not None
        ]
        found = _extended(depths, mine, few.period)
        if found is None:
            return at(None, ", every block: the three passes do not predict the others")
        made.append((found[0], f"{traced[0][index][1]}; {found[1]}"))  # type: ignore[index]
    return made


class _Few(NamedTuple):
    """How many blocks stand for all: so many periods, and the part of one that is left over."""

    period: int

    def kept(self, number: int) -> Callable[[int], int]:
        """Blocks in the first trace, the second and so on."""
        depth = (number + 1) * self.period + _ENDS
        return lambda count: depth + (count - depth) % self.period

    def saves(self, count: int, num_traces: int) -> bool:
        """Whether so many traces, three at least, are fewer blocks than one trace of all."""
        numbers = range(max(num_traces, 3))
        return sum(self.kept(number)(count) for number in numbers) < count


def _step_of_rank(
    request: Request, rank: int, blocks: tuple[int, ...], period: int | None
) -> tuple[Step, str]:
    """The rank's step with all its blocks, and how it was found."""
    few = _Few(period) if period is not None else None
    depths: list[Depth] = []
    while few is not None and not request.whole and few.saves(min(blocks), len(depths) + 1):
        kept = few.kept(len(depths))
        depths.append(Depth(tuple(map(kept, blocks)), _traced(request, rank, kept)))
        found = _extended(depths[-3:], blocks, few.period) if len(depths) >= 3 else None
        if found is not None:
            return found
    return _traced(request, rank, None), WHOLE


def _extended(depths: list[Depth], blocks: tuple[int, ...], period: int) -> tuple[Step, str] | None:
    """The step of all blocks from two depths, when they predict a third."""
    small, larger, check = depths
    foretold = extend(small, larger, check.blocks, period)
    if foretold is None or not is_equal(foretold, check.step):
        return None
    step = extend(larger, check, blocks, period)
    if step is None:
        return None

    def shown(blocks: tuple[int, ...]) -> str:
        return " + ".join(map(str, blocks))

    return step, (
        f"{shown(small.blocks)}, {shown(larger.blocks)} and {shown(check.blocks)} blocks traced "
        f"(the first two predict the third); {shown(blocks)} computed from these"
    )


def _traced(request: Request, rank: int, kept: Callable[[int], int] | None) -> Step:
    with _tracing(request):
        trace = trace_rank(request, rank, kept)
    step = cut(trace, operation_seconds(request.rates, request.host))
    missing = request.layout.accumulation - traced_layout(request.layout).accumulation
    repeated = repeat_micro_batches(step, missing)
    if repeated is None:
        raise PlanError.of(
            code="F002",
            what="micro-batches after the first do not leave memory as they found it",
            where="the model's forward pass",
            fix="see what the model keeps between two calls; `paceline plan` has an estimate",
        )
    return repeated


@contextmanager
def _tracing(request: Request) -> Iterator[None]:
    """What goes wrong while the model's own code runs is said as such."""
    try:
        yield
    except (JobError, PlanError):
        raise
    except Exception as error:
        raise _untraceable(request, error) from error


def _untraceable(request: Request, error: Exception) -> JobError:
    """What a forward pass did that pretended tensors cannot, and where."""
    told = reason_of(error)
    kinds = ("DataDependentOutputException", "DynamicOutputShapeException")
    depends = type(error).__name__ in kinds or any(kind in told for kind in kinds)
    what = (
        f"its shapes depend on values, which a dry run does not have: {told}{_frame(error)}"
        if depends
        else f"the dry run failed: {told}{_frame(error)}"
    )
    return JobError.of(
        code="F001",
        what=what,
        where="model",
        fix="the estimate of `paceline plan` still holds; for experts use an implementation "
        "with fixed shapes (grouped_mm)"
        if depends
        else "run it with `paceline run` on a few ranks to see whether it fails there too",
    )


def _frame(error: BaseException) -> str:
    """The innermost line that is neither torch's nor ours."""
    frame, found = error.__traceback__, ""
    while frame is not None:
        code = frame.tb_frame.f_code
        is_library = any(f"/{name}/" in code.co_filename for name in ("torch", "paceline"))
        if not is_library and code.co_filename.endswith(".py"):
            found = f" (in {code.co_qualname}, {code.co_filename} line {frame.tb_lineno})"
        frame = frame.tb_next
    return found


def _simulated(
    request: Request, steps: list[Step], ranks: list[int]
) -> tuple[list[RankTime] | None, str]:
    """The time of each rank; or None, and why."""
    if request.rates is None:
        return None, "the cluster's rates are not known"
    if request.layout.offload != "none" and request.host is None:
        return None, "the rates of the link to the host are unknown"
    try:
        times = simulate(
            steps,
            ranks,
            collective_seconds(request.rates, _stage_ranks(request)),
            host_s=float(request.rates.host_s),
            wants_events=request.wants_trace,
        )
    except WaitsForeverError as error:
        return None, f"in the order in which this layout sends, {error}, which sends nothing"
    return times, ""


def _slowest(request: Request, times: list[RankTime]) -> Simulated:
    assert request.rates is not None, "without rates there are no times"
    fixed_s = float(request.rates.step_s)
    end = max(each.end_s for each in times)
    stage = max(range(len(times)), key=lambda index: times[index].compute_s)
    busiest = times[stage]
    return Simulated(
        step_s=end + fixed_s,
        compute_s=busiest.compute_s,
        communication_s=busiest.communication_s,
        exposed_s=busiest.exposed_s,
        bubble_s=busiest.bubble_s + end - busiest.end_s,
        launch_s=busiest.launch_s,
        offload_s=busiest.offload_s,
        fixed_s=fixed_s,
        stage=stage,
    )


def _stage(
    request: Request,
    stage: int,
    rank: int,
    step: Step,
    how: str,
    time_of: RankTime | None,
    num_blocks: int,
) -> StageProof:
    peak = find_peak(step)
    place = peak.segment.place
    by_phase: dict[str, float] = {}
    by_module: dict[str, float] = {}
    for segment in step.segments:
        for module, flops in segment.flops.items():
            phase = segment.place.phase
            by_phase[phase] = by_phase.get(phase, 0.0) + flops
            where = "blocks" if segment.place.block is not None else module or "loss"
            by_module[where] = by_module.get(where, 0.0) + flops
    return StageProof(
        stage=stage,
        rank=rank,
        peak_bytes=round(peak.num_bytes),
        parts={part: round(peak.parts[part]) for part in PARTS if peak.parts.get(part)},
        moment=Moment(
            phase=place.phase, micro_batch=place.micro_batch, module=peak.segment.peak_module
        ),
        resting_bytes=round(sum(step.resting.values())),
        timeline=tuple(_timeline(step, time_of)),
        collectives=tuple(_collectives(request, step)),
        flops=by_phase,
        flops_by_module=by_module,
        num_blocks=num_blocks,
        how=how,
    )


def _timeline(step: Step, time_of: RankTime | None) -> Iterator[MemoryPoint]:
    """The peaks, thinned to the highest of each of a few hundred stretches."""
    count = len(step.segments)
    ends = time_of.ends if time_of is not None and time_of.end_s else None
    points = [
        MemoryPoint(
            at=ends[index] / time_of.end_s if ends and time_of else index / max(1, count - 1),
            bytes=round(size),
            phase=segment.place.phase,
        )
        for index, (segment, size) in enumerate(levels(step))
    ]
    width = -(-count // _MOST_POINTS)
    for start in range(0, count, width):
        yield max(points[start : start + width], key=lambda point: point.bytes)


def _beside_blocks(place: Place) -> str:
    return f"{place.module} (outside the blocks)" if place.module else "outside the blocks"


def _stage_ranks(request: Request) -> int:
    return request.layout.num_ranks // request.layout.pipeline


def _collectives(request: Request, step: Step) -> Iterator[Collective]:
    seconds_of = collective_seconds(request.rates, _stage_ranks(request))
    totals: dict[Any, list[float]] = {}
    for segment in step.segments:
        place = segment.place
        where = "blocks" if place.block is not None else _beside_blocks(place)
        for work in segment.work:
            if isinstance(work, Issue):
                kind, phase = work.what.kind, place.phase
                if phase == "loss" and kind in ("send", "receive"):
                    phase = "forward"  # between two stages' passes: it brings what a block gave
                key = (kind, phase, where, work.what.ranks)
                total = totals.setdefault(key, [0, 0, 0.0])
                total[0] += 1
                total[1] += work.what.num_bytes
                total[2] += seconds_of(work.what)
    for (kind, phase, where, ranks), (count, size, seconds) in totals.items():
        is_inside = num_nodes_of(ranks, request.ranks_per_node) == 1
        yield Collective(
            kind=kind,
            phase=phase,
            where=where,
            ranks=ranks[:_SHOWN_RANKS],
            group_size=len(ranks),
            link="inside node" if is_inside else "between nodes",
            count=int(count),
            num_bytes=int(size),
            seconds=seconds if request.rates is not None else None,
        )


def _notes(request: Request) -> Iterator[str]:
    if request.is_cuda:
        yield (
            "allocations are rounded up to 512 bytes as by CUDA's allocator; not proved: its "
            "fragmentation, the CUDA context and library buffers, which are estimated above"
        )
    if request.layout.offload != "none":
        yield (
            f"bytes of the host are not counted: {request.layout.offloaded} state, and what the "
            "optimizer works with; `paceline plan` estimates them"
        )
    if request.layout.expert > 1:
        yield "every expert gets its even share of the tokens"
    if request.compression == "powersgd":
        yield "PowerSGD is proved as after its first steps, which send gradients as they are"
    for each in request.left_out:
        yield f"{each} is not part of a proof"
