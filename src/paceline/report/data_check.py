"""A check of data for people: as text, as JSON and as a page."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from markupsafe import Markup

from paceline.check.data import DataCheck, check_data_as_json, imbalance_of
from paceline.prepare.quality_report import QualityReport
from paceline.prepare.survey import Asked, Survey
from paceline.report.page import asset, render_template
from paceline.report.table import wrapped
from paceline.units import counted, format_bytes

_MOST_SHOWN = 8
"""Classes that are listed."""


def data_check_json(
    asked: Asked,
    survey: Survey,
    verdict: DataCheck,
    quality: QualityReport | None,
    *,
    seconds: float,
) -> dict[str, Any]:
    """What `--json` prints, which the text and the page are made from."""
    similar = survey.similar
    return {
        "files": list(asked.files),
        "eval_files": list(asked.eval_files),
        "bytes": survey.num_bytes,
        "seconds": seconds,
        "rows": survey.rows,
        "eval_rows": survey.eval_rows,
        "blank_lines": survey.blank_lines,
        "compared": list(survey.compared),
        "columns": _columns(survey),
        "lengths": _lengths(survey.lengths, asked.seq_len),
        "label": survey.label,
        "classes": survey.classes,
        "imbalance": imbalance_of(survey.classes),
        "duplicates": {
            "exact": similar.exact,
            "near": None if asked.near is None else similar.near,
            "similarity": asked.near,
            "not_compared": similar.not_compared,
            "short": similar.short,
            "short_words": similar.short_words,
            "pairs": {
                kind: [
                    {"row": f"{file}:{row}", "like": f"{other}:{at}", "similarity": alike}
                    for file, row, other, at, alike in pairs
                ]
                for kind, pairs in survey.pairs.items()
                if pairs
            },
        },
        "quality_report": None if quality is None else asdict(quality),
        "errors": verdict.errors,
        "findings": check_data_as_json(verdict),
        "findings_not_listed": verdict.hidden,
    }


def _columns(survey: Survey) -> dict[str, dict[str, int]]:
    nulls = survey.seen.get("nulls", {})
    return {
        name: {kind: seen.count for kind, seen in survey.columns.get(name, {}).items()}
        | ({"null": nulls[name].count} if name in nulls else {})
        for name in dict.fromkeys([*survey.columns, *nulls])
    }


def _lengths(lengths: Counter[int], seq_len: int | None) -> dict[str, Any] | None:
    """Quantiles of the tokens of a document, and how many are longer than a sample."""
    if not lengths:
        return None
    total, rest = sum(lengths.values()), 0
    quantiles: dict[float, int] = {}
    for length in sorted(lengths):
        rest += lengths[length]
        for share in (0.5, 0.95, 0.99):
            if rest >= share * total:
                quantiles.setdefault(share, length)
    return {
        "tokens": sum(length * count for length, count in lengths.items()),
        "shortest": min(lengths),
        "median": quantiles[0.5],
        "p95": quantiles[0.95],
        "p99": quantiles[0.99],
        "longest": max(lengths),
        "seq_len": seq_len,
    }


def format_data_check(data: Mapping[str, Any]) -> Iterator[str]:
    """Lines for a terminal: what was read, then what is wrong, errors first."""
    yield from (f"{label:<12}{text}" for label, text in summary_of(data))
    said = None
    for finding, following in zip_longest(data["findings"], data["findings"][1:]):
        place = finding["where"]
        line = f":{place['line']}" if place["line"] else ""
        text = f"{place['path']}{line}: {finding['what']}"
        if finding["fix"] != said:
            yield ""
        yield from wrapped(f"{finding['severity']}: {finding['id']}: ", text, indent=2)
        said = finding["fix"]
        if following is None or following["fix"] != said:
            yield from wrapped("  fix: ", said)
    warnings = len(data["findings"]) - data["errors"]
    more = data["findings_not_listed"]
    yield ""
    yield (
        f"{counted(data['errors'], 'error')}, {counted(warnings, 'warning')}"
        + (f"; {more} more of the same checks" if more else "")
    )


def summary_of(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What was read, by label."""
    rate = data["bytes"] / max(data["seconds"], 1e-9)
    evals = f", {counted(data['eval_rows'], 'evaluation row')}" if data["eval_files"] else ""
    num_files = len(data["files"]) + len(data["eval_files"])
    blank = f", {counted(data['blank_lines'], 'blank line')} left out" * bool(data["blank_lines"])
    read = f"{counted(num_files, 'file')}, {counted(data['rows'], 'row')}{evals}{blank}, "
    read += f"{format_bytes(data['bytes'])} in {data['seconds']:.1f} s ({rate / 1e6:.1f} MB/s)"
    yield "read", read
    yield "compared", ", ".join(data["compared"]) or "all columns"
    if (lengths := data["lengths"]) is not None:
        text = f"{lengths['tokens']:,}; a document: median {lengths['median']:,}, 95 % up to "
        text += f"{lengths['p95']:,}, longest {lengths['longest']:,}"
        sample = f"; a sample has {lengths['seq_len']:,}" if lengths["seq_len"] else ""
        yield "tokens", text + sample
    if data["classes"]:
        shown = [f"{name} {count:,}" for name, count in data["classes"].items()][:_MOST_SHOWN]
        more = len(data["classes"]) - len(shown)
        text = ", ".join(shown) + (f" and {more} more" if more else "")
        yield "classes", f"{text}; imbalance {data['imbalance']:.1f} to 1"
    found, near = data["duplicates"], "near ones not looked for"
    if found["near"] is not None:
        near = f"{found['near']:,} near (Jaccard similarity {found['similarity']:g} and more, "
        near += "estimated)"
        if found["short"]:
            near += (
                f"; {counted(found['short'], 'row')} under {found['short_words']} words "
                "compared exactly"
            )
    yield "duplicates", f"{found['exact']:,} exact, {near}"
    if (quality := data["quality_report"]) is not None:
        kept = sum(gate["is_kept"] for gate in quality["gates"])
        yield "gates", f"{kept} of {len(quality['gates'])} kept ({quality['program']})"


def render_data_page(data: Mapping[str, Any]) -> str:
    """The whole page as text."""
    return render_template(
        "data.html.j2",
        style=Markup(asset("page.css")),
        summary=list(summary_of(data)),
        **data,
    )
