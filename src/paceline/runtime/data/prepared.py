"""Samples of prepared data: tokens on a disk, mapped into memory and read by number.

A rank holds no tokens, only the pages that the kernel keeps of them. Sample ids run through the
sources in the index's order.

Letters in tensor names: B samples, S tokens in a sample, E documents in the fullest sample.

Leaves out: which samples a step reads (`sampling.py`), and writing the files (`prepare`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import JobError
from paceline.prepare.index import (
    ENDS,
    PACK_DOCUMENTS,
    PACK_STARTS,
    TOKENS,
    TRAINED,
    Index,
    SourceIndex,
    open_index,
)
from paceline.runtime.sampling import Mixture
from paceline.runtime.strategy.train import IGNORED, Batch

_FILLED = 0
"""Token in the places of a pack that no document fills; a document of its own, and no target."""

Ints = NDArray[np.int64]


def load_prepared(folder: Path) -> "tuple[PreparedData, PreparedData | None]":
    """The training samples in a folder of prepared data, and the held-out ones or None.

    Raises:
        JobError: D020, there is no index, or a file is not as the index says.
    """
    index = open_index(folder)
    held_out = PreparedData(folder, index, index.held_out)
    return PreparedData(folder, index, index.train), held_out if held_out.num_samples else None


class PreparedData:
    """The samples of one side, training or held out."""

    def __init__(self, folder: Path, index: Index, sources: Sequence[SourceIndex]) -> None:
        self.index = index
        self._described = [source for source in sources if source.samples]
        self._opened = [_Source.open(folder, index, source) for source in self._described]
        self._starts = np.cumsum([0, *(source.samples for source in self._described)])

    @property
    def num_samples(self) -> int:
        """Of all sources."""
        return int(self._starts[-1])

    @property
    def order(self) -> int | Mixture:
        """All samples alike where no source has a weight; else sources by weight."""
        sizes = tuple(source.samples for source in self._described)
        weights = tuple(source.weight for source in self._described)
        if len(sizes) < 2 or not any(weights):
            return self.num_samples
        return Mixture(sizes=sizes, weights=tuple(weight or 0.0 for weight in weights))

    @property
    def sources(self) -> dict[str, range]:
        """Name of each source, and the ids of its samples."""
        edges = zip(self._described, self._starts.tolist(), self._starts[1:].tolist(), strict=False)
        return {source.name: range(start, stop) for source, start, stop in edges}

    @property
    def targets_per_sample(self) -> float | None:
        """Mean number of targets that count, by the index."""
        return sum(source.targets for source in self._described) / max(1, self.num_samples)

    def samples(self, ids: Sequence[int] | Ints) -> Batch:
        """`(inputs_BS, targets_BS)`, int64, of these samples in this order; of packs also
        `ends_BE`, int32: where each document ends, filled up with S."""
        wanted, seq_len = np.asarray(ids, dtype=np.int64), self.index.seq_len
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= self.num_samples):
            raise IndexError(f"sample ids are 0 to {self.num_samples - 1}, got {list(ids)}")
        inputs_BS = np.full((len(wanted), seq_len), _FILLED, np.int64)
        targets_BS = np.full((len(wanted), seq_len), IGNORED, np.int64)
        ends: list[list[int]] = []
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        places = wanted - self._starts[numbers]
        for row, (number, place) in enumerate(zip(numbers.tolist(), places.tolist(), strict=True)):
            source, at = self._opened[number], 0
            ends.append([])
            for start, stop in source.spans(place, seq_len):
                after = at + stop - start - 1
                source.read(start, stop, inputs_BS[row, at:after], targets_BS[row, at:after])
                ends[-1].append(after)
                at = after
        tensors = torch.from_numpy(inputs_BS), torch.from_numpy(targets_BS)
        if self.index.pack == "windows":
            return tensors
        ends_BE = np.full((len(ends), max(map(len, ends), default=0) + 1), seq_len, np.int32)
        for row, found in enumerate(ends):
            ends_BE[row, : len(found)] = found
        return *tensors, torch.from_numpy(ends_BE)


@dataclass(frozen=True)
class _Source:
    """One source's files."""

    folder: Path
    tokens: NDArray[np.unsignedinteger]
    trained: NDArray[np.uint8] | None
    is_packed: bool

    @staticmethod
    def open(folder: Path, index: Index, source: SourceIndex) -> "_Source":
        """
        Raises:
            JobError: D020, a file is missing or has another size.
        """
        own = folder / source.folder
        dtype = np.dtype(index.dtype).newbyteorder("<")
        tokens = _mapped(own / TOKENS, dtype, source.tokens)
        has_trained = (own / TRAINED).exists()
        trained = (
            _mapped(own / TRAINED, np.dtype(np.uint8), -(-source.tokens // 8))
            if has_trained
            else None
        )
        return _Source(own, tokens, trained, index.pack == "documents")

    @cached_property
    def _ends(self) -> Ints:
        ends: Ints = np.load(self.folder / ENDS, mmap_mode="r")
        return ends

    @cached_property
    def _packs(self) -> tuple[Ints, Ints]:
        names = (PACK_STARTS, PACK_DOCUMENTS)
        starts, documents = (np.load(self.folder / name, mmap_mode="r") for name in names)
        return starts, documents

    def spans(self, place: int, seq_len: int) -> list[tuple[int, int]]:
        """First token of each part of a sample, and the one after its last target."""
        if not self.is_packed:
            return [(place * seq_len, (place + 1) * seq_len + 1)]
        starts, documents = self._packs
        numbers = documents[int(starts[place]) : int(starts[place + 1])].tolist()
        firsts = (int(self._ends[number - 1]) if number else 0 for number in numbers)
        lasts = (int(self._ends[number]) for number in numbers)
        return [pair for pair in zip(firsts, lasts, strict=True) if pair[1] - pair[0] > 1]

    def read(self, start: int, stop: int, inputs_S: Ints, targets_S: Ints) -> None:
        """Write the tokens of a span as inputs and as targets."""
        tokens = self.tokens[start:stop]
        inputs_S[:], targets_S[:] = tokens[:-1], tokens[1:]
        if self.trained is not None:
            bits = np.unpackbits(self.trained[start // 8 : -(-stop // 8)])
            first = start % 8 + 1
            targets_S[bits[first : first + len(targets_S)] == 0] = IGNORED


def _mapped(path: Path, dtype: np.dtype, length: int) -> NDArray:  # type: ignore[type-arg]
    """A file of numbers, read where it is looked at.

    Raises:
        JobError: D020, it is not there, or not as long.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes == length * dtype.itemsize:
            return np.memmap(path, dtype, "r", shape=(length,))
        found = f"{num_bytes:,} bytes"
    except OSError as error:
        found = error.strerror or str(error)
    raise JobError.of(
        code="D020",
        what=f"{path.name}: {found}; the index says {length * dtype.itemsize:,} bytes",
        where=str(path),
        fix=f"delete {path.parent.parent} and prepare the data again: "
        "paceline data prepare job.yaml",
    )
