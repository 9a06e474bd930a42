"""How often a warning or an error of `paceline lint` is right, on repositories that others wrote.

    python benchmarks/lint_precision.py --clone FOLDER | sh   # once: the repositories
    python benchmarks/lint_precision.py FOLDER                # the open half
    python benchmarks/lint_precision.py FOLDER --half away    # the half that is put away
    python benchmarks/lint_precision.py FOLDER --half fresh   # in neither half, chosen later
    python benchmarks/lint_precision.py FOLDER --half fresh2  # chosen after rules were deleted
    python benchmarks/lint_precision.py FOLDER --half fresh3  # chosen after levels had become data
    python benchmarks/lint_precision.py FOLDER --half fresh4  # after levels followed the record
    python benchmarks/lint_precision.py FOLDER --half fresh5  # after fresh4's corrections
    python benchmarks/lint_precision.py FOLDER --half fresh6  # after twelve rules were deleted
    python benchmarks/lint_precision.py FOLDER --half fresh7  # with rules for what commits fixed
    python benchmarks/lint_precision.py FOLDER --half fresh8  # its put-away half is fresh8away
    python benchmarks/lint_precision.py FOLDER --half fresh9  # after fewer rules may warn
    python benchmarks/lint_precision.py FOLDER --half fresh10  # its put-away half is fresh10away
    python benchmarks/lint_precision.py FOLDER --only owner/name --list
    python benchmarks/lint_precision.py FOLDER --half fresh --record   # for lint_levels.py

Each repository of data/lint_repositories.toml is linted as a whole, in a process of its own with a
limit on time and memory. Every warning and error is looked up in data/lint_judgements.csv, where
somebody who read the code wrote what it is:

- true: the run fails, hangs, trains something else or wastes machines, as the finding states.
- deliberate: what it states holds, and the authors chose it (a test of the failure, a comment, an
  option).
- overstated: there is something, but not at this level or not in the cases that the finding names.
- false: what it states does not hold here.

A judgement belongs to one commit, file, line, rule and level. A finding at another line is printed
as not judged, and counts in no share; at a lower level, what was overstated is to be judged again.
"""

import argparse
import csv
import json
import subprocess
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lint_runs import Linted, lint_folder

from paceline.check.finding import Severity, lint_level

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A public repository at one commit."""

    name: str
    commit: str
    style: str
    half: str
    """`open`, `away` (put away until the rules are finished), or `fresh` and on, chosen later."""

    seen: bool = False
    """Its findings were discussed before the halves were made."""

    folder: str = "."
    """What of it is linted."""

    def path(self, checkouts: Path) -> Path:
        return checkouts / self.name.replace("/", "+")


Key = tuple[str, str, str, str, str, str]
KEY = ("repository", "commit", "file", "line", "rule", "level")
"""What a judgement belongs to."""


@dataclass(slots=True)
class Tally:
    """Findings of one or several repositories by judgement."""

    files: int = 0
    judgements: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    with_false_error: int = 0

    def add(self, level: str, judgement: str) -> None:
        self.judgements[judgement] += 1
        if level == "error":
            self.errors[judgement] += 1

    def include(self, other: "Tally") -> None:
        self.files += other.files
        self.judgements += other.judgements
        self.errors += other.errors
        self.with_false_error += bool(other.errors["false"])

    def line(self, name: str) -> str:
        kinds = "".join(f"{self.judgements[kind]:>7}" for kind in KINDS)
        shares = f"{share(self.judgements):>9}{share(self.errors):>9}"
        return f"{name:<42}{self.files:>6}{self.judgements.total():>7}{kinds}{shares}"


KINDS = ("true", "deliberate", "overstated", "false", "unjudged")
HEADER = f"{'':<42}{'files':>6}{'found':>7}" + "".join(
    f"{name:>7}" for name in ("true", "delib.", "overst.", "false", "open")
)


def share(judgements: Counter[str]) -> str:
    """True or deliberate, of those that were judged."""
    judged = judgements.total() - judgements["unjudged"]
    right = judgements["true"] + judgements["deliberate"]
    return f"{right / judged:.0%}" if judged else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="checkouts, each in owner+name")
    parser.add_argument(
        "--half",
        choices=list(dict.fromkeys(one.half for one in repositories())),
        default="open",
    )
    parser.add_argument("--only", action="append", default=[], metavar="OWNER/NAME")
    parser.add_argument("--list", action="store_true", help="print what is false or not judged")
    parser.add_argument("--rules", action="store_true", help="print a table by rule")
    parser.add_argument("--results", type=Path, help="keep lint's answers here, and read them")
    parser.add_argument("--clone", action="store_true", help="print the commands that fetch them")
    parser.add_argument("--seconds", type=int, default=600, help="limit of one repository")
    parser.add_argument("--memory-gb", type=float, default=8, help="limit of one repository")
    parser.add_argument("--record", action="store_true", help="note what lint finds now")
    options = parser.parse_args()
    chosen = [one for one in repositories() if one.half == options.half]
    if options.only:
        chosen = [one for one in chosen if one.name in options.only]
    if options.clone:
        print("\n".join(clone_commands(repositories(), options.folder)))
        return
    judgements = read_judgements()
    total, fresh, by_rule = Tally(), Tally(), Counter[tuple[str, str]]()
    print(f"{options.half}\n{HEADER}{'right':>9}{'errors':>9}")
    for repository in chosen:
        tally = measure(repository, judgements, options, by_rule)
        total.include(tally)
        if not repository.seen:
            fresh.include(tally)
    for name, tally in (("all", total), ("not seen before", fresh)):
        print(tally.line(name))
        if tally.judgements["unjudged"] < tally.judgements.total():
            print(f"  repositories with a false error: {tally.with_false_error}")
    if options.rules:
        print_rules(by_rule)


def print_rules(by_rule: Counter[tuple[str, str]]) -> None:
    """A rule a line, those with the most false findings first."""
    for rule in sorted({rule for rule, _ in by_rule}, key=lambda rule: -by_rule[rule, "false"]):
        counts = "".join(f"{by_rule[rule, kind]:>7}" for kind in KINDS)
        print(f"{rule:<48}{sum(by_rule[rule, kind] for kind in KINDS):>7}{counts}")


def measure(
    repository: Repository,
    judgements: Mapping[Key, Mapping[str, str]],
    options: argparse.Namespace,
    by_rule: Counter[tuple[str, str]],
) -> Tally:
    """Lint one repository, print its line, and what of it is to be looked at."""
    tally = Tally()
    checkout = repository.path(options.folder)
    if trouble := wrong_checkout(repository, checkout):
        print(f"{repository.name:<42} {trouble}")
        return tally
    linted = kept(repository, options)
    if linted is None:
        linted = lint_folder(checkout / repository.folder, options.seconds, options.memory_gb)
        keep(repository, linted, options)
    tally.files = linted.files
    shown = []
    if options.record and not linted.trouble:
        record(repository, linted.findings)
    for one in linted.findings:
        level = lint_level(one["id"], Severity(one["severity"]))
        if level is Severity.INFO:
            continue
        kind = judgement_of(judgements, key_of(repository, one, level))
        tally.add(level, kind)
        by_rule[one["id"], kind] += 1
        if kind not in ("true", "deliberate"):
            shown.append(f"    {kind}: {spot(one)} {level} [{one['id']}] {one['what']}")
    print(tally.line(repository.name) + f"{linted.seconds:>8.1f} s  {linted.trouble}".rstrip())
    if options.list:
        print("\n".join(shown))
    return tally


def record(repository: Repository, findings: Sequence[Mapping[str, Any]]) -> None:
    """Write into the judgements of a repository the level that lint shows there now."""
    now = {key_of(repository, one, "")[:-1]: one["severity"] for one in findings}
    path = DATA / "lint_judgements.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["repository"] == repository.name:
            row["now"] = now.get(tuple(row[name] for name in KEY[:-1]), "")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def judgement_of(judgements: Mapping[Key, Mapping[str, str]], key: Key) -> str:
    """What was judged at this place; at another level, what says that it holds or not."""
    exact = judgements.get(key)
    if exact is not None:
        return exact["judgement"]
    others = (judgements.get((*key[:-1], level)) for level in ("error", "warning"))
    found = next((one["judgement"] for one in others if one is not None), "unjudged")
    return "unjudged" if found == "overstated" else found


def unseen() -> list[str]:
    """Repositories whose findings were judged before any rule was changed for them."""
    return [one.name for one in repositories() if one.half != "open"]


def repositories() -> list[Repository]:
    with (DATA / "lint_repositories.toml").open("rb") as file:
        return [Repository(**row) for row in tomllib.load(file)["repository"]]


def read_judgements() -> dict[Key, dict[str, str]]:
    """By repository, commit, file, line, rule and level.

    Raises:
        ValueError: A judgement is none of the known ones, gives no reason, or stands there twice.
    """
    found: dict[Key, dict[str, str]] = {}
    with (DATA / "lint_judgements.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in KEY)
            if row["judgement"] not in KINDS[:-1] or not row["reason"] or key in found:
                raise ValueError(f"lint_judgements.csv: {row}")
            found[key] = row  # type: ignore[index]
    return found


def key_of(repository: Repository, finding: Mapping[str, Any], level: str) -> Key:
    where = finding["where"]
    line = str(where["line"] or "")
    return (repository.name, repository.commit[:12], where["path"], line, finding["id"], level)


def spot(finding: Mapping[str, Any]) -> str:
    return f"{finding['where']['path']}:{finding['where']['line'] or ''}"


def wrong_checkout(repository: Repository, checkout: Path) -> str:
    if not checkout.is_dir():
        return "not there (--clone prints how to get it)"
    head = subprocess.run(
        ("git", "-C", checkout, "rev-parse", "HEAD"), capture_output=True, text=True, check=False
    ).stdout.strip()
    return "" if head == repository.commit else f"at {head[:12]}, not {repository.commit[:12]}"


def clone_commands(chosen: Sequence[Repository], folder: Path) -> list[str]:
    commands = []
    for one in chosen:
        path = one.path(folder)
        commands.append(f"git clone -q --no-checkout https://github.com/{one.name} {path}")
        commands.append(f"git -C {path} checkout -q {one.commit}")
    return commands


def result_file(repository: Repository, options: argparse.Namespace) -> Path | None:
    if options.results is None:
        return None
    path: Path = repository.path(options.results)
    return path.with_name(f"{path.name}@{repository.commit[:12]}.json")


def keep(repository: Repository, linted: Linted, options: argparse.Namespace) -> None:
    path = result_file(repository, options)
    if path is not None and not linted.trouble:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(linted)), encoding="utf-8")


def kept(repository: Repository, options: argparse.Namespace) -> Linted | None:
    path = result_file(repository, options)
    return Linted(**json.loads(path.read_text("utf-8"))) if path and path.exists() else None


if __name__ == "__main__":
    main()
