"""What `paceline doctor` found, for people: the verdict, then a line for each check."""

from collections.abc import Iterator, Sequence

from paceline.check.preflight.result import Result, Status
from paceline.report.table import wrapped
from paceline.units import counted

_WORDS = {
    Status.PASS: "ok",
    Status.WARNING: "warning",
    Status.FAIL: "fails",
    Status.UNKNOWN: "unknown",
}


def format_doctor(results: Sequence[Result]) -> Iterator[str]:
    """Lines for a terminal, in the order of the results."""
    count = {status: sum(each.status is status for each in results) for status in Status}
    verdict = "This machine is fit to train" if not count[Status.FAIL] else "Not ready to train"
    yield (
        f"{verdict}: {counted(count[Status.FAIL], 'check')} failed, "
        f"{counted(count[Status.WARNING], 'warning')}, {count[Status.PASS]} ok"
        + (f", {count[Status.UNKNOWN]} unknown" if count[Status.UNKNOWN] else "")
    )
    yield ""
    names = max(len(each.name) for each in results)
    for each in results:
        head = f"{_WORDS[each.status]:<8} {each.name:<{names}}  "
        id = f"  [{each.id}]" if each.id is not None else ""
        yield from wrapped(head, each.evidence + id)
        if each.fix:
            yield from wrapped(" " * len(head) + "fix: ", each.fix, indent=len(head) + 5)
