"""Samples of prepared data: tokens on a disk, mapped into memory and read by number.

A rank holds no tokens, only the pages that the kernel keeps of them. Sample ids run through the
sources in the index's order.

Letters in tensor names: B samples, S tokens in a sample, E documents in the fullest sample.

Leaves out: which samples a step reads (`sampling.py`), and writing the files (`prepare`).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from paceline.prepare.index import (
    Index,
    Ints,
    SourceArrays,
    SourceIndex,
    open_arrays,
    open_index,
)
from paceline.runtime.sampling import Mixture, order_of
from paceline.runtime.strategy.train import IGNORED, Batch

_FILLED = 0
"""Token in the places of a pack that no document fills; a document of its own, and no target."""


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
        self._opened = [open_arrays(folder, index, source) for source in self._described]
        self._starts = np.cumsum([0, *(source.samples for source in self._described)])

    @property
    def num_samples(self) -> int:
        return int(self._starts[-1])

    @property
    def order(self) -> int | Mixture:
        """All samples alike where no source has a weight; else sources by weight."""
        return order_of(self._described)

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
            for start, stop in _spans(source, place, seq_len):
                after = at + stop - start - 1
                _read(source, start, stop, inputs_BS[row, at:after], targets_BS[row, at:after])
                ends[-1].append(after)
                at = after
        tensors = torch.from_numpy(inputs_BS), torch.from_numpy(targets_BS)
        if self.index.pack == "windows":
            return tensors
        ends_BE = np.full((len(ends), max(map(len, ends), default=0) + 1), seq_len, np.int32)
        for row, found in enumerate(ends):
            ends_BE[row, : len(found)] = found
        return *tensors, torch.from_numpy(ends_BE)


def _spans(source: SourceArrays, place: int, seq_len: int) -> list[tuple[int, int]]:
    """First token of each part of a sample, and the one after its last target."""
    if source.packs is None:
        return [(place * seq_len, (place + 1) * seq_len + 1)]
    spans = map(source.span, source.documents(place))
    return [(start, stop) for start, stop in spans if stop - start > 1]


def _read(source: SourceArrays, start: int, stop: int, inputs_S: Ints, targets_S: Ints) -> None:
    tokens, trained = source.tokens[start:stop], source.trained(start, stop)
    inputs_S[:], targets_S[:] = tokens[:-1], tokens[1:]
    if trained is not None:
        targets_S[~trained[1:]] = IGNORED
