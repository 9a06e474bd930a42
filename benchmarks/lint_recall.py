"""How many faults that others have fixed `paceline lint` finds: before the fix, and gone after it.

    python benchmarks/lint_recall.py --clone FOLDER | sh   # once: the repositories, bare
    python benchmarks/lint_recall.py FOLDER                # the open half
    python benchmarks/lint_recall.py FOLDER --away         # the half that is put away
    python benchmarks/lint_recall.py FOLDER --sample 2     # faults that were taken later: 2, 3
    python benchmarks/lint_recall.py FOLDER --list         # what each fault gave

data/lint_faults.csv has a fixing commit of a public repository a row, and what was wrong in one
file. That file is linted as it was in the commit's parent and as it was after the fix, each time
with the files of the repository that it imports. A finding counts where the fixed file has no such
finding on a line that reads the same, and where it names the fault: data/lint_faults_named.csv says
for each rule that came up whether it does (yes, no), judged by reading both.

The half that is put away is that of an odd last digit of the commit's hash; in sample 3 that of an
even last byte of sha256("owner/name"), so that no repository is in both.
"""

import argparse
import ast
import csv
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from lint_runs import lint_folder

from paceline.check.finding import Severity, lint_level

DATA = Path(__file__).parent / "data"
MOST_FILES = 60
"""Imported files of the repository that are linted beside one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A row of lint_faults.csv."""

    repository: str
    commit: str
    """The fix; its parent is the bad one."""

    file: str
    kind: str
    shown_by: str
    """`file`: by itself; `imports`: with files beside it; `purpose`: with how it is run."""

    fault: str
    sample: str = "1"
    """`2`, `3`: taken later, from other repositories."""

    @property
    def half(self) -> str:
        """`open` or `away`: what is put away is looked at when the rules are done."""
        if self.sample == "3":
            return "open" if sha256(self.repository.encode()).digest()[-1] % 2 else "away"
        return "away" if int(self.commit[-1], 16) % 2 else "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What lint reported on a fault: rules that are gone after the fix, by whether they name it."""

    fault: Fault
    gone: Sequence[Mapping[str, Any]] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    trouble: str = ""

    @property
    def result(self) -> str:
        """`found`, `hint` where only advice names it, `missed`, or `unjudged`."""
        if any(one["id"] not in self.named for one in self.gone):
            return "unjudged"
        levels = {
            lint_level(one["id"], Severity(one["severity"]))
            for one in self.gone
            if self.named[one["id"]] == "yes"
        }
        return "found" if levels - {Severity.INFO} else "hint" if levels else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="repositories, each in owner+name")
    parser.add_argument("--away", action="store_true", help="the half that is put away")
    parser.add_argument("--sample", choices=("1", "2", "3"), default="1")
    parser.add_argument("--list", action="store_true", help="print what each fault gave")
    parser.add_argument("--clone", action="store_true", help="print the commands that fetch them")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    faults = read_faults()
    if options.clone:
        for name in sorted({one.repository for one in faults}):
            where = options.folder / name.replace("/", "+")
            print(f"git clone -q --bare https://github.com/{name} {where}")
        return
    half = "away" if options.away else "open"
    named = read_named()
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(
            pool.map(
                lambda one: measure(one, options.folder, named),
                [one for one in faults if (one.half, one.sample) == (half, options.sample)],
            )
        )
    if options.list:
        for outcome in outcomes:
            print_outcome(outcome)
    print_table(half, outcomes)


def read_faults() -> list[Fault]:
    with (DATA / "lint_faults.csv").open(encoding="utf-8", newline="") as file:
        return [Fault(**row) for row in csv.DictReader(file)]


def read_named() -> dict[tuple[str, str], dict[str, str]]:
    """By commit and file: whether a rule names the fault."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    with (DATA / "lint_faults_named.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["named"] not in ("yes", "no"):
                raise ValueError(f"lint_faults_named.csv: {row}")
            found.setdefault((row["commit"], row["file"]), {})[row["rule"]] = row["named"]
    return found


def measure(
    fault: Fault, folder: Path, named: Mapping[tuple[str, str], Mapping[str, str]]
) -> Outcome:
    """Lint both versions of one fault's file."""
    try:
        repository = Repository(folder / fault.repository.replace("/", "+"))
        bad = lint_version(repository, f"{fault.commit}^", fault.file)
        good = lint_version(repository, fault.commit, fault.file)
    except (OSError, ValueError) as error:
        return Outcome(fault=fault, trouble=str(error))
    left = Counter(key for key, _ in good)
    gone = []
    for key, finding in bad:
        if left[key] > 0:
            left[key] -= 1
        else:
            gone.append(finding)
    return Outcome(fault=fault, gone=gone, named=named.get((fault.commit, fault.file), {}))


Read = tuple[tuple[str, str], Mapping[str, Any]]
"""A finding, after its rule and the text of its line."""


def lint_version(repository: "Repository", commit: str, file: str) -> list[Read]:
    """Findings in a file as it was at a commit.

    Raises:
        ValueError: The repository lacks it, or lint gave no answer.
    """
    text = repository.read(commit, file)
    with tempfile.TemporaryDirectory() as name:
        for path in (file, *imported(repository, commit, file, text)):
            target = Path(name) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text if path == file else repository.read(commit, path))
        linted = lint_folder(Path(name), seconds=300)
    if linted.trouble:
        raise ValueError(f"{file} at {commit[:12]}: {linted.trouble}")
    if file in linted.unread:
        raise ValueError(f"{file} at {commit[:12]}: lint cannot read it")
    lines = text.decode("utf-8", "replace").split("\n")
    return [
        ((one["id"], lines[(one["where"]["line"] or 1) - 1].strip()), one)
        for one in linted.findings
        if one["where"]["path"] == file
    ]


class Repository:
    """A git repository, bare or not; of a folder with one inside it, that one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "repo" if (folder / "repo").is_dir() else folder
        self._trees: dict[str, set[str]] = {}

    def read(self, commit: str, file: str) -> bytes:
        """What a file held at a commit.

        Raises:
            ValueError: There is no such file, commit or repository.
        """
        return self._git("show", f"{commit}:{file}")

    def tree(self, commit: str) -> set[str]:
        if commit not in self._trees:
            listed = self._git("ls-tree", "-r", "--name-only", "-z", commit)
            self._trees[commit] = set(listed.decode("utf-8", "replace").split("\0"))
        return self._trees[commit]

    def _git(self, *arguments: str) -> bytes:
        done = subprocess.run(
            ("git", "-C", self.folder, *arguments), capture_output=True, check=False
        )
        if done.returncode:
            raise ValueError(done.stderr.decode("utf-8", "replace").strip())
        return done.stdout


def imported(repository: Repository, commit: str, file: str, text: bytes) -> list[str]:
    """Files of the repository that a program imports by name."""
    if not file.endswith(".py"):
        return []
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    files = repository.tree(commit)
    folder = file.rpartition("/")[0]
    parents = ["/".join(folder.split("/")[:depth]) for depth in range(folder.count("/") + 2)]
    found: list[str] = []
    for module in modules(tree, folder):
        stem = module.replace(".", "/")
        for parent in dict.fromkeys(("", *parents, "src")):
            paths = (f"{parent}/{stem}.py", f"{parent}/{stem}/__init__.py")
            found.extend(path.lstrip("/") for path in paths)
    there = files - {file}
    return [path for path in dict.fromkeys(found) if path in there][:MOST_FILES]


def modules(tree: ast.Module, folder: str) -> Iterator[str]:
    """Names of the modules that a program imports, those relative to its folder made whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = folder.split("/")
                above = parts[: len(parts) - node.level + 1]
                base = ".".join((*above, base) if base else above)
            yield base
            yield from (f"{base}.{one.name}" for one in node.names if base)


def print_outcome(outcome: Outcome) -> None:
    fault = outcome.fault
    print(f"{outcome.result:<9}{fault.repository} {fault.commit[:12]} {fault.file}: {fault.fault}")
    if outcome.trouble:
        print(f"    {outcome.trouble}")
    for one in outcome.gone:
        named = outcome.named.get(one["id"], "?")
        print(f"    {named:<4}{one['severity']} {one['where']['line']} [{one['id']}] {one['what']}")


RESULTS = ("found", "hint", "missed", "unjudged")


def print_table(half: str, outcomes: Sequence[Outcome]) -> None:
    by_kind: dict[str, Counter[str]] = {}
    total: Counter[str] = Counter()
    for outcome in outcomes:
        fault = outcome.fault
        names = (fault.kind, f"shown by {fault.shown_by}")
        for count in (*(by_kind.setdefault(name, Counter()) for name in names), total):
            count["n"] += 1
            count["trouble" if outcome.trouble else outcome.result] += 1
    print(f"{half + ' half':<18}{'n':>5}" + "".join(f"{name:>9}" for name in RESULTS))
    for kind, count in (*sorted(by_kind.items()), ("all", total)):
        share = f"{count['found'] / count['n']:>8.0%}" if count["n"] else ""
        row = "".join(f"{count[name]:>9}" for name in RESULTS)
        print(f"{kind:<18}{count['n']:>5}{row}{share}")
    if total["trouble"]:
        print(f"could not be linted: {total['trouble']}")


if __name__ == "__main__":
    main()
