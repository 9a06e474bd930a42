"""What a worker and its writer process say to each other."""

import struct
from dataclasses import dataclass

from paceline.runtime.checkpoint._files import Record, WriteTask

WANTED = struct.Struct("<q")
"""The number of the save that is wanted, at the start of memory that both share: the worker changes
it to abandon what is on its way, without a word and without waiting."""

NOTHING = 0
"""The number when no save is wanted."""


@dataclass(frozen=True, slots=True)
class Memory:
    """From the worker: a descriptor follows, of new memory for shares."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Write:
    """From the worker: a save."""

    number: int
    task: WriteTask
    records: tuple[Record, ...]
    starts: tuple[int, ...]
    """Where the values of each record begin in the memory."""

    metadata: bytes
    """torch's table of contents; of rank 0 alone."""

    has_phase: bool


@dataclass(frozen=True, slots=True)
class GoOn:
    """From the worker, after `Phase`."""

    number: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Phase:
    """To the worker: the data file is written; nothing is committed."""

    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """To the worker: what became of a save, as far as this rank's writer has to do with it."""

    number: int
    num_bytes: int = 0
    """Bytes of all data files; only where it was committed."""

    reason: str | None = None
    is_space: bool = False
