"""The page's tables and bars as plain values, all numbers already text.

Leaves out: curves (`curves.py`), the head of the page (`head.py`), and every word of HTML.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.plan import Plan
from paceline.record import events as log
from paceline.record.gather import RunRecord
from paceline.record.metrics import most_bytes
from paceline.report.time_account import HEADINGS, TimeShare, recovery_phases
from paceline.report.timeline import Failure, Part, RunningClock
from paceline.units import format_bytes, format_count, format_seconds

NAMES = {key: name for key, _, name, _ in HEADINGS}

_GROUPS = {
    "training": "Training steps",
    "keeping": "Evaluation and checkpoints",
    "recovery": "Failures and recovery",
    "other": "Everything else",
}

_MOST_RANKS = 8
"""Most ranks that are drawn in full; of more only the fullest and the least full are drawn."""

_LIMIT_SHOWN = 2.5
"""The memory limit is drawn where it is at most this many times the longest bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a bar."""

    key: str
    name: str
    value: str
    percent: float
    """Percent of the bar's full width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """A heading of the time account, or the sum of a group."""

    key: str
    name: str
    meaning: str
    seconds: str
    share: str
    is_sum: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSection:
    """Where the time went."""

    total: str
    pieces: list[Piece]
    rows: list[TimeRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """Memory of one rank, predicted or seen."""

    name: str
    how: str
    total: str
    pieces: list[Piece]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySection:
    """Memory predicted against seen."""

    bars: list[MemoryBar]
    verdict: str
    limit: str
    limit_percent: float | None
    """Where the limit is on the bars' scale; None when it is far off it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRow:
    """One failure, and its recovery where there was one."""

    number: int
    when: str
    step: int
    rank: int
    how: str
    detail: str
    downtime: str
    phases: list[Piece]
    seconds: list[str]
    """Seconds of each phase, in order; empty when the run did not recover."""

    lost: str
    """Finished steps that were repeated."""

    back_to: str
    """Step of the checkpoint."""

    width: float
    """Percent of the longest recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealthRow:
    """Something new that the driver reported of a GPU."""

    when: str
    node: int
    gpu: str
    what: str
    value: int
    is_fatal: bool
    """Whether it counts against the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One save."""

    step: int
    name: str
    size: str
    stall: str
    write: str
    state: str
    is_kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """One layout of the plan."""

    name: str
    batch: str
    memory: str
    step_time: str
    rate: str
    reason: str
    is_chosen: bool

    memory_percent: float
    """Percent of the widest bar, for the bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """One layout that no other beats in time and memory, placed in the plot in percent."""

    left: float
    bottom: float
    label: str
    is_chosen: bool


def time_section(account: list[TimeShare]) -> TimeSection | None:
    """The account as one bar and a table with a sum for each group."""
    if not account:
        return None
    rows = []
    for group, title in _GROUPS.items():
        mine = [share for share in account if share.group == group]
        total = sum(share.seconds for share in mine)
        part = sum(share.share for share in mine)
        if total > 0:
            rows.append(_time_row(group, title, "", total, part, is_sum=True))
        rows += [
            _time_row(share.key, share.name, share.meaning, share.seconds, share.share)
            for share in mine
            if share.seconds > 0
        ]
    return TimeSection(
        total=format_seconds(sum(share.seconds for share in account)),
        pieces=[
            Piece(
                key=share.key,
                name=share.name,
                value=f"{format_seconds(share.seconds)}, {format_share(share.share)}",
                percent=share.share * 100,
            )
            for share in account
            if share.seconds > 0
        ],
        rows=rows,
    )


def _time_row(
    key: str, name: str, meaning: str, seconds: float, share: float, *, is_sum: bool = False
) -> TimeRow:
    return TimeRow(
        key=key,
        name=name,
        meaning=meaning,
        seconds=format_seconds(seconds),
        share=format_share(share),
        is_sum=is_sum,
    )


def format_share(share: float) -> str:
    """Percent, with a digit more where it is small.

    >>> format_share(0.0312)
    '3.1 %'
    """
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share * 100:.1f} %"


def memory_section(record: RunRecord, end: log.RunFinished | None) -> MemorySection | None:
    """Predicted parts beside what each rank was seen to hold."""
    seen = _seen(record, end)
    if record.plan is None and not seen:
        return None
    plan = record.plan
    predicted = plan.estimate.memory.known_bytes if plan is not None else 0
    longest = max([predicted, *(peak for _, _, peak in seen), 1])
    limit = plan.cluster.usable_bytes if plan is not None else None
    is_near = limit is not None and limit <= _LIMIT_SHOWN * longest
    scale = max(longest, limit if is_near and limit is not None else 0) * 1.02
    bars = [_predicted_bar(plan, scale)] if plan is not None else []
    bars += [_seen_bar(*entry, scale=scale) for entry in seen]
    return MemorySection(
        bars=bars,
        verdict=_memory_verdict(plan, seen),
        limit=_limit_text(plan, is_near=is_near) if plan is not None else "",
        limit_percent=limit / scale * 100 if is_near and limit is not None else None,
    )


def _seen(record: RunRecord, end: log.RunFinished | None) -> list[tuple[str, int, int]]:
    """Name, bytes before the model was built (0: not known) and highest bytes of each rank whose
    memory was measured."""
    if end is not None and end.peak_bytes:
        pairs = zip(end.baseline_bytes, end.peak_bytes, strict=False)
        ranks = [
            (f"rank {rank}", base or 0, peak)
            for rank, (base, peak) in enumerate(pairs)
            if peak is not None
        ]
        if len(ranks) <= _MOST_RANKS:
            return ranks
        by_peak = sorted(ranks, key=lambda entry: entry[2])
        least, most = by_peak[0], by_peak[-1]
        return [
            (f"{most[0]}, fullest of {len(ranks)}", most[1], most[2]),
            (f"{least[0]}, least full", least[1], least[2]),
        ]
    so_far = most_bytes(line.memory_bytes for line in record.metrics)
    return [("rank 0, so far", 0, so_far)] if so_far is not None else []


def _predicted_bar(plan: Plan, scale: float) -> MemoryBar:
    memory = plan.estimate.memory
    parts = sorted(memory.parts.items(), key=lambda part: part[0] != "overhead")  # it comes first
    total = memory.total_bytes
    unknown = [name for name, part in parts if part is None]
    known = f"at least {format_bytes(memory.known_bytes)}; {', '.join(unknown)} unknown"
    return MemoryBar(
        name="predicted, fullest rank",
        how=plan.estimate.known,
        total=format_bytes(total) if total is not None else known,
        pieces=[
            Piece(
                key=f"m-{name.replace(' ', '-')}",
                name=name,
                value=format_bytes(part),
                percent=part / scale * 100,
            )
            for name, part in parts
            if part
        ],
    )


def _seen_bar(name: str, base: int, peak: int, *, scale: float) -> MemoryBar:
    growth = max(0, peak - base)
    pieces = [("m-overhead", "before the model was built", base)] if base else []
    pieces.append(("m-seen", "growth since then" if base else "in all", growth))
    return MemoryBar(
        name=f"seen, {name}",
        how="measured",
        total=format_bytes(peak),
        pieces=[
            Piece(key=key, name=what, value=format_bytes(size), percent=size / scale * 100)
            for key, what, size in pieces
        ],
    )


def comparable_bytes(plan: Plan) -> int | None:
    """The predicted bytes of what is measured: on an accelerator only what tensors take."""
    memory = plan.estimate.memory
    total = memory.total_bytes
    if total is None or plan.cluster.backend == "gloo":
        return total
    return total - memory.overhead_bytes - (memory.parts.get("slack") or 0)


def _memory_verdict(plan: Plan | None, seen: list[tuple[str, int, int]]) -> str:
    predicted = comparable_bytes(plan) if plan is not None else None
    if plan is None or predicted is None or not seen:
        return ""
    _, base, peak = max(seen, key=lambda entry: entry[2])
    if not peak:  # a device that counts no bytes
        return ""
    if plan.cluster.backend != "gloo":
        text = f"Taken by tensors, {_compared(predicted, peak)}."
        return f"{text} The overhead is no tensor's: it is predicted and not measured here."
    text = f"In all, {_compared(predicted, peak)}."
    if base and peak > base:
        growth = predicted - plan.estimate.memory.overhead_bytes
        both = _compared(growth, peak - base)
        text += f" Without what a process takes before the model is built, {both}."
    return text


def _compared(predicted: int, seen: int) -> str:
    off = predicted / seen - 1
    side = "above" if off > 0 else "below"
    both = f"{format_bytes(predicted)} predicted and {format_bytes(seen)} seen at the fullest rank"
    return f"{both}: the prediction is {abs(off) * 100:.0f} % {side}"


def _limit_text(plan: Plan, *, is_near: bool) -> str:
    known = plan.cluster.known.get("usable_bytes")
    how = f" ({known})" if known else ""
    far = "" if is_near else ", far off this scale"
    return f"Limit of one rank: {format_bytes(plan.cluster.usable_bytes)}{how}{far}."


def gpu_health_rows(record: RunRecord, clock: RunningClock) -> list[GpuHealthRow]:
    """What the driver reported of GPUs, in order."""
    return [
        GpuHealthRow(
            when=format_seconds(clock(event.at)),
            node=event.node,
            gpu=event.gpu,
            what=event.what,
            value=event.value,
            is_fatal=event.is_fatal,
        )
        for event in record.events
        if isinstance(event, log.GpuHealth)
    ]


def failure_rows(broken: Iterable[tuple[Part, Failure]], clock: RunningClock) -> list[FailureRow]:
    """Every failure with the phases of its recovery."""
    every = [failure for _, failure in broken]
    back = [failure.recovered for failure in every if failure.recovered is not None]
    longest = max((event.downtime_s for event in back), default=0.0) or 1.0
    return [
        _failure_row(index, failure, clock, longest) for index, failure in enumerate(every, start=1)
    ]


def _failure_row(index: int, failure: Failure, clock: RunningClock, longest: float) -> FailureRow:
    event, lost = failure.recovered, failure.lost
    phases = recovery_phases(event) if event is not None else []
    total = sum(seconds for _, seconds in phases) or 1.0
    unseen = event is not None and event.detect_s is None
    return FailureRow(
        number=index,
        when=format_seconds(clock(lost.at)),
        step=failure.step,
        rank=lost.rank,
        how=lost.how
        + (" (the job's drill)" if failure.is_drill else "")
        + (f"; resumed with {failure.changed}" if failure.changed else ""),
        detail=lost.detail or "",
        downtime=format_seconds(event.downtime_s) if event is not None else "not recovered",
        phases=[
            Piece(
                key=key,
                name=NAMES[key],
                value=format_seconds(seconds),
                percent=seconds / total * 100,
            )
            for key, seconds in phases
            if seconds > 0
        ],
        seconds=[
            "unknown" if key == "detect" and unseen else format_seconds(seconds)
            for key, seconds in phases
        ],
        lost=str(event.steps_lost) if event is not None else "",
        back_to=str(event.resumed_from_step) if event is not None else "",
        width=event.downtime_s / longest * 100 if event is not None else 0.0,
    )


def checkpoint_rows(record: RunRecord) -> list[CheckpointRow]:
    """Every save and every save that failed, in order; a name saved twice counts as its newest."""
    newest = {e.checkpoint: e for e in record.events if isinstance(e, log.CheckpointSaved)}
    rows = []
    for event in record.events:
        if isinstance(event, log.CheckpointSaved):
            is_kept = event.checkpoint in record.kept and newest[event.checkpoint] is event
            rows.append(
                CheckpointRow(
                    step=event.step,
                    name=event.checkpoint,
                    size=_or_unknown(format_bytes, event.num_bytes),
                    stall=_or_unknown(format_seconds, event.stall_s),
                    write=_or_unknown(format_seconds, event.write_s),
                    state="kept" if is_kept else "pruned",
                    is_kept=is_kept,
                )
            )
        elif isinstance(event, log.CheckpointFailed):
            rows.append(
                CheckpointRow(
                    step=event.step,
                    name="",
                    size="",
                    stall="",
                    write="",
                    state=f"not written: {event.reason}",
                    is_kept=False,
                )
            )
    return rows


def _or_unknown(text: Callable[[float], str], value: float | None) -> str:
    return "unknown" if value is None else text(value)


def layout_rows(plan: Plan) -> list[LayoutRow]:
    """The chosen layout, then the case against each of the others."""
    options = [(plan.layout, plan.estimate, "")]
    options += [(other.layout, other.estimate, other.reason) for other in plan.rejected]
    widest = max(estimate.memory.known_bytes for _, estimate, _ in options) or 1
    rows = []
    for index, (layout, estimate, reason) in enumerate(options):
        total, step_s, rate = estimate.memory.total_bytes, estimate.step_s, estimate.tokens_per_s
        rows.append(
            LayoutRow(
                name=layout.name,
                batch=f"{layout.data} x {layout.micro_batch} x {layout.accumulation}",
                memory=format_bytes(total) if total is not None else "unknown",
                step_time=format_seconds(step_s) if step_s is not None else "unknown",
                rate=f"{format_count(rate)}/s" if rate is not None else "unknown",
                reason=reason,
                is_chosen=index == 0,
                memory_percent=round(100 * estimate.memory.known_bytes / widest, 1),
            )
        )
    return rows


_EDGE = 4.0
"""Room beside the outermost points of the front, in percent."""


def front_points(plan: Plan) -> list[FrontPoint]:
    """Time (across) against memory (up) of the layouts that none beats in both."""
    known = [(point, point.step_s) for point in plan.pareto if point.step_s is not None]
    if len(known) < 2:
        return []
    seconds = [step_s for _, step_s in known]
    sizes = [point.memory_bytes for point, _ in known]
    wide, tall = max(seconds) - min(seconds) or 1.0, max(sizes) - min(sizes) or 1.0
    room = 100 - 2 * _EDGE
    return [
        FrontPoint(
            left=round(_EDGE + room * (step_s - min(seconds)) / wide, 1),
            bottom=round(_EDGE + room * (point.memory_bytes - min(sizes)) / tall, 1),
            label=f"{point.layout.name}, {point.layout.micro_batch} x {point.layout.accumulation}: "
            f"{format_seconds(step_s)} a step, {format_bytes(point.memory_bytes)}",
            is_chosen=point.layout == plan.layout,
        )
        for point, step_s in known
    ]
