"""How often `paceline diagnose` names the right cause first, on excerpts of real threads.

    python benchmarks/diagnose_accuracy.py [--json]

Two measurements, each by source, with n:

- threads: tests/check/logs, shortened logs of threads whose cause was confirmed, none of them a
  source of the catalog. `held` were written down before ours ran on them; `tuned` may have shaped
  a pattern.
- examples: the lines that the catalog shows. The patterns were made from them, so this says only
  that no failure takes another's line; it is no estimate for unseen logs. To leave out a source's
  lines would change nothing: a pattern is not made from lines automatically.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.catalog.failure import load_failures
from paceline.check.diagnose.diagnose import diagnose
from paceline.record.log_files import Log

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.check.diagnose.corpus import cases

    found = cases()
    rows = {
        "threads, held": _measure((c.source, c.causes, c.text) for c in found if c.held),
        "threads, tuned": _measure((c.source, c.causes, c.text) for c in found if not c.held),
        "examples of the catalog": _measure(_examples()),
    }
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    for name, row in rows.items():
        first, third, n = row["first"], row["first_three"], row["n"]
        print(
            f"{name:<24} n {n:>4}   right first {first:>4} ({first / max(n, 1):.0%})   "
            f"in the first three {third:>4} ({third / max(n, 1):.0%})"
        )
        for each in row["wrong"]:
            print(f"    {each['source']}: {each['said']} and not {each['right']}")


def _measure(cases: Iterable[tuple[str, tuple[str, ...], str]]) -> dict[str, Any]:
    row: dict[str, Any] = {"n": 0, "first": 0, "first_three": 0, "wrong": []}
    for source, right, text in cases:
        diagnosis = diagnose([Log(name="-", blocks=[text.encode()])])
        said = [each.id for each in (*diagnosis.causes, *diagnosis.resembling)]
        row["n"] += 1
        row["first"] += said[:1] != [] and said[0] in right
        row["first_three"] += any(each in right for each in said[:3])
        if not said or said[0] not in right:
            row["wrong"].append({"source": source, "said": said[:3], "right": list(right)})
    return row


def _examples() -> Iterable[tuple[str, tuple[str, ...], str]]:
    for failure in load_failures().values():
        for text in failure.shows:
            if any(re.search(pattern, text) for pattern in failure.log):
                yield failure.id, (failure.id,), text + "\n"


if __name__ == "__main__":
    main()
