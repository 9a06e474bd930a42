"""A bench's page: one HTML file in the style of a run's, plots inside."""

from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from paceline.check.bench import Verdict
from paceline.check.bench_row import Row
from paceline.record.bench import PHASES
from paceline.report.bench_text import METHODS, idle_lines, rate_of, share_text, spread_text
from paceline.report.page import asset, render_template
from paceline.report.plots import draw_scaling
from paceline.units import counted, format_bytes, format_count, format_seconds


def render_bench_page(name: str, verdict: Verdict, *, machine: str) -> str:
    """The whole page as text.

    Args:
        name: The job's.
        verdict: From `check.bench`.
        machine: One line about where it was measured.
    """
    rows = verdict.rows
    unit = rate_of(rows[0])[1]
    curve = draw_scaling(
        [row.num_ranks for row in rows],
        [rate_of(row)[0] for row in rows],
        name="scaling",
        label=f"{unit} a second by number of ranks",
    )
    return render_template(
        "bench.html.j2",
        name=name,
        style=Markup(asset("page.css")),
        scaling=verdict.scaling,
        sentence=verdict.sentence,
        caution=verdict.caution,
        unit=unit,
        curve=Markup(curve.wide + curve.narrow),
        phases=PHASES,
        rows=[_row(row) for row in rows],
        notes=[
            *(f"{counted(row.num_ranks, 'rank')}: {note}" for row in rows for note in row.notes),
            *idle_lines(rows),
        ],
        methods=METHODS,
        advice=[
            asdict(each) | {"gain": "" if each.gain is None else f"{each.gain:+.0%}"}
            for each in verdict.advice
        ],
        machine=machine,
    )


def _row(row: Row) -> dict[str, Any]:
    total = sum(row.phases_s.values()) or 1.0
    return {
        "num_ranks": row.num_ranks,
        "layout": row.layout,
        "batch": row.global_batch,
        "step": format_seconds(row.step_s),
        "spread": spread_text(row),
        "rate": format_count(rate_of(row)[0]),
        "speedup": f"{row.speedup:.2f}",
        "efficiency": f"{row.efficiency:.0%}",
        "memory": "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        "phases": {
            phase: share_text(row.phases_s.get(phase), row.phases_total_s) for phase in PHASES
        },
        "pieces": [
            {"key": key, "percent": 100 * seconds / total, "value": format_seconds(seconds)}
            for key, seconds in row.phases_s.items()
        ],
        "exposed": share_text(row.exposed_s, row.step_s),
        "hidden": share_text(row.hidden_s, row.step_s),
    }
