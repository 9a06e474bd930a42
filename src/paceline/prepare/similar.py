"""Rows with the same text and with nearly the same: MinHash in bands, kept on a disk.

Every row leaves a hash of its text, 14 bands of 8 MinHash values and one byte of each of the 112
values in files of a folder: 240 bytes a row. They are compared a band and a range of hashes at a
time, so that memory holds `_AT_ONCE` hashes and 13 bytes a row, whatever the size of the data.

Two rows are near duplicates when they share a band and as many of their 112 bytes as texts of
that Jaccard similarity would (b-bit minwise hashing, arXiv:0910.3349). Leaves out: similarity of
meaning.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.job.packages import import_package
from paceline.prepare.words import SHINGLE, Hashes, Ints, mixed, shingles_of

BANDS, ROWS = 14, 8
"""Source: FineWeb, arXiv:2406.17557, section 3.4: 112 hashes as 14 buckets of 8."""

_AT_ONCE = 1 << 20
"""Hashes of a band that are sorted at once, a guess: 16 MiB with their rows."""

_PAIRS_AT_ONCE = 1 << 14
_MOST_ROUNDS = 32
"""Texts of one bucket that the others of it are compared with, a guess; each round takes the first
of those that are like none before it."""

_MOST_SIZES = 256
"""Numbers of shingles that are counted apart: enough for thresholds up to 0.99."""

_SHOWN = 3
_LINE_BITS = 40
_CHANCE = 1 / 256
"""Bytes that are equal by chance."""


@dataclass(slots=True)
class Similar:
    """What is alike. Rows of a group but its first are counted."""

    exact: int = 0
    near: int = 0
    conflicts: int = 0
    """Rows of the same text with another label than the first."""

    leaked_exact: int = 0
    """Rows of evaluation whose text is trained on."""

    leaked_near: int = 0
    not_compared: int = 0
    """Rows of crowded buckets that were compared with 32 others of it, and not with all."""

    short: int | None = 0
    """Rows of fewer words than `short_words`; None where a threshold near 1 asks for more words
    than are counted apart."""

    short_words: int | None = 0
    """A text with fewer words is near to those with the same words alone: one word that is changed
    at its end takes more of its shingles than the threshold leaves."""

    examples: dict[str, list[tuple[int, int, float]]] = field(default_factory=dict)
    """Kind -> row, one like it before, and their similarity."""

    def add(self, kind: str, first: Ints, second: Ints, alike: NDArray[Any]) -> None:
        """Keep the pairs of a kind that come first in the files."""
        order = np.argsort(second, kind="stable")[:_SHOWN]
        columns = second[order].tolist(), first[order].tolist(), alike[order].tolist()
        kept = {*self.examples.get(kind, ()), *zip(*columns, strict=True)}
        self.examples[kind] = sorted(kept)[:_SHOWN]


class Fingerprints:
    """Writes what is kept of every row, and finds those that are alike."""

    def __init__(self, folder: Path, *, near: bool) -> None:
        self._folder = folder
        self._columns = {"text": np.uint64, "label": np.uint64, "place": np.int64}
        if near:
            where = "--near"
            need = "near duplicates are found by rensa"
            self._rensa = import_package("rensa", need, where=where)
            self._columns |= {f"band-{band}": np.uint64 for band in range(BANDS)}
        self._near = near
        self._files = ExitStack()
        names = [*self._columns, *(["bytes"] if near else [])]
        self._open = {
            name: self._files.enter_context((folder / name).open("wb", buffering=1 << 20))
            for name in names
        }
        self.num_rows = 0
        self._sizes = np.zeros(_MOST_SIZES, np.int64)

    def add(self, *, text: Hashes, label: Hashes, place: Ints, words: Hashes, starts: Ints) -> None:
        """Rows of one batch.

        Args:
            text: Hash of each row's text; 0 is compared with none.
            place: From `place_number`.
            starts: Where each row's words begin.
        """
        found = {"text": text, "label": label, "place": place}
        if self._near:
            shingles, edges = shingles_of(words, starts)
            digests = self._rensa.RMinHash.digest_matrix_from_flat_token_hashes(
                shingles, edges.astype(np.uint64), BANDS * ROWS, 42
            )
            values = np.asarray(digests.to_rows(), np.uint32).reshape(len(text), BANDS, ROWS)
            is_text = (np.diff(edges) > 0) & (text != 0)
            sizes = np.minimum(np.diff(edges)[is_text], _MOST_SIZES - 1)
            self._sizes += np.bincount(sizes, minlength=_MOST_SIZES)
            for band in range(BANDS):
                key = np.zeros(len(text), np.uint64)
                for row in range(ROWS):
                    key = mixed(key + values[:, band, row] + np.uint64(row + 1))
                found[f"band-{band}"] = np.where(is_text, key | np.uint64(1), np.uint64(0))
            values.astype(np.uint8).tofile(self._open["bytes"])
        for name, column in found.items():
            column.astype(self._columns[name], copy=False).tofile(self._open[name])
        self.num_rows += len(text)

    def close(self) -> None:
        """Close the files, before anything is compared or deleted."""
        self._files.close()

    def place(self, row: int) -> tuple[int, int]:
        """Number of a row's file, and of the row in it."""
        number = int(self._column("place")[row])
        return number >> _LINE_BITS, number & ((1 << _LINE_BITS) - 1)

    def compare(self, *, num_train: int, threshold: float) -> Similar:
        """What is alike among the rows that were added.

        Args:
            threshold: Jaccard similarity of near duplicates.
        """
        self.close()
        found = Similar()
        is_done = np.zeros(self.num_rows, np.bool_)
        self._compare_texts(found, is_done, num_train)
        if self._near:
            # Of n shingles n - 1 are left of n + 1 in both.
            most = _MOST_SIZES
            if threshold < 1:
                most = ceil(round((1 + threshold) / (1 - threshold), 6))
            is_counted = most < _MOST_SIZES  # the last of them is of all longer rows
            found.short = int(self._sizes[:most].sum()) if is_counted else None
            found.short_words = most + SHINGLE - 1 if is_counted else None
            parents = np.arange(self.num_rows)
            is_leaked = np.zeros(self.num_rows, np.bool_)
            for band in range(BANDS):
                for rows, firsts in self._runs(f"band-{band}", is_done):
                    self._compare_run(found, rows, firsts, parents, is_leaked, num_train, threshold)
            found.near = int((parents[:num_train] != np.arange(num_train)).sum())
            found.leaked_near = int(is_leaked.sum())
        return found

    def _compare_texts(self, found: Similar, is_done: NDArray[np.bool_], num_train: int) -> None:
        """Marks the rows that have a copy before them."""
        labels = self._column("label")
        for rows, firsts in self._runs("text", None):
            leader = np.repeat(rows[firsts], np.diff(np.append(firsts, len(rows))))
            is_copy = rows != leader
            leader, copy = leader[is_copy], rows[is_copy]
            is_train = copy < num_train
            is_leak = (leader < num_train) & ~is_train
            is_other = is_train & (labels[leader] != labels[copy])
            is_other &= (labels[leader] != 0) & (labels[copy] != 0)
            for name, mask in (("exact", is_train), ("leaked_exact", is_leak)):
                setattr(found, name, getattr(found, name) + int(mask.sum()))
                found.add(name, leader[mask], copy[mask], np.ones(int(mask.sum())))
            found.conflicts += int(is_other.sum())
            found.add("conflicts", leader[is_other], copy[is_other], np.ones(int(is_other.sum())))
            is_done[copy] = True

    def _compare_run(
        self,
        found: Similar,
        rows: Ints,
        firsts: Ints,
        parents: Ints,
        is_leaked: NDArray[np.bool_],
        num_train: int,
        threshold: float,
    ) -> None:
        """Compares the rows of each bucket with its first, those unlike it with the first of them,
        and so on."""
        bucket = np.repeat(np.arange(len(firsts)), np.diff(np.append(firsts, len(rows))))
        for _ in range(_MOST_ROUNDS):
            starts = np.flatnonzero(np.append(True, bucket[1:] != bucket[:-1]))
            leader = np.repeat(rows[starts], np.diff(np.append(starts, len(rows))))
            is_other = rows != leader
            leader, rows, bucket = leader[is_other], rows[is_other], bucket[is_other]
            if not len(rows):
                return
            alike = self._similarity(leader, rows)
            is_near, is_train = alike >= threshold, rows < num_train
            is_leak = is_near & ~is_train & (leader < num_train)
            _join(parents, leader[is_near & is_train], rows[is_near & is_train])
            new = is_leak & ~is_leaked[rows]
            for kind, mask in (("near", is_near & is_train), ("leaked_near", new)):
                found.add(kind, leader[mask], rows[mask], alike[mask])
            is_leaked[rows[is_leak]] = True
            rows, bucket = rows[~is_near], bucket[~is_near]
            if not len(rows):
                return
        found.not_compared += len(rows)

    def _similarity(self, first: Ints, second: Ints) -> NDArray[np.float64]:
        shares = [np.zeros(0)]
        width = BANDS * ROWS
        with (self._folder / "bytes").open("rb", buffering=0) as file:
            for at in range(0, len(first), _PAIRS_AT_ONCE):
                # Read and not mapped: the kernel would map 64 KiB around each row.
                left, right = (
                    np.frombuffer(
                        b"".join([os.pread(file.fileno(), width, width * row) for row in rows]),
                        np.uint8,
                    ).reshape(-1, width)
                    for rows in (
                        each[at : at + _PAIRS_AT_ONCE].tolist() for each in (first, second)
                    )
                )
                shares.append((left == right).mean(axis=1))
        return (np.concatenate(shares) - _CHANCE) / (1 - _CHANCE)

    def _runs(self, name: str, is_done: NDArray[np.bool_] | None) -> Iterator[tuple[Ints, Ints]]:
        """Rows with equal hashes beside each other, ascending, and where each run begins; a range
        of hashes at a time. Rows that are alone, done or of hash 0 are left out."""
        bits = max(0, (self.num_rows - 1) // _AT_ONCE).bit_length()
        for part in range(1 << bits):
            rows, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
            for at in range(0, self.num_rows, _AT_ONCE):
                path = self._folder / name  # read and not mapped: pages of it would count as ours
                block = np.fromfile(path, np.uint64, _AT_ONCE, offset=8 * at)
                wanted = block != 0
                if bits:
                    wanted &= block >> np.uint64(64 - bits) == part
                if is_done is not None:
                    wanted &= ~is_done[at : at + _AT_ONCE]
                here = np.flatnonzero(wanted)
                rows.append(here + at)
                keys.append(block[here])
            of_part, key = np.concatenate(rows), np.concatenate(keys)
            if not len(key):
                continue
            order = np.argsort(key, kind="stable")
            of_part, key = of_part[order], key[order]
            same = key[1:] == key[:-1]
            is_run = np.append(False, same) | np.append(same, False)
            of_part, key = of_part[is_run], key[is_run]
            if len(of_part):
                yield of_part, np.flatnonzero(np.append(True, key[1:] != key[:-1]))

    def _column(self, name: str) -> NDArray[Any]:
        path = self._folder / name
        kind = self._columns[name]
        return np.memmap(path, kind, "r") if self.num_rows else np.zeros(0, kind)


def place_numbers(file: int, rows: list[int]) -> Ints:
    """A file's number and each row's, as one number that `Fingerprints.place` takes apart."""
    return (file << _LINE_BITS) + np.asarray(rows, np.int64)


def _join(parents: Ints, first: Ints, second: Ints) -> None:
    """Put the groups of these rows together; a group goes by its lowest row."""
    while len(first):
        first, second = _root(parents, first), _root(parents, second)
        is_apart = first != second
        first, second = first[is_apart], second[is_apart]
        np.minimum.at(parents, np.maximum(first, second), np.minimum(first, second))


def _root(parents: Ints, rows: Ints) -> Ints:
    while not (parents[rows] == rows).all():
        rows = parents[rows]
    return rows
