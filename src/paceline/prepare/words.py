"""Texts as hashed words, many at once: what near duplicates and measures of quality are made of.

A word is a run of letters and digits in lower case; each Chinese, Japanese or Korean character is a
word of its own. Leaves out: how words are compared (`similar.py`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SHINGLE = 5
"""Words of a shingle. Source: FineWeb, arXiv:2406.17557, section 3.4; Lee et al.,
arXiv:2107.06499."""

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]

_LETTER, _DIGIT, _CJK = 1, 2, 3
_KINDS = np.zeros(256, np.uint8)
_KINDS[ord("0") : ord("9") + 1] = _DIGIT
_KINDS[ord("a") : ord("z") + 1] = _LETTER
_KINDS[0x80:] = _LETTER
_KINDS[0xE3:0xEE] = _CJK
"""First bytes of U+3000 to U+DFFF in UTF-8, each of three bytes."""

_random = np.random.default_rng(0x5EED)
_OF_PLACE = _random.integers(0, 1 << 64, 256, np.uint64) | np.uint64(1)
_OF_WORD = _random.integers(0, 1 << 64, SHINGLE, np.uint64) | np.uint64(1)


class Words(NamedTuple):
    """The words of some texts, one text after another."""

    hashes: Hashes
    starts: Ints
    """Text t has the words `starts[t]` to `starts[t + 1]`."""

    has_letter: NDArray[np.bool_]
    num_letters: Ints


def words_of(texts: Sequence[str]) -> Words:
    """The words of each text.

    >>> first, second = words_of(["One, two!", "ONE two"]).hashes.reshape(2, 2)
    >>> bool((first == second).all())
    True
    """
    encoded = [text.lower().encode(errors="replace") for text in texts]
    ends = np.cumsum([len(each) + 1 for each in encoded], dtype=np.int64)
    data = np.frombuffer(b" ".join([*encoded, b"   "]), np.uint8)
    kinds = _KINDS[data]
    is_word = kinds > 0
    is_more = (data & 0xC0) == 0x80  # a later byte of a character
    begins = is_word & ~is_more
    begins[1:] &= ~is_word[:-1] | (kinds[1:] == _CJK) | np.append([False] * 2, kinds[:-3] == _CJK)
    places = np.flatnonzero(is_word)
    firsts = np.flatnonzero(begins[places])
    if not len(firsts):
        none = np.zeros(0, np.int64)
        return Words(none.view(np.uint64), np.zeros(len(texts) + 1, np.int64), none > 0, none)
    lengths = np.diff(np.append(firsts, len(places)))
    within = np.arange(len(places)) - np.repeat(firsts, lengths)
    products = (data[places].astype(np.uint64) + np.uint64(1)) * _OF_PLACE[within & 255]
    starts = np.append(0, np.searchsorted(places[firsts], ends))
    return Words(
        hashes=mixed(np.add.reduceat(products, firsts) + lengths.astype(np.uint64)),
        starts=starts,
        has_letter=np.logical_or.reduceat(kinds[places] != _DIGIT, firsts),
        num_letters=np.add.reduceat((~is_more[places]).astype(np.int64), firsts),
    )


def shingles_of(hashes: Hashes, starts: Ints) -> tuple[Hashes, Ints]:
    """Hashes of every five words that follow each other, of texts with fewer that of all of them;
    and where each text's begin."""
    lengths = np.diff(starts)
    counts = np.where(lengths > 0, np.maximum(lengths - SHINGLE + 1, 1), 0)
    edges = np.append(0, np.cumsum(counts))
    first = np.arange(edges[-1]) + np.repeat(starts[:-1] - edges[:-1], counts)
    last = np.repeat(starts[1:], counts)
    padded = np.append(hashes, np.zeros(SHINGLE, np.uint64))
    total = np.zeros(len(first), np.uint64)
    for place, factor in enumerate(_OF_WORD):
        at = first + place
        total += np.where(at < last, padded[np.minimum(at, len(hashes))] * factor, np.uint64(0))
    return mixed(total), edges


def mixed(hashes: Hashes) -> Hashes:
    """Hashes with every bit stirred in: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA
    2014, figure 5), modulo 2 ** 64."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))
