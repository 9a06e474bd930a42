"""What another program concluded about the data, and the gates that it held them against.

Read are the results of Great Expectations (a validation result or a checkpoint's), Soda, pandera
and whylogs, as JSON, and a plain form for any other program:

    {"rows": 1000, "gates": [{"name": "null ids", "value": 3, "max": 0, "severity": "error"}]}

Leaves out: judging again. What the program called a failure is one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One thing that the data were held against."""

    name: str
    is_kept: bool
    severity: str = "error"
    seen: str = ""
    rows: int | None = None
    """That the program looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReport:
    """A report that was read."""

    path: str
    program: str
    gates: tuple[Gate, ...]
    rows: int | None = None
    """That the program looked at; None where it does not say."""


def read_quality_report(path: Path) -> QualityReport:
    """The report in a JSON file.

    Raises:
        JobError: D022, it cannot be read, is of no known form, or holds no gate.
    """
    try:
        data = msgspec.json.decode(path.read_bytes())
        known = next(((name, gates) for name, is_one, gates in _FORMS if is_one(data)), None)
        if known is None:
            raise ValueError("it has none of the forms that are known")
        program, gates = known[0], tuple(known[1](data))
        if not gates:
            raise ValueError(f"it is {program}'s, and holds no result")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or f"{error}"
        if isinstance(error, TypeError | KeyError | AttributeError):
            reason = f"a part of it is not as its form has it ({type(error).__name__}: {error})"
        raise JobError.of(
            code="D022",
            what=f"{path} is no data-quality report that can be read: {reason}",
            where="--quality-report",
            fix="give the JSON of Great Expectations, Soda, pandera or whylogs, or "
            '{"gates": [{"name": "null ids", "value": 3, "max": 0}]}',
        ) from None
    said = data.get("rows") if isinstance(data, dict) else None
    counts = [gate.rows for gate in gates if gate.rows is not None]
    rows = said if isinstance(said, int) else max(counts, default=None)
    return QualityReport(path=str(path), program=program, gates=gates, rows=rows)


def _great_expectations(data: Mapping[str, Any]) -> Iterator[Gate]:
    """A validation result, or each of a checkpoint's (`run_results`)."""
    for inner in data.get("run_results", {}).values():
        yield from _great_expectations(inner.get("validation_result", inner))
    for each in data.get("results", ()):
        asked = each["expectation_config"]
        given, result = asked.get("kwargs", {}), each.get("result") or {}
        kind = asked.get("type") or asked["expectation_type"]
        column = given.get("column") or ", ".join(given.get("column_list", ()))
        raised = (each.get("exception_info") or {}).get("exception_message")
        seen = [f"observed {result['observed_value']}"] if "observed_value" in result else []
        if "unexpected_count" in result:
            percent = result.get("unexpected_percent")
            of = f" ({percent:.3g} %)" if isinstance(percent, int | float) else ""
            seen.append(f"{result['unexpected_count']} unexpected{of}")
        if raised:
            seen.append(f"it raised {raised}")
        yield Gate(
            name=f"{kind} of {column}" if column else kind,
            is_kept=_truth(each["success"]),
            severity=_severity(asked.get("severity")),
            seen="; ".join(seen),
            rows=result.get("element_count"),
        )


def _soda(data: Mapping[str, Any]) -> Iterator[Gate]:
    """docs.soda.io: the results of a scan."""
    for check in data["checks"]:
        outcome = check["outcome"]  # pass, warn, fail, or None: not evaluated
        yield Gate(
            name=check.get("name") or check.get("definition") or "a check without a name",
            is_kept=outcome == "pass",
            severity="warning" if outcome == "warn" else "error",
            seen=f"outcome {outcome or 'not evaluated'}",
        )


def _pandera(data: Mapping[str, Any]) -> Iterator[Gate]:
    """pandera's SchemaErrors as JSON: it lists failures alone."""
    for kinds in data.values():
        for kind, failures in kinds.items():
            for each in failures:
                name = f"{each.get('column') or each.get('schema')}: {each.get('check') or kind}"
                yield Gate(name=name, is_kept=False, seen=str(each.get("error", kind)))


def _whylogs(data: list[Any]) -> Iterator[Gate]:
    """whylogs' constraints report: [name, passed, failed], or the same with names."""
    for each in data:
        name, passed, failed = (
            (each[0], each[1], each[2])
            if isinstance(each, list)
            else (each["name"], each["passed"], each["failed"])
        )
        yield Gate(name=name, is_kept=not failed, seen=f"{passed} passed, {failed} failed")


def _plain(data: Mapping[str, Any]) -> Iterator[Gate]:
    for gate in data["gates"]:
        unknown = gate.keys() - {"name", "value", "min", "max", "passed", "severity"}
        if unknown:
            raise ValueError(f"gate {gate.get('name')} has an unknown key {sorted(unknown)[0]}")
        low, high, value = (gate.get(key) for key in ("min", "max", "value"))
        if "passed" in gate:
            is_kept = _truth(gate["passed"])
        elif value is None or low is high is None:
            raise ValueError(f"gate {gate['name']} has neither `passed` nor a value with a limit")
        else:
            is_kept = (low is None or value >= low) and (high is None or value <= high)
        limits = [f"{key} {gate[key]}" for key in ("min", "max") if gate.get(key) is not None]
        seen = ", ".join([*([f"value {value}"] if value is not None else []), *limits])
        yield Gate(
            name=gate["name"], is_kept=is_kept, severity=_severity(gate.get("severity")), seen=seen
        )


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} stands where true or false has to")


def _severity(word: str | None) -> str:
    words = {"critical": "error", None: "error"}
    found = words.get(word, word)
    if found in ("error", "warning", "info"):
        return str(found)
    raise ValueError(f"severity {word} is none of critical, error, warning, info")


def _is_great_expectations(data: Any) -> bool:
    if not _has("run_results", "results")(data):
        return False
    results = data.get("results")  # dbt's, for one, are of another form
    return not results or (isinstance(results, list) and "success" in results[0])


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda data: isinstance(data, dict) and any(key in data for key in keys)


_FORMS: tuple[tuple[str, Callable[[Any], bool], Callable[[Any], Iterator[Gate]]], ...] = (
    ("Great Expectations", _is_great_expectations, _great_expectations),
    ("Soda", _has("checks"), _soda),
    ("pandera", _has("SCHEMA", "DATA"), _pandera),
    ("whylogs", lambda data: isinstance(data, list), _whylogs),
    ("the plain form", _has("gates"), _plain),
)
"""Program, whether a report is its, and the gates of one."""
