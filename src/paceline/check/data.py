"""What a survey of data means for training: one finding for each thing that is wrong, by check.

A check fails where more than its limit of the rows has it; below it is a warning. Leaves out: what
is in the data (`prepare/survey.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.catalog.failure import load_failures
from paceline.check.finding import Finding, Place, Severity, finding_data
from paceline.prepare.quality_report import QualityReport
from paceline.prepare.survey import Seen, Survey
from paceline.units import counted


class _Check(NamedTuple):
    """How one thing is judged."""

    what: str
    """The sentence, with places for `detail`, `count`, `of`, `share`, and verbs of the count."""

    limit: float | None
    """Share of the rows above which it is an error; None: never."""


CHECKS: Mapping[str, _Check] = {
    "broken-files": _Check("{detail}", 0),
    "empty-files": _Check("{files} without a row", None),
    # data.broken_rows: what `data prepare` takes.
    "broken-rows": _Check("{count} of {of} cannot be read ({share}): {detail}", 0.01),
    # `data prepare` refuses a source with more.
    "empty-rows": _Check("{count} of {of} {are} empty ({share}): {detail}", 0.5),
    "schema": _Check("{count} of {of} break{s} the schema ({share}): {detail}", 0),
    "nulls": _Check("column `{detail}` is null or empty in {count} of {of} ({share})", None),
    "columns": _Check("column `{detail}` is missing in {count} of {of} ({share})", None),
    "mixed-types": _Check("column {detail}", None),
    "exact-duplicates": _Check("{count} of {of} repeat{s} the text of another ({share})", None),
    "near-duplicates": _Check("{count} of {of} {are} nearly the text of another ({share})", None),
    "label-conflicts": _Check(
        "{count} of {of} {have} the text of another, and another label", None
    ),
    "leakage": _Check("{detail}", 0),
    "too-long": _Check("{detail}", None),
    "imbalance": _Check("{detail}", None),
    "unknown-labels": _Check("{count} of {of} {have} a label that the job does not name", 0),
    "secrets": _Check("{count} of {of} hold{s} {detail}", 0),
    "personal": _Check("{count} of {of} hold{s} {detail} ({share})", None),
    "text-quality": _Check("{count} of {of}: {detail} ({share})", None),
    "gates": _Check("{detail}", 0),
}
"""Check, which `--limit` takes -> how it is judged. Its failure is `data-CHECK` in the catalog."""

_TOGETHER = ("broken-rows", "empty-rows")
"""Checks whose limit is of all reasons together: a row has one of them."""

_IMBALANCE = 10.0
"""Rows of the most frequent class for one of the rarest, above which it is said (a guess)."""

_MOST_OF_A_CHECK = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheck:
    """The verdict."""

    findings: tuple[Finding, ...]
    hidden: int
    """Findings of the same checks that are not listed."""

    @property
    def errors(self) -> int:
        """How many of them fail the check."""
        return sum(each.severity is Severity.ERROR for each in self.findings)


def judge_data(
    survey: Survey,
    *,
    limits: Mapping[str, float] | None = None,
    labels: Sequence[str] = (),
    seq_len: int | None = None,
    windows: bool = False,
    refuses_long: bool = False,
    quality: QualityReport | None = None,
    path: str,
) -> DataCheck:
    """What is wrong, errors first.

    Args:
        limits: Check -> share of the rows that may have it, instead of its own.
        labels: Classes that the job names; empty: any.
        seq_len: Tokens of a sample.
        windows: Documents are joined, so that none is too long.
        refuses_long: The job refuses longer documents.
        quality: Another program's report.
        path: Where something is that no file shows.
    """
    own = {name: check.limit for name, check in CHECKS.items()} | dict(limits or {})
    if refuses_long and "too-long" not in (limits or {}):
        own["too-long"] = 0.0
    found: list[Finding] = []
    hidden = 0
    rows = survey.rows + survey.eval_rows
    if rows == 0:
        own["empty-files"] = 0.0  # nothing to train on at all
    for check, details in (
        *_of_rows(survey, seq_len, windows),
        *_of_classes(survey, labels, path),
        *_of_similar(survey),
    ):
        listed = sorted(details.items(), key=lambda each: -each[1].count)
        hidden += len(listed[_MOST_OF_A_CHECK:])
        whole = sum(seen.count for seen in details.values())
        total = max(rows + (whole if check == "broken-rows" else 0), 1)
        limit = own[check]
        for detail, seen in listed[:_MOST_OF_A_CHECK]:
            count = whole if check in _TOGETHER else seen.count
            is_error = limit is not None and count / total > limit
            found.append(_finding(check, detail, seen, total, is_error=is_error, path=path))
    if quality is not None:
        found += _of_report(quality, rows, own["gates"])
    order = list(Severity)
    return DataCheck(
        findings=tuple(sorted(found, key=lambda each: order.index(each.severity))), hidden=hidden
    )


def check_data_as_json(verdict: DataCheck) -> list[dict[str, Any]]:
    """The findings as `--json` prints them."""
    return [finding_data(each) for each in verdict.findings]


_Details = tuple[str, Mapping[str, Seen]]


def _of_rows(survey: Survey, seq_len: int | None, windows: bool) -> Iterator[_Details]:
    for check, details in survey.seen.items():
        if check != "too-long":
            yield check, details
        elif not windows:
            seen = details["rows"]
            longest = max(survey.lengths, default=0)
            are = "is" if seen.count == 1 else "are"
            said = f"{counted(seen.count, 'document')} {are} longer than a sample of "
            said += f"{seq_len:,} tokens; the "
            yield check, {f"{said}longest has {longest:,}": seen}
    mixed = {}
    for name, kinds in survey.columns.items():
        if len({"number" if kind in ("int", "float") else kind for kind in kinds}) > 1:
            counts = " and ".join(f"{seen.count:,} x {kind}" for kind, seen in kinds.items())
            mixed[f"`{name}` holds {counts}"] = min(kinds.values(), key=lambda seen: seen.count)
    yield "mixed-types", mixed


def _of_classes(survey: Survey, labels: Sequence[str], path: str) -> Iterator[_Details]:
    classes = survey.classes
    if not classes:
        return
    if labels:
        known = {*labels, *map(str, range(len(labels)))}
        if unknown := sum(count for name, count in classes.items() if name not in known):
            yield "unknown-labels", {"": Seen(unknown)}
    ratio = imbalance_of(classes)
    if len(classes) > 1 and ratio is not None and ratio > _IMBALANCE:
        (most, many), *_, (least, few) = classes.items()
        said = f"{most} has {counted(many, 'row')} and {least} has {few:,}: {ratio:.1f} to 1"
        yield "imbalance", {f"of column `{survey.label}`, {said}": Seen(few, [(path, 0)])}


def imbalance_of(classes: Mapping[str, int] | None) -> float | None:
    """Rows of the most frequent class for one of the rarest; None without classes."""
    return max(classes.values()) / min(classes.values()) if classes else None


def _of_similar(survey: Survey) -> Iterator[_Details]:
    similar = survey.similar
    plain = (("exact-duplicates", "exact"), ("near-duplicates", "near"))
    for check, kind in (*plain, ("label-conflicts", "conflicts")):
        if count := getattr(similar, kind):
            yield check, {"": _pairs_seen(survey, kind, count)}
    leaks = {}
    for kind, word in (("leaked_exact", "exactly"), ("leaked_near", "nearly")):
        if count := getattr(similar, kind):
            of = counted(survey.eval_rows, "evaluation row")
            said = f"{count:,} of {of} {'is' if count == 1 else 'are'} {word} rows that are "
            leaks[f"{said}trained on"] = _pairs_seen(survey, kind, count)
    if leaks:
        yield "leakage", leaks


def _pairs_seen(survey: Survey, kind: str, count: int) -> Seen:
    return Seen(count, [pair[:2] for pair in survey.pairs.get(kind, ())])


def _finding(
    check: str, detail: str, seen: Seen, rows: int, *, is_error: bool, path: str
) -> Finding:
    is_one = seen.count == 1
    what = CHECKS[check].what.format(
        detail=detail,
        count=f"{seen.count:,}",
        of=counted(rows, "row"),
        are="is" if is_one else "are",
        have="has" if is_one else "have",
        s="s" if is_one else "",
        share=f"{seen.count / rows:.2%}",
        files=counted(seen.count, "file"),
    )
    others = [f"{file}:{number}" for file, number in seen.places[1:]]
    file, line = seen.places[0] if seen.places else (path, 0)
    return Finding(
        id=f"data-{check}",
        severity=Severity.ERROR if is_error else Severity.WARNING,
        where=Place(path=file, line=line or None),
        what=what + (f"; also {', '.join(others)}" if others else ""),
        fix=" ".join(load_failures()[f"data-{check}"].fix.split()),
    )


def _of_report(quality: QualityReport, rows: int, limit: float | None) -> Iterator[Finding]:
    """The gates that were not kept, and whether the report is of these data."""
    fix = " ".join(load_failures()["data-gates"].fix.split())
    where = Place(path=quality.path)
    for gate in quality.gates:
        if not gate.is_kept:
            is_error = gate.severity == "error" and limit is not None and limit < 1
            yield Finding(
                id="data-gates",
                severity=Severity.ERROR if is_error else Severity.WARNING,
                where=where,
                what=f"{quality.program}: {gate.name} is not kept"
                + (f" ({gate.seen})" if gate.seen else ""),
                fix=fix,
            )
    if quality.rows is not None and quality.rows != rows:
        yield Finding(
            id="data-gates",
            severity=Severity.WARNING,
            where=where,
            what=f"{quality.program} looked at {counted(quality.rows, 'row')}, "
            f"and the data have {rows:,}",
            fix="make the report again from these files",
        )
