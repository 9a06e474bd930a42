"""The process that keeps a run's sinks: starts each, keeps its log, starts it again.

    python -m paceline.launch.sinks.supervisor RUN SETTINGS

Standard input is a pipe: its end means that the run is over. Then every sink has a time to send
what is left, and is ended.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from paceline.job.secret_names import find_under_name
from paceline.launch.sinks import REFUSED
from paceline.launch.sinks.feed import LAST_S

FEED = (sys.executable, "-m", "paceline.launch.sinks.feed")

MOST_STARTS = 4
"""Starts of one sink: it is started again three times."""

_LOOK_S = 0.25
_PAUSE_S = 2.0
"""Before a sink is started again; twice as long each time. A guess."""

_NICENESS = 19
"""Training comes first."""

_MOST_LOG_BYTES = 1 << 20
_LONGEST_LINE = 4096


def log_file(run: Path, name: str) -> Path:
    """What a sink and its libraries print."""
    return run / "logs" / f"sink-{name}.log"


def keep_sinks(
    run: Path,
    names: Sequence[str],
    settings: str,
    over: int,
    *,
    feed: Sequence[str] = FEED,
    last_s: float = LAST_S,
) -> None:
    """Keep the sinks of a run until it is over, and a little longer.

    Args:
        settings: The section `metrics` of the job, as JSON.
        over: A file descriptor that ends when the run is over.
        last_s: How long sinks may take for what is left then.
    """
    secrets = secret_values(os.environ)
    sinks = [_Kept(run, name, [*feed, str(run), name, settings], secrets) for name in names]
    deadline_s = None
    while sum(sink.look(time.monotonic()) for sink in sinks):
        if deadline_s is not None:
            if time.monotonic() > deadline_s:
                break
            time.sleep(_LOOK_S)
        elif select.select([over], [], [], _LOOK_S)[0] and not os.read(over, 1):
            deadline_s = time.monotonic() + last_s
            for sink in sinks:
                sink.end()
    for sink in sinks:
        sink.close()


class _Kept:
    """One sink: its process, and how often it was started."""

    def __init__(
        self, run: Path, name: str, command: Sequence[str], secrets: frozenset[str]
    ) -> None:
        self._command = command
        self._log = _Log(log_file(run, name), secrets)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._num_starts, self._starts_at_s = 0, 0.0
        self._is_over = False

    def look(self, now_s: float) -> bool:
        """Whether it is at work or will be; starts it when it is time to."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return True
            self._process = None
            if code == 0:
                self._num_starts = MOST_STARTS
                return False
            self._log.write(f"ended with {code}\n".encode())
            if code == REFUSED:
                self._num_starts = MOST_STARTS
            if self._num_starts == MOST_STARTS:
                self._log.write(b"not started again\n")
            self._starts_at_s = now_s + _PAUSE_S * 2 ** (self._num_starts - 1)
        if self._num_starts == MOST_STARTS:
            return False
        if now_s >= self._starts_at_s:
            self._start()
        return True

    def end(self) -> None:
        """The run is over: it has a moment for what is left."""
        self._is_over = True
        self._starts_at_s = 0.0
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def close(self) -> None:
        """End it and what it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._thread is not None:
            self._thread.join(1.0)  # what it started may hold the pipe
        self._log.close()

    def _start(self) -> None:
        self._num_starts += 1
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.write(f"--- start {self._num_starts}, {stamp}\n".encode())
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if self._is_over and self._process.stdin is not None:
            self._process.stdin.close()
        assert self._process.stdout is not None
        self._thread = threading.Thread(
            target=self._log.take, args=(self._process.stdout,), daemon=True
        )
        self._thread.start()


class _Log:
    """A bounded file of what a sink prints, without secrets."""

    def __init__(self, path: Path, secrets: frozenset[str]) -> None:
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._secrets = secrets
        self._room = _MOST_LOG_BYTES - self._file.tell()

    def take(self, stream: IO[bytes]) -> None:
        """Everything until the stream ends."""
        with contextlib.suppress(ValueError, OSError), stream:  # closed, or a full disk
            while line := stream.readline(_LONGEST_LINE):
                self.write(line)

    def write(self, line: bytes) -> None:
        """A line, while there is room."""
        if self._room <= 0:
            return
        shown = without_secrets(line.decode(errors="replace"), self._secrets).encode()
        self._room -= len(shown)
        self._file.write(shown if self._room > 0 else b"--- the log is full\n")

    def close(self) -> None:
        self._file.close()


def secret_values(environment: Mapping[str, str]) -> frozenset[str]:
    """Values of variables that are named like secrets, and of headers."""
    found = set()
    for name, value in environment.items():
        if name.endswith("_HEADERS"):
            values = [pair.partition("=")[2].strip() for pair in value.split(",")]
            found |= {*values, *(urllib.parse.unquote(each) for each in values)}
        elif find_under_name(name, value) is not None:
            found.add(value.strip())
    words = {word for value in found for word in (value, *value.split()[1:])}
    return frozenset(word for word in words if len(word) >= _SHORTEST_SECRET)


_SHORTEST_SECRET = 6
"""Characters; what is shorter is found in ordinary words."""

_IN_URL = re.compile(r"://[^\s/@]+@")


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """The text with `***` for each of them, and for names and passwords in addresses.

    >>> without_secrets("POST https://ann:hunter2@host/ with key-123", ["key-123"])
    'POST https://***@host/ with ***'
    """
    for secret in secrets:
        text = text.replace(secret, "***")
    return _IN_URL.sub("://***@", text)


def main(words: Sequence[str]) -> None:
    run, settings = words
    os.nice(_NICENESS)
    names = msgspec.json.decode(settings)["wanted"]
    keep_sinks(Path(run), names, settings, sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
