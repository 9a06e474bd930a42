"""The job and the plan of a run, new or gone on with, and every reason not to start it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from paceline.job import Job, Script, SourceSize
    from paceline.plan import Plan
    from paceline.prepare import TrainedOn
    from paceline.record.run import RunFolder

    _J = TypeVar("_J", Job, Script)


def with_hosts_of(job: "_J", hosts: str | None, place: str) -> "_J":
    """The job or script with the hosts of the command line, where it names some."""
    from paceline.launch.handover import with_hosts

    refuse_hosts(hosts, place)
    return with_hosts(job, hosts) if hosts is not None else job


def with_alerts(job: "_J", file: Path | None) -> "_J":
    """The job or script with the alert rules of a file, where there is one.

    Raises:
        JobError: The rules cannot be judged.
    """
    from paceline.control.alerts import check_names
    from paceline.errors import JobError
    from paceline.job import Script
    from paceline.job.load import load_alerts

    if file is None:
        return job
    is_script = isinstance(job, Script)
    alerts, where = load_alerts(file, of_script=is_script)
    its_own = is_script or getattr(job.spec, "program", None) is not None
    JobError.raise_for(check_names(alerts, where, logs_its_own=its_own))
    spec: Any = replace(job.spec, alerts=alerts)
    return replace(job, spec=spec)


def refuse_hosts(hosts: str | None, place: str) -> None:
    """
    Raises:
        UsageError: Hosts are named for a place that has its own.
    """
    if hosts is not None and place != "ssh":
        raise click.UsageError("--hosts goes with --on ssh.")


def go_on(
    run: "RunFolder",
    overrides: tuple[str, ...],
    *,
    place: str,
    hosts: str | None,
    other: "Job | None" = None,
    alerts: Path | None = None,
) -> "tuple[Job, Plan]":
    """The job and the plan that a run goes on with.

    Args:
        run: What goes on.
        overrides: Of its own job.
        place: Where.
        hosts: Of the command line.
        other: A job instead of its own, the overrides in it already.
        alerts: A file of rules in place of its own.

    Raises:
        PacelineError: Something was changed that may not be, or it cannot be run.
    """
    from paceline.cli.job_input import convert_weights
    from paceline.launch.attached import can_take_over
    from paceline.record.run import (
        check_same_data,
        check_same_training,
        check_same_weights,
        check_steps_left,
    )

    before = run.job()
    convert_weights(before)
    data = find_data_there(before, place)
    if data is not None:
        check_same_data(run, data)
    check_same_weights(run, before)
    if not overrides and hosts is None and other is None and alerts is None:
        if not can_take_over(run):  # if it can be, what it lacks is its end
            check_steps_left(run, before)
        plan = _plan_of(run, before, place)
        _check(before, plan, place)
        return before, plan
    job = other or _own_job(run, before, overrides, place)
    job = with_alerts(with_hosts_of(job, hosts, place), alerts)
    check_same_training(before, job)
    find_data_there(job, place, prepare=False)
    check_steps_left(run, job)
    return job, check_and_plan(job, place)


def changed_settings(before: "Job", job: "Job") -> list[str]:
    """A line for each setting that a run is resumed with and did not have before."""
    from dataclasses import asdict

    from paceline.record.run_files import flat

    old, new = (dict(flat(asdict(each.spec))) for each in (before, job))
    names = dict.fromkeys((*old, *new))
    return [
        f"{name} from {old.get(name)} to {new.get(name)}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _own_job(run: "RunFolder", before: "Job", overrides: tuple[str, ...], place: str) -> "Job":
    """The run's job with overrides; what its steps were made of is kept with them."""
    from paceline.cli.job_input import count_samples_at
    from paceline.job import load_job

    def count(job: "Job") -> "Sequence[SourceSize]":
        return count_samples_at(place)(replace(job, folder=before.folder))

    job = load_job(run.job_file, overrides, count=count)
    length = job.length or _plan_of(run, before, place).length
    return replace(job, folder=before.folder, length=length)


def _plan_of(run: "RunFolder", job: "Job", place: str) -> "Plan":
    """The plan of before; when its file is lost, a new one from the same job."""
    from paceline.errors import JobError

    try:
        return run.plan()
    except JobError as damaged:
        click.echo(f"{damaged.problems[0].what}; planning again", err=True)
        return check_and_plan(job, place)


def find_data_there(job: "Job", place: str, *, prepare: bool = True) -> "TrainedOn | None":
    """What the job trains on; None where the machines read no file of this one.

    Args:
        job: What is asked.
        place: Where it runs.
        prepare: Whether data that must be prepared are prepared now; else they are looked at.
    """
    from paceline.cli.prepare_progress import show_preparing
    from paceline.job.data_rules import is_prepared
    from paceline.launch.places import find_place
    from paceline.prepare import check_data, find_data

    if job.spec.engine != "paceline":  # its own program reads them
        if not find_place(place).has_our_files and job.spec.data.path is not None:
            _check_paths_there(job, place)
        return None
    if not find_place(place).has_our_files:
        if is_prepared(job):
            _refuse_prepared_there(job, place)
        if job.spec.data.path is not None:
            _check_paths_there(job, place)
            return None
    if is_prepared(job) and not prepare:
        check_data(job)
        return None
    return find_data(job, show_preparing())


def look_at_data_there(job: "Job", place: str, *, dry_run: bool) -> "TrainedOn | None":
    """What the job trains on, as far as nothing must be prepared. A dry run for other machines only
    notes that data or tokenizer are not on this one."""
    from paceline.errors import JobError
    from paceline.launch.plannable import ABSENT

    try:
        return find_data_there(job, place, prepare=False)
    except JobError as error:
        is_absent = all(each.code in ABSENT for each in error.problems)
        if not (dry_run and place != "local" and is_absent):
            raise
        for problem in error.problems:
            click.echo(f"note: {problem}", err=True)
        return None


def _refuse_prepared_there(job: "Job", place: str) -> None:
    """
    Raises:
        JobError: `W027`, what is prepared here is not on the machines.
    """
    from paceline.errors import JobError
    from paceline.launch.places import find_place

    raise JobError.of(
        code="W027",
        what=f"data that are tokenized are prepared on this machine, and at "
        f"{find_place(place).title} no file of this machine is read",
        where=job.where("data"),
        fix="run there with a shared folder (local, ssh, slurm, srun), or on bytes: "
        "model.tokenizer: bytes",
    )


def _check_paths_there(job: "Job", place: str) -> None:
    """
    Raises:
        JobError: `W027`, the data would not be on the machines.
    """
    from paceline.errors import JobError
    from paceline.launch.places import find_place

    paths = job.spec.data.path
    relative = [
        each for each in ([paths] if isinstance(paths, str) else paths or []) if each[:1] != "/"
    ]
    if relative and not (place == "kubernetes" and job.spec.kubernetes.script is not None):
        raise JobError.of(
            code="W027",
            what=f"data.path {', '.join(relative)} is beside the job file, and at "
            f"{find_place(place).title} no file of this machine is read",
            where=job.where("data.path"),
            fix="put the files where those machines have them (image, claim, cloud.setup), and "
            "name them by absolute paths, such as /workspace/corpus/*.txt",
        )


def check_and_plan(job: "Job", place: str, *, dry_run: bool = False) -> "Plan":
    """The plan of a job that can be run at a place.

    Raises:
        PacelineError: It cannot, with every reason.
    """
    from paceline.launch.plannable import planned
    from paceline.topology.places import at_place

    plan = planned(at_place(job, place))
    _check(job, plan, place, dry_run=dry_run)
    return plan


def _check(job: "Job", plan: "Plan", place: str, *, dry_run: bool = False) -> None:
    """Everything that can be known to fail before anything is written or started; at a dry run, but
    for what has to be installed, or allocated."""
    from paceline.errors import JobError
    from paceline.launch.ready import check_can_run
    from paceline.render import RenderError

    problems = list(check_can_run(job, plan, place=place))
    if dry_run:
        missing = {"R010", "W009", "W020", "J018", "H023"} | (
            {"W014"} if place == "srun" else set()
        )
        problems = [each for each in problems if each.code not in missing]
    only_files = all(each.code == "H002" for each in problems)
    (RenderError if only_files else JobError).raise_for(problems)


def find_source(path: Path, job: "Job", place: str) -> Path:
    """The checkpoint that a new run begins with, every byte as it was written.

    Raises:
        UsageError: The machines of this place do not read it.
        JobError: There is none, or it is of another training (`R005`) or of a model of other sizes
            (`M013`).
        CheckpointError: It is damaged.
    """
    from shlex import quote

    from paceline.errors import CheckpointError, JobError, Problem
    from paceline.launch.external_checkpoints import find_other
    from paceline.launch.places import find_place
    from paceline.profile.fitting import check_decoder_sizes
    from paceline.profile.hf_names import to_hf_name
    from paceline.profile.resolve import resolve_decoder
    from paceline.record.checkpoints import read_manifest, verify_checkpoint
    from paceline.record.find_checkpoints import one_checkpoint_at
    from paceline.record.run import training_digest
    from paceline.record.tensors import read_tensors

    if not find_place(place).has_our_files:
        raise click.UsageError(f"--from is of this machine, whose files {place} does not read.")
    if (other := find_other(path)) is not None:
        raise JobError.of(
            code="C011",
            what=f"{path} is {other.wrote}, and --from takes a checkpoint that Paceline wrote",
            where="--from",
            fix=f"`paceline checkpoint convert {quote(str(path))} start`, and --from start; to "
            "fine-tune a model's folder, name it as model.pretrained",
        )
    folder = one_checkpoint_at(path)
    manifest = read_manifest(folder)
    problem = manifest if isinstance(manifest, Problem) else verify_checkpoint(folder)
    if problem is not None or isinstance(manifest, Problem):
        raise CheckpointError(*([problem] if problem is not None else []))
    if manifest.job_digest not in (None, training_digest(job)):
        raise JobError.of(
            code="R005",
            what=f"{folder} is from a job that trains something else (model, data, program, "
            "batch, optimizer or seed)",
            where="--from",
            fix="give the job that wrote it; to take only its weights, use `paceline checkpoint "
            "convert` to safetensors and back",
        )
    if manifest.step >= job.spec.train.steps:
        raise JobError.of(
            code="R008",
            what=f"{folder} is at step {manifest.step}, and train.steps is {job.spec.train.steps}: "
            "nothing is left to train",
            where="--from",
            fix=f"set train.steps beyond {manifest.step}, or give an earlier step",
        )
    held = (read_tensors(folder) or {}).items()
    stored = {n.removeprefix(_MODEL): each for n, each in held if n.startswith(_MODEL)}
    shape = resolve_decoder(job) if stored and manifest.job_digest is None else None
    if shape is None:
        return folder
    if all(to_hf_name(name) is None for name in stored):
        raise JobError.of(
            code="R005",
            what=f"{folder} has weights by other names than the job's built-in decoder has: "
            f"{next(iter(stored))}",
            where="--from",
            fix="convert it beside its config.json, which tells what its names mean: paceline "
            "checkpoint convert",
        )
    if job.spec.train.adapter is None:  # else the adapter's own tensors are there, or are not
        sizes = {to_hf_name(name) or name: each.size for name, each in stored.items()}
        fix = "give a job whose model is the one that the checkpoint was made from"
        unlike = check_decoder_sizes(shape, sizes, where=f"--from: {folder}")
        JobError.raise_for(replace(each, fix=fix) for each in unlike)
    return folder


_MODEL = "model/"
"""What stands before the names of weights in a checkpoint."""


def begin_with(run: "RunFolder", checkpoint: Path) -> None:
    """Put it into a new run, which then resumes from there."""
    import shutil

    from paceline.errors import Problem
    from paceline.record.checkpoints import checkpoint_name, read_manifest

    manifest = read_manifest(checkpoint)
    assert not isinstance(manifest, Problem), "it was verified"
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    shutil.copytree(checkpoint, run.checkpoints / checkpoint_name(manifest.step))
