"""Copies of a rank's state in its node's memory: they outlive the process, and not the node.

Each slot has two files, written in turn. A file's header says what it holds and the xxh3-128 of it,
and says nothing while it is written: a process killed meanwhile leaves the other file as it was.
A step waits for one copy of the bytes; they are hashed in a thread, and the header is written then.

Leaves out: files of another run on this machine, and their removal when a node is given up
(`record.snapshot_files`); sending a copy to another node (`peer_snapshots.py`).
"""

import mmap
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from paceline.record.best import Best
from paceline.record.checkpoints import BatchChanges
from paceline.record.snapshot_files import (
    FOLDER,
    remove_snapshots,
    snapshot_path,
    snapshot_slots,
)
from paceline.runtime.recovery.live import Entry, LiveState

_HEADER_BYTES = 4096
"""A page, so that what follows begins on one."""

_ALIGN = 64
"""A tensor begins at a multiple of it: a cache line, as torch's own memory does."""

_HEADER = struct.Struct("<8sqqqq16s8s")
"""Mark, step, generation, whether it is certified, bytes after the header, their xxh3-128, and the
xxh3-64 of all before."""

_LENGTH = struct.Struct("<q")
"""Length of the table, which follows it; the tensors come after the table."""

_MARK, _SIGN_BYTES = b"paceline", 8


class SnapshotError(Exception):
    """A snapshot is not there, not whole, or of another model."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs to a state and is no tensor."""

    job_digest: str = ""
    held_out_loss: float | None = None
    loss_scaler: Mapping[str, float] | None = None
    batches: BatchChanges = ()
    best: Best | None = None


NO_FACTS = Facts()


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    facts: Facts
    entries: list[Entry]
    offsets: list[int]
    num_bytes: int
    """Bytes of all tensors, with what lies between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A snapshot that is there; whether its bytes are what was written is seen when it is read."""

    step: int
    generation: int
    certified: bool
    num_bytes: int
    digest: bytes
    path: Path


class _Header(NamedTuple):
    mark: bytes
    step: int
    generation: int
    certified: int
    num_bytes: int
    digest: bytes
    sign: bytes


class Snapshots:
    """The snapshots in one node's memory, as one process of that node sees them."""

    def __init__(self, run: Path, node: int, *, generation: int, folder: Path = FOLDER) -> None:
        self._run = run
        self._node = node
        self._generation = generation
        self._folder = folder
        self._maps: dict[Path, tuple[int, mmap.mmap]] = {}
        self._writing: threading.Thread | None = None

    def take(
        self,
        slot: int,
        step: int,
        state: LiveState,
        facts: Facts = NO_FACTS,
        *,
        certified: bool = False,
    ) -> Tensor:
        """Copy a state into memory as it is now; the older of the slot's two files gives way.

        Returns:
            The content as it lies in memory, until the next but one is taken.

        Raises:
            SnapshotError: There is not enough memory.
        """
        self.wait()
        table = _laid_out(state.entries(), facts)
        encoded = msgspec.json.encode(table)
        first = _rounded(_LENGTH.size + len(encoded))
        path = self._next_path(slot)
        content = self._room(path, first + table.num_bytes)
        prefix = torch.frombuffer(
            bytearray(_LENGTH.pack(len(encoded)) + encoded), dtype=torch.uint8
        )
        content[: len(prefix)] = prefix
        for place, (_, tensor) in zip(
            _places(table, content[first:]), state.tensors(), strict=True
        ):
            place.copy_(tensor)

        def finish() -> None:
            digest = xxhash.xxh3_128_digest(content.numpy().data)
            self._seal(path, step, content, digest, certified=certified)

        self._writing = threading.Thread(target=finish, name="snapshot", daemon=True)
        self._writing.start()
        return content

    def wait(self) -> None:
        """Wait until the last snapshot is hashed and its header written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def held(self, slot: int) -> list[Held]:
        """A slot's snapshots on this node, newest first; none that is being written."""
        self.wait()
        found = [self._header(path) for path in self._paths(slot)]
        return sorted((each for each in found if each), key=lambda each: each.step, reverse=True)

    def newest(self, slot: int) -> int | None:
        """Step of the slot's newest snapshot on this node."""
        return next((each.step for each in self.held(slot)), None)

    def load_into(self, slot: int, step: int, state: LiveState) -> Facts:
        """Bring a state back, bit for bit, once its hash is found right. Nothing is changed
        otherwise.

        Raises:
            SnapshotError: There is none of the step, its bytes are not what was written, or the
                model is another one.
        """
        content = self.content(slot, step)
        table, first = _table(content)
        try:
            state.make_room(table.entries)
        except ValueError as error:
            raise SnapshotError(f"slot {slot}, step {step}: {error}") from error
        places = _places(table, content[first:])
        with torch.no_grad():
            for place, (_, tensor) in zip(places, state.tensors(), strict=True):
                tensor.copy_(place)
        return table.facts

    def facts(self, slot: int, step: int) -> Facts:
        """What belongs to a snapshot and is no tensor.

        Raises:
            SnapshotError: As `content`.
        """
        return _table(self.content(slot, step))[0].facts

    def content(self, slot: int, step: int) -> Tensor:
        """The bytes after the header, in the shared memory itself, verified.

        Raises:
            SnapshotError: As `load_into`.
        """
        self.wait()
        found = next((each for each in self.held(slot) if each.step == step), None)
        if found is None:
            raise SnapshotError(f"no snapshot of slot {slot} at step {step} on node {self._node}")
        content = self._content(found.path)
        if xxhash.xxh3_128_digest(content.numpy().data) != found.digest:
            raise SnapshotError(f"the snapshot of slot {slot} at step {step} is damaged")
        return content

    def room(self, slot: int, num_bytes: int) -> Tensor:
        """Memory for the content of a slot's next snapshot that comes from elsewhere; `seal` ends
        it.

        Raises:
            SnapshotError: There is not enough memory.
        """
        self.wait()
        return self._room(self._next_path(slot), num_bytes)

    def seal(
        self, slot: int, step: int, content: Tensor, digest: bytes, *, certified: bool
    ) -> None:
        """Say that what was put into `room` is whole.

        Args:
            digest: xxh3-128 of it, from where it came.
            certified: Whether all replicas agreed on it.
        """
        self._seal(self._next_path(slot), step, content, digest, certified=certified)

    def seen(self) -> dict[int, list[tuple[int, bool]]]:
        """Every slot's snapshots on this node, of whatever process: steps, newest first, and
        whether each is certified."""
        self.wait()
        slots = snapshot_slots(self._folder, self._run, node=self._node)
        return {slot: [(each.step, each.certified) for each in self.held(slot)] for slot in slots}

    def drop(self, slot: int, *, after: int) -> None:
        """Take away a slot's snapshots that may be of a wrong state: those of later steps than one,
        and those that nobody certified."""
        self.wait()
        for each in self.held(slot):
            if each.step > after or not each.certified:
                self._map(each.path)[: _HEADER.size] = bytes(_HEADER.size)

    def remove(self) -> None:
        """Take away every slot's snapshots on this node."""
        self.wait()
        self._maps.clear()
        remove_snapshots(self._folder, self._run, node=self._node)

    def _paths(self, slot: int) -> Iterator[Path]:
        for turn in (0, 1):
            yield snapshot_path(self._folder, self._run, node=self._node, slot=slot, turn=turn)

    def _next_path(self, slot: int) -> Path:
        first, second = self._paths(slot)
        held = {each.path: each.step for each in self.held(slot)}
        return min((first, second), key=lambda path: held.get(path, -1))

    def _room(self, path: Path, num_bytes: int) -> Tensor:
        if not path.exists() or path.stat().st_size != _HEADER_BYTES + num_bytes:
            path.unlink(missing_ok=True)
            _make(path, _HEADER_BYTES + num_bytes)
        self._map(path)[: _HEADER.size] = bytes(_HEADER.size)
        return self._content(path)

    def _content(self, path: Path) -> Tensor:
        return torch.frombuffer(self._map(path), dtype=torch.uint8, offset=_HEADER_BYTES)

    def _map(self, path: Path) -> mmap.mmap:
        """The file in memory, kept: mapping it anew costs a fault for every page."""
        place = path.stat().st_ino
        held = self._maps.get(path)
        if held is None or held[0] != place:
            with path.open("r+b") as file:
                held = self._maps[path] = place, mmap.mmap(file.fileno(), 0)
        return held[1]

    def _seal(
        self, path: Path, step: int, content: Tensor, digest: bytes, *, certified: bool
    ) -> None:
        fields = (_MARK, step, self._generation, int(certified), content.numel(), digest)
        unsigned = _HEADER.pack(*fields, bytes(_SIGN_BYTES))[:-_SIGN_BYTES]
        self._map(path)[: _HEADER.size] = unsigned + xxhash.xxh3_64_digest(unsigned)

    def _fields(self, path: Path) -> _Header:
        return _Header(*_HEADER.unpack(self._map(path)[: _HEADER.size]))

    def _header(self, path: Path) -> Held | None:
        if not path.exists() or path.stat().st_size < _HEADER_BYTES:
            return None
        found = self._fields(path)
        unsigned = self._map(path)[: _HEADER.size - _SIGN_BYTES]
        if found.mark != _MARK or found.sign != xxhash.xxh3_64_digest(unsigned):
            return None
        return Held(
            step=found.step,
            generation=found.generation,
            certified=bool(found.certified),
            num_bytes=found.num_bytes,
            digest=found.digest,
            path=path,
        )


def _make(path: Path, num_bytes: int) -> None:
    """A file of memory that is there: a page that is not when it is written ends the process."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SnapshotError(
            f"{path.parent} has no room for {num_bytes} bytes: {os.strerror(error.errno or 0)}"
        ) from error


def _laid_out(entries: list[Entry], facts: Facts) -> _Table:
    starts = list(accumulate((_rounded(entry.num_bytes) for entry in entries), initial=0))
    return _Table(facts=facts, entries=entries, offsets=starts[:-1], num_bytes=starts[-1])


def _table(content: Tensor) -> tuple[_Table, int]:
    (length,) = _LENGTH.unpack(content[: _LENGTH.size].numpy().tobytes())
    text = content[_LENGTH.size : _LENGTH.size + length].numpy().tobytes()
    return msgspec.json.decode(text, type=_Table), _rounded(_LENGTH.size + length)


def _places(table: _Table, values: Tensor) -> Iterator[Tensor]:
    for entry, offset in zip(table.entries, table.offsets, strict=True):
        flat = values[offset : offset + entry.num_bytes]
        yield flat.view(getattr(torch, entry.dtype)).view(entry.shape)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
