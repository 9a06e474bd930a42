"""A diagnosis for people: the root cause first, on one screen."""

import re
from collections.abc import Iterator
from textwrap import wrap

from paceline import units
from paceline.check.diagnose.candidate import YIELDS
from paceline.check.diagnose.conclusion import (
    MAX_SHOWN,
    Cause,
    Confidence,
    Consequence,
    Diagnosis,
)
from paceline.check.diagnose.line import read_line
from paceline.check.diagnose.messages import spans
from paceline.check.diagnose.unique import Events
from paceline.check.finding import Evidence
from paceline.report.table import text_width
from paceline.units import counted

_LEAST_QUOTED = 30
"""Characters of a quoted line that stand beside its place; with less room it goes below."""
_QUOTED = 2
"""Lines of the screen that a quoted line takes at most."""
_INDENT = 12
_WHOLE = {"repaired", "recovered", "script", "unset"}
"""Facts whose every part is an answer of its own."""
MAX_LINES = 25
"""Lines that a diagnosis takes: one screen of 80 x 25."""


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """The answer, top to bottom. Where a screen has no room for all of it, the last rows but one
    are left out: they say least of the cause."""
    rows: list[list[str]] = []
    for line in _lines(diagnosis):
        if line.startswith(" ") and rows:
            rows[-1].append(line)
        else:
            rows.append([line])
    while len(rows) > 2 and sum(map(len, rows)) > MAX_LINES:
        del rows[-2]
    for row in rows:
        yield from row


def brief_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """The cause and its fix, below a run that failed."""
    if not diagnosis.causes:
        yield from _row("cause", "unknown: nothing in the catalog explains this failure", 2)
        return
    cause = diagnosis.causes[0]
    yield from _row("cause", _first(diagnosis), 2)
    yield from _row("", cause.what, 3)
    if calls := diagnosis.facts.get("collectives"):
        yield from _row("collectives", calls, 4)
    if script := diagnosis.facts.get("script"):
        yield from _row("script", script, 4)
    yield from _row("fix", cause.fix or cause.failure.fix)


def event_lines(events: Events) -> Iterator[str]:
    """Each kind of line once: how often, on which ranks, and its first line."""
    yield f"{'times':>9}  {'ranks':<16}  first line"
    for event in events.kinds:
        ranks = spans(sorted(event.ranks)) if event.ranks else "-"
        yield f"{event.count:>9,}  {ranks:<16}  {event.first.message.strip()[:160]}"
    for trouble in events.troubles:
        yield f"not read: {trouble.removeprefix('not read: ')}"
    yield f"{events.num_lines:,} lines, {len(events.kinds):,} kinds" + (
        f"; {events.left_out:,} lines of further kinds are left out" if events.left_out else ""
    )


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.causes:
        yield from _cause(diagnosis)
    elif diagnosis.is_words:
        why = "these words match no known symptom; give the log: paceline diagnose FILE"
        yield from _row("unknown", why, 2)
    elif "drill" in diagnosis.facts:
        yield from _row("cause", f"the drill's own fault: {diagnosis.facts['drill']}", 6)
    elif diagnosis.has_failed:
        why = (
            "the run failed, and nothing in the catalog explains how"
            if diagnosis.num_lines
            else "what is here does not show why the run stopped"
        )
        yield from _row("cause", f"unknown: {why}", 2)
        for each in diagnosis.unknown:
            yield from _quote("see", each)
    elif diagnosis.open_end:
        why = f"{diagnosis.open_end}; no error line and no line of the run's end follows"
        yield from _row("unknown", why, 4)
        yield from _row("check", _HOW_IT_ENDED, 3)
    elif not diagnosis.facts.keys() & {"repaired", "recovered"}:
        yield from _row("nothing", "no sign of a failure in these logs", 2)
    if diagnosis.consequences:
        told = ", ".join(
            f"{each.id}" + (f" ({_lines_of(each, diagnosis)})" if each.count > 1 else "")
            for each in diagnosis.consequences
        )
        yield from _row("not causes", f"these follow from a failure: {told}", 2)
    if diagnosis.causes and not diagnosis.has_failed:
        ended = "these logs show no error that ended the run"
        end = f"; {diagnosis.open_end}" if diagnosis.open_end else ""
        yield from _row("note", f"{ended}{end}", 4)
    for note in diagnosis.notes:
        yield from _row("note", note, 2)
    for name, fact in diagnosis.facts.items():
        if name == "drill" and not diagnosis.causes:
            continue
        yield from _row(name, fact, 6 if name in _WHOLE else 2)
    explained = _explained(diagnosis) if diagnosis.causes else []
    others = [cause for cause in diagnosis.causes if cause not in explained]
    for number, cause in enumerate(others[1:MAX_SHOWN], start=2):
        told = f"{cause.failure.title}. Check: {cause.check}" if cause.check else cause.what
        most = 4 if cause.check else 2
        place = f"{number}. " if _is_one_of(diagnosis) else ""
        text = f"{place}{cause.failure.id} ({cause.confidence}): {told}"
        yield from _row("also", text, most)
    is_sure = diagnosis.causes and diagnosis.causes[0].confidence is Confidence.CERTAIN
    for like in () if is_sure else diagnosis.resembling:
        yield from _row(
            "looks like",
            f"{like.id}? Unsure: only the words of {_place(like.evidence)} are like it "
            f"({like.failure.title})",
            2,
        )
    for trouble in diagnosis.troubles[:2]:
        yield from _row("not read", trouble.removeprefix("not read: "), 4)
    if not diagnosis.is_words:
        yield from _row("read", _read(diagnosis), 2)


_HOW_IT_ENDED = (
    "does it still run? py-spy dump --pid PID of each rank shows where, and diagnose reads it; if "
    "it is gone, the scheduler's record says how it ended (sacct -j ID, kubectl describe pod)"
)


def _first(diagnosis: Diagnosis) -> str:
    """The cause; behind what is certain, where it is the likely reason for that."""
    cause = diagnosis.causes[0]
    certain = " and ".join(each.title for each in _explained(diagnosis))
    if certain:
        return f"{certain} (certain); {cause.confidence} reason: {cause.title}"
    return f"{cause.failure.id}: {cause.title} ({cause.confidence})"


def _explained(diagnosis: Diagnosis) -> list[Cause]:
    """Causes that are certain and that the first, which is not, would explain."""
    first, *others = diagnosis.causes
    sure = [each for each in others if each.confidence is Confidence.CERTAIN]
    is_sure = first.confidence is Confidence.CERTAIN
    return [each for each in sure if first.id in YIELDS.get(each.id, ()) and not is_sure]


def _is_one_of(diagnosis: Diagnosis) -> bool:
    """Whether the first cause is only the likeliest of several: then they are numbered."""
    return diagnosis.causes[0].confidence is Confidence.POSSIBLE and len(diagnosis.causes) > 1


def _cause(diagnosis: Diagnosis) -> Iterator[str]:
    cause = diagnosis.causes[0]
    failure = cause.failure
    yield from _row("cause", f"{'1. ' * _is_one_of(diagnosis)}{_first(diagnosis)}", 2)
    if not cause.what.endswith(failure.title):
        yield from _row("symptom" if diagnosis.is_words else "", cause.what, 3)
    if cause.check:
        yield from _row("check", cause.check, 2)
    where = []
    if cause.rank is not None:
        where.append(f"rank {cause.rank}")
    if cause.host is not None:
        where.append(f"host {cause.host}")
    if where or cause.place:
        told = " on ".join(where)
        if others := sorted(set(cause.ranks) - {cause.rank}):
            told += f" first; also ranks {spans(others)}"
        place = f"{', ' if told else ''}{cause.place}" if cause.place else ""
        yield from _row("where", f"{told}{place}", 2)
    for each in () if diagnosis.is_words else cause.evidence[:3]:
        yield from _quote("evidence", each)
    yield from _row("why", failure.why)
    yield from _row("fix", cause.fix or failure.fix)
    yield from _row("more", f"paceline explain {failure.id}", 1)


def _quote(name: str, each: Evidence) -> Iterator[str]:
    """A line of a log behind its place, which stays whole however long its path is."""
    head = f"{name.ljust(_INDENT)}{_place(each)}: "
    if len(head) > text_width() - _LEAST_QUOTED:
        yield head.rstrip()
        head = ""
    text = each.text
    if len(_wrap(head, text, is_quote=True)) > _QUOTED:  # the message, rather than who wrote it
        text = read_line(text, source=each.where.path, number=each.where.line or 0).message
    yield from _row(head, text, _QUOTED, is_quote=True)


def _place(each: Evidence) -> str:
    where = each.where
    return f"{where.path}:{where.line}" if where.line else where.path


def _row(name: str, text: str, most: int = MAX_LINES, *, is_quote: bool = False) -> Iterator[str]:
    """A name and a text behind it, of at most so many lines or one sentence. A quote keeps its
    spaces, to be searched for in the log, and is cut."""
    lines = _wrap(name, text, is_quote=is_quote)
    if len(lines) > most and is_quote:
        lines = lines[:most]
        lines[-1] = lines[-1][: text_width() - 4] + " ..."
    sentences = _SENTENCE_END.split(text)
    while len(lines) > most and len(sentences) > 1:
        del sentences[-1]
        lines = _wrap(name, " ".join(sentences).removesuffix(";"), is_quote=False)
    yield from (line.rstrip() for line in lines)


_SENTENCE_END = re.compile(r"(?<=[.;]) (?=[A-Z])")


def _wrap(name: str, text: str, *, is_quote: bool) -> list[str]:
    return wrap(
        text,
        text_width(),
        initial_indent=name.ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
        break_long_words=is_quote,
        drop_whitespace=not is_quote,
        replace_whitespace=not is_quote,
        expand_tabs=not is_quote,
    )


def _lines_of(each: Consequence, diagnosis: Diagnosis) -> str:
    """Past a number of lines a pattern is no longer looked for."""
    return f"{'at least ' if each.id in diagnosis.saturated else ''}{each.count} lines"


def _read(diagnosis: Diagnosis) -> str:
    parts = [
        counted(diagnosis.num_sources, "log"),
        counted(diagnosis.num_lines, "line"),
        units.format_bytes(diagnosis.num_bytes),
    ]
    if diagnosis.num_ranks and diagnosis.only_rank is None:
        parts.append(f"ranks up to {diagnosis.num_ranks - 1}")
    text = ", ".join(parts)
    if diagnosis.saturated:
        text += f"; too frequent to count: {', '.join(diagnosis.saturated[:3])}"
    if diagnosis.only_rank is not None:
        text += f"; only rank {diagnosis.only_rank} writes in it"
        if not (diagnosis.causes and diagnosis.causes[0].confidence is Confidence.CERTAIN):
            text += ": if there are other ranks, give their logs too (paceline diagnose LOG LOG)"
    return text
