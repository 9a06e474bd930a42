"""How long a run is: `train.steps`, or what they are made of, `train.epochs` or `train.tokens`.

A job that was read has steps; `Job.length` keeps what they were made of.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.units import counted

LENGTHS = ("steps", "epochs", "tokens")
"""Fields of `train` of which a job gives one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSize:
    """How many samples a source has to train on."""

    name: str
    samples: int
    weight: float | None = None
    """Its share of the samples beside the others' weights; None: by size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """What `train.epochs` or `train.tokens` made of a run, as its plan keeps it."""

    steps: int
    global_batch: int
    epochs: float | None = None
    """As asked: how many times all samples together are read."""

    tokens: int | None = None
    """As asked: tokens that are read."""

    seq_len: int | None = None
    """With `tokens`: those in a sample."""

    sources: tuple[SourceSize, ...] = ()
    """With `epochs`: what was counted."""

    @property
    def num_samples(self) -> int:
        """Samples of all sources."""
        return sum(source.samples for source in self.sources)

    @property
    def passes(self) -> dict[str, float]:
        """How often each source is read, by its name."""
        drawn = self.steps * self.global_batch
        weights = [source.weight for source in self.sources]
        if len(weights) < 2 or not any(weights):
            return {source.name: drawn / self.num_samples for source in self.sources}
        total = sum(weight or 0.0 for weight in weights)
        return {
            source.name: drawn * (source.weight or 0.0) / total / source.samples
            for source in self.sources
        }

    def __str__(self) -> str:
        """`2 epochs of 1,234 samples at 32 a step`; of weighted sources, how often each is read."""
        if self.tokens is not None and self.seq_len is not None:
            return f"{self.tokens:,} tokens at {self.global_batch * self.seq_len:,} a step"
        epochs = "1 epoch" if self.epochs == 1 else f"{self.epochs:g} epochs"
        text = f"{epochs} of {counted(self.num_samples, 'sample')} at {self.global_batch:,} a step"
        passes = self.passes
        if len(set(passes.values())) > 1:
            text += "; by weight, " + ", ".join(
                f"{name} is read {often:.3g} times" for name, often in passes.items()
            )
        return text


def keep_overridden(values: dict[str, Any], lines: Mapping[tuple[str | int, ...], int]) -> None:
    """Drop the file's way to give the length where `--set` gives another, and what is null."""
    train = values.get("train")
    if not isinstance(train, dict):
        return
    given = {name for name in LENGTHS if train.get(name) is not None}
    is_set = {name for name in given if lines.get(("train", name)) == 0}
    for name in set(LENGTHS) - (is_set or given):
        train.pop(name, None)
