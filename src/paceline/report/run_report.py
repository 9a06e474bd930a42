"""A run's report as JSON and as Markdown: throughput, memory of each rank, scaling, and why the
layout was chosen. `report/page.py` has the page with plots."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import msgspec

from paceline.check.bench_row import Row
from paceline.errors import JobError
from paceline.plan import Decision
from paceline.record import events as log
from paceline.record.gather import RunRecord
from paceline.record.run_row import RunRow
from paceline.report.bench_text import rate_of
from paceline.report.head import Head, head_of
from paceline.report.plan_markdown import plan_markdown
from paceline.report.table import markdown_table
from paceline.report.time_account import TimeShare, time_account
from paceline.report.view import view_of
from paceline.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank held, as its newest part of the run ended."""

    rank: int
    baseline_bytes: int | None
    """Before the model was built; None where it was not measured."""

    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLayout:
    """A layout that was considered."""

    layout: str
    step_s: float | None
    memory_bytes: int | None
    reason: str
    """Why it was not chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rationale:
    """Which layout was chosen, and why."""

    layout: str
    engine: str
    predicted_bytes: dict[str, int | None]
    """Part -> bytes of the fullest rank; None is unknown."""

    limit_bytes: int
    decisions: tuple[Decision, ...]
    others: list[OtherLayout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A `bench.json`, as `paceline bench --out` writes it."""

    scaling: str
    sentence: str
    rows: list[Row]
    caution: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything that the report says."""

    head: Head
    run: RunRow
    """Throughput, MFU, losses, cost and restarts are here."""

    time: list[TimeShare]
    memory: list[RankMemory]
    """Empty until the run has ended once."""

    rationale: Rationale | None
    """None without a plan, as of your own script."""

    scaling: Bench | None


def parse_bench(content: bytes, source: str) -> Bench:
    """A bench to show beside a run, from the text of its file.

    Raises:
        JobError: `R002`, it is another file.
    """
    try:
        return msgspec.json.decode(content, type=Bench)
    except msgspec.MsgspecError as error:
        raise JobError.of(
            code="R002",
            what=f"{source} cannot be read: it is no bench.json: {error}",
            where="--bench",
            fix="give the bench.json that `paceline bench JOB --out FOLDER` writes",
        ) from None


def report_of(record: RunRecord, row: RunRow, bench: Bench | None = None) -> RunReport:
    """The report of a run as it stands.

    Args:
        bench: The scaling of its job, where that was measured.
    """
    ends = [event for event in record.events if isinstance(event, log.RunFinished)]
    pairs = zip(ends[-1].baseline_bytes, ends[-1].peak_bytes, strict=False) if ends else ()
    return RunReport(
        head=head_of(view_of(record)),
        run=row,
        time=time_account(record),
        memory=[
            RankMemory(rank=rank, baseline_bytes=base, peak_bytes=peak)
            for rank, (base, peak) in enumerate(pairs)
        ],
        rationale=_rationale(record),
        scaling=bench,
    )


def report_json(report: RunReport) -> str:
    """The report for programs: bytes, seconds and shares as numbers; null is unknown."""
    return msgspec.json.format(msgspec.json.encode(asdict(report)), indent=2).decode()


def report_markdown(record: RunRecord, report: RunReport) -> str:
    """The report for a pull request or a wiki."""
    return "\n\n".join(_sections(record, report)) + "\n"


def _rationale(record: RunRecord) -> Rationale | None:
    plan = record.plan
    if plan is None:
        return None
    return Rationale(
        layout=plan.layout_name,
        engine=plan.engine,
        predicted_bytes=dict(plan.estimate.memory.parts),
        limit_bytes=plan.limit_bytes,
        decisions=tuple(plan.decisions),
        others=[
            OtherLayout(
                layout=plan.named(each.layout),
                step_s=each.estimate.step_s,
                memory_bytes=each.estimate.memory.total_bytes,
                reason=each.why,
            )
            for each in plan.rejected
        ],
    )


def _sections(record: RunRecord, report: RunReport) -> Iterator[str]:
    head = report.head
    yield f"# {record.name}"
    yield head.sentence + (f"\n\nReason: {head.reason}" if head.reason else "")
    tiles = [(each.name, each.value, f"{each.note} ({each.how})") for each in head.tiles]
    yield markdown_table([("what", "value", "note"), *tiles])
    if head.facts:
        yield markdown_table([("run", ""), *head.facts])
    if report.time:
        rows = [
            (each.name, format_seconds(each.seconds), f"{each.share:.1%}")
            for each in report.time
            if each.seconds
        ]
        yield "## Where the time went (measured)"
        yield markdown_table([("part", "time", "share"), *rows])
    if report.memory:
        yield "## Memory of each rank (measured)"
        yield markdown_table([("rank", "highest", "before the model"), *_memory(report)])
    if report.scaling is not None:
        yield f"## Scaling ({report.scaling.scaling}, measured)"
        caution = report.scaling.caution
        yield report.scaling.sentence + (f"\n\nCaution: {caution}" if caution else "")
        yield markdown_table(list(_scaling(report.scaling)))
    yield "## Why this layout (estimated)"
    if record.plan is None:
        yield "There is no plan in the run's folder that this version can read; scripts have none."
    else:
        yield plan_markdown(record.plan).rstrip().replace("## ", "### ", 1)


def _memory(report: RunReport) -> Iterator[tuple[str, str, str]]:
    for each in report.memory:
        sizes = (each.peak_bytes, each.baseline_bytes)
        highest, base = ("unknown" if size is None else format_bytes(size) for size in sizes)
        yield str(each.rank), highest, base


def _scaling(bench: Bench) -> Iterator[tuple[str, ...]]:
    unit = rate_of(bench.rows[0])[1] if bench.rows else "tokens"
    yield "ranks", "layout", "step", f"{unit}/s", "speed-up", "efficiency", "memory"
    for row in bench.rows:
        peak = "unknown" if row.peak_bytes is None else format_bytes(row.peak_bytes)
        rate = format_count(rate_of(row)[0])
        speed = (f"{row.speedup:.2f}", f"{row.efficiency:.0%}")
        yield str(row.num_ranks), row.layout, format_seconds(row.step_s), rate, *speed, peak
