"""A worker's slot: shared memory in which it says where it is, for its agent to read.

One anonymous file for each worker, made by the agent and inherited by the worker. It has no name,
so the kernel frees it with the last process that has it open: a SIGKILL of either leaves nothing
behind. The worker writes, the agent reads; neither waits for the other, and a worker that is
stopped, deadlocked or holds the interpreter can still be read.

Three kinds of writing: the training thread's place (a sequence lock around it, so that no reader
takes half of an old and half of a new one), the tick of a second thread that says the interpreter
still turns, and from `STACKS_AT` on the tracebacks that `faulthandler` writes when asked. The last
`NUM_DURATIONS` finished phases are kept too, so that a reader that comes by ten times a second
still learns how long short phases take.
"""

import mmap
import os
import signal
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """What a worker's training thread does, in the order in which a worker gets there."""

    STARTING = 0
    """The process runs, the interpreter starts."""
    IMPORTING = 1
    BUILDING = 2
    PARKED = 3
    """Ready, without a place: a spare, or a survivor that waits for the next generation."""
    JOINING = 4
    RESTORING = 5
    COMPILING = 6
    FORWARD = 10
    BACKWARD = 11
    VOTE = 12
    APPLY = 13
    BOUNDARY = 14
    """Between the update and the next forward pass: reports, and the program's own code."""
    SAVE = 15
    EVALUATE = 16
    ENDING = 20
    """Every step is done."""

    @property
    def is_of_step(self) -> bool:
        """Whether it is part of an optimizer step, and so takes about as long every time."""
        return Phase.FORWARD <= self <= Phase.BOUNDARY

    @property
    def words(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a slot said at one moment. Times are of this machine's monotonic clock."""

    worker: int
    generation: int
    step: int
    """The step in work, or the last one in work; 0 is none."""

    phase: Phase
    micro_batch: int
    """Micro-batch of the step, from 0."""

    is_first_step: bool
    """Whether it is this process's first step in its generation, which takes longer."""

    progress: int
    """How many times the place has changed."""

    liveness_ns: int
    """When the second thread ticked last; 0 is never."""

    training_thread: int
    liveness_thread: int
    """Thread ids as the kernel has them; 0 is unknown."""

    stacks_ready: bool
    """Whether the worker writes its tracebacks when it gets `STACKS_SIGNAL`."""

    is_torn: bool
    """Whether the worker was stopped while it wrote its place, so parts may not fit together."""


@dataclass(frozen=True, slots=True)
class Duration:
    """How long a finished phase took."""

    phase: Phase
    is_first_step: bool
    seconds: float


NUM_DURATIONS = 64
"""Finished phases a slot remembers. A reader that comes ten times a second misses none up to 640
phases a second; beyond, it sees the newest."""

STACKS_AT = 4096
"""Where tracebacks begin: the next page."""

STACKS_LIMIT = 256 * 1024
"""Most bytes of tracebacks that are read; faulthandler writes at most 100 threads of 100 frames."""

STACKS_SIGNAL = signal.SIGUSR2
"""What makes a worker write its tracebacks."""

TICK_S = 0.1
"""Between two ticks of the second thread."""

_FORMAT = 0x50414345_0002  # "PACE", version 2
_FIRST_BIT = 1 << 62
_PHASE_SHIFT = 56
_DURATION_MASK = (1 << _PHASE_SHIFT) - 1

# Eight bytes each. An aligned eight-byte store is one store on every machine torch runs on.
(
    _AT_FORMAT,
    _AT_WORKER,
    _AT_GENERATION,
    _AT_SEQUENCE,
    _AT_STEP,
    _AT_PHASE,
    _AT_MICRO_BATCH,
    _AT_IS_FIRST,
    _AT_LIVENESS_NS,
    _AT_TRAINING_THREAD,
    _AT_LIVENESS_THREAD,
    _AT_STACKS_READY,
    _AT_NUM_DURATIONS,
) = range(13)
_AT_DURATIONS = 24
_NUM_WORDS = _AT_DURATIONS + NUM_DURATIONS
_SIZE = _NUM_WORDS * 8
_WORDS = struct.Struct(f"={_NUM_WORDS}q")
_HEAD = struct.Struct(f"={_AT_NUM_DURATIONS + 1}q")
_PLACE = struct.Struct("=4q")
"""From `_AT_STEP` to `_AT_IS_FIRST`."""


class SlotFile:
    """The agent's side: makes the slot, hands its descriptor to the worker, and reads."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """To be inherited by the worker, which shares its file offset."""

        self._map = mmap.mmap(fd, _SIZE, prot=mmap.PROT_READ)
        self._seen_durations = 0

    def read(self) -> Reading:
        """Where the worker is. A few microseconds, whatever state the worker is in."""
        words = _HEAD.unpack_from(self._map)
        for _ in range(4):
            before = words[_AT_SEQUENCE]
            words = _HEAD.unpack_from(self._map)
            if before % 2 == 0 and before == _HEAD.unpack_from(self._map)[_AT_SEQUENCE]:
                return _reading(words, is_torn=False)
        return _reading(words, is_torn=True)

    def take_durations(self) -> list[Duration]:
        """The phases finished since the last call, oldest first."""
        words = _WORDS.unpack(self._map[:_SIZE])
        count = words[_AT_NUM_DURATIONS]
        # The oldest place may be being overwritten while it is read.
        first = max(self._seen_durations, count - NUM_DURATIONS + 1)
        self._seen_durations = count
        return [
            _duration(words[_AT_DURATIONS + number % NUM_DURATIONS])
            for number in range(first, count)
        ]

    def clear_stacks(self) -> None:
        """Forget tracebacks; call it before asking for new ones."""
        os.ftruncate(self.fd, STACKS_AT)
        os.lseek(self.fd, STACKS_AT, os.SEEK_SET)

    def num_stack_bytes(self) -> int:
        """How much has been written since `clear_stacks`."""
        return os.fstat(self.fd).st_size - STACKS_AT

    def stacks(self) -> str:
        """The tracebacks that have been written since `clear_stacks`."""
        text = os.pread(self.fd, STACKS_LIMIT, STACKS_AT)
        return text.decode("utf-8", "backslashreplace")

    def close(self) -> None:
        """Let go; the kernel frees the memory once the worker has ended too."""
        self._map.close()
        os.close(self.fd)


def create_slot(worker: int) -> SlotFile:
    """A new slot, in memory where the system has anonymous files, else in a file without a name."""
    if sys.platform == "linux":
        fd = os.memfd_create(f"paceline-slot-{worker}", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    words = [0] * _NUM_WORDS
    words[_AT_FORMAT], words[_AT_WORKER] = _FORMAT, worker
    os.pwrite(fd, _WORDS.pack(*words), 0)
    os.ftruncate(fd, STACKS_AT)
    os.lseek(fd, STACKS_AT, os.SEEK_SET)
    return SlotFile(fd)


class SlotWriter:
    """The worker's side. `tick` belongs to the second thread, the rest to the training thread."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._map).cast("q")
        if self._words[_AT_FORMAT] != _FORMAT:
            raise ValueError(f"descriptor {fd} is not a slot of this version")
        self._sequence = 0
        self._num_durations = 0
        self._phase = Phase.STARTING
        self._since_ns = time.monotonic_ns()
        self._is_first = False

    def begin(self, generation: int, *, training_thread: int) -> None:
        """Whose place this is from now on."""
        self._words[_AT_GENERATION] = generation
        self._words[_AT_TRAINING_THREAD] = training_thread

    def enter(self, phase: Phase, step: int, micro_batch: int = 0, is_first: bool = False) -> None:
        """The training thread goes on to another phase. Costs well below a microsecond."""
        now, words, sequence = time.monotonic_ns(), self._words, self._sequence + 2
        took = now - self._since_ns
        words[_AT_SEQUENCE] = sequence - 1
        words[_AT_DURATIONS + self._num_durations % NUM_DURATIONS] = (
            took | self._phase << _PHASE_SHIFT | (_FIRST_BIT if self._is_first else 0)
        )
        self._num_durations += 1
        words[_AT_NUM_DURATIONS] = self._num_durations
        _PLACE.pack_into(self._map, _AT_STEP * 8, step, phase, micro_batch, is_first)
        words[_AT_SEQUENCE] = self._sequence = sequence
        self._phase, self._since_ns, self._is_first = phase, now, is_first

    def abandon(self, phase: Phase, step: int) -> None:
        """As `enter`, but the phase before was cut short: how long it took says nothing."""
        now, words, sequence = time.monotonic_ns(), self._words, self._sequence + 2
        words[_AT_SEQUENCE] = sequence - 1
        _PLACE.pack_into(self._map, _AT_STEP * 8, step, phase, 0, False)
        words[_AT_SEQUENCE] = self._sequence = sequence
        self._phase, self._since_ns, self._is_first = phase, now, False

    def tick(self, thread: int) -> None:
        """The interpreter turns."""
        self._words[_AT_LIVENESS_THREAD] = thread
        self._words[_AT_LIVENESS_NS] = time.monotonic_ns()

    def stacks_ready(self) -> None:
        """The handler that writes tracebacks is in place."""
        self._words[_AT_STACKS_READY] = 1

    def close(self) -> None:
        """Let go of the memory; the descriptor stays the caller's."""
        self._words.release()
        self._map.close()


def _reading(words: tuple[int, ...], *, is_torn: bool) -> Reading:
    return Reading(
        worker=words[_AT_WORKER],
        generation=words[_AT_GENERATION],
        step=words[_AT_STEP],
        phase=Phase(words[_AT_PHASE]),
        micro_batch=words[_AT_MICRO_BATCH],
        is_first_step=bool(words[_AT_IS_FIRST]),
        progress=words[_AT_SEQUENCE] // 2,
        liveness_ns=words[_AT_LIVENESS_NS],
        training_thread=words[_AT_TRAINING_THREAD],
        liveness_thread=words[_AT_LIVENESS_THREAD],
        stacks_ready=bool(words[_AT_STACKS_READY]),
        is_torn=is_torn,
    )


def _duration(word: int) -> Duration:
    return Duration(
        phase=Phase((word & (_FIRST_BIT - 1)) >> _PHASE_SHIFT),
        is_first_step=bool(word & _FIRST_BIT),
        seconds=(word & _DURATION_MASK) / 1e9,
    )
