"""Documents of one source file on a disk, as they are tokenized: what is resumed after a kill.

A part is a folder with the file's tokens, lengths, hashes and targets, renamed to its last name
when it is whole. Parts are joined into a source's arrays (`join.py`) and deleted.
"""

import shutil
from collections import Counter
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.prepare.documents import Batch, Document

_SUMMARY = "part.json"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a file's rows."""

    file: str
    rows: int
    left_out: dict[str, int]
    examples: dict[str, int]
    broken: int
    first_broken: list[tuple[int, str]]


class PartWriter:
    """Writes one part; nothing is there until `close`."""

    def __init__(self, folder: Path, file: str, dtype: str) -> None:
        self._folder = folder
        self._unfinished = folder.with_name(f"{folder.name}.unfinished")
        self._file = file
        self._dtype = np.dtype(dtype).newbyteorder("<")
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)
        self._tokens: IO[bytes] = (self._unfinished / "tokens").open("wb")
        self._trained: IO[bytes] | None = None
        self._lengths: list[int] = []
        self._keys: list[int] = []
        self._open = (0, 0)
        self._left_out: Counter[str] = Counter()
        self._examples: dict[str, int] = {}
        self._broken: list[tuple[int, str]] = []
        self._num_broken = 0
        self._num_rows = 0

    def add(self, batch: Batch, num_rows: int) -> None:
        """What became of the next rows."""
        self._num_rows += num_rows
        for document in batch.documents:
            self._add(document)
        self._left_out += batch.left_out
        for reason, number in batch.examples.items():
            self._examples.setdefault(reason, number)
        self._num_broken += len(batch.broken)
        self._broken = (self._broken + batch.broken)[:3]

    def _add(self, document: Document) -> None:
        tokens = document.tokens.astype(self._dtype, copy=False)
        self._tokens.write(tokens.tobytes())
        if document.trained is not None:
            if self._trained is None:
                self._trained = (self._unfinished / "trained").open("wb")
            self._trained.write(document.trained.astype(np.uint8).tobytes())
        length, key = self._open
        length, key = length + len(tokens), (key + document.key) % 2**64
        self._open = (length, key)
        if document.is_last:
            self._lengths.append(length)
            self._keys.append(key)
            self._open = (0, 0)

    def abandon(self) -> None:
        """Close its files; after an error it is not made whole."""
        self._tokens.close()
        if self._trained is not None:
            self._trained.close()

    def close(self) -> Part:
        """Make the part whole."""
        self.abandon()
        np.save(self._unfinished / "lengths.npy", np.asarray(self._lengths, np.int64))
        np.save(self._unfinished / "keys.npy", np.asarray(self._keys, np.uint64))
        part = Part(
            file=self._file,
            rows=self._num_rows,
            left_out=dict(self._left_out),
            examples=self._examples,
            broken=self._num_broken,
            first_broken=self._broken,
        )
        (self._unfinished / _SUMMARY).write_bytes(msgspec.json.encode(part))
        self._unfinished.rename(self._folder)
        return part


def read_part(folder: Path) -> Part | None:
    """The part that is there; None where it is not, or not whole."""
    try:
        return msgspec.json.decode((folder / _SUMMARY).read_bytes(), type=Part)
    except FileNotFoundError:
        return None


class PartArrays:
    """A part's documents, mapped into memory."""

    def __init__(self, folder: Path, dtype: str) -> None:
        kind = np.dtype(dtype).newbyteorder("<")
        self.lengths: NDArray[np.int64] = np.load(folder / "lengths.npy")
        self.keys: NDArray[np.uint64] = np.load(folder / "keys.npy")
        self.tokens = _mapped(folder / "tokens", kind)
        targets = folder / "trained"
        self.trained = _mapped(targets, np.dtype(np.uint8)) if targets.exists() else None


def _mapped(path: Path, kind: Any) -> NDArray[Any]:
    if not path.stat().st_size:
        return np.zeros(0, kind)
    return np.memmap(path, kind, "r")
