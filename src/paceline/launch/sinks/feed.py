"""The process of one sink: it follows a run's files and sends what is new.

    python -m paceline.launch.sinks.feed RUN NAME SETTINGS

Standard input is a pipe. When its other end closes the run is over: what is left is sent, for
`LAST_S` at most. How much is safe is kept every two seconds, so that another process goes on there.
"""

import contextlib
import fcntl
import hashlib
import math
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from paceline.choices.sinks import SINKS, SinkRow
from paceline.launch.sinks import (
    REFUSED,
    REFUSES,
    Sink,
    SinkRefused,
    Told,
    lock_file,
    mark_file,
    opener,
)
from paceline.record.events import Evaluated
from paceline.record.follow import LineFollower
from paceline.record.lines import read_json, write_whole
from paceline.record.machines import (
    MachineSample,
    decode_machine,
    machine_files,
    numbers_of_machine,
)
from paceline.record.metric_names import numbers_of, numbers_of_evaluation
from paceline.record.run_files import flat

LAST_S = 30.0
"""For what is left when a run is over. A guess: 15,000 steps to the slowest sink measured."""

_LOOK_S = 0.25
_KEEP_S = 2.0
"""Between two marks: a kill costs as much work again."""

_HOLD_S = 1.0
"""How long a step waits for its evaluation and its pictures, which other processes write. Some
sinks take nothing for a step once they have the next. A guess."""

_FILES = ("metrics.jsonl", "events.jsonl", "media.jsonl")


class Mark(msgspec.Struct):
    """How much of a run is safe with a sink."""

    lines: dict[str, int] = {}
    """Whole lines of each file that were sent."""

    step: int = 0
    """Newest step of them."""

    evaluated: int = -1
    """Newest step with an evaluation."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of one of the files that has something to send."""

    file: str
    number: int
    """Number of the line, from 1."""

    key: tuple[int, int]
    """Generation and step."""

    content: Any


class Feeder:
    """Brings what a run's files have to one sink, each step once, in the order of the steps."""

    def __init__(self, run: Path, sink: Sink, row: SinkRow, mark: Mark, *, every: int = 1) -> None:
        """Args:
        run: The run's folder.
        sink: Open.
        row: Of the table of sinks.
        mark: Where to begin; it is moved on.
        every: Steps that are no multiple of this are left out.
        """
        self._run, self._sink, self._row, self._every = run, sink, row, every
        self._mark = mark
        self._follow = {name: LineFollower(run / name) for name in _FILES}
        self._num_read = dict.fromkeys(_FILES, 0)
        self._steps: deque[tuple[float, _Line]] = deque()
        self._others: dict[str, deque[_Line]] = {name: deque() for name in _FILES[1:]}
        self._samples: deque[_Line] = deque()
        self._is_skipping = False
        self.num_steps = 0
        """Sent by this process."""

    def look(self, now_s: float, *, is_over: bool = False) -> int:
        """Send what is new; returns how many lines that were.

        Args:
            now_s: Monotonic.
            is_over: Whether nothing more will be written.
        """
        self._steps.extend((now_s, line) for line in self._read("metrics.jsonl", _decoded))
        has_more = self._follow["metrics.jsonl"].has_more
        for name, decode in (("events.jsonl", _evaluation_of), ("media.jsonl", _decoded)):
            while True:
                self._others[name].extend(self._read(name, decode))
                if not self._follow[name].has_more:
                    break
        self._read_machines()
        num, last = 0, None
        while self._steps and (is_over or has_more or self._steps[0][0] <= now_s - _HOLD_S):
            _, last = self._steps.popleft()
            num += self._send_others(before=last.key)
            self._send_step(last)
            num += 1 + self._send_samples(until=last.content["at"])
        if is_over and not has_more:
            num += self._send_others(before=None) + self._send_samples(until=math.inf)
        elif last is not None:
            num += self._send_others(before=(last.key[0], last.key[1] + 1))
        return num + has_more

    def _read_machines(self) -> None:
        """Samples of all nodes, by their time."""
        for file in machine_files(self._run):
            name = str(file.relative_to(self._run))
            self._follow.setdefault(name, LineFollower(file))
            self._num_read.setdefault(name, 0)
            while True:
                self._samples.extend(self._read(name, _sample_of))
                if not self._follow[name].has_more:
                    break
        self._samples = deque(sorted(self._samples, key=lambda line: line.content.at))

    def _send_samples(self, until: float) -> int:
        """Samples up to this time, with the newest step that was sent."""
        num = 0
        while self._samples and self._samples[0].content.at <= until:
            line = self._samples.popleft()
            shown = {
                f"{name}/{whose.replace(' ', '_')}": value
                for name, whose, value in numbers_of_machine(line.content)
            }
            self._sink.write(self._mark.step, line.content.at, _finite(shown))
            self._mark.lines[line.file] = line.number
            num += 1
        return num

    def _read(self, name: str, decode: Callable[[bytes], Any]) -> Iterator[_Line]:
        news = self._follow[name].look()
        if news.is_anew:  # another file: the steps alone tell what was sent
            self._num_read[name] = self._mark.lines[name] = 0
        for text in news.lines:
            self._num_read[name] += 1
            if self._num_read[name] <= self._mark.lines.get(name, 0):
                continue
            content = decode(text)
            if content is not None:
                key = _key_of(content)
                yield _Line(name, self._num_read[name], key, content)

    def _send_step(self, line: _Line) -> None:
        step, mark = line.key[1], self._mark
        if step <= mark.step and not self._row.goes_back:
            if not self._is_skipping:
                print(f"the run repeats step {step}: steps that were sent stay as they are")
            self._is_skipping = True
        else:
            if step <= mark.step:
                self._sink.begin(step - 1)
            self._is_skipping = False
            mark.step = step
            if step % self._every == 0:
                self._sink.write(step, line.content["at"], _finite(numbers_of(line.content)))
                self.num_steps += 1
        mark.lines[line.file] = line.number

    def _send_others(self, before: tuple[int, int] | None) -> int:
        num = 0
        for waiting in self._others.values():
            while waiting and (before is None or waiting[0].key < before):
                self._send_other(waiting.popleft())
                num += 1
        return num

    def _send_other(self, line: _Line) -> None:
        content, mark, step = line.content, self._mark, line.key[1]
        if line.file == "media.jsonl":
            file = self._run / content["file"]
            if (step >= mark.step or self._row.goes_back) and file.is_file():
                self._sink.media(step, content["at"], content["name"], file)
        elif step > mark.evaluated or self._row.goes_back:
            mark.evaluated = step
            self._sink.write(step, content["at"], _finite(content["values"]))
        mark.lines[line.file] = line.number


def _key_of(content: Any) -> tuple[int, int]:
    if isinstance(content, MachineSample):
        return (0, 0)  # by its time
    return (content["generation"], content["step"])


def _sample_of(text: bytes) -> Any:
    with contextlib.suppress(msgspec.DecodeError):
        return decode_machine(text)
    return None


def _evaluation_of(text: bytes) -> Any:
    if b'"Evaluated"' not in text:
        return None
    with contextlib.suppress(msgspec.DecodeError):
        event = msgspec.json.decode(text, type=Evaluated)
        values = numbers_of_evaluation(event)
        return {"generation": event.generation, "step": event.step, "at": event.at} | {
            "values": values
        }
    return None


def _decoded(text: bytes) -> Any:
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(text)
    return None  # torn by a kill


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {n: v for n, v in values.items() if v is not None and math.isfinite(v)}


def read_mark(run: Path, name: str) -> Mark | None:
    """What a sink has of a run; None where nothing is known to be there."""
    return read_json(mark_file(run, name), Mark)


def settings_of(metrics: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A sink's own section of `metrics`; TensorBoard has none."""
    found = metrics.get(name)
    return found if isinstance(found, dict) else {}


def feed(
    run: Path,
    name: str,
    settings: Mapping[str, Any],
    *,
    every: int,
    is_over: Callable[[], bool],
    again: bool = False,
    patience_s: float = LAST_S + 10.0,
) -> int:
    """Send a run to one sink until it is over; returns how many steps that were.

    Args:
        run: The run's folder.
        name: Of the sink.
        settings: Its section of the job file.
        every: Only steps that are a multiple of this.
        is_over: Waits for a moment; whether nothing more will be written.
        again: Whether to send everything from the beginning.
        patience_s: How long to wait for another process that sends the run there: the sink of the
            run's part before may have a moment left.

    Raises:
        TimeoutError: Another process sends the run there.
    """
    row = SINKS[name]
    with _alone(lock_file(run, name), patience_s):
        # Files for a later upload are written whole: nobody can say what a killed one holds.
        is_whole = again or not row.keeps_steps or settings.get("mode") == "offline"
        known = None if is_whole else read_mark(run, name)
        mark = known or Mark()
        told = Told(run=run, id=_id_of(run), settings=settings, job=_settings_of(run))
        keep = _Keep(mark_file(run, name) if row.keeps_steps else None, mark, row.lags)
        with opener(name)(told) as sink:
            sink.begin(mark.step)
            feeder = Feeder(run, sink, row, mark, every=every)
            _until_over(feeder, is_over, sink, keep)
        keep.all()
        return feeder.num_steps


class _Keep:
    """Writes the mark."""

    def __init__(self, file: Path | None, mark: Mark, lags: bool) -> None:
        self._file, self._mark, self._lags = file, mark, lags
        self._before = msgspec.json.encode(mark)

    def flushed(self) -> None:
        """The sink says that all so far is safe."""
        now = msgspec.json.encode(self._mark)
        self._write(self._before if self._lags else now)
        self._before = now

    def all(self) -> None:
        """The sink is closed."""
        self._write(msgspec.json.encode(self._mark))

    def _write(self, content: bytes) -> None:
        if self._file is not None:
            write_whole(self._file, content)


def _until_over(feeder: Feeder, is_over: Callable[[], bool], sink: Sink, keep: _Keep) -> None:
    kept_s, is_kept, over = time.monotonic(), True, False
    while True:
        over = over or is_over()
        now_s = time.monotonic()
        num = feeder.look(now_s, is_over=over)
        is_kept &= not num
        if over and not num:
            return
        if not is_kept and now_s - kept_s > _KEEP_S:
            sink.flush()
            keep.flushed()
            kept_s, is_kept = now_s, True


@contextlib.contextmanager
def _alone(path: Path, patience_s: float) -> Iterator[None]:
    """One process at a time sends a run to a sink."""
    deadline_s = time.monotonic() + patience_s
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError("another process sends the run there") from None
                time.sleep(_LOOK_S)
            else:
                break
        yield


def _id_of(run: Path) -> str:
    """An id from name and birth, not from the folder, which may be moved."""
    info = msgspec.json.decode((run / "run.json").read_bytes())
    return hashlib.sha256(f"{info['name']} {info['created_at']!r}".encode()).hexdigest()[:16]


def _settings_of(run: Path) -> dict[str, Any]:
    """The job's settings that are given; without those of the sinks and the environment's."""
    job = yaml.safe_load((run / "job.yaml").read_text())
    shown = {key: value for key, value in job.items() if key not in ("metrics", "environment")}
    return {key: value for key, value in flat(shown) if value not in (None, [], "")}


def _pipe_has_ended() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], _LOOK_S)
    if not ready or os.read(sys.stdin.fileno(), 1):
        return False
    # Whatever hangs now, even in C: the kernel ends us, and the mark says how far we came.
    signal.setitimer(signal.ITIMER_REAL, LAST_S)
    return True


def main(words: Iterable[str]) -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    run, name, text = words
    settings = msgspec.json.decode(text)
    own = settings_of(settings, name)
    try:
        num = feed(Path(run), name, own, every=settings["every"], is_over=_pipe_has_ended)
    except SinkRefused as error:
        print(f"{REFUSES}{error}")
        sys.exit(REFUSED)
    print(f"all is sent: {num} steps by this process")


if __name__ == "__main__":
    main(sys.argv[1:])
