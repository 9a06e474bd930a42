"""What a soak has verified: `soak.jsonl` in the folder of its runs, one line a schedule."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "soak.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakLine:
    """One schedule's line."""

    seed: int
    passed: bool
    faults: tuple[str, ...]
    """With steps from 1, as in a run of their own."""

    happened: int
    """Faults that did; one that waits for a recovery may find none."""

    recoveries: int
    longest_s: float | None
    """The longest downtime."""

    steps_lost: int
    says: str
    run: str


def append_soak_line(ledger: Path, line: SoakLine) -> None:
    """Keep what was just verified."""
    with ledger.open("a") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def read_passed(ledger: Path) -> dict[int, SoakLine]:
    """Schedules that an earlier soak has verified, by seed; failed ones are tried again."""
    if not ledger.exists():
        return {}
    texts = [text for text in ledger.read_text().splitlines() if text.strip()]
    lines = [SoakLine(**json.loads(text)) for text in texts]
    return {line.seed: line for line in lines if line.passed}
