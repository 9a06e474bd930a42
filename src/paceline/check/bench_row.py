"""One row of a bench: what was measured on a number of ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb, inf
from statistics import fmean, median

from paceline.estimate.schedule import bubble_share
from paceline.parallel.rank_map import coordinates
from paceline.record.bench import PHASES, Communication, Measured
from paceline.record.metrics import most_bytes

_WIDE = 1.5
"""95th over 5th percentile of a step's time above which it is called noisy. A guess: on a quiet
machine it is about 1.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of ranks. Seconds of a step: the slowest rank's, then the median over steps."""

    num_ranks: int
    layout: str
    device: str
    global_batch: int
    step_s: float
    step_low_s: float
    """5th percentile over steps."""

    step_high_s: float
    num_steps: int
    samples_per_s: float
    tokens_per_s: float | None
    speedup: float
    """Samples a second, over those of the fewest ranks."""

    efficiency: float
    """Speed-up, over how many times as many ranks these are."""

    phases_s: dict[str, float]
    """Phase -> seconds of a step, mean over ranks, then the median over steps."""

    median_s: tuple[float, float] | None
    """95 % interval of `step_s`, of order statistics; None of fewer than 6 steps."""

    communication_s: float | None
    """Collectives in flight: their share of a profiled step, mean over ranks, x `step_s`. None
    where it was not looked at."""

    exposed_s: float | None
    """Part of `communication_s` in which the rank computes nothing: an upper bound. Waiting for
    other stages is in it."""

    hidden_s: float | None
    """The rest, behind computation: a lower bound."""

    profiler_stretch: float | None
    """A profiled step over a timed one, less 1: how far communication may be off."""

    peak_bytes: int | None
    """Memory of the fullest rank; None where a rank's was not measured."""

    predicted_bytes: int | None
    predicted_step_s: float | None
    limit_bytes: int
    """What one rank may use."""

    cores_per_rank: float | None
    stages_idle: tuple[float, ...] = ()
    """Share of a profiled step in which each pipeline stage only waits for other stages: for their
    messages, and once it is done for those that are not. Empty without a pipeline, and where other
    ranks send messages too."""

    stages_held_up: tuple[float, ...] = ()
    """Share of a profiled step in which each pipeline stage computes nothing while a message or a
    collective is under way, `stages_idle` included; empty without a pipeline."""

    bubble: float | None = None
    """Mean of `stages_idle`; None where that is unknown."""

    ideal_bubble: float = 0.0
    """What the schedule leaves idle of equal stages."""

    notes: tuple[str, ...] = ()

    @property
    def phases_total_s(self) -> float:
        """Seconds that phases are shares of: an accelerator's are timed in slower steps."""
        return max(self.step_s, sum(self.phases_s.values()))

    def share(self, seconds: float) -> float:
        """Share of a step that a phase takes."""
        return seconds / self.phases_total_s


def row_of(measured: Measured, first: Row | None) -> Row:
    """What was measured on one number of ranks, beside the first row."""
    plan, ranks = measured.plan, measured.ranks
    steps = [max(times) for times in zip(*(rank.step_s for rank in ranks), strict=True)]
    step_s = median(steps)
    samples_per_s = plan.layout.global_batch / step_s
    speedup = samples_per_s / first.samples_per_s if first else 1.0
    more = measured.num_ranks / first.num_ranks if first else 1.0
    seen = [rank.communication for rank in ranks if rank.communication is not None]
    flight = step_s * fmean(each.in_flight_s / each.step_s for each in seen) if seen else None
    exposed = step_s * fmean(each.exposed_s / each.step_s for each in seen) if seen else None
    per_sample = measured.tokens_per_sample
    idle = tuple(_idle(measured))
    return Row(
        num_ranks=measured.num_ranks,
        layout=plan.layout.name,
        device=plan.cluster.accelerator,
        global_batch=plan.layout.global_batch,
        step_s=step_s,
        step_low_s=_at(steps, 0.05),
        step_high_s=_at(steps, 0.95),
        num_steps=len(steps),
        median_s=median_interval(steps),
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * per_sample if per_sample else None,
        speedup=speedup,
        efficiency=speedup / more,
        phases_s={
            phase: median(
                fmean(times) for times in zip(*(rank.phases[phase] for rank in ranks), strict=True)
            )
            for phase in PHASES
            if all(rank.phases.get(phase) for rank in ranks)
        },
        communication_s=flight,
        exposed_s=exposed,
        hidden_s=None if flight is None or exposed is None else flight - exposed,
        profiler_stretch=max(each.step_s for each in seen) / step_s - 1 if seen else None,
        peak_bytes=most_bytes(rank.peak_bytes for rank in ranks),
        predicted_bytes=plan.estimate.memory.total_bytes,
        predicted_step_s=plan.estimate.step_s,
        limit_bytes=plan.cluster.usable_bytes,
        cores_per_rank=plan.cluster.cores_per_rank,
        stages_idle=idle,
        stages_held_up=tuple(_by_stage(measured, lambda seen, _: seen.exposed_s)),
        bubble=fmean(idle) if idle else None,
        ideal_bubble=bubble_share(plan.layout),
        notes=measured.notes,
    )


def _idle(measured: Measured) -> Iterator[float]:
    """Each stage's share of a profiled step that it waits for others, its ranks' mean.

    A stage that has sent its last gradients waits in the vote, for those of its pipeline that come
    to it later: the last one waits least. A ring of context ranks sends messages as well, and
    NCCL's all-to-all is made of them.
    """
    layout = measured.plan.layout
    if layout.context > 1 or layout.expert > 1:
        return
    num_pipelines = layout.num_ranks // layout.pipeline  # stages are the outermost axis of ranks
    least: dict[int, float] = {}
    for rank in measured.ranks:
        vote_s = rank.communication.vote_s if rank.communication else None
        pipeline = rank.rank % num_pipelines
        least[pipeline] = min(least.get(pipeline, inf), vote_s or 0.0)

    def idle(seen: Communication, rank: int) -> float | None:
        if seen.waiting_s is None or seen.vote_s is None:
            return None
        return seen.waiting_s + seen.vote_s - least[rank % num_pipelines]

    yield from _by_stage(measured, idle)


def _by_stage(
    measured: Measured, of: Callable[[Communication, int], float | None]
) -> Iterator[float]:
    """Share of a profiled step, each stage's ranks' mean; empty where a rank was not looked at."""
    layout = measured.plan.layout
    shares: dict[int, list[float]] = {}
    for rank in measured.ranks if layout.pipeline > 1 else ():
        seen = rank.communication
        seconds = None if seen is None else of(seen, rank.rank)
        if seen is None or seconds is None or not seen.step_s:
            return
        stage = coordinates(layout, rank.rank).pipeline
        shares.setdefault(stage, []).append(min(1.0, seconds / seen.step_s))
    for stage in sorted(shares):
        yield fmean(shares[stage])


def _at(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of a median, whatever the distribution; None of fewer than 6 values.

    The k-th smallest and the k-th largest, for the largest k with 2 P(B < k) <= 5 %, B binomial of
    n values and 1/2. Source: Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2.

    >>> median_interval([3, 1, 2, 6, 5, 4])
    (1, 6)
    """
    ordered, num, below, rank = sorted(values), len(values), 1, 0
    while 2 * below <= 0.05 * 2**num:
        rank += 1
        below += comb(num, rank)
    return (ordered[rank - 1], ordered[num - rank]) if rank else None


def caution_of(spreads: Mapping[str, float]) -> str | None:
    """What is said where steps vary much.

    Args:
        spreads: What was measured -> 95th over 5th percentile of its steps.
    """
    noisy = {name: spread for name, spread in spreads.items() if spread > _WIDE}
    if not noisy:
        return None
    return (
        f"steps vary up to {max(noisy.values()):.1f} times (p5 to p95; {', '.join(noisy)}): "
        "something else uses this machine, or they are too few: measure when it is quiet, with a "
        "higher --steps"
    )
