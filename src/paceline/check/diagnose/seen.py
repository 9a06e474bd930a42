"""What was seen in the logs: bounded in size however long they are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.check.diagnose.line import Line

KEEP_LINES = 8
"""First lines kept of one failure; beyond them only the first of each rank."""

KEEP_RANKS = 4096
KEEP_DISTINCT = 400
KEEP_RAISED = 2000
KEEP_NCCL = 40_000

Gpu = tuple[str | None, int]
"""(host, PCI bus)."""


@dataclass(slots=True)
class Sighting:
    """The lines of one failure's own patterns, or of its weak ones."""

    name: str
    weak: bool
    count: int = 0
    first: list[tuple[Line, dict[str, str]]] = field(default_factory=list)
    """The first lines, with what the pattern's named groups hold."""

    by_rank: dict[int, Line] = field(default_factory=dict)

    def add(self, line: Line, groups: dict[str, str]) -> None:
        """Note one more line."""
        self.count += 1
        if len(self.first) < KEEP_LINES:
            self.first.append((line, groups))
        if line.rank is not None and len(self.by_rank) < KEEP_RANKS:
            self.by_rank.setdefault(line.rank, line)

    @property
    def lines(self) -> list[Line]:
        """All that is kept, each line once."""
        kept = [*(line for line, _ in self.first), *self.by_rank.values()]
        return list({(line.source, line.number): line for line in kept}.values())

    @property
    def fullest(self) -> tuple[Line, dict[str, str]]:
        """The line whose groups hold most."""
        return max(self.first, key=lambda pair: len(pair[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame of a Python traceback."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it is in nobody's installed package."""
        return self.file != "?" and not _INSTALLED.search(self.file)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


_INSTALLED = re.compile(
    r"(?:site|dist)-packages|/lib/python3|\\lib\\|^<|/torch/|/ray/_private|/bin/(?:torchrun|accelerate"
    r"|deepspeed)$|multiprocessing/|/conda/|runpy\.py$|/\.pyenv/|importlib"
    r"|(?:^|/)(?:torch|deepspeed|accelerate|transformers|threading|lightning)(?:/|\.py$)"
    r"|\.(?:c|cc|cpp|cu|h|hpp)$"
)


@dataclass(slots=True, kw_only=True)
class Raised:
    """An exception that ended a traceback."""

    line: Line
    """Its last line: type and message."""

    header: Line
    type: str
    message: str
    frames: tuple[Frame, ...]
    rank: int | None
    caused_by: "Raised | None" = None
    during: "Raised | None" = None
    """What was being handled when it came up."""

    count: int = 1
    more: list[str] = field(default_factory=list)
    """Lines of the same writer behind it: a message that goes on, or was wrapped."""

    @property
    def place(self) -> Frame | None:
        """The deepest frame in the reader's own code; the deepest of all where there is none."""
        own = [frame for frame in self.frames if frame.is_users]
        return own[-1] if own else (self.frames[-1] if self.frames else None)

    @property
    def text(self) -> str:
        """The exception as Python prints it."""
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass(frozen=True, slots=True)
class Begun:
    """A traceback whose last line was never written, or was cut off."""

    header: Line
    frames: tuple[Frame, ...]
    last: Line | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended, by whoever started it."""

    line: Line
    code: int
    """Negative: the signal that ended it."""

    rank: int | None
    host: str | None
    pid: int | None
    first_observed: bool = False
    """torchrun calls it the root cause."""


@dataclass(slots=True, kw_only=True)
class Watched:
    """A watchdog's line of one rank: where it stood when it gave up."""

    line: Line
    rank: int | None
    seq: int
    op: str | None = None
    num_in: int | None = None
    group: str | None = None
    timeout_ms: int | None = None
    enqueued: int | None = None
    completed: int | None = None


@dataclass(slots=True, kw_only=True)
class ErrorLine:
    """A line with the word error or alike, that no pattern knows."""

    line: Line
    count: int = 1
    ranks: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a reader of dumps or of NCCL's report concludes."""

    id: str
    what: str
    line: Line
    ranks: tuple[int, ...] = ()
    place: str | None = None
    is_certain: bool = False
    title: str | None = None
    """Title in place of the failure's own."""

    check: str | None = None
    """What decides whether it does harm, or whether it is so where it is possible and no more."""


@dataclass(slots=True)
class Source:
    """One log: its parts that are kept whole."""

    name: str
    rank: int | None = None
    host: str | None = None
    num_bytes: int = 0
    num_lines: int = 0
    head: str = ""
    before: str = ""
    """What stood before the first line of a failure."""

    after: str = ""
    tail: str = ""
    trouble: str | None = None
    """Why it could not be read, or not to its end."""


@dataclass(slots=True)
class Seen:
    """Everything that was seen, over all sources."""

    sources: list[Source] = field(default_factory=list)
    sightings: dict[tuple[str, bool], Sighting] = field(default_factory=dict)
    """By failure, and by whether its patterns are weak ones."""

    raised: list[Raised] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)
    nccl: list[Line] = field(default_factory=list)
    error_lines: dict[str, ErrorLine] = field(default_factory=dict)
    rank_of: dict[tuple[str | None, int], int] = field(default_factory=dict)
    """(host, process id) -> rank, as Ray and NCCL say."""

    rank_of_gpu: dict[Gpu, int] = field(default_factory=dict)
    """(host, PCI bus) -> rank, as NCCL says."""

    first_ranks: dict[str, set[int]] = field(default_factory=dict)
    """Source -> rank less local rank, of the lines that say both."""

    ranks: set[int] = field(default_factory=set)
    found: list[Found] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    """What the run used, in words."""

    nccl_fields: Mapping[str, Any] | None = None
    """What NCCL's log says of the network, field by field."""

    has_finished: bool = False
    """Whether a run's own events say that it trained to its end."""

    saturated: list[str] = field(default_factory=list)
    """Patterns that matched so often that they were no longer looked for."""
