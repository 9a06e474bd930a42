"""Documents into samples of one length: a pure function of the lengths."""

import numpy as np
from numpy.typing import NDArray


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
