"""A run is handed over to a queue: all of it, or nothing.

Leaves out what each queue is given (its own module, see `places.py`).
"""

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import JobError, PacelineError
from paceline.job import Job, Script
from paceline.launch.places import PLACES, Submission, queued
from paceline.plan import Plan
from paceline.record.lines import write_whole
from paceline.record.placement import Placement, read_placement, write_placement
from paceline.record.run import RunFolder

_J = TypeVar("_J", Job, Script)

FOLDER = "place"
"""In a run's folder: what was handed over, word for word."""


def hand_over(
    place: str,
    job: Job | Script,
    plan: Plan | None,
    run: RunFolder,
    options: Sequence[str] = (),
) -> tuple[Placement, Submission]:
    """Submit a run, and keep what the queue calls it.

    Args:
        options: Of the `paceline run` that the queue starts, where it starts one.

    Raises:
        JobError: The place cannot take it, or the queue refuses; nothing is in the queue then.
            `W013`, it is in the queue already.
    """
    module = queued(place)
    JobError.raise_for(module.check(job, plan))
    check_not_queued(run)
    submission = module.prepare(job, plan, run, options)
    for name, text in submission.files.items():
        path = run.path / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    job_id = module.submit(submission, run)
    placement = Placement(place=place, job_id=job_id)
    try:
        write_placement(run.path, placement)
    except OSError as error:
        with contextlib.suppress(PacelineError):  # nobody would find it again
            module.cancel(placement)
        raise JobError.of(
            code="R002",
            what=f"{run.path} cannot be written: {error.strerror}; job {job_id} was cancelled",
            where="place.json",
            fix="make room on that disk",
        ) from None
    return placement, submission


def check_not_queued(run: RunFolder) -> None:
    """
    Raises:
        JobError: `W013`, the run is in a queue already, or running there.
    """
    placement = read_placement(run.path)
    if placement is None or placement.job_id is None:
        return
    if placement.place not in PLACES or PLACES[placement.place].kind != "queued":
        return
    try:
        sight = queued(placement.place).look(placement)
    except PacelineError as error:
        if error.problems[0].code == "W012":  # forgotten, so it is over
            return
        raise
    if sight.state in ("waiting", "running"):
        raise JobError.of(
            code="W013",
            what=f"the run is job {placement.job_id} of {PLACES[placement.place].title} "
            f"already: {sight.detail}",
            where=str(run.path),
            fix=f"wait for it (paceline status {shlex.quote(str(run.path))}), or end it "
            f"first: paceline stop {shlex.quote(str(run.path))}",
        )


def format_submission(submission: Submission, run: RunFolder) -> str:
    """Exactly what would be submitted, for people; what is left out stands first."""
    parts = [
        f"==> {run.path / FOLDER / name} <==\n{text}" for name, text in submission.files.items()
    ]
    command = f"cd {shlex.quote(str(run.path / FOLDER))} && {shlex.join(submission.command)}"
    return "\n".join([*submission.notes, *parts, f"==> submitted by <==\n{command}"])


def with_hosts(job: _J, hosts: str) -> _J:
    """The job or script with hosts from the command line: `a,b`, or the path of a hostfile.

    Raises:
        JobError: `W007`, a name is no host.
    """
    from paceline.job.places import check_host

    ssh = job.spec.ssh
    path = Path(hosts).expanduser()
    if "/" in hosts or path.is_file():  # an option's path starts in the current folder
        ssh = replace(ssh, hosts=[], hostfile=str(path.absolute()))
    else:
        names = [name.strip() for name in hosts.split(",")]
        for name in names:
            try:
                check_host(name)
            except ValueError as error:
                raise JobError.of(
                    code="W007",
                    what=str(error),
                    where="--hosts",
                    fix="write --hosts node-a,node-b, or the path of a hostfile",
                ) from None
        ssh = replace(ssh, hosts=names, hostfile=None)
    spec: Any = replace(job.spec, ssh=ssh)
    return replace(job, spec=spec)
