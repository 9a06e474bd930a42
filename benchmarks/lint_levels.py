"""The level that a rule of `paceline lint` has earned on code of others, from its record.

    python benchmarks/lint_levels.py             # a rule a line: record and level
    python benchmarks/lint_precision.py FOLDER --half away --record   # what lint finds now

Nobody sets a level: tests/check/lint/test_evidence.py holds the catalogue to what this file derives
from three tables of data/:

- lint_basis.csv: what a rule's claim rests on. `proof`: the evidence shows it for every run.
  `condition`: it names a condition that the file does not decide (a release, the data). `absence`:
  something was not found. `name`: what a thing is called. `advice`: it runs, but slower. `leak`: a
  key in the form that its issuer documents, which a miss costs most. `own`: a job file or a plan
  of Paceline, of which nobody else's code has any. `promised`: the row of docs/capabilities.md that
  names it, by a published id or an anti-pattern.
- lint_judgements.csv: what readers judged. `now` is the level that the rule shows there today,
  before the catalogue's row cuts it; empty where the finding is gone.
- lint_faults_named.csv: fixing commits whose fault the rule names, each a case of its own. The half
  that is put away judges the levels and sets none.

A hint is kept where it was right once in a repository or a fixing commit, or is promised; a hint
without either is deleted (`without_worth`).

Cases are repositories, not findings: twelve files of one author are one mistake. A repository in
which a rule is right once and wrong once is a case of both.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lint_recall import read_faults

from paceline.catalog.failure import load_failures

DATA = Path(__file__).parent / "data"
BASES = ("proof", "condition", "absence", "name", "advice", "leak", "own")
ENOUGH = 3
"""Independent cases that a claim needs which reading the file cannot prove (issue 19, design 7)."""

RIGHT_OF_WARNINGS = 0.9
"""The goal of issue 19 for warnings and errors that are true or deliberate."""

SHOWN = ("error", "warning")


@dataclass(slots=True)
class Record:
    """Repositories and fixing commits in which a rule was right, and in which it was wrong."""

    right: set[str] = field(default_factory=set)
    """Of findings that it still makes."""

    wrong: set[str] = field(default_factory=set)
    """Of findings that it still makes: overstated ones as well."""

    unseen_right: set[str] = field(default_factory=set)
    """Of samples that no rule had seen when they were linted, corrected since or not. A kind of
    finding that is a hint now counts no more; one that a condition keeps out today does."""

    unseen_wrong: set[str] = field(default_factory=set)
    """False ones only: what was overstated was the right fault, and names its cases today."""

    @property
    def surprises(self) -> bool:
        """Whether it was wrong in more unseen repositories than it was right: what corrected it was
        made for those, and the next ones differ."""
        return len(self.unseen_wrong) > len(self.unseen_right)

    once_right: set[str] = field(default_factory=set)
    """Of findings that it still makes, hints among them."""

    @property
    def share(self) -> float:
        return len(self.right) / max(1, len(self.right) + len(self.wrong))


def earned(basis: str, record: Record, highest: str = "error") -> str:
    """The level of a rule: `error`, `warning` or `info`.

    Args:
        basis: One of BASES.
        highest: What its effect allows at most: training that is only slower is a warning.
    """
    if basis == "own":
        return highest
    surprises = record.surprises and basis != "leak"
    if surprises or (basis != "proof" and len(record.right) < ENOUGH):
        return "info"
    if record.wrong and record.share < RIGHT_OF_WARNINGS:
        return "info"
    return highest if basis in ("proof", "leak") and not record.wrong else "warning"


def highest(effect: str, basis: str) -> str:
    """What a failure's effect allows: one that only slows training is no error."""
    return "warning" if effect in ("degraded", "info", "warning") and basis != "leak" else "error"


def read_bases() -> dict[str, str]:
    """Rule -> what its claim rests on.

    Raises:
        ValueError: A row has no known basis or no reason.
    """
    found = {}
    for row in rows("lint_basis.csv"):
        if row["basis"] not in BASES or not row["reason"] or row["rule"] in found:
            raise ValueError(f"lint_basis.csv: {row}")
        found[row["rule"]] = row["basis"]
    return found


def read_records(unseen: Iterable[str]) -> dict[str, Record]:
    """Rule -> its record.

    Args:
        unseen: Repositories whose findings were judged before any rule was changed for them.
    """
    unseen = frozenset(unseen)
    records: dict[str, Record] = {}
    for row in rows("lint_judgements.csv"):
        record = records.setdefault(row["rule"], Record())
        is_right = row["judgement"] in ("true", "deliberate")
        if is_right and row["now"]:
            record.once_right.add(row["repository"])
        if row["now"] in SHOWN:
            (record.right if is_right else record.wrong).add(row["repository"])
        counts = row["now"] != "info" and row["judgement"] != "overstated"
        if counts and row["repository"] in unseen:
            (record.unseen_right if is_right else record.unseen_wrong).add(row["repository"])
    shown = {one.commit for one in read_faults() if one.half == "open"}
    for row in rows("lint_faults_named.csv"):
        if row["named"] == "yes" and row["commit"] in shown:
            record = records.setdefault(row["rule"], Record())
            record.right.add(row["commit"])
            record.once_right.add(row["commit"])
    return records


def without_worth(unseen: Iterable[str]) -> list[str]:
    """Hints that were never right in others' code, and that nothing promises: to be deleted."""
    records, found = read_records(unseen), levels(unseen)
    promised = {row["rule"] for row in rows("lint_basis.csv") if row["promised"]}
    return [
        rule
        for rule, level in found.items()
        if level == "info" and rule not in promised and not records.get(rule, Record()).once_right
    ]


def levels(unseen: Iterable[str]) -> dict[str, str]:
    """Rule -> the level that it has earned."""
    records, known = read_records(unseen), load_failures()
    return {
        rule: earned(basis, records.get(rule, Record()), highest(known[rule].effect, basis))
        for rule, basis in read_bases().items()
    }


def rows(name: str) -> Iterable[Mapping[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def main() -> None:
    from lint_precision import unseen

    bases, records, known = read_bases(), read_records(unseen()), load_failures()
    print(f"{'':<36}{'basis':<11}{'right':>6}{'wrong':>6}   unseen  level      catalogue")
    for rule, level in levels(unseen()).items():
        record = records.get(rule, Record())
        first = f"{len(record.unseen_right):>4}:{len(record.unseen_wrong):<4}"
        print(
            f"{rule:<36}{bases[rule]:<11}{len(record.right):>6}{len(record.wrong):>6}{first}"
            f" {level:<10} {known[rule].lint}"
        )


if __name__ == "__main__":
    main()
