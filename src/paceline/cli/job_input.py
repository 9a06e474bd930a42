"""Read what a person hands to a verb: a job file, or one of the JSON contracts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from paceline.cli.screen import say
from paceline.job import CountSamples, Job, SourceSize, load_job


def read_job(
    path: Path, overrides: Sequence[str] = (), *, count: CountSamples | None = None
) -> Job:
    """The job in a file of either kind; what a contract left open is said on standard error. A
    GGUF file that its model starts from is converted, once.

    Args:
        path: The file.
        overrides: Dotted assignments such as `train.global_batch=64`.
        count: Counts the samples of a job with `train.epochs`; left out, they are counted here.

    Raises:
        JobError: Every problem of the file at once.
    """
    job = _read(path, overrides, count or count_samples_at("local"))
    convert_weights(job)
    return job


def read_plannable(path: Path, overrides: Sequence[str] = (), *, files_for: str = "") -> Job:
    """Read a job that `paceline run` would take too, of the engine that files are written for.

    What only another engine or another machine can take is printed on standard error instead.

    Raises:
        JobError: Every problem of the file at once, or of the files that it names.
    """
    from paceline.launch.plannable import check_plannable

    job = with_engine(read_job(path, overrides), files_for)
    for problem in check_plannable(job):
        click.echo(f"note: {problem}", err=True)
    return job


def with_engine(read: Job, engine: str) -> Job:
    """The job as it is planned for an engine named on the command line; another one that the job
    names itself is noted on standard error."""
    from paceline.render import for_engine

    job = for_engine(read, engine)
    if job is not read and ("engine",) in read.lines:
        say(f"note: planned for {engine}, not for {read.spec.engine} as the job says")
    return job


def convert_weights(job: Job) -> None:
    """Convert the GGUF file that the job's model starts from, where it has one.

    Raises:
        JobError: It cannot be converted.
    """
    if job.spec.model.pretrained is not None:
        from paceline.launch.gguf import convert_gguf

        convert_gguf(job, say)


def _read(path: Path, overrides: Sequence[str], count: CountSamples) -> Job:
    if path.suffix.lower() == ".json":
        from paceline.contracts.reading import load_contract

        contract = load_contract(path, overrides)
        if contract is not None:
            for note in contract.notes:
                click.echo(f"note: {note}", err=True)
            for finding in contract.findings:
                click.echo(str(finding), err=True)
            return contract.job
    return load_job(path, overrides, count=count)


def count_samples_at(place: str) -> CountSamples:
    """Counts the samples of a job that is to run at a place; data are prepared for it."""

    def count(job: Job) -> Sequence[SourceSize]:
        from paceline.cli.prepare_progress import show_preparing
        from paceline.errors import JobError
        from paceline.launch.places import find_place
        from paceline.prepare import count_samples

        if not find_place(place).has_our_files and job.spec.data.corpus is None:
            raise JobError.of(
                code="W027",
                what=f"train.epochs is counted from the data, and those at "
                f"{find_place(place).title} are not read here",
                where=job.where("train.epochs"),
                fix=_NEEDS_NO_DATA,
            )
        convert_weights(job)  # the tokenizer may be in the same file
        try:
            return count_samples(job, show_preparing())
        except JobError as error:
            problems = [replace(each, fix=f"{each.fix}; {_AS_WELL}") for each in error.problems]
            raise JobError(*problems) from None

    return count


_NEEDS_NO_DATA = "give train.steps or train.tokens"
_AS_WELL = f"{_NEEDS_NO_DATA} instead of train.epochs to plan without the data"
