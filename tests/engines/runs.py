"""Real runs of other engines: start them, and believe nothing but what every rank said.

Launchers report success where one process ran, or several that knew nothing of each other; so what
counts are the last words of every rank (`say_end` in `render/scripts/lm_plain.py`).
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from paceline.check.verify.tolerance import UNITS, order_of_sums

_SINGLE_DEVICE = Path(__file__).with_name("single_device.py")
_LAST_CHARACTERS = 6000


class BadRun(AssertionError):
    """A run was not what it was asked to be."""


def write_files(files: Mapping[str, str], folder: Path) -> Path:
    """The rendered files in a folder, as `paceline render --out` writes them."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
    return folder


def start(
    command: Sequence[str],
    folder: Path,
    *,
    python: Path,
    environment: Mapping[str, str] | None = None,
    limit_s: float = 240.0,
    fails: bool = False,
) -> str:
    """What a command prints, with the programs of `python`'s environment first on PATH.

    Everything it started ends with it.

    Raises:
        BadRun: It did not end in time; or its exit code is not 0 (with `fails`: is 0).
    """
    given = {key: value for key, value in os.environ.items() if key not in _OF_OUR_TESTS}
    given |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    given["PATH"] = f"{python.parent}{os.pathsep}{given['PATH']}"
    printed = folder / "output.txt"
    with printed.open("ab") as output:
        began = output.tell()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=given | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = printed.read_bytes()[began:].decode(errors="replace")
    if returncode is None:
        raise BadRun(f"{command[0]} did not end in {limit_s:.0f} s\n{text[-_LAST_CHARACTERS:]}")
    if (returncode != 0) != fails:
        raise BadRun(f"{command[0]} ended with {returncode}\n{text[-_LAST_CHARACTERS:]}")
    return text


_OF_OUR_TESTS = {"PYTHONPATH", "PYTEST_CURRENT_TEST", "VIRTUAL_ENV", "PYTHONWARNINGS"}


def check_run(
    output: str,
    *,
    world_size: int,
    wrapper: str,
    sharded: bool | int,
    restarted: bool = False,
) -> list[float]:
    """The loss of every step, of a run that was what it was asked to be.

    Args:
        output: Everything that its ranks printed.
        world_size: Ranks that must have ended, each knowing of all.
        wrapper: Class that must be around the model.
        sharded: Whether ranks hold parts of parameters, or of how many parameters.
        restarted: Whether steps may have been repeated.

    Raises:
        BadRun: Naming what is wrong.
    """
    said = list(objects(output))
    ends = [each for each in said if "sha256" in each]
    ranks = sorted(each["rank"] for each in ends)
    if ranks != list(range(world_size)):
        sizes = sorted({each["world_size"] for each in ends})
        if len(ranks) == world_size and sizes == [1]:
            raise BadRun(f"{world_size} runs of one rank each, not one run of {world_size}")
        raise BadRun(
            f"ranks {ranks} said their end, each counting {sizes}; it takes one each of "
            f"{world_size}\n{output[-_LAST_CHARACTERS:]}"
        )
    for end in ends:
        who = f"rank {end['rank']}"
        if end["world_size"] != world_size:
            raise BadRun(f"{who} counted {end['world_size']} ranks, not {world_size}")
        if end["wrapper"] != wrapper:
            raise BadRun(f"{who} trained a {end['wrapper']}, not a {wrapper}")
        found = end["sharded"] if type(sharded) is int else end["sharded"] > 0
        if found != sharded:
            raise BadRun(f"{who} holds parts of {end['sharded']} parameters; wanted: {sharded}")
    hashes = {end["sha256"] for end in ends}
    if len(hashes) != 1:
        raise BadRun(f"ranks end with {len(hashes)} different hashes of their parameters: {hashes}")
    return _losses(said, restarted=restarted)


def _losses(said: list[dict[str, Any]], *, restarted: bool) -> list[float]:
    steps = [(each["step"], each["loss"]) for each in said if {"step", "loss"} <= each.keys()]
    if not steps:
        raise BadRun("no step was printed")
    by_step = dict(steps)
    if len(by_step) < len(steps) and not restarted:
        raise BadRun(f"steps were done more than once: {[step for step, _ in steps]}")
    numbers = sorted(by_step)
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise BadRun(f"steps are missing: {numbers}")
    losses = [by_step[number] for number in numbers]
    if not all(isinstance(loss, int | float) and math.isfinite(loss) for loss in losses):
        raise BadRun(f"a loss is not finite: {losses}")
    return losses


def objects(output: str) -> Iterator[dict[str, Any]]:
    """Every JSON object in a text, whatever stands before or after it on its line."""
    decoder, place = json.JSONDecoder(), output.find("{")
    while place >= 0:
        try:
            found, after = decoder.raw_decode(output, place)
        except ValueError:
            after = place + 1
        else:
            if isinstance(found, dict):
                yield found
        place = output.find("{", after)


def check_losses(
    losses: Sequence[float], folder: Path, *, precision: str = "fp32", first_step: int = 1
) -> None:
    """The losses of a run of the example program are those of a single device, up to rounding.

    The bound is that of `paceline verify` (`check/verify/tolerance.py`): the truth is the single
    device's run in float64, and a layout may be off by `order_of_sums` times what the single device
    itself is off in the job's precision, at that step or before.

    Args:
        losses: Of every step from `first_step` to the last.
        folder: Where the example program and its `train.json` are.
        precision: Of `UNITS`.
        first_step: More than 1 for a run that has gone on from a checkpoint.

    Raises:
        BadRun: A step's loss is further away.
    """
    truth, narrow, longest = _single_device(folder, precision)
    wanted = len(truth) - first_step + 1
    if len(losses) != wanted:
        raise BadRun(f"{len(losses)} steps were done, not {wanted}")
    worst = UNITS[precision]
    for step, (right, alone) in enumerate(zip(truth, narrow, strict=True), start=1):
        worst = max(worst, abs(alone - right) / right)
        if step < first_step:
            continue
        found = losses[step - first_step]
        off, allowed = abs(found - right) / right, order_of_sums(longest) * worst
        if not off <= allowed:
            raise BadRun(
                f"step {step}: the loss {found!r} is off by {off:.1e} from the single device's "
                f"{right!r} in float64; rounding explains {allowed:.1e}"
            )


def check_narrow_losses(losses: Sequence[float], folder: Path, precision: str) -> None:
    """The losses are those of a single device up to the rounding of a narrow precision, and further
    off than float32's explains: it was really that precision that computed them.

    Raises:
        BadRun: Either is not so.
    """
    check_losses(losses, folder, precision=precision)
    try:
        check_losses(losses, folder)
    except BadRun:
        return
    raise BadRun(f"the losses are as exact as float32's: {precision} was not used")


@cache
def _single_device(folder: Path, precision: str) -> tuple[list[float], list[float], int]:
    command = [sys.executable, str(_SINGLE_DEVICE), str(folder), precision]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    return found["truth"], found["narrow"], found["longest"]
