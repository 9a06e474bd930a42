"""A diagnosis as JSON, and the refusal where nothing was read."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.check.diagnose.conclusion import MAX_SHOWN, Cause, Diagnosis
from paceline.errors import JobError


def check_read(diagnosis: Diagnosis, names: Sequence[str]) -> None:
    """
    Raises:
        JobError: `V011`, nothing was read of what these names mean.
    """
    nothing_read = diagnosis.num_sources and len(diagnosis.troubles) == diagnosis.num_sources
    says_something = diagnosis.causes or diagnosis.num_lines or not nothing_read
    if diagnosis.num_bytes and says_something:
        return
    why = diagnosis.troubles[0] if diagnosis.troubles else f"{' '.join(names)}: empty"
    raise JobError.of(
        code="V011",
        what=f"nothing was read: {why}",
        where=" ".join(names),
        fix="give a log with text in it, or whole dumps of all ranks; "
        "`... 2>&1 | paceline diagnose -` reads both outputs",
    )


def diagnosis_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """What `diagnose --json` prints."""
    return asdict(diagnosis) | {
        "causes": [_cause(each) for each in diagnosis.causes],
        "candidates": _candidates(diagnosis),
        "concluded": diagnosis.is_concluded,
    }


def _candidates(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """What the answer names, in order, and how surely: a look-alike is unsure."""
    named = [
        {"id": each.id, "certainty": str(each.confidence), "check": each.check}
        for each in diagnosis.causes
    ]
    named += [
        {"id": each.id, "certainty": "unsure", "check": None} for each in diagnosis.resembling
    ]
    return named[:MAX_SHOWN]


def _cause(cause: Cause) -> dict[str, Any]:
    failure = cause.failure
    return asdict(cause) | {
        "effect": str(failure.effect),
        "why": failure.why,
        "fix": cause.fix or failure.fix,
        "not_to_confuse": failure.not_to_confuse,
        "published": list(failure.published),
    }
