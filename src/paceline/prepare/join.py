"""Parts of a source become its arrays: training or held out, cut to the sample's length, packed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.prepare.index import (
    ENDS,
    PACK_DOCUMENTS,
    PACK_STARTS,
    TOKENS,
    TRAINED,
    Pack,
)
from paceline.prepare.parts import PartArrays

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How documents become samples."""

    pack: Pack
    seq_len: int
    too_long: str
    share: float
    """Part of the documents that is held out."""

    @property
    def each(self) -> int:
        """Documents that stay together."""
        return 2 if self.pack == "pairs" else 1


class Side(NamedTuple):
    """Documents on one side: first token and the one after the last, in each part."""

    starts: list[Ints]
    stops: list[Ints]


@dataclass(slots=True)
class Joined:
    """What was written for one side of a source."""

    documents: int = 0
    tokens: int = 0
    targets: int = 0
    samples: int = 0
    too_long: int = 0
    too_long_targets: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def split_sides(parts: Sequence[PartArrays], cut: Cut) -> tuple[Side, Side]:
    """Training and held-out documents: a hash of a document's content says which, so what is added
    later moves no other one. Each side has one document at least where there are two; a single text
    is held out by its end."""
    each_keys = [part.keys[:: cut.each] for part in parts]
    held = [keys.astype(np.float64) / 2**64 < cut.share for keys in each_keys]
    num_held, num_all = sum(int(mask.sum()) for mask in held), sum(map(len, held))
    if cut.share and num_all == 1 and cut.pack == "windows":
        return _split_text(parts, cut.share)
    if cut.share and num_all > 1 and num_held in (0, num_all):
        keys = np.concatenate(each_keys)
        at = int(keys.argmin() if num_held == 0 else keys.argmax())
        for mask in held:
            if 0 <= at < len(mask):
                mask[at] = num_held == 0
            at -= len(mask)
    stops = [np.cumsum(part.lengths) for part in parts]
    starts = [stop - part.lengths for stop, part in zip(stops, parts, strict=True)]
    masks = [np.repeat(mask, cut.each) for mask in held]
    pairs = list(zip(starts, stops, masks, strict=True))
    return (
        Side([start[~mask] for start, _, mask in pairs], [stop[~mask] for _, stop, mask in pairs]),
        Side([start[mask] for start, _, mask in pairs], [stop[mask] for _, stop, mask in pairs]),
    )


def _split_text(parts: Sequence[PartArrays], share: float) -> tuple[Side, Side]:
    sides = Side([], []), Side([], [])
    for part in parts:
        length = int(part.lengths.sum())
        edge = length - round(length * share)
        for side, (start, stop) in zip(sides, ((0, edge), (edge, length)), strict=True):
            present = [start] if stop > start else []
            side.starts.append(np.asarray(present, np.int64))
            side.stops.append(np.asarray([stop] if present else [], np.int64))
    return sides


def join_parts(folder: Path, parts: Sequence[PartArrays], side: Side, cut: Cut) -> Joined:
    """Write one side's arrays into a folder of its own."""
    folder.mkdir(parents=True)
    joined, bits = Joined(), _Bits(folder / TRAINED)
    lengths: list[Ints] = []
    with (folder / TOKENS).open("wb") as file:
        for part, starts, stops in zip(parts, *side, strict=True):
            if cut.pack != "windows":
                fit = _fit_pairs if cut.pack == "pairs" else _fit
                starts, stops = fit(part, starts, stops, cut, joined)
            lengths.append(stops - starts)
            for start, stop in _merged(starts, stops):
                part.tokens[start:stop].tofile(file)
                if part.trained is not None:
                    bits.write(part.trained[start:stop])
            joined.targets += _count_targets(part, starts, stops)
    bits.close()
    all_lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
    np.save(folder / ENDS, np.cumsum(all_lengths))
    joined.documents, joined.tokens = len(all_lengths), int(all_lengths.sum())
    if cut.pack == "windows":
        joined.samples = max(0, (joined.tokens - 1) // cut.seq_len)
        joined.targets = joined.samples * cut.seq_len
    else:
        pack_starts, documents = (
            (np.arange(0, len(all_lengths) + 1, 2), np.arange(len(all_lengths)))
            if cut.pack == "pairs"
            else pack_documents(all_lengths - 1, cut.seq_len)
        )
        np.save(folder / PACK_STARTS, pack_starts)
        np.save(folder / PACK_DOCUMENTS, documents)
        joined.samples = len(pack_starts) - 1
    return joined


def _fit(
    part: PartArrays, starts: Ints, stops: Ints, cut: Cut, joined: Joined
) -> tuple[Ints, Ints]:
    """Documents of two tokens at least and seq_len + 1 at most, made of the ones given."""
    longest = cut.seq_len + 1
    is_short = stops - starts < 2
    joined.left_out["a document of one token, which has no target"] += int(is_short.sum())
    starts, stops = starts[~is_short], stops[~is_short]
    is_long = stops - starts > longest
    if not is_long.any():
        return starts, stops
    joined.too_long += int(is_long.sum())
    joined.too_long_targets += _count_targets(part, starts[is_long], stops[is_long])
    if cut.too_long in ("refuse", "drop"):
        joined.left_out[f"longer than seq_len {cut.seq_len}: dropped"] += int(is_long.sum())
        return starts[~is_long], stops[~is_long]
    if cut.too_long == "split":
        pairs = [
            (at, min(at + longest, stop))
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
            for at in range(start, max(start + 1, stop - 1), cut.seq_len)
        ]
        split = np.asarray(pairs, np.int64).reshape(-1, 2)
        return split[:, 0], split[:, 1]
    stops = np.minimum(stops, starts + longest)
    return _with_targets(part, starts, stops, joined)


def _fit_pairs(
    part: PartArrays, starts: Ints, stops: Ints, cut: Cut, joined: Joined
) -> tuple[Ints, Ints]:
    """Pairs whose documents fit into one sample together, made of the ones given. What is cut are
    the ends: neither loses more than what is beyond half a sample."""
    starts_P2, stops_P2 = starts.reshape(-1, 2), stops.reshape(-1, 2)
    lengths_P2 = stops_P2 - starts_P2 - 1
    is_long = lengths_P2.sum(axis=1) > cut.seq_len
    joined.too_long += int(is_long.sum())
    long = starts_P2[is_long].ravel(), stops_P2[is_long].ravel()
    joined.too_long_targets += _count_targets(part, *long)
    if cut.too_long in ("refuse", "drop"):
        joined.left_out[f"a pair longer than seq_len {cut.seq_len}: dropped"] += int(is_long.sum())
        return starts_P2[~is_long].ravel(), stops_P2[~is_long].ravel()
    chosen, rejected = lengths_P2.T
    chosen = np.minimum(chosen, np.maximum(cut.seq_len // 2, cut.seq_len - rejected))
    rejected = np.minimum(rejected, cut.seq_len - chosen)
    stops = (starts_P2 + np.stack([chosen, rejected], axis=1) + 1).ravel()
    has_targets = (_targets_of(part, starts, stops).reshape(-1, 2) > 0).all(axis=1)
    reason = "a pair whose answer was cut off whole"
    joined.left_out[reason] += int((~has_targets).sum())
    kept = np.repeat(has_targets, 2)
    return starts[kept], stops[kept]


def _with_targets(part: PartArrays, starts: Ints, stops: Ints, joined: Joined) -> tuple[Ints, Ints]:
    """Without documents whose trained tokens were all cut off."""
    if part.trained is None:
        return starts, stops
    counts = _targets_of(part, starts, stops)
    joined.left_out["no token is left to train on after it was cut"] += int((counts == 0).sum())
    return starts[counts > 0], stops[counts > 0]


def _count_targets(part: PartArrays, starts: Ints, stops: Ints) -> int:
    if part.trained is None:
        return int((stops - starts - 1).sum())
    return int(_targets_of(part, starts, stops).sum())


def _targets_of(part: PartArrays, starts: Ints, stops: Ints) -> Ints:
    assert part.trained is not None, "it says which tokens are trained on"
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    counts = [int(part.trained[start + 1 : stop].sum()) for start, stop in pairs]
    return np.asarray(counts, np.int64)


def _merged(starts: Ints, stops: Ints) -> list[tuple[int, int]]:
    if not len(starts):
        return []
    edges = np.flatnonzero(starts[1:] != stops[:-1])
    firsts, lasts = np.append(0, edges + 1), np.append(edges, len(starts) - 1)
    return list(zip(starts[firsts].tolist(), stops[lasts].tolist(), strict=True))


class _Bits:
    """Writes bits in eights; no file where none come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = np.zeros(0, np.uint8)

    def write(self, bits: NDArray[Any]) -> None:
        if self._file is None:
            self._file = self._path.open("wb")
        bits = np.concatenate([self._rest, bits])
        whole = len(bits) // 8 * 8
        np.packbits(bits[:whole]).tofile(self._file)
        self._rest = bits[whole:]

    def close(self) -> None:
        if self._file is not None:
            np.packbits(self._rest).tofile(self._file)
            self._file.close()


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The pack of each document: longest first, each into the fullest pack that has room.

    Ties go by number. Room is a small integer, so a list of packs for each room and a bit set of
    the rooms that exist make each document O(capacity / 64).

    Args:
        lengths: Places that each document fills, 1 to `capacity`.
        capacity: Places in a pack.
    """
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = count = 0
    packs = np.empty(len(lengths), np.int64)
    for document in np.argsort(-lengths, kind="stable").tolist():
        need = int(lengths[document])
        if fitting := rooms >> need:
            room = need + (fitting & -fitting).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, pack = capacity, count
            count += 1
        packs[document] = pack
        if left := room - need:
            by_room[left].append(pack)
            rooms |= 1 << left
    return packs


def pack_documents(
    lengths: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`(pack_starts, pack_documents)` of documents of these lengths, best fit decreasing.

    Documents of a pack are in their own order.
    """
    packs = best_fit(lengths, capacity)
    documents = np.argsort(packs, kind="stable")
    sizes = np.bincount(packs) if len(packs) else np.zeros(0, np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return starts.astype(np.int64), documents.astype(np.int64)
