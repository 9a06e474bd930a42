"""A verification for people: one line for each thing that was looked at."""

from collections.abc import Iterator

from paceline.check.verify.judge import Verdict
from paceline.check.verify.line import Line
from paceline.record.verification import Facts
from paceline.report.table import wrapped


def verdict_lines(verdict: Verdict, facts: Facts) -> Iterator[str]:
    """The whole answer, top to bottom."""
    case = facts.case
    kind = "ranks" if case.device == "cpu" else "GPUs"
    yield (
        f"verify      {case.layout.name} on {case.layout.num_ranks} {case.device} {kind} against "
        f"one device, {case.steps} steps, float64 and {case.precision}"
    )
    for note in verdict.notes:
        yield from wrapped("note        ", note)
    yield ""
    width = max(len(line.name) for line in verdict.lines)
    for line in verdict.lines:
        yield from _line(line, width)
    yield ""
    counts = dict.fromkeys(("pass", "fail", "skip"), 0)
    for line in verdict.lines:
        counts[line.status] += 1
    told = f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped"
    if verdict.is_right:
        yield f"right       {told}: the layout computes what one device computes"
    else:
        yield f"wrong       {told}"


def _line(line: Line, width: int) -> Iterator[str]:
    numbers = ""
    if line.seen is not None and line.allowed is not None:
        numbers = f"  {_number(line.seen)} (limit {_number(line.allowed)})"
    head = f"{line.status.upper()}  {line.name.ljust(width)}"
    yield from wrapped(f"{head}{numbers}  ", line.what, indent=len(head) + 2)
    for name in ("where", "why", "fix"):
        text = getattr(line, name)
        if text is not None and line.status == "fail":
            yield from wrapped(f"      {name}: ", text, indent=12)


def _number(value: float) -> str:
    """Bytes whole, shares with two digits."""
    if value >= 1e3 and value == int(value):
        return f"{int(value):,}"
    return f"{value:.2g}"
