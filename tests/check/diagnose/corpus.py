"""The excerpts of tests/check/logs: real logs, shortened, and the cause their thread confirmed.

A case begins with `=== owner/repository#number | cause, or other right causes | tuned or held`.
Held cases were written down before ours ran on them, and no pattern was changed for them. The third
and later rounds were too, and were then looked at: all of them count as tuned, and
docs/benchmarks/checks.md keeps what their first runs scored.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from paceline.check.diagnose.conclusion import Diagnosis
from paceline.check.diagnose.diagnose import diagnose
from paceline.record.log_files import Log

LOGS = Path(__file__).parent.parent / "logs"


@dataclass(frozen=True)
class Case:
    """One excerpt."""

    source: str
    causes: tuple[str, ...]
    held: bool
    text: str


def cases() -> list[Case]:
    """All excerpts, in the order of the files."""
    found = []
    for path in sorted(LOGS.glob("*.txt")):
        for part in re.split(r"(?m)^=== ", path.read_text(encoding="utf-8"))[1:]:
            head, _, text = part.partition("\n")
            source, causes, kind = (each.strip() for each in head.split(" | "))
            names = tuple(each.strip() for each in causes.split(","))
            found.append(Case(source, names, kind == "held", text))
    return found


def diagnose_text(text: str) -> Diagnosis:
    """Diagnose one log."""
    return diagnose([Log(name="-", blocks=[text.encode()])])
