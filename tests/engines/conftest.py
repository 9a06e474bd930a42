"""Which Python has an engine, and a record of what really ran.

A test of an engine is marked `engine("accelerate", ran="FSDP2 on 2 ranks")`: what a passing test
says goes into `.engines/runs.jsonl`, from which `scripts/engine_table.py` makes the table of
`docs/reference/engines-tested.md`. `validated="..."` instead of `ran` is for what the engine's own
code has read.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
RUNS = ROOT / ".engines" / "runs.jsonl"
_BY_HAND = {
    "megatron-bridge": "pip, with --no-deps for megatron-bridge 0.3.1 (it wants CUDA's libraries, "
    "and transformers older than 5), into an environment that PACELINE_ENGINES names,"
}
"""What `./test-engines` leaves out -> what else installs it."""

_VERSIONS = pytest.StashKey[dict[str, str]]()


@pytest.fixture
def python_with(request: pytest.FixtureRequest) -> Callable[..., Path]:
    """`python_with("accelerate", "transformers")`: the Python of an environment that has them.

    Looked for in PACELINE_ENGINES (an environment, or a folder of environments; `./test-engines`
    sets it), then in the one that runs the tests. Where none has, the test is skipped by name.
    """

    def find(*distributions: str) -> Path:
        wanted = [_normal(name) for name in distributions]
        for python in _pythons(os.environ.get("PACELINE_ENGINES", str(ROOT / ".engines"))):
            versions = _installed(python)
            if all(name in versions for name in wanted):
                kept = request.node.stash.setdefault(_VERSIONS, {})
                kept.update({name: versions[name] for name in wanted})
                return python
        how = next((_BY_HAND[name] for name in wanted if name in _BY_HAND), "./test-engines")
        pytest.skip(f"{' and '.join(distributions)}: not installed; {how} installs them")

    return find


@cache
def _pythons(folder: str) -> tuple[Path, ...]:
    place = Path(folder)
    found = [place / "bin" / "python", *sorted(place.glob("*/bin/python")), Path(sys.executable)]
    return tuple(each for each in found if each.exists())


@cache
def _installed(python: Path) -> Mapping[str, str]:
    """Normalised name of every distribution -> its version."""
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.name: d.version for d in m.distributions()}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return {_normal(name): version for name, version in json.loads(done.stdout).items()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marker = item.get_closest_marker("engine")
    over = report.when == "call" or (report.when == "setup" and not report.passed)
    if marker is not None and over and os.environ.get("PACELINE_ENGINE_RECORD", "1") != "0":
        _record(item, marker, report)
    return report


def _record(item: pytest.Item, marker: pytest.Mark, report: pytest.TestReport) -> None:
    of_module = Path(item.path).stem.removeprefix("test_")
    said = item.name.removeprefix("test_").replace("_", " ")
    ran, validated = marker.kwargs.get("ran"), marker.kwargs.get("validated")
    line = {
        "engine": marker.args[0] if marker.args else of_module,
        "kind": "validated" if validated else "ran",
        "what": ran or validated or said,
        "outcome": report.outcome,
        "reason": str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "",
        "versions": item.stash.get(_VERSIONS, {}) | marker.kwargs.get("versions", {}),
        "seconds": round(report.duration, 1),
        "date": date.today().isoformat(),
        "test": item.nodeid,
    }
    RUNS.parent.mkdir(exist_ok=True)
    with RUNS.open("a") as file:
        file.write(json.dumps(line) + "\n")
