"""Findings as SARIF 2.1.0, which code hosts and editors show beside the lines."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from paceline import __version__
from paceline.catalog.failure import load_failures
from paceline.check.finding import Finding, Severity
from paceline.check.lint.judged import Unread

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_THREAD = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")


def sarif(
    findings: Sequence[Finding], answered: Sequence[Finding] = (), unread: Iterable[Unread] = ()
) -> dict[str, Any]:
    """The log of one run: its rules, each with help, and its results.

    Args:
        findings: What stands.
        answered: What a comment answers: kept as suppressed results.
        unread: Files that could not be read: notifications of the tool.
    """
    every = [*findings, *answered]
    ids = sorted({one.id for one in every})
    notes = [
        {
            "level": "error",
            "message": {"text": one.what},
            "locations": [{"physicalLocation": _place(one.path, one.line, None)}],
        }
        for one in unread
    ]
    results = [_result(one, ids) for one in findings]
    results += [_result(one, ids) | {"suppressions": [{"kind": "inSource"}]} for one in answered]
    rules = [_rule(name) for name in ids]
    run = {
        "tool": {
            "driver": {"name": "paceline lint", "version": __version__, "rules": rules},
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not notes, "toolExecutionNotifications": notes}],
        "results": results,
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(name: str) -> dict[str, Any]:
    failure = load_failures()[name]
    rule: dict[str, Any] = {
        "id": name,
        "shortDescription": {"text": failure.title},
        "fullDescription": {"text": failure.why},
        "help": {"text": f"{failure.why}\n\nFix: {failure.fix}"},
        "properties": {
            "tags": [failure.category, *failure.published],
            "published": list(failure.published),
        },
    }
    links = [link for link in map(_link, failure.sources) if link is not None]
    return rule | ({"helpUri": links[0]} if links else {})


def _link(source: str) -> str | None:
    """The page of a source: a thread of a repository, or an address as it stands."""
    thread = _THREAD.fullmatch(source)
    if thread is not None:
        return f"https://github.com/{thread[1]}/issues/{thread[2]}"
    return source if re.fullmatch(r"https?://[^\s]+", source) else None


def _result(finding: Finding, ids: Sequence[str]) -> dict[str, Any]:
    place = finding.where
    found: dict[str, Any] = {
        "ruleId": finding.id,
        "ruleIndex": ids.index(finding.id),
        "level": LEVELS[finding.severity],
        "message": {"text": f"{finding.what}. Fix: {finding.fix}"},
        "locations": [{"physicalLocation": _place(place.path, place.line, place.column)}],
    }
    related = [
        {
            "id": number,
            "message": {"text": one.text or "seen here"},
            "physicalLocation": _place(one.where.path, one.where.line, one.where.column),
        }
        for number, one in enumerate(finding.evidence)
    ]
    return found | ({"relatedLocations": related} if related else {})


def _place(path: str, line: int | None, column: int | None) -> dict[str, Any]:
    def escaped(sign: re.Match[str]) -> str:
        return "".join(f"%{byte:02X}" for byte in sign[0].encode())

    # A relative reference: what a URI may not hold stands as its bytes in percent signs.
    uri = re.sub(r"[^A-Za-z0-9_.~/-]", escaped, path.replace("\\", "/"))
    place: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if line is not None:
        place["region"] = {"startLine": max(line, 1)}
        place["region"] |= {"startColumn": max(column, 1)} if column is not None else {}
    return place
