"""Jobs that no run's folder is here for: how they stand, their logs, their end.

`PLACE:ID` is a job that a person submitted from the files of `paceline render`, by the id that the
place gave it; `HOST:/FOLDER` is a run on a machine that ssh reaches. Each place is asked by its own
tool. Where that is not installed or gets no answer, the error names the command that would do it.

Leaves out runs whose folder is here: `run_status.py`.
"""

import contextlib
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.catalog.load import read_shipped
from paceline.errors import JobError, PacelineError, Problem, RunError
from paceline.job.places import check_host
from paceline.launch.places import PLACES, queued
from paceline.launch.tools import Silent, ask_tool, check_tool
from paceline.record.placement import Placement

Verb = Literal["status", "logs", "stop"]

_TOOLS: Mapping[str, Mapping[Verb, str]] = read_shipped("place_tools.toml")
"""Place -> what its own tool is asked with."""

_FOLLOWS: Mapping[str, Sequence[str]] = {
    "kubernetes": ("--follow",),
    "ray": ("--follow",),
    "modal": (),
    "vertex": (),
}
"""Words by which a tool goes on printing a log; Modal's and gcloud's do so always."""

_UNREACHED = {"W009", "W011", "W020", "W021", "W022", "W023", "H043"}
"""Codes of a place that cannot be asked from here."""

_ASK_S = 60.0
"""How long a tool may take to answer. A guess: twice what Slurm's may."""

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--")

_SSH_FAILED = 255
"""ssh(1), EXIT STATUS: an error of its own, not of the command there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceJob:
    """A job at a place, by the place's own id of it."""

    place: str
    job_id: str

    def command(self, verb: Verb) -> list[str]:
        """The words of the place's own tool; empty where it has none for this."""
        names = {"id": self.job_id}
        tool = self.place
        if tool == "kubernetes":
            names |= zip(("namespace", "kind", "name"), self.job_id.split("."), strict=True)
        if tool == "sky":
            cluster, _, number = self.job_id.rpartition(":")
            tool = "sky-jobs" if cluster == "jobs" else tool
            names |= {"cluster": cluster, "number": number}
        return [word.format(**names) for word in _TOOLS[tool].get(verb, "").split()]

    @property
    def placement(self) -> Placement:
        """The job's placement, as the module of a queued place takes it."""
        return Placement(place=self.place, job_id=self.job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class FarRun:
    """A run's folder on a machine that ssh reaches."""

    host: str
    folder: str

    def do(self, verb: Verb, *words: str) -> int:
        """Do the same verb there; it prints as it does there. Returns its exit code.

        Raises:
            RunError: `W009`, ssh is not installed; `W011`, it does not get there.
        """
        _need(_SSH[0])
        there = [*_SSH, self.host, shlex.join(["paceline", verb, self.folder, *words])]
        code = subprocess.run(there, check=False).returncode
        if code == _SSH_FAILED:
            raise RunError(_no_answer(there, "it said why above"))
        return code


def find_elsewhere(named: str) -> PlaceJob | FarRun | None:
    """What `PLACE:ID` or `HOST:/FOLDER` means; None where it is neither.

    Raises:
        JobError: `W007`, the host is none; `W015`, the id is none of that place's.

    >>> find_elsewhere("slurm:4711")
    PlaceJob(place='slurm', job_id='4711')
    >>> find_elsewhere("me@node-a:/data/runs/x")
    FarRun(host='me@node-a', folder='/data/runs/x')
    """
    place, colon, rest = named.partition(":")
    if not colon or not rest or Path(named).exists():
        return None
    if rest.startswith("/"):
        try:
            return FarRun(host=check_host(place), folder=rest)
        except ValueError as error:
            raise JobError.of(
                code="W007", what=str(error), where="RUN", fix="write HOST:/FOLDER, as for scp"
            ) from None
    if place not in _TOOLS:
        return None
    if not re.fullmatch(_IDS.get(place, _PLAIN_ID), rest):
        raise JobError.of(
            code="W015",
            what=f"{rest!r} is no id of a job at {place}",
            where="RUN",
            fix=f"write {_SHAPES.get(place, f'{place}:ID, as the place gave it')}",
        )
    return PlaceJob(place=place, job_id=rest)


_PLAIN_ID = r"[A-Za-z0-9][A-Za-z0-9._/-]*"
_IDS = {
    "slurm": r"\d+",
    "kubernetes": r"[a-z0-9-]+\.(trainjob|pytorchjob|rayjob)\.[a-z0-9-]+",
    "sky": r"[a-z0-9-]+:\d+",
}
_SHAPES = {
    "slurm": "slurm:4711",
    "kubernetes": "kubernetes:NAMESPACE.KIND.NAME, of kind trainjob, pytorchjob or rayjob",
    "sky": "sky:CLUSTER:NUMBER, or sky:jobs:NUMBER of a managed job",
}


def stand_elsewhere(job: PlaceJob) -> dict[str, Any]:
    """How a job stands: what the queue says, or the tool's own text where its answer is not read.

    Raises:
        PacelineError: The place cannot be asked; the command that would is named.
    """
    found: dict[str, Any] = {"place": job.place, "job_id": job.job_id, "queue": None, "text": None}
    with naming_command(job, "status"):
        if _is_queue(job):
            return found | {"queue": asdict(queued(job.place).look(job.placement))}
        return found | {"text": _answer(job, "status")}


def stop_elsewhere(job: PlaceJob) -> str:
    """Ask the place to end a job; what was asked, for people.

    Raises:
        PacelineError: The place cannot be asked; the command that would is named.
    """
    with naming_command(job, "stop"):
        if _is_queue(job) and job.place != "slurm":  # a script of one's own need not know USR2
            queued(job.place).cancel(job.placement)
        else:
            _answer(job, "stop")
    return f"job {job.job_id} at {job.place} was asked to end"


def log_command(job: PlaceJob, rank: int | None, *, follow: bool, tail: int) -> list[str]:
    """The command that prints a job's log, to be run as it is.

    Raises:
        PacelineError: `W009`, its tool is not installed; `W017`, the place keeps no log that a
            command prints.
    """
    with naming_command(job, "logs"):
        if job.place == "slurm":
            lines = ("-n", "+1" if tail == 0 else str(tail))
            return ["tail", *lines, *(("-f",) if follow else ()), str(_slurm_log(job))]
        own = queued(job.place).log_command(job.placement, rank, follow) if _is_queue(job) else None
        if own is not None:
            _need(own[0])
            return list(own)
        words = job.command("logs")
        if not words:
            raise JobError.of(
                code="W017",
                what=f"{job.place} has no command that prints a job's log",
                where=f"{job.place}:{job.job_id}",
                fix="see it at the place's own page",
            )
        _need(words[0])
        return [*words, *(_FOLLOWS[job.place] if follow else ())]


@contextlib.contextmanager
def naming_command(job: PlaceJob | Placement, verb: Verb) -> Iterator[None]:
    """A place that cannot be asked from here: the error names the command that does it there."""
    try:
        yield
    except PacelineError as error:
        words = command_there(job, verb)
        if not words:
            raise
        problems = [
            replace(problem, fix=f"{problem.fix}; or, where that works: {words}")
            if problem.code in _UNREACHED
            else problem
            for problem in error.problems
        ]
        raise type(error)(*problems) from None


def command_there(job: PlaceJob | Placement, verb: Verb) -> str | None:
    """What a person types where the place's tools are: `scancel 4711`."""
    if isinstance(job, Placement):
        if job.job_id is None or job.place not in _TOOLS:
            return None
        job = PlaceJob(place=job.place, job_id=job.job_id)
    try:
        return shlex.join(job.command(verb)) or None
    except ValueError:  # the id in place.json is none of that place's
        return None


def _is_queue(job: PlaceJob) -> bool:
    return job.place in PLACES and PLACES[job.place].kind == "queued"


def _answer(job: PlaceJob, verb: Verb) -> str:
    """What the tool prints.

    Raises:
        RunError: `W009`, it is not installed; `W011`, it refuses or does not answer.
    """
    words = job.command(verb)
    _need(words[0])
    try:
        done = ask_tool(words, limit_s=_ASK_S)
    except Silent as error:
        raise RunError(_no_answer(words, str(error))) from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RunError(
            _no_answer(words, lines[-1] if lines else f"it ended with {done.returncode}")
        )
    return done.stdout


def _need(tool: str) -> None:
    fix = "run this on a machine of that place, such as its login node"
    RunError.raise_for(check_tool(tool, fix=fix))


def _no_answer(words: Sequence[str], why: str) -> Problem:
    return Problem(
        code="W011",
        what=f"{words[0]} failed: {why[:300]}",
        where=shlex.join(words),
        fix="check that the place is up and that you are logged in",
    )


def _slurm_log(job: PlaceJob) -> Path:
    found = re.search(r"(?m)^\s*StdOut=(\S+)", _answer(job, "status"))
    path = Path(found[1]) if found else None
    if path is None or not path.exists():
        raise JobError.of(
            code="W017",
            what=f"the log of job {job.job_id} is not on this machine"
            + (f": {path}" if path is not None else ""),
            where=f"slurm:{job.job_id}",
            fix="look on the node of the job: scontrol show job "
            f"{job.job_id} names BatchHost and StdOut",
        )
    return path
