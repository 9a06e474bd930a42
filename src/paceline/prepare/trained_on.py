"""What a run trains on, as its record names it: text that is read as bytes, or prepared data."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.job import Job, SourceSize
from paceline.job.corpus import Corpus, find_corpus
from paceline.job.data_rules import is_prepared
from paceline.prepare.index import Index, fingerprint, open_index
from paceline.prepare.prepare import Report, prepared


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared data."""

    folder: Path

    @cached_property
    def index(self) -> Index:
        """What is in it."""
        return open_index(self.folder)

    @property
    def fingerprint(self) -> str:
        """Changes with any file, the tokenizer and the settings: 16 hex digits."""
        return fingerprint(self.folder)

    @property
    def padding(self) -> float:
        """Share of a batch's places that no document fills."""
        return self.index.padding

    @property
    def num_files(self) -> int:
        """Files that were read."""
        sources = (*self.index.train, *self.index.held_out)
        return len({name for source in sources for name in source.source_files})


TrainedOn = Corpus | Prepared


def find_data(job: Job, report: Report | None = None) -> TrainedOn | None:
    """What the job trains on, prepared now where it must be; None for a program's own data.

    Raises:
        JobError: A file is missing, or the data cannot be prepared.
    """
    if is_prepared(job):
        return Prepared(prepared(job, report))
    if job.spec.data.path is None and job.spec.data.corpus is None:
        return None
    return find_corpus(job)


def count_samples(job: Job, report: Report | None = None) -> tuple[SourceSize, ...]:
    """Samples to train on, by source; data are prepared now where they must be.

    Raises:
        JobError: As `find_data`.
    """
    data = find_data(job, report)
    assert data is not None, "a job without a program has data"
    if isinstance(data, Prepared):
        return tuple(
            SourceSize(name=source.name, samples=source.samples, weight=source.weight)
            for source in data.index.train
            if source.samples
        )
    return (SourceSize(name="", samples=data.num_samples(job.spec.data.seq_len)),)
