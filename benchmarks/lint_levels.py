"""The level that a rule of `paceline lint` has earned on code of others, from its record.

    python benchmarks/lint_levels.py             # a rule a line: record and level
    python benchmarks/lint_precision.py FOLDER --half away --record   # what lint finds now

Nobody sets a level: tests/check/lint/test_evidence.py holds the catalogue to what this file derives
from three tables of data/:

- lint_basis.csv: what a rule's claim rests on. `refused`: the library's own code or schema refuses
  it. `proof`: the evidence shows it for every run.
  `condition`: it names a condition that the file does not decide (a release, the data). `absence`:
  something was not found. `name`: what a thing is called. `advice`: it runs, but slower. `leak`: a
  key in the form that its issuer documents, which a miss costs most. `own`: a job file or a plan
  of Paceline, of which nobody else's code has any. `promised`: the row of docs/capabilities.md that
  names it, by a published id or an anti-pattern.
- lint_judgements.csv: what readers judged. `now` is the level that the rule shows there today,
  before the catalogue's row cuts it; empty where the finding is gone. The newest samples
  (`NEWEST`) judge the levels and set none, until levels are changed again.
- lint_faults_named.csv: fixing commits whose fault the rule names, each a case of its own. The half
  that is put away judges the levels and sets none.

A rule warns where nine of ten findings were right in the repositories that nobody had seen before,
and three independent cases support it; only what a library refuses by itself needs no cases. Where
a kind of finding is cut out of a rule as a whole (`cut` in `now`), what it found speaks for or
against the rest no more. A hint is kept where three cases support it and it was not wrong more
often than right in unseen repositories, or where it is promised; others are deleted
(`without_worth`).

Cases are repositories, not findings: twelve files of one author are one mistake. A repository in
which a rule is right once and wrong once is a case of both.
"""

import csv
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lint_recall import read_faults

from paceline.catalog.failure import load_failures

DATA = Path(__file__).parent / "data"
BASES = ("refused", "proof", "condition", "absence", "name", "advice", "leak", "own")
ENOUGH = 3
"""Independent cases that a rule needs to warn, or to stay as a hint (issue 19, design 7)."""

RIGHT_OF_WARNINGS = 0.9
"""The goal of issue 19 for warnings and errors that are true or deliberate."""

NEWEST: tuple[str, ...] = ()

RIGHT_OF_HINTS = 0.5
"""A guess: what is wrong more often than right costs its reader more than it gives."""

SHOWN = ("error", "warning")
PROOFS = ("refused", "proof", "leak")
CUT = ("info", "cut")
"""Kinds of findings that say nothing of what a rule still warns of."""


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

    once_right: set[str] = field(default_factory=set)
    """Of findings that it still makes, hints among them."""

    @property
    def share(self) -> float:
        """Repositories in which what it still finds is right, of all in which it finds something.
        1 where there are none."""
        return _share(self.right, self.wrong)

    @property
    def unseen_share(self) -> float:
        """The same in samples that nobody had seen: what corrected it since was made for those, and
        the next ones differ."""
        return _share(self.unseen_right, self.unseen_wrong)

    @property
    def is_of_use(self) -> bool:
        """Whether it may stay as a hint."""
        return len(self.once_right) >= ENOUGH and self.unseen_share >= RIGHT_OF_HINTS


def _share(right: set[str], wrong: set[str]) -> float:
    return len(right) / (len(right) + len(wrong)) if right or wrong else 1.0


def earned(basis: str, record: Record, highest: str = "error") -> str:
    """The level of a rule: `error`, `warning` or `info`.

    Args:
        basis: One of BASES.
        highest: What its effect allows at most: training that is only slower is a warning.
    """
    if basis == "own":
        return highest
    if basis not in ("leak", "refused") and len(record.right) < ENOUGH:
        return "info"
    unseen_share = 1.0 if basis == "leak" else record.unseen_share
    if min(record.share, unseen_share) < RIGHT_OF_WARNINGS:
        return "info"
    return highest if basis in PROOFS and not record.wrong else "warning"


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
    with (DATA / "lint_repositories.toml").open("rb") as file:
        listed = tomllib.load(file)["repository"]
    newest = {one["name"] for one in listed if one["half"] in NEWEST}
    for row in rows("lint_judgements.csv"):
        if row["repository"] in newest:
            continue
        record = records.setdefault(row["rule"], Record())
        is_right = row["judgement"] in ("true", "deliberate")
        if is_right and row["now"] not in ("", "cut"):
            record.once_right.add(row["repository"])
        if row["now"] in SHOWN:
            (record.right if is_right else record.wrong).add(row["repository"])
        counts = row["now"] not in CUT and row["judgement"] != "overstated"
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
    """Hints that others' code does not support, and that nothing promises: to be deleted."""
    records, found = read_records(unseen), levels(unseen)
    promised = {row["rule"] for row in rows("lint_basis.csv") if row["promised"]}
    return [
        rule
        for rule, level in found.items()
        if level == "info" and rule not in promised and not records.get(rule, Record()).is_of_use
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
