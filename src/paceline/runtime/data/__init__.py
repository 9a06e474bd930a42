"""Training data, read by number: bytes of text, or what `prepare` wrote to a disk.

Leaves out: which samples a step reads (`sampling.py`).
"""

from paceline.runtime.data.prepared import PreparedData, load_prepared
from paceline.runtime.data.samples import Samples
from paceline.runtime.data.text import TextData, load_text

__all__ = ["PreparedData", "Samples", "TextData", "load_prepared", "load_text"]
