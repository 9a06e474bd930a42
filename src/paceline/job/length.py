"""How long a run is: `train.steps`, or what they are made of, `train.epochs` or `train.tokens`.

A job that was read has steps; `Job.length` keeps what they were made of. Leaves out counting the
samples (`prepare/trained_on.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError, Problem
from paceline.job.data_rules import names_data
from paceline.units import counted

if TYPE_CHECKING:
    from paceline.job.load import Job

LENGTHS = ("steps", "epochs", "tokens")
"""Fields of `train` of which a job gives one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSize:
    """How many samples a source has to train on."""

    name: str
    samples: int
    weight: float | None = None
    """Its share of the samples beside the others' weights; None: by size."""


CountSamples = Callable[["Job"], Sequence[SourceSize]]
"""Counts what a job trains on, by source."""


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


def in_steps(job: "Job", count: CountSamples | None) -> "Job":
    """The job with `train.steps`, made of its epochs or tokens where it gives those.

    Args:
        job: As `check_length` lets it pass.
        count: Counts the samples; None where whoever reads the job has no data.

    Raises:
        JobError: There are epochs, and nobody to count the samples, or the data have none.
    """
    train, data = job.spec.train, job.spec.data
    if train.steps:
        return job
    if train.tokens is not None:
        steps = ceil(Fraction(train.tokens, train.global_batch * data.seq_len))
        length = Length(
            steps=steps, global_batch=train.global_batch, tokens=train.tokens, seq_len=data.seq_len
        )
    else:
        length = _of_epochs(job, count)
    train = replace(train, steps=length.steps, epochs=None, tokens=None)
    return replace(job, spec=replace(job.spec, train=train), length=length)


def _of_epochs(job: "Job", count: CountSamples | None) -> Length:
    train = job.spec.train
    if count is None:
        raise JobError.of(
            code="J007",
            what="train.epochs is counted from the data, which are not read here",
            where=job.where("train.epochs"),
            fix="give train.steps or train.tokens",
        )
    sources = tuple(count(job))
    num_samples = sum(source.samples for source in sources)
    # As it was written: 0.7 x 10 is 7, and in binary a little more.
    samples = Fraction(repr(train.epochs)) * num_samples
    return Length(
        steps=max(1, ceil(samples / train.global_batch)),
        global_batch=train.global_batch,
        epochs=train.epochs,
        sources=sources,
    )


def uncounted(job: "Job") -> Sequence[SourceSize]:
    """Far more samples than a step takes: for whoever reads a job and does not ask how long."""
    return (SourceSize(name="", samples=1000 * job.spec.train.global_batch),)


def keep_overridden(values: dict[str, Any], lines: Mapping[tuple[str | int, ...], int]) -> None:
    """Drop the file's way to give the length where `--set` gives another, and what is null."""
    train = values.get("train")
    if not isinstance(train, dict):
        return
    given = {name for name in LENGTHS if train.get(name) is not None}
    is_set = {name for name in given if lines.get(("train", name)) == 0}
    for name in set(LENGTHS) - (is_set or given):
        train.pop(name, None)


def check_length(job: "Job") -> Iterator[Problem]:
    """A job gives one of the three, and epochs and tokens only where they can be counted."""
    train = job.spec.train
    given = {name: getattr(train, name) for name in LENGTHS if getattr(train, name)}
    if not given:
        yield Problem(
            code="J005",
            what="the length of the run is missing: none of train.steps, train.epochs and "
            "train.tokens is given",
            where=job.where("train"),
            fix="add train.steps: 1000, or train.epochs: 2, or train.tokens: 10M",
        )
    elif len(given) > 1:
        ways = " and ".join(f"train.{name} {value:g}" for name, value in given.items())
        yield Problem(
            code="J007",
            what=f"the length of the run is given {len(given)} times: {ways}",
            where=job.where(f"train.{list(given)[-1]}"),
            fix="keep one of them",
        )
    elif "steps" not in given:
        yield from _check_countable(job, next(iter(given)))


def _check_countable(job: "Job", name: str) -> Iterator[Problem]:
    """What is known without the data."""
    spec = job.spec
    if spec.program is not None:
        reads = f"program {spec.program} reads its own data"
        fix = "give train.steps: samples of the data / train.global_batch is one epoch"
    elif name == "epochs" and spec.engine != "paceline":
        reads = f"{spec.engine} reads its data by itself"
        fix = "give train.steps or train.tokens"
    elif name == "epochs" and not names_data(job):
        reads = "the job names no data"
        fix = "give train.steps or train.tokens, or name the data: data.path"
    else:
        return
    yield Problem(
        code="J007",
        what=f"train.{name} cannot be counted: {reads}",
        where=job.where(f"train.{name}"),
        fix=fix,
    )
