"""Runs a command on a rented machine and ends it before it costs too much.

    cloud_guard.py --max-run-s 3600 --idle-s 600 --per-hour-usd 32 --budget-usd 50 -- sh launch.sh

It ends with the command's exit code; 124 after the longest time or when the budget is spent, 125
when every GPU has done nothing for so long. Then whoever started it gives the machine back. With
--spent-file, on storage that outlives the machine, the time and the money of earlier starts count
too. Needs Python alone; where nvidia-smi is missing, idling is not seen, which is said.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

TOO_LONG, IDLE = 124, 125
_NOTE_S = 60
"""Between two notes of what is spent: storages bill each write."""

_NOTICES = (0.5, 0.8, 0.95)
"""Shares of the limit whose passing is said: time to save or to raise it."""

_BUSY_PERCENT = 1
"""A GPU that computes anything at all shows more."""


def busiest() -> int | None:
    """Use of the busiest GPU in percent; None where it cannot be known."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
        return max((int(line) for line in found.stdout.split()), default=None)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def say(text: str) -> None:
    """One line on stderr."""
    print(f"guard: {text}", file=sys.stderr, flush=True)


def end(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """SIGTERM to all that the command has started, and SIGKILL after a while."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def watch(asked: argparse.Namespace) -> int:
    """Start the command, look at it now and then, and return the exit code."""
    rate, budget = asked.per_hour_usd, asked.budget_usd
    limit_s = asked.max_run_s
    if rate and budget:
        limit_s = min(limit_s, budget / rate * 3600)
    before_s = read_spent(asked.spent_file)
    if before_s >= limit_s:
        say(
            f"not started: earlier starts took {cost(before_s, rate)}, the limit is {limit_s:.0f} s"
        )
        return TOO_LONG
    if busiest() is None:
        say("no nvidia-smi: an idle machine is not seen here")
    process = subprocess.Popen(asked.command, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end(process, asked.grace_s))
    busy_at = said_at = noted_at = time.monotonic()
    started = busy_at - before_s
    ahead = [share for share in _NOTICES if before_s < share * limit_s]
    while True:
        try:
            left_s = limit_s - (time.monotonic() - started)
            code = process.wait(max(0.05, min(asked.look_s, left_s)))
        except subprocess.TimeoutExpired:
            pass
        else:
            now = time.monotonic()
            note_spent(asked.spent_file, now - started)
            say(f"the command ended with {code} after {cost(now - started, rate)}")
            return 128 - code if code < 0 else code
        now = time.monotonic()
        use = busiest()
        if use is None or use >= _BUSY_PERCENT:
            busy_at = now
        if now - noted_at >= _NOTE_S:
            noted_at = now
            note_spent(asked.spent_file, now - started)
        passed = [share for share in ahead if now - started >= share * limit_s]
        if passed:
            ahead = ahead[len(passed) :]
            spent = cost(now - started, rate)
            say(f"alert: {spent} so far, {passed[-1]:.0%} of the limit of {limit_s:.0f} s")
        if now - said_at >= 3600:
            said_at = now
            say(f"{cost(now - started, rate)} so far")
        if now - started >= limit_s:
            say(f"ended after {cost(now - started, rate)}: the limit is {limit_s:.0f} s")
            end(process, asked.grace_s)
            note_spent(asked.spent_file, time.monotonic() - started)
            return TOO_LONG
        if now - busy_at >= asked.idle_s:
            say(f"ended after {cost(now - started, rate)}: every GPU idle for {asked.idle_s:.0f} s")
            end(process, asked.grace_s)
            note_spent(asked.spent_file, time.monotonic() - started)
            return IDLE


def read_spent(path: Path | None) -> float:
    """Seconds of earlier starts; 0 where there were none."""
    with contextlib.suppress(OSError, ValueError):
        return float(path.read_text()) if path is not None else 0.0
    return 0.0


def note_spent(path: Path | None, seconds: float) -> None:
    """Keep the seconds of all starts, for the next one. A storage that cannot be written is said
    and does not end the run."""
    if path is None:
        return
    part = path.with_name(f".{path.name}.{os.uname().nodename}")
    try:
        part.write_text(f"{seconds:.0f}\n")
        part.replace(path)
    except OSError as error:
        say(f"{path} cannot be written: {error}")


def cost(seconds: float, rate: float | None) -> str:
    """Time, and dollars where the price is known."""
    dollars = f", ${seconds / 3600 * rate:.2f}" if rate else ""
    return f"{seconds:.0f} s{dollars}"


def main() -> None:
    """Read the limits and watch."""
    parser = argparse.ArgumentParser(description="Ends a command before it costs too much.")
    parser.add_argument("--max-run-s", type=float, required=True)
    parser.add_argument("--idle-s", type=float, required=True)
    parser.add_argument("--per-hour-usd", type=float, help="of all machines together")
    parser.add_argument("--budget-usd", type=float)
    parser.add_argument("--spent-file", type=Path, help="keeps the seconds of all starts")
    parser.add_argument("--grace-s", type=float, default=60.0, help="from SIGTERM to SIGKILL")
    parser.add_argument("--look-s", type=float, default=15.0, help="between two looks")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    if asked.budget_usd is not None and not asked.per_hour_usd:
        parser.error("--budget-usd needs --per-hour-usd: without a price nothing is counted")
    sys.exit(watch(asked))


if __name__ == "__main__":
    main()
