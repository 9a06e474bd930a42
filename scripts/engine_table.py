"""The table of engines: version, rendered, validated by, really run, seconds.

    python scripts/engine_table.py            print what `.engines/runs.jsonl` says
    python scripts/engine_table.py --write    keep it in docs/engine-runs.jsonl, and write the table
                                              of docs/reference/engines-tested.md from that file

Tests of engines write what they did into `.engines/runs.jsonl` (tests/engines/conftest.py). Of a
test that ran several times the last counts; one that was skipped or failed never counts as run.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.render import ENGINES

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / ".engines" / "runs.jsonl"
KEPT = ROOT / "docs" / "engine-runs.jsonl"
PINS = ROOT / "constraints-engines.txt"
PAGE = ROOT / "docs" / "reference" / "engines-tested.md"
GOLDEN = ROOT / "tests" / "render" / "golden"
BEGIN, END = "<!-- engines -->\n", "<!-- end of engines -->\n"
HEADER = ("engine", "version", "rendered", "validated by", "really run, seconds", "last run")
_COMMON = {"train.json"}

Line = Mapping[str, Any]


def read(path: Path) -> list[Line]:
    """Every line that a test wrote; none where no test has run."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def newest(lines: Iterable[Line]) -> list[Line]:
    """The last line of each test."""
    return list({line["test"]: line for line in lines}.values())


def rows(lines: Iterable[Line]) -> list[tuple[str, ...]]:
    """One row for every engine that is rendered, and for every other that ran."""
    last = newest(lines)
    names = [*ENGINES, *sorted({line["engine"] for line in last} - set(ENGINES))]
    return [row(name, [line for line in last if line["engine"] == name]) for name in names]


def row(name: str, lines: list[Line]) -> tuple[str, ...]:
    """What is known of one engine."""
    passed = [line for line in lines if line["outcome"] == "passed"]
    other = [line for line in lines if line["outcome"] != "passed"]
    pinned = {pin.partition("==")[0] for pin in PINS.read_text().splitlines() if "==" in pin}
    found = {n: v for line in passed for n, v in line["versions"].items()}
    versions = {n: v for n, v in found.items() if n in pinned or n == name}
    took: dict[str, list[str]] = {}
    for line in passed:
        if line["kind"] == "ran":
            took.setdefault(line["what"], []).append(f"{line['seconds']:.0f}")
    ran = [f"{what}: {' and '.join(seconds)} s" for what, seconds in took.items()]
    validated = sorted({line["what"] for line in passed if line["kind"] == "validated"})
    failed = [f"{line['outcome']}: {line['what']} {line['reason']}".strip() for line in other]
    return (
        name,
        ", ".join(f"{n} {v}" for n, v in sorted(versions.items())) or "-",
        ", ".join(rendered(name)) or "-",
        "; ".join(validated) or "-",
        "; ".join([*ran, *failed]) or "-",
        max((line["date"] for line in passed), default="-"),
    )


def rendered(name: str) -> list[str]:
    """Files in the golden sets of an engine."""
    folder = GOLDEN / name
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent != folder)
    return sorted({"/".join(path.relative_to(folder).parts[1:]) for path in files} - _COMMON)


def as_markdown(table: list[tuple[str, ...]]) -> str:
    """The table as it stands in the page."""
    lines = [HEADER, tuple("---" for _ in HEADER), *table]
    cells = (tuple(cell.replace("|", "\\|") for cell in line) for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def page(text: str, kept: Iterable[Line]) -> str:
    """The page with the table between its marks written anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{as_markdown(rows(kept))}\n{END}{after}"


def keep(kept: Iterable[Line], ran: Iterable[Line]) -> list[Line]:
    """What is kept of all runs: of each test the last that passed, in the order of their names."""
    passed = [line for line in [*kept, *ran] if line["outcome"] == "passed"]
    return sorted(newest(passed), key=lambda line: line["test"])


def is_there(line: Line) -> bool:
    """Whether the test is still one of ours."""
    path, _, name = line["test"].partition("::")
    file = ROOT / path
    return file.exists() and f"def {name.partition('[')[0]}(" in file.read_text()


def main() -> None:
    """Prints, or writes."""
    ran = read(RUNS)
    if sys.argv[1:] != ["--write"]:
        for name, version, files, validated, run, day in rows(ran):
            if run != "-" or validated != "-":
                print(f"\n{name}  ({version}; {day})\n  rendered      {files}")
                print(f"  validated by  {validated}\n  really run    {run}")
        return
    kept = [line for line in keep(read(KEPT), ran) if is_there(line)]
    KEPT.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in kept))
    PAGE.write_text(page(PAGE.read_text(), kept))
    print(f"written: {KEPT.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
