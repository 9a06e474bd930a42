"""Training data, read by number: bytes of text, or what `prepare` wrote to a disk.

Leaves out: which samples a step reads (`sampling.py`).
"""

from paceline.prepare import Prepared, TrainedOn
from paceline.runtime.data.prepared import PreparedData, load_prepared
from paceline.runtime.data.samples import Samples
from paceline.runtime.data.text import TextData, load_corpus, load_text

__all__ = ["PreparedData", "Samples", "TextData", "load_prepared", "load_samples", "load_text"]


def load_samples(data: TrainedOn, seq_len: int) -> tuple[Samples, Samples | None]:
    """The samples to train on, and the held-out ones or None.

    Raises:
        JobError: A file is not there any more, or not as it was found.
    """
    if isinstance(data, Prepared):
        return load_prepared(data.folder)
    return load_corpus(data, seq_len)
