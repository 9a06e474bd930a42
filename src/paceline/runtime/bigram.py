"""What a bigram model would lose: the bar a trained byte-level model has to pass.

Leaves out: words and anything longer than one byte of context.
"""

import numpy as np
from numpy.typing import NDArray

SMOOTHING = 0.1
"""Added to the count of every pair of bytes, so that an unseen pair has a finite loss. A guess:
at 30 MB of text the loss hardly depends on it."""

_CHUNK = 1 << 20


def bigram_loss(train_bytes: NDArray[np.uint8], held_out_bytes: NDArray[np.uint8]) -> float:
    """Nats per byte, on held-out bytes, of the bigram model counted on the training bytes.

    Args:
        held_out_bytes: At least two bytes; the first is only context.

    >>> text = np.frombuffer(b"abababababababab", dtype=np.uint8)
    >>> round(bigram_loss(text, text), 2)
    1.47
    """
    counts = _pair_counts(train_bytes) + SMOOTHING
    log_probability = np.log(counts) - np.log(counts.sum(axis=1, keepdims=True))
    seen = _pair_counts(held_out_bytes)
    return float(-(seen * log_probability).sum() / seen.sum())


def _pair_counts(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """How often each byte follows each other: `counts[first, second]`, in 8 MiB of memory."""
    counts = np.zeros(256 * 256, dtype=np.int64)
    for start in range(0, len(text) - 1, _CHUNK):
        first = text[start : min(start + _CHUNK, len(text) - 1)].astype(np.uint16)
        second = text[start + 1 : start + 1 + len(first)]
        counts += np.bincount(first * 256 + second, minlength=256 * 256)
    return counts.reshape(256, 256)
