"""Ask a process of `paceline.runtime`, so that the command line needs no torch itself: the request
goes to its standard input, and the answer is the last line that it prints, both JSON."""

import os
import subprocess
import sys
from typing import TypeVar

import msgspec

_T = TypeVar("_T")

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


class NoAnswer(Exception):
    """The process ended without an answer: its exit code and the last line of its errors."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        """As in `subprocess`; None where it took too long."""


def ask(module: str, request: object, kind: type[_T], *, limit_s: float | None = None) -> _T:
    """What a module of `paceline.runtime` answers; nothing is downloaded meanwhile.

    Raises:
        NoAnswer: It failed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"paceline.runtime.{module}"],
            input=msgspec.json.encode(request),
            capture_output=True,
            check=False,
            env={**os.environ, **dict.fromkeys(_OFFLINE, "1")},
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"took longer than {limit_s:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return msgspec.json.decode(lines[-1], type=kind)
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    raise NoAnswer(f"ended with {done.returncode}: {last[0][:300]}", done.returncode)
