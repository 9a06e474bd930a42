"""What a code of ours means: a finding, a symptom, a harmless line, a refusal, a topic, a guide.

Leaves out how it is printed (`cli/explain.py`).
"""

import difflib
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from paceline.catalog.code import Code, load_codes, load_guides
from paceline.catalog.failure import (
    BenignLine,
    Failure,
    failures_named,
    load_benign_lines,
    load_failures,
)
from paceline.catalog.symptom import Symptom, load_symptoms
from paceline.check.preflight.preflight import check_names
from paceline.errors import JobError

_MOST_NEAR = 3
"""Codes that are named where none is called so."""

Entry = Code | Failure | BenignLine | Symptom


def explain(name: str) -> tuple[Entry, ...]:
    """Everything that is called so, by id, published name or code.

    Raises:
        JobError: `T020`, nothing is; with what is written alike.
    """
    code = load_codes().get(name.upper()) or load_codes().get(name.lower())
    code = code or load_guides().get(name.lower())
    if code is not None:
        return (code,)
    harmless = tuple(line for line in load_benign_lines() if line.id == name.upper())
    found = harmless or failures_named(name)
    shown = load_symptoms().get(name.lower())
    if found or shown:
        return (*found, *([shown] if shown else []))
    begun = [each for each in load_codes().values() if each.code.startswith(f"{name.lower()}-")]
    if len(begun) == 1:  # `memory` is memory-by-size
        return tuple(begun)
    near = _near(name)
    what = f"no code is called {name!r}"
    if name in check_names():
        what = (
            f"{name} is a check of `paceline preflight`; the code of what it found is in brackets"
        )
    raise JobError.of(
        code="T020",
        what=what,
        where=f"paceline explain {name}",
        fix=f"did you mean {' or '.join(near)}?" if near else "`paceline explain --list` has all",
    )


def _near(name: str) -> list[str]:
    """Codes that are written alike, and those whose name or title has all of its words."""
    known = titles()
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    named = [
        code
        for code, title in known.items()
        if words and all(word in f"{code} {title}".lower() for word in words)
    ]
    close = difflib.get_close_matches(name, known, n=_MOST_NEAR)
    return list(dict.fromkeys([*named, *close]))[:_MOST_NEAR]


def titles() -> Mapping[str, str]:
    """Every code, id and published name with its title."""
    known = {failure.id: failure.title for failure in load_failures().values()}
    for failure in load_failures().values():
        for name in failure.published:
            known.setdefault(name, f"{failure.title} ({failure.id})")
    for symptom in load_symptoms().values():
        known.setdefault(symptom.id, f"symptom: {symptom.title}")
    known |= {line.id: f"harmless: {line.why}" for line in load_benign_lines()}
    known |= {name: guide.text.partition("\n")[0] for name, guide in load_guides().items()}
    return known | {
        code.code: textwrap.shorten(code.title, 90, placeholder=" ...")
        for code in load_codes().values()
    }


def entry_data(entry: Entry) -> dict[str, Any]:
    """What is known of it, under the name `code` whichever it is."""
    if isinstance(entry, Symptom):
        causes = [{"id": each.id, "check": each.check} for each in entry.causes]
        return {
            "code": entry.id,
            "title": entry.title,
            "of": sorted(entry.of),
            "causes": causes,
            "sources": entry.sources,
        }
    found = asdict(entry)
    return found if isinstance(entry, Code) else {"code": found.pop("id")} | found
