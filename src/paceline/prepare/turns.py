"""The token at which an answer ends in prepared conversations: where generation must stop."""

from pathlib import Path

import numpy as np

from paceline.prepare.index import ENDS, TOKENS, TRAINED, open_index

_LOOKED_AT = 64
"""Documents of a source. A guess: a template ends every turn alike."""


def end_of_turn(folder: Path) -> int | None:
    """The last token that counts in the loss of each document, where all have the same one.

    None where documents end differently, and for text, of which every token counts.

    Args:
        folder: Of prepared data.

    Raises:
        JobError: D020, there is no index.
    """
    index = open_index(folder)
    found: set[int] = set()
    for source in index.train:
        place = folder / source.folder
        if not (place / TRAINED).is_file():
            return None
        ends = np.load(place / ENDS, mmap_mode="r")[:_LOOKED_AT]
        num_tokens = int(ends[-1]) if len(ends) else 0
        dtype = np.dtype(index.dtype).newbyteorder("<")
        tokens = np.fromfile(place / TOKENS, dtype=dtype, count=num_tokens)
        bits = np.fromfile(place / TRAINED, dtype=np.uint8, count=-(-num_tokens // 8))
        counts = np.flatnonzero(np.unpackbits(bits, count=num_tokens))
        for start, end in zip([0, *ends[:-1]], ends, strict=False):
            last = np.searchsorted(counts, end) - 1
            if last >= 0 and counts[last] >= start:
                found.add(int(tokens[counts[last]]))
    return found.pop() if len(found) == 1 else None
