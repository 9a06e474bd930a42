"""How much of what is wrong `lint` finds, and how often it is wrong about what is right.

    python benchmarks/lint_accuracy.py                       # our own programs and planted faults
    python benchmarks/lint_accuracy.py --examples FOLDER     # programs beside an expected.json
    python benchmarks/lint_accuracy.py --correct FOLDER ...  # others' code: every loud finding

Own programs are tests/check/lint/programs: `bad_*.py` say `# expect: id` where a finding belongs,
`clean_*.py` may have none of warning or above. Faults are planted in the clean ones as well, one at
a time by `PLANTS`; these count as found on the id, wherever the line. "Other" are findings of
warning or above that nobody asked for.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint
from paceline.check.lint.stated import context_from_facts

PROGRAMS = Path(__file__).parent.parent / "tests" / "check" / "lint" / "programs"
EXPECT = re.compile(r"# expect: ([\w-]+)")


@dataclass
class Count:
    """What one set of programs gave."""

    programs: int = 0
    planted: int = 0
    found: int = 0
    other: int = 0

    def line(self, name: str) -> str:
        share = f"{self.found / self.planted:.1%}" if self.planted else "-"
        return (
            f"{name:<34} {self.programs:>5} programs  {self.found:>4} of {self.planted:<4} found"
            f" ({share})  {self.other} other"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=Path, help="a folder with expected.json")
    parser.add_argument("--correct", type=Path, nargs="*", default=[], help="folders of code")
    options = parser.parse_args()
    started = time.perf_counter()
    for name, prefix in (("own, faults", "bad_"), ("own, correct", "clean_")):
        print(own_programs(prefix).line(name))
    for name, count in planted_faults().items():
        print(count.line(f"planted: {name}"))
    for name, folder in (
        ("configurations, faults", "planted"),
        ("configurations, correct", "correct"),
    ):
        print(configurations(folder).line(name))
    for name, count in planted_in_configurations().items():
        print(count.line(f"planted: {name}"))
    if options.examples:
        print(examples(options.examples).line("examples"))
    for folder in options.correct:
        print(correct(folder).line(str(folder)))
    print(f"{time.perf_counter() - started:.1f} s")


def own_programs(prefix: str) -> Count:
    count = Count()
    for path in sorted(PROGRAMS.glob(f"{prefix}*.py")):
        text = path.read_text(encoding="utf-8")
        wanted = {
            (name, number)
            for number, line in enumerate(text.split("\n"), start=1)
            for name in EXPECT.findall(line)
        }
        tally(count, path.name, wanted, lint({path.name: text.encode()}, Context()))
    return count


def tally(count: Count, name: str, wanted: set[tuple[str, int]], findings: list[Finding]) -> None:
    found = {(one.id, one.where.line or 0) for one in findings}
    loud = {(one.id, one.where.line or 0) for one in findings if one.severity != Severity.INFO}
    count.programs += 1
    count.planted += len(wanted)
    count.found += len(wanted & found)
    count.other += len(loud - wanted)
    for one in sorted(wanted - found):
        print(f"  missed {name}:{one[1]} {one[0]}")
    for one in sorted(loud - wanted):
        print(f"  other  {name}:{one[1]} {one[0]}")


def examples(folder: Path) -> Count:
    """Programs and configurations beside an expected.json, each by itself."""
    count = Count()
    for name, row in json.loads((folder / "expected.json").read_text()).items():
        wanted = {(one["id"], one["line"]) for one in row["findings"]}
        context = context_from_facts(row.get("context", {}))
        found = lint({name: (folder / name).read_bytes()}, context)
        accepted = set(row.get("also_acceptable", ()))
        tally(count, name, wanted, [one for one in found if one.id not in accepted])
    return count


CASES = PROGRAMS.parent / "cases"
GOLDEN = PROGRAMS.parents[2] / "render" / "golden"
MARK = re.compile(r"[ \t]*(?:#|//)! ([a-z0-9 -]+)$", re.M)
FACTS = re.compile(r"^(?:#|//)\? (\{.*\})$", re.M)


def configurations(folder: str) -> Count:
    """Our own configurations; lines with a fault say so (tests/check/lint/marked_cases.py)."""
    count = Count()
    for path in sorted((CASES / folder).iterdir()):
        raw = path.read_text(encoding="utf-8")
        wanted = {
            (name, number)
            for number, line in enumerate(raw.split("\n"), start=1)
            for mark in MARK.findall(line)
            for name in mark.split()
        }
        facts = FACTS.search(raw)
        context = context_from_facts(json.loads(facts[1])) if facts else Context()
        text = MARK.sub("", FACTS.sub("", raw))
        tally(count, path.name, wanted, lint({path.name: text.encode()}, context))
    return count


CONFIG_PLANTS: tuple[tuple[str, str, str, str, dict[str, object]], ...] = (
    (
        "nccl-wrong-interface",
        r"\A(#!.*?\n)",
        r"\1export NCCL_SOCKET_IFNAME=docker0\n",
        "torchrun",
        {},
    ),
    ("nccl-env-deprecated", r"\A(#!.*?\n)", r"\1export NCCL_BLOCKING_WAIT=1\n", "torchrun", {}),
    ("ds-config-silent-keys", '"zero_optimization"', '"zero_optimisation"', '"stage"', {}),
)
"""Failure, what is replaced (once) and by what, what the file must hold, facts that are known."""


def planted_in_configurations() -> Mapping[str, Count]:
    """One fault at a time in correct configurations and in what Paceline renders."""
    counts: dict[str, Count] = {}
    paths = [path for path in (CASES / "correct").iterdir() if path.suffix != ".py"]
    paths += [path for path in GOLDEN.rglob("*") if path.is_file() and path.suffix != ".py"]
    for path in sorted(paths):
        text = FACTS.sub("", path.read_text(encoding="utf-8"))
        for name, old, new, needs, facts in CONFIG_PLANTS:
            changed = re.sub(old, new, text, count=1)
            if not re.search(needs, text, re.S) or not re.search(old, text) or "{{" in text:
                continue
            count = counts.setdefault(name, Count())
            findings = lint({path.name: changed.encode()}, context_from_facts(facts))
            count.programs += 1
            count.planted += 1
            if name in {one.id for one in findings}:
                count.found += 1
            else:
                print(f"  missed {name} in {path.parent.name}/{path.name}")
    return counts


DISTRIBUTED = re.compile(rb"torch\.distributed|accelerat|DistributedDataParallel|horovod|deepspeed")


def correct(folder: Path) -> Count:
    """Code that is taken to be right: every loud finding is printed, to be looked at."""
    count = Count()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_bytes()
        if not DISTRIBUTED.search(source):
            continue
        tally(count, str(path), set(), lint({str(path): source}, Context()))
    return count


# planting


def drop_line(pattern: str) -> Callable[[str], Iterator[str]]:
    def plant(text: str) -> Iterator[str]:
        for found in re.finditer(rf"^( *){pattern}.*$", text, re.MULTILINE):
            yield text[: found.start()] + f"{found[1]}pass" + text[found.end() :]

    return plant


def change(pattern: str, by: str, needs: str = "") -> Callable[[str], Iterator[str]]:
    def plant(text: str) -> Iterator[str]:
        if not re.search(needs, text):
            return
        for found in re.finditer(pattern, text, re.MULTILINE):
            yield text[: found.start()] + found.expand(by) + text[found.end() :]

    return plant


def all_at_once(pattern: str, by: str, needs: str = "") -> Callable[[str], Iterator[str]]:
    def plant(text: str) -> Iterator[str]:
        changed = re.sub(pattern, by, text, flags=re.MULTILINE)
        if changed != text and re.search(needs, text):
            yield changed

    return plant


RANK_ZERO = r"\1if int(os.environ['RANK']) == 0:\n\1    \2"
TRAINS = r"\.backward\(\)"
PLANTS: Mapping[str, Callable[[str], Iterator[str]]] = {
    "set-epoch-missing": drop_line(r"[\w.]*sampler\.set_epoch\("),
    "sampler-and-shuffle": change(
        r"sampler=(sampler|train_sampler|self\.sampler)\b", r"sampler=\1, shuffle=True"
    ),
    "sampler-missing": change(
        r"DataLoader\((\w+), batch_size=([\w.]+), sampler=sampler",
        r"DataLoader(\1, batch_size=\2, shuffle=True",
        TRAINS,
    ),
    "collective-mismatch": change(r"^( *)(dist\.(?:barrier|all_reduce)\([^)]*\))$", RANK_ZERO),
    "rank-divergent-decision": change(
        r"^( *)(loss\.backward\(\))$", r"\1if torch.isnan(loss):\n\1    continue\n\1\2", r"DDP\("
    ),
    "all-ranks-save-same-file": change(
        r"^( *)if (?:dist\.get_rank\(\)|rank|local_rank) == 0:(\n +torch\.save)", r"\1if True:\2"
    ),
    "gloo-backend-gpu": change(
        r'init_process_group\("nccl"', 'init_process_group("gloo"', r"\.cuda\(\), device_ids"
    ),
    "world-size-hardcoded": change(
        r'init_process_group\("(nccl|gloo)"\)',
        r'init_process_group("\1", world_size=8, rank=int(os.environ["RANK"]))',
    ),
    "dataparallel-not-ddp": change(r"\bDDP\((?=torch|model|net)", "torch.nn.DataParallel("),
    "mixed-precision-loss-scaling": drop_line(r"scaler\.unscale_\("),
}
"""What is done to a correct program, each place by itself, and what should then be found."""


def planted_faults() -> dict[str, Count]:
    """Each plant in each place of each clean program where it fits."""
    counts: dict[str, Count] = {}
    for name, plant in PLANTS.items():
        count = counts.setdefault(name, Count())
        for path in sorted(PROGRAMS.glob("clean_*.py")):
            for text in plant(path.read_text(encoding="utf-8")):
                text = text if "import os" in text else f"import os\n{text}"
                found = {one.id for one in lint({path.name: text.encode()}, Context())}
                count.programs += 1
                count.planted += 1
                count.found += name in found
                if name not in found:
                    print(f"  missed {name} in {path.name}")
    return counts


if __name__ == "__main__":
    main()
