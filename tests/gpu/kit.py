"""What one GPU shows of Paceline, check by check: `python -m tests.gpu.kit [NAME ...]`.

Each check is a child process with a time limit of its own. It prints one line of JSON, and the next
one begins; a table follows, and `--write` puts it into docs/gpu.md. Without a GPU the kit ends with
2. `--device cpu` runs the same code on a CPU with small sizes, as tests do: it shows nothing of a
GPU.

Leaves out: pass or fail for what was never measured before. Such lines are `measured`.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

Verdict = Literal["pass", "fail", "measured", "not run"]

LIMITS_S = {
    "contract": 90,
    "memory": 270,
    "time": 190,
    "calibrate": 100,
    "making": 75,
    "death": 45,
    "sticky": 45,
    "stall": 100,
    "two-ranks": 150,
    "gloo-on-gpu": 120,
    "same-bits": 150,
    "guard": 40,
    "narrow": 40,
    "compile": 85,
}
"""Check -> seconds that its process may take: 25 minutes in all."""

CPU_PATIENCE = 4
"""A CPU computes beside other work: a check may take so many times its seconds there. A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one check found."""

    name: str
    expected: str
    found: str
    verdict: Verdict
    seconds: float = 0.0


def main(words: Sequence[str] | None = None) -> int:
    """Entry point; 0 when no check failed, 1 when one did, 2 when there is no GPU to check."""
    parser = argparse.ArgumentParser(prog="./test-gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LIMITS_S))
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cuda, or cpu to try the kit itself",
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    parser.add_argument("--child-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    unknown = [name for name in options.names if name not in LIMITS_S]
    if unknown:
        parser.error(f"there is no check {unknown[0]}; there are {', '.join(LIMITS_S)}")
    if options.write and options.device != "cuda":
        parser.error("--write puts a GPU's figures into docs/gpu.md: leave out --device cpu")
    if options.child_of is not None:
        return _one(options.names[0], options.device, options.child_of)
    if options.device == "cuda" and (why := why_no_gpu()) is not None:
        print(f"./test-gpu: nothing was checked: {why}", file=sys.stderr)
        return 2
    lines = []
    for name in options.names or LIMITS_S:
        lines.append(run_check(name, options.device))
        print(json.dumps(asdict(lines[-1])), flush=True)
    print(table(lines, options.device))
    if options.write:
        PAGE.write_text(with_figures(PAGE.read_text(), table(lines, options.device)))
    return 1 if any(line.verdict == "fail" for line in lines) else 0


PYTHONS = ((3, 11), (3, 13))
TORCH = (2, 11)
GPU_GIB = 15
"""Memory that has to be free. The largest layout takes 12.1 GiB on a small GPU, by the plan's
estimate."""

PACKAGES = {
    "click": "click", "jinja2": "jinja2", "msgspec": "msgspec", "numpy": "numpy",
    "pydantic": "pydantic", "pytest": "pytest", "xxhash": "xxhash", "yaml": "pyyaml",
}  # fmt: skip
"""Module that the checks import -> its package, beside PyTorch."""


def why_no_gpu() -> str | None:
    """Why there is nothing to check; None where Python, packages and a GPU are there."""
    first, last = (".".join(map(str, each)) for each in PYTHONS)
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return f"this is Python {platform.python_version()}; it needs {first} to {last}"
    needed = {"torch": "torch (for CUDA)"} | PACKAGES
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        return f"this Python has no {', '.join(missing)} (docs/gpu.md has the list of wheels)"
    try:
        import torch
    except ImportError as error:
        return f"PyTorch cannot be imported ({error})"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH:
        return f"this is PyTorch {torch.__version__}; it needs {'.'.join(map(str, TORCH))} or newer"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no CUDA device: {_why_no_device()}"
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < GPU_GIB:
        name = torch.cuda.get_device_name()
        return f"{free:.1f} GiB of the {name}'s memory are free; it needs {GPU_GIB} GiB"
    return None


def _why_no_device() -> str:
    """What hides the devices, else torch's own reason, such as a driver that is too old for it."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r}; unset it (nvidia-smi -L lists the GPUs)"
    if torch.version.cuda is None:
        return "it was built without CUDA; pip install torch from download.pytorch.org/whl/cu130"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return "no reason given; nvidia-smi -L lists the GPUs"


def run_check(name: str, device: str, *, limit_s: float | None = None) -> Line:
    """One check in a process group of its own, which ends with it."""
    if limit_s is None:
        limit_s = LIMITS_S[name] * (1 if device == "cuda" else CPU_PATIENCE)
    command = [sys.executable, "-m", "tests.gpu.kit", name, "--device", device]
    command += ["--child-of", str(os.getpid())]
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        said = ""
    finally:
        _end_group(process)
    seconds = time.monotonic() - began
    found = [line for line in said.splitlines() if line.startswith('{"name"')]
    if found:
        return Line(**(json.loads(found[-1]) | {"seconds": round(seconds, 1)}))
    how = f"exit code {process.returncode}" if seconds < limit_s else f"nothing in {limit_s} s"
    return Line(
        name=name, expected="an answer", found=how, verdict="fail", seconds=round(seconds, 1)
    )


def _end_group(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()  # closes the pipe, too


def tied(command: Sequence[str]) -> list[str]:
    """The command, in a process that ends with this one, however this one ends."""
    program = (
        "import os, sys; from paceline.control.parent import die_with_parent as tie; "
        "tie(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-c", program, str(os.getpid()), *command]


def _one(name: str, device: str, parent: int) -> int:
    from paceline.control.parent import die_with_parent

    die_with_parent(parent)
    try:
        from tests.gpu.checks import CHECKS

        line = CHECKS[name](device)
    except Exception as error:  # noqa: BLE001 (the line says it, and the next check begins)
        traceback.print_exc()
        why = (str(error).strip().splitlines() or [""])[-1].replace("|", "/")
        found = f"{type(error).__name__}: {why[-300:]}"
        line = Line(name=name, expected="an answer", found=found, verdict="fail")
    print(json.dumps(asdict(line)), flush=True)
    os._exit(0)  # threads of gloo, or a broken device, may hold a normal exit


def table(lines: Sequence[Line], device: str) -> str:
    """The lines for people, with the machine above them."""
    rows = [
        f"{machine(device)}",
        "",
        "| check | expected | found | verdict | s |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| {line.name} | {line.expected} | {line.found} | {line.verdict} | {line.seconds:g} |"
        for line in lines
    ]
    return "\n".join(rows)


def machine(device: str) -> str:
    """What the figures were taken on, and when."""
    import torch

    if device == "cuda":
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
        name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, NCCL {nccl}"
    else:
        name = "CPU (shows nothing of a GPU)"
    day = time.strftime("%Y-%m-%d")
    return f"{name}, PyTorch {torch.__version__}, Python {platform.python_version()}, {day}."


def with_figures(page: str, figures: str) -> str:
    """The page with a table between its marks. Rows of other checks stay where they were taken on
    the same machine, software and day, as one call may have time for some checks only."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    (taken_on, *head), rows = _head_and_rows(figures)
    if taken_on in old.splitlines():
        rows = _head_and_rows(old)[1] | rows
    body = [rows[name] for name in sorted(rows, key=list(LIMITS_S).index)]
    return "\n".join([f"{before}{BEGIN}", taken_on, *head, *body, f"{END}{after}"])


def _head_and_rows(figures: str) -> tuple[list[str], dict[str, str]]:
    """What stands above a table's rows, and the row of each check."""
    lines = figures.splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    rows = {name: line for name, line in rows.items() if name in LIMITS_S}
    return [line for line in lines if line not in rows.values()], rows


if __name__ == "__main__":
    sys.exit(main())
