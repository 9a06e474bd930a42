"""Samples of a corpus: bytes of text as tokens, cut into windows of equal length.

Letters in tensor names: B samples, S tokens in a sample.

Leaves out: which samples a step reads (`sampling.py`), tokenizers other than one token a byte, and
corpora that do not fit into memory: every rank holds all bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.job import Job
from paceline.job.corpus import SEPARATOR, Corpus, find_corpus, unreadable_file


@dataclass(frozen=True, slots=True, kw_only=True)
class TextData:
    """Some text and how it is cut: sample i is the tokens i x seq_len up to (i + 1) x seq_len.

    The targets are the same tokens one further on, so a window is seq_len + 1 bytes and shares its
    last byte with the next one: each byte but the first is a target once an epoch.
    """

    text: NDArray[np.uint8]
    seq_len: int

    @property
    def num_samples(self) -> int:
        """Whole windows; the rest of the text, shorter than one, is never read."""
        return max(0, (len(self.text) - 1) // self.seq_len)

    @property
    def order(self) -> int:
        """All samples alike."""
        return self.num_samples

    @property
    def sources(self) -> dict[str, range]:
        """One without a name."""
        return {"": range(self.num_samples)}

    @property
    def targets_per_sample(self) -> None:
        """Every token is a target."""
        return None

    def samples(self, ids: Sequence[int] | NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """`(inputs_BS, targets_BS)`, int64, of these samples in this order."""
        starts = np.asarray(ids, dtype=np.int64) * self.seq_len
        if len(starts) and (starts.min() < 0 or starts.max() + self.seq_len >= len(self.text)):
            raise IndexError(f"sample ids are 0 to {self.num_samples - 1}, got {list(ids)}")
        windows = self.text[starts[:, None] + np.arange(self.seq_len + 1)]
        # `astype` copies; `contiguous` of a single window would not: whoever marks targets as
        # ignored would write into the inputs.
        inputs, targets = (part.astype(np.int64) for part in (windows[:, :-1], windows[:, 1:]))
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def load_text(job: Job) -> tuple[TextData, TextData | None]:
    """The job's training text, and its held-out text or None when nothing is held out.

    Raises:
        JobError: As `find_corpus` says.
    """
    return load_corpus(find_corpus(job), job.spec.data.seq_len)


def load_corpus(corpus: Corpus, seq_len: int) -> tuple[TextData, TextData | None]:
    """The texts of a corpus, read into memory: training, and held-out or None.

    Raises:
        JobError: A file has gone, or shrunk, since `find_corpus`.
    """
    train = TextData(text=_read(corpus.train)[: corpus.split_byte], seq_len=seq_len)
    if not corpus.held_out:
        return train, None
    held_out = _read(corpus.held_out)[corpus.split_byte or 0 :]
    return train, TextData(text=held_out, seq_len=seq_len)


def _read(paths: Sequence[Path]) -> NDArray[np.uint8]:
    text = bytearray()
    for path in paths:
        try:
            text += path.read_bytes()
        except OSError as error:
            raise unreadable_file(path, error) from None
        text += SEPARATOR
    return np.frombuffer(text, dtype=np.uint8)[: -len(SEPARATOR)]
