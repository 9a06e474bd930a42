"""What the page's tables and bars show.

Leaves out: curves (`curves.py`), the head of the page (`head.py`), and every word of HTML.
"""

from dataclasses import dataclass

from paceline.plan import Plan
from paceline.record import events as log
from paceline.record.gather import RunRecord
from paceline.record.metrics import most_bytes
from paceline.report.time_account import HEADINGS
from paceline.units import format_bytes, format_seconds

NAMES = {key: name for key, _, name, _ in HEADINGS}

GROUPS = {
    "training": "Training steps",
    "keeping": "Evaluation and checkpoints",
    "recovery": "Failures and recovery",
    "other": "Everything else",
}
"""Group of `time_account` -> its title, in the order of the table."""

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
class MemoryBar:
    """Memory of one rank, estimated or measured."""

    name: str
    how: str
    total: str
    pieces: list[Piece]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySection:
    """Memory estimated and measured."""

    bars: list[MemoryBar]
    verdict: str
    limit: str
    limit_percent: float | None
    """Where the limit is on the bars' scale; None when it is far off it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """One layout that no other beats in time and memory, placed in the plot in percent."""

    left: float
    bottom: float
    label: str
    is_chosen: bool


def format_share(share: float) -> str:
    """Percent, with a digit more where it is small.

    >>> format_share(0.0312)
    '3.1 %'
    """
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share * 100:.1f} %"


def memory_section(record: RunRecord, end: log.RunFinished | None) -> MemorySection | None:
    """Estimated parts beside what was measured on each rank."""
    measured = _measured(record, end)
    if record.plan is None and not measured:
        return None
    plan = record.plan
    estimated = plan.estimate.memory.known_bytes if plan is not None else 0
    longest = max([estimated, *(peak for _, _, peak in measured), 1])
    limit = plan.cluster.usable_bytes if plan is not None else None
    is_near = limit is not None and limit <= _LIMIT_SHOWN * longest
    scale = max(longest, limit if is_near and limit is not None else 0) * 1.02
    bars = [_estimated_bar(plan, scale)] if plan is not None else []
    bars += [_measured_bar(*entry, scale=scale) for entry in measured]
    return MemorySection(
        bars=bars,
        verdict=_memory_verdict(plan, measured),
        limit=_limit_text(plan, is_near=is_near) if plan is not None else "",
        limit_percent=limit / scale * 100 if is_near and limit is not None else None,
    )


def _measured(record: RunRecord, end: log.RunFinished | None) -> list[tuple[str, int, int]]:
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


def _estimated_bar(plan: Plan, scale: float) -> MemoryBar:
    memory = plan.estimate.memory
    parts = sorted(memory.parts.items(), key=lambda part: part[0] != "overhead")  # it comes first
    total = memory.total_bytes
    unknown = [name for name, part in parts if part is None]
    known = f"at least {format_bytes(memory.known_bytes)}; {', '.join(unknown)} unknown"
    return MemoryBar(
        name="estimated, fullest rank",
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


def _measured_bar(name: str, base: int, peak: int, *, scale: float) -> MemoryBar:
    growth = max(0, peak - base)
    pieces = [("m-overhead", "before the model was built", base)] if base else []
    pieces.append(("m-seen", "growth since then" if base else "in all", growth))
    return MemoryBar(
        name=f"measured, {name}",
        how="measured",
        total=format_bytes(peak),
        pieces=[
            Piece(key=key, name=what, value=format_bytes(size), percent=size / scale * 100)
            for key, what, size in pieces
        ],
    )


def comparable_bytes(plan: Plan) -> int | None:
    """The estimated bytes of what is measured: on an accelerator only what tensors take."""
    memory = plan.estimate.memory
    total = memory.total_bytes
    if total is None or plan.cluster.backend == "gloo":
        return total
    return total - memory.overhead_bytes - (memory.parts.get("slack") or 0)


def _memory_verdict(plan: Plan | None, measured: list[tuple[str, int, int]]) -> str:
    estimated = comparable_bytes(plan) if plan is not None else None
    if plan is None or estimated is None or not measured:
        return ""
    _, base, peak = max(measured, key=lambda entry: entry[2])
    if not peak:  # a device that counts no bytes
        return ""
    if plan.cluster.backend != "gloo":
        text = f"Taken by tensors, {_compared(estimated, peak)}."
        return f"{text} The overhead is no tensor's: it is estimated and not measured here."
    text = f"In all, {_compared(estimated, peak)}."
    if base and peak > base:
        growth = estimated - plan.estimate.memory.overhead_bytes
        both = _compared(growth, peak - base)
        text += f" Without what a process takes before the model is built, {both}."
    return text


def _compared(estimated: int, measured: int) -> str:
    off = estimated / measured - 1
    side = "above" if off > 0 else "below"
    both = f"{format_bytes(estimated)} estimated and {format_bytes(measured)} measured"
    return f"{both} on the fullest rank: the estimate is {abs(off) * 100:.0f} % {side}"


def _limit_text(plan: Plan, *, is_near: bool) -> str:
    known = plan.cluster.known.get("usable_bytes")
    how = f" ({known})" if known else ""
    far = "" if is_near else ", far off this scale"
    return f"Limit of one rank: {format_bytes(plan.cluster.usable_bytes)}{how}{far}."


def saves(record: RunRecord) -> list[tuple[log.CheckpointSaved | log.CheckpointFailed, str]]:
    """Every save and every save that failed, in order, and what became of it; a name saved twice
    counts as its newest."""
    newest = {e.checkpoint: e for e in record.events if isinstance(e, log.CheckpointSaved)}
    kept = {id(event) for name, event in newest.items() if name in record.kept}
    return [
        (event, f"not written: {event.reason}")
        if isinstance(event, log.CheckpointFailed)
        else (event, "kept" if id(event) in kept else "pruned")
        for event in record.events
        if isinstance(event, log.CheckpointSaved | log.CheckpointFailed)
    ]


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
            label=f"{plan.named(point.layout)}, {point.layout.micro_batch} x "
            f"{point.layout.accumulation}: {format_seconds(step_s)} a step, "
            f"{format_bytes(point.memory_bytes)}",
            is_chosen=point.layout == plan.layout,
        )
        for point, step_s in known
    ]
