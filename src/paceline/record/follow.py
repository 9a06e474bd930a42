"""Files of JSON lines that grow, followed by `stat`: what is new since the last look.

A look costs one `stat` a file when nothing is new, and works on network file systems, where
inotify is silent. The page, the sinks and the alerts follow a run with this.

Leaves out: when to look, and what to do with steps that were repeated (`rising` finds them).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from paceline.record.events import AnyEvent, decode_event
from paceline.record.metrics import StepMetrics, decode_step

_CHUNK_BYTES = 8 << 20
"""Read at a time. A guess: some 20,000 lines, far less memory than what they decode to."""


class HasStep(Protocol):
    """A line that is about one step."""

    @property
    def step(self) -> int:
        """The step."""


_T = TypeVar("_T")
_Step = TypeVar("_Step", bound=HasStep)


@dataclass(frozen=True, slots=True)
class News(Generic[_T]):
    """What one look found in one file."""

    lines: list[_T]
    """In the order written."""

    is_anew: bool = False
    """Whether the file was replaced or cut: what was read of it before no longer counts, and the
    lines are from its beginning."""


class LineFollower:
    """The whole lines of one file that were not read before. A torn last line waits for its end."""

    def __init__(self, path: Path, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._path = path
        self._chunk_bytes = chunk_bytes
        self._offset, self._inode, self._torn = 0, 0, b""

    def look(self) -> News[bytes]:
        """New lines, at most one chunk of the file; empty when there are none, or no file."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return News([])
        is_anew = False
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            is_anew = self._inode != 0
            self._offset, self._inode, self._torn = 0, stat.st_ino, b""
        if stat.st_size == self._offset:
            return News([], is_anew)
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read(self._chunk_bytes)
        self._offset += len(content)
        *whole, self._torn = (self._torn + content).split(b"\n")
        return News(whole, is_anew)

    @property
    def has_more(self) -> bool:
        """Whether the file had bytes past the last look's chunk."""
        try:
            return self._path.stat().st_size > self._offset
        except FileNotFoundError:
            return False


class Follower(Generic[_T]):
    """Decoded lines of one file. Lines that cannot be decoded are left out."""

    def __init__(self, path: Path, decode: Callable[[bytes], _T]) -> None:
        self._lines = LineFollower(path)
        self._decode = decode

    def look(self) -> News[_T]:
        """Everything new since the last look."""
        found: list[_T] = []
        is_anew = False
        while True:
            news = self._lines.look()
            if news.is_anew:
                is_anew, found = True, []
            for line in filter(bytes.strip, news.lines):
                with contextlib.suppress(msgspec.DecodeError):
                    found.append(self._decode(line))
            if not self._lines.has_more:
                return News(found, is_anew)


@dataclass(frozen=True, slots=True)
class RunNews:
    """What one look found in a run's folder."""

    metrics: list[StepMetrics]
    """Lines in the order written; see `rising` for steps that were repeated."""

    events: list[AnyEvent]
    is_anew: bool
    """Whether a file was replaced or cut: drop what was kept of this run; everything is here."""


class RunFollower:
    """Steps and events of one run, as they are written and afterwards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin()

    def look(self) -> RunNews:
        """Everything new since the last look."""
        metrics, events = self._metrics.look(), self._events.look()
        if metrics.is_anew or events.is_anew:
            self._begin()
            return RunNews(self._metrics.look().lines, self._events.look().lines, True)
        return RunNews(metrics.lines, events.lines, False)

    def _begin(self) -> None:
        folder = self._folder
        self._metrics = Follower(folder / "metrics.jsonl", decode_step)
        self._events = Follower(folder / "events.jsonl", decode_event)


def rising(lines: Iterable[_Step]) -> Iterator[list[_Step]]:
    """Stretches of lines whose steps rise. Where another stretch begins, the run had gone back:
    its first step and all later ones are repeated, and earlier lines of them no longer count.

    Compare the first step of the first stretch with the last step known before.
    """
    stretch: list[_Step] = []
    for line in lines:
        if stretch and line.step <= stretch[-1].step:
            yield stretch
            stretch = []
        stretch.append(line)
    if stretch:
        yield stretch
