"""The steps of a job that gives `train.epochs` or `train.tokens`, and the rules of its length.

Leaves out counting the samples (`prepare/trained_on.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from paceline.errors import JobError, Problem
from paceline.job.data_rules import names_data
from paceline.job.job import Job
from paceline.job.length import LENGTHS, Length, SourceSize

CountSamples = Callable[[Job], Sequence[SourceSize]]
"""Counts what a job trains on, by source."""


def in_steps(job: Job, count: CountSamples | None) -> Job:
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


def _of_epochs(job: Job, count: CountSamples | None) -> Length:
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


def uncounted(job: Job) -> Sequence[SourceSize]:
    """Far more samples than a step takes: for whoever reads a job and does not ask how long."""
    return (SourceSize(name="", samples=1000 * job.spec.train.global_batch),)


def check_length(job: Job) -> Iterator[Problem]:
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


def _check_countable(job: Job, name: str) -> Iterator[Problem]:
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
