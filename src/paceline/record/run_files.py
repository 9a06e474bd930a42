"""The files in a run's folder as a row needs them, and what of them cannot be read.

A few fields are read, whatever version wrote them. Damage is kept, not raised: a list of runs shows
the others all the same.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paceline.record.history import Event

_T = TypeVar("_T")

NAMES = (
    *("run.json", "job.yaml", "plan.json", "place.json"),
    *("events.jsonl", "metrics.jsonl", "starts.jsonl"),
)
"""What is read."""

_TAIL_BYTES = 16 << 10
"""Read of the end of the metrics: about forty lines. A longer line makes it read more."""


class Info(msgspec.Struct):
    """Fields of `run.json`."""

    name: str = ""
    created_at: float = 0.0


class Place(msgspec.Struct):
    """Fields of `place.json`."""

    place: str = "local"
    job_id: str | None = None


class Memory(msgspec.Struct):
    """What a plan predicts of memory."""

    parts: dict[str, float | None] = {}


class Estimate(msgspec.Struct):
    """What a plan predicts."""

    memory: Memory = msgspec.field(default_factory=Memory)
    step_s: float | None = None


class Cluster(msgspec.Struct):
    """What a plan is for."""

    accelerator: str | None = None


class Cost(msgspec.Struct):
    """What a plan's machines cost."""

    per_instance_hour_usd: float
    num_instances: int


class Planned(msgspec.Struct):
    """Fields of `plan.json`."""

    cluster: Cluster = msgspec.field(default_factory=Cluster)
    estimate: Estimate = msgspec.field(default_factory=Estimate)
    engine: str | None = None
    cost: Cost | None = None


class Code(msgspec.Struct):
    """The code of a start."""

    commit: str | None = None
    is_dirty: bool | None = None
    diff_sha256: str | None = None


class Start(msgspec.Struct):
    """Fields of a line of `starts.jsonl`."""

    command: list[str] = []
    host: str | None = None
    python: str | None = None
    packages: dict[str, str] = {}
    code: Code | None = None


class Step(msgspec.Struct):
    """Fields of a line of `metrics.jsonl`."""

    step: int
    at: float = 0.0
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    num_steps: int | None = None
    not_finite: list[str] | None = None
    """A script's fields that were nan or infinite; others that are None were not printed."""


class RunFiles:
    """The files of one folder, and the first damage that was met."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damage: str | None = None

    def info(self) -> Info:
        """`run.json`; its own defaults where it cannot be read."""
        return self._whole("run.json", _decode(Info)) or Info()

    def settings(self) -> dict[str, Any]:
        """The job's settings by dotted name."""
        return self._whole("job.yaml", read_settings) or {}

    def plan(self) -> Planned:
        """`plan.json`; a script has none."""
        return self._whole("plan.json", _decode(Planned)) or Planned()

    def place(self) -> Place:
        """`place.json`; this machine where there is none."""
        return self._whole("place.json", _decode(Place)) or Place()

    def layout_name(self) -> str:
        """The planned layout, for a run that has not started."""
        from paceline.parallel import Layout  # not needed for any other run

        class Chosen(msgspec.Struct):
            layout: Layout

        chosen = self._whole("plan.json", _decode(Chosen))
        return chosen.layout.name if chosen is not None else "unknown"

    def made_at(self) -> float:
        """When the folder was last changed: where `run.json` cannot be read."""
        try:
            return self.folder.stat().st_mtime
        except OSError:
            return 0.0

    def events(self) -> list[Event]:
        """Every whole line of the events."""
        return self.lines("events.jsonl", Event)

    def lines(self, name: str, kind: type[_T]) -> list[_T]:
        """Every whole line of a file of lines."""
        return list(self._lines(name, self._bytes(name) or b"", _decoder(kind), 1))

    def json(self, name: str) -> dict[str, Any]:
        """All of a JSON file; empty where there is none."""
        return self._whole(name, _decode(dict[str, Any])) or {}

    def last_start(self) -> Start | None:
        """By whom and from which code it was last started; None in runs of older versions."""
        found = self.lines("starts.jsonl", Start)
        return found[-1] if found else None

    def newest_steps(self) -> list[Step]:
        """The steps in the last lines of the metrics."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                end, size = os.fstat(file.fileno()).st_size, _TAIL_BYTES
                while True:
                    start = max(0, end - size)
                    file.seek(start)
                    text = file.read(end - start)
                    skipped = text.find(b"\n") + 1 if start else 0
                    first = None if start else 1
                    found = list(
                        self._lines("metrics.jsonl", text[skipped:], _decoder(Step), first)
                    )
                    if found or start == 0:
                        return found
                    size *= 8
        except FileNotFoundError:
            return []
        except OSError as error:
            self.miss(f"metrics.jsonl cannot be read: {error.strerror}")
            return []

    def _whole(self, name: str, decode: Callable[[bytes], _T]) -> _T | None:
        text = self._bytes(name)
        if text is None:
            if name in ("run.json", "job.yaml"):
                self.miss(f"{name} is missing")
            return None
        try:
            return decode(text)
        except (ValueError, RecursionError) as error:  # msgspec's and those of a text are such
            self.miss(f"{name} cannot be read: {str(error).partition(chr(10))[0][:120]}")
            return None

    def _lines(
        self, name: str, text: bytes, decoder: "msgspec.json.Decoder[_T]", first: int | None
    ) -> Iterator[_T]:
        """Every whole line. One that a crash cut short is left out; any other that cannot be read
        is damage, with its number where the first line of the file has the number `first`."""
        try:
            yield from decoder.decode_lines(text)
            return
        except msgspec.DecodeError:
            pass
        for number, line in enumerate(text.split(b"\n")):
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                if "truncated" not in str(error):
                    place = "near its end" if first is None else f"line {first + number}"
                    self.miss(f"{name}, {place}, cannot be read: {str(error)[:80]}")

    def _bytes(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.miss(f"{name} cannot be read: {error.strerror}")
            return None

    def miss(self, what: str) -> None:
        """Note damage; the first counts."""
        self.damage = self.damage or what


def _decode(kind: type[_T]) -> Callable[[bytes], _T]:
    return _decoder(kind).decode


def _decoder(kind: type[_T]) -> "msgspec.json.Decoder[_T]":
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.json.Decoder(kind)
    found: msgspec.json.Decoder[_T] = _DECODERS[kind]
    return found


_DECODERS: dict[Any, Any] = {}


_TOP_KEY = re.compile(r"^(?=[A-Za-z_])", re.MULTILINE)
"""Where a top-level section of a job file begins."""

_SECTIONS: dict[str, dict[str, Any]] = {}
"""Text of a section -> its settings."""

_MOST_SECTIONS = 4096
"""After which they are thrown away: some tens of megabytes. A guess."""


def read_settings(text: bytes) -> dict[str, Any]:
    """Settings of a job file by dotted name, such as `train.learning_rate`.

    YAML takes most of the time of reading a run, and the runs of a sweep share all sections but
    one: a section that was read before is not parsed again.

    Raises:
        ValueError: It is not YAML, or has no keys and values.
    """
    whole, found = text.decode(), dict[str, Any]()
    try:
        for section in filter(str.strip, _TOP_KEY.split(whole)):
            found |= _section(section)
    except ValueError:  # an alias from one section to another, say
        return _parsed(whole)
    return found


def _section(text: str) -> dict[str, Any]:
    if text not in _SECTIONS:
        if len(_SECTIONS) >= _MOST_SECTIONS:
            _SECTIONS.clear()
        _SECTIONS[text] = _parsed(text)
    return _SECTIONS[text]


def _parsed(text: str) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"not YAML: {getattr(error, 'problem', None) or error}{place}") from None
    if not isinstance(values, dict):
        raise ValueError("it has no keys and values")
    return dict(flat(values))


def flat(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name -> value, for every value that is no section.

    >>> dict(flat({"train": {"steps": 5}, "name": "x"}))
    {'train.steps': 5, 'name': 'x'}
    """
    for name, value in section.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
