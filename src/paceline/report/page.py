"""A run's page: live (`paceline watch`), or frozen into one file (`paceline report`).

One template, one script and one palette make both. The frozen page has its numbers and its script
inside, needs no network, and is the same to the byte for the same record. What changes while a run
goes on is in `picture.py`; the tables further down are gathered here.
"""

import base64
import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.estimate import Estimate
from paceline.parallel import Layout
from paceline.record import events as log
from paceline.record.gather import RunRecord
from paceline.report.picture import picture
from paceline.report.script_text import advice_lines, profile_rows
from paceline.report.sections import (
    GROUPS,
    NAMES,
    format_share,
    front_points,
    memory_section,
    saves,
)
from paceline.report.time_account import recovery_phases, time_account
from paceline.report.timeline import RunningClock, all_failures, outcome, parts
from paceline.report.view import view_of
from paceline.units import format_bytes, format_count, format_seconds

ASSETS = {
    "curves.js": "text/javascript",
    "page.js": "text/javascript",
    "page.css": "text/css",
    "uplot.js": "text/javascript",
    "uplot.css": "text/css",
}
"""File in `static/` -> its type. uPlot 1.6.32 (MIT, `uplot.LICENSE`) is `dist/uPlot.iife.min.js`
and `dist/uPlot.min.css` of the npm package, unchanged."""

SCRIPTS = ("uplot.js", "curves.js", "page.js")
"""In the order in which they run."""

_MOST_ROWS = 200
"""Longer tables are cut, and say so."""

_MOST_LAYOUTS = 12


def render_page(record: RunRecord) -> str:
    """The frozen page as text."""
    scripts = [asset(name) for name in SCRIPTS]
    content = msgspec.json.encode(picture(view_of(record))).decode()
    # Nothing in a script element may look like its end.
    content = content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return render_template(
        "page.html.j2",
        frozen=True,
        title=f"{record.name}: {outcome(record)}",
        hashes=Markup(" ".join(_hash(script) for script in scripts)),
        style=Markup(asset("uplot.css") + asset("page.css")),
        data=Markup(content),
        scripts=[Markup(script) for script in scripts],
        **_tables(record),
    )


def render_live_page() -> str:
    """The live page, which asks the server that it came from for its runs."""
    return render_template("page.html.j2", frozen=False, title="Paceline", names=SCRIPTS)


def render_tables(record: RunRecord) -> str:
    """The part of a page below the events, as HTML: it changes little while a run goes on."""
    return render_template("tables.html.j2", **_tables(record))


@cache
def asset(name: str) -> str:
    """Text of one of `ASSETS`."""
    return (Path(__file__).parent / "static" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def render_template(template: str, **values: Any) -> str:
    """A page from its template in `templates/`. A name that the template lacks is an error."""
    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    return environment.get_template(template).render(values)


def _or_unknown(text: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: "unknown" if value is None else text(value)


_FILTERS = {
    "seconds": _or_unknown(format_seconds),
    "size": _or_unknown(format_bytes),
    "count": _or_unknown(format_count),
    "share": format_share,
    "phases": recovery_phases,
}


def _tables(record: RunRecord) -> dict[str, Any]:
    every, plan = parts(record), record.plan
    failures = [failure for _, failure in all_failures(every)]
    downtimes = [each.recovered.downtime_s for each in failures[:_MOST_ROWS] if each.recovered]

    def events(kind: type[log.AnyEvent]) -> list[Any]:
        return [event for event in record.events if isinstance(event, kind)]

    considered: list[tuple[Layout, Estimate, str]] = []
    if plan is not None:
        considered = [(plan.layout, plan.estimate, "")]
        considered += [(each.layout, each.estimate, each.why) for each in plan.rejected]
    return {
        "most": _MOST_ROWS,
        "outputs": record.outputs,
        "profile": list(profile_rows(record.profile)) if record.profile is not None else [],
        "advice": list(advice_lines(record.profile)) if record.profile is not None else [],
        "time": time_account(record),
        "groups": GROUPS,
        "num_parts": len(every),
        "memory": memory_section(record, every[-1].finished if every else None),
        "failures": failures,
        "longest_s": max(downtimes, default=0.0) or 1.0,
        "phases": {
            key: NAMES[key] for key in ("detect", "fence", "start", "restore", "first_step")
        },
        "refused": events(log.StepRefused),
        "passed_over": events(log.CheckpointRefused),
        "gpu_health": events(log.GpuHealth),
        "clock": RunningClock(every),
        "checkpoints": saves(record),
        "plan": plan,
        "layouts": considered[:_MOST_LAYOUTS],
        "widest": max((each.memory.known_bytes for _, each, _ in considered), default=0) or 1,
        "front": front_points(plan) if plan is not None else [],
        "job_text": without_nulls(record.job_text),
        "versions": _versions(record),
    }


def without_nulls(text: str) -> str:
    """A resolved job file without the fields that say nothing, and without sections left empty.

    >>> without_nulls("a: 1\\nb: null\\nc:\\n  d: null\\ne:\\n- 2\\n")
    'a: 1\\ne:\\n- 2\\n'
    """
    kept: list[str] = []
    for line in reversed(text.splitlines()):
        if re.fullmatch(r"\s*[\w.-]+: (null|\{\}|\[\])", line):
            continue
        if re.fullmatch(r"\s*[\w.-]+:", line) and not _opens(line, kept[-1:]):
            continue
        kept.append(line)
    return "\n".join(reversed(kept)) + "\n"


def _opens(line: str, following: list[str]) -> bool:
    """Whether the next line that was kept is inside the section that a line opens."""
    if not following:
        return False
    depth, next_depth = (len(each) - len(each.lstrip()) for each in (line, following[0]))
    return next_depth > depth or (next_depth == depth and following[0].lstrip().startswith("- "))


def _versions(record: RunRecord) -> list[str]:
    """`paceline 0.1.0`, `python 3.11.7` ...: each that a part of the run was made with."""
    started = [event for event in record.events if isinstance(event, log.RunStarted)]
    return list(
        dict.fromkeys(f"{name} {version}" for e in started for name, version in e.versions.items())
    )
