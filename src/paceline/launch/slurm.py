"""Slurm as a place: what sbatch is given, and what Slurm says of it afterwards.

Leaves out the batch scripts (`render/slurm.py`) and what runs inside of the job (`srun.py`).
"""

import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from paceline.errors import JobError, Problem, RunError
from paceline.job import Job, Script
from paceline.launch.places import Sight, State, Submission
from paceline.launch.requeue import value_of
from paceline.launch.tools import Answer, Silent, ask_tool, check_tool, never_submitted
from paceline.plan import Plan
from paceline.record.placement import Placement
from paceline.record.run import RunFolder
from paceline.render.slurm import agents_script, launcher_script, program_script

PLACE_FOLDER = "place"
SCRIPT = "job.sbatch"

_PATIENCE_S = 30.0
"""How long a command of Slurm may take. A guess: three times its MessageTimeout."""

_LOGIN = "run this on a login node of the cluster"

_DOWN = re.compile(
    "unable to contact slurm controller|connection refused"
    "|could not establish a configuration source|resolve_ctls_from_dns_srv"
    "|fatal: unable to process configuration file",
    re.IGNORECASE,
)
"""What sbatch says when nobody has heard it; nothing is in the queue then."""

_WORDS: dict[State, str] = {
    "waiting": "PENDING CONFIGURING REQUEUED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
    "running": "RUNNING COMPLETING SUSPENDED STOPPED SIGNALING STAGE_OUT RESIZING",
    "finished": "COMPLETED",
    "cancelled": "CANCELLED",
}
_STATES = {word: state for state, words in _WORDS.items() for word in words.split()}
"""Job states of squeue(1), Slurm 22.05 to 25.05; all others are ends by failure."""

_FIRST: tuple[State, ...] = ("running", "waiting", "failed", "cancelled", "finished")
"""States of several jobs of an array; the first that one of them is in stands for the whole."""


def check(job: Job | Script, plan: Plan | None) -> Iterator[Problem]:
    """Whether Slurm's commands are here."""
    fix = f"{_LOGIN}, or see what would be submitted with --dry-run"
    yield from check_tool("sbatch", "scontrol", "scancel", fix=fix)


def prepare(
    job: Job | Script, plan: Plan | None, run: RunFolder, options: Sequence[str] = ()
) -> Submission:
    """The batch script, and the command that submits it."""
    spec = job.spec.slurm
    python = spec.python or sys.executable
    is_one = isinstance(job, Job) or job.spec.starts == "nodes"
    if is_one and spec.array is not None:
        raise JobError.of(
            code="W014",
            what="an array starts several jobs, and this run is one",
            where=job.where("slurm.array") if isinstance(job, Job) else "slurm.array",
            fix="leave it out, or submit your own script: --script",
        )
    if isinstance(job, Job):
        assert plan is not None
        text = agents_script(plan, job, run=str(run.path), python=python, options=options)
    elif job.spec.starts == "nodes":
        text = launcher_script(job, run=str(run.path), python=python, options=options)
    else:
        text = program_script(job, folder=str(job.folder), python=python)
    array = spec.array is not None
    command = [
        "sbatch",
        "--parsable",
        f"--chdir={run.path}",
        f"--output={_escaped(str(run.logs))}/slurm-{'%A_%a' if array else '%j'}.log",
        SCRIPT,
    ]
    return Submission(files={SCRIPT: text}, command=command)


def submit(submission: Submission, run: RunFolder) -> str:
    """Slurm's id of the job.

    Raises:
        JobError: `W010`, Slurm refuses it.
        RunError: `W011`, Slurm is down.
    """
    done = _ask(*submission.command, folder=str(run.path / PLACE_FOLDER))
    job_id = done.stdout.strip().partition(";")[0]
    if done.returncode or not job_id.isdecimal():
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        if _DOWN.search(done.stderr):
            raise RunError(_silent("sbatch", done.stderr.strip()))
        raise JobError.of(
            code="W010",
            what=f"Slurm does not take the job: {said[-1] if said else 'no reason given'}",
            where="sbatch",
            fix="change what the job file's section `slurm` asks for; `sinfo` lists the "
            "partitions, `sacctmgr show associations` your accounts",
        )
    return job_id


def look(placement: Placement) -> Sight:
    """What Slurm says of the job now, or said last."""
    job_id = _id_of(placement)
    done = _ask("scontrol", "--oneliner", "show", "job", job_id)
    if done.returncode == 0 and "JobState=" in done.stdout:
        return read_jobs(done.stdout, expand=_expand)
    said = done.stderr.strip() or done.stdout.strip()
    if "nvalid job id" not in said:
        raise RunError(_silent("scontrol", said))
    if shutil.which("sacct") is not None:
        kept = _ask(
            *("sacct", "--jobs", job_id, "--allocations", "--parsable2", "--noheader"),
            *("--format", "State,NodeList,Start,End"),
        )
        if kept.returncode == 0 and kept.stdout.strip():
            return read_accounts(kept.stdout, expand=_expand)
    raise RunError.of(
        code="W012",
        what=f"Slurm knows no job {job_id} (any more)",
        where="scontrol show job",
        fix="its end is in the run's folder; without accounting Slurm forgets a job some "
        "minutes after it (MinJobAge)",
    )


def cancel(placement: Placement) -> None:
    """Workers save at the next step boundary; a job that waits leaves the queue."""
    job_id = _id_of(placement)
    sight = look(placement)
    if sight.state == "running":
        done = _ask("scancel", "--batch", "--signal=USR2", job_id)
    else:
        done = _ask("scancel", job_id)
    if done.returncode:
        raise RunError(_silent("scancel", done.stderr.strip()))


def log_command(placement: Placement, rank: int | None, follow: bool) -> Sequence[str] | None:
    """The logs are in the run's folder, which nodes share with this machine."""
    return None


def read_jobs(text: str, *, expand: "Expand") -> Sight:
    """What `scontrol --oneliner show job` says: a line for a job, several for an array."""
    lines = [line for line in text.splitlines() if "JobState=" in line]
    words = [value_of(line, "JobState") or "UNKNOWN" for line in lines]
    reason = value_of(lines[0], "Reason")
    nodes = value_of(lines[0], "NodeList")
    started = [_time(value_of(line, "StartTime")) for line in lines]
    ended = [_time(value_of(line, "EndTime")) for line in lines]
    state = _whole(words)
    over = state in ("finished", "failed", "cancelled")
    restarts = value_of(lines[0], "Restarts")
    return Sight(
        state=state,
        detail=_detail(words, None if state == "running" else reason),
        nodes=expand(nodes) if nodes and nodes != "(null)" else (),
        started_at=None if state == "waiting" else min(filter(None, started), default=None),
        ended_at=max(filter(None, ended), default=None) if over else None,
        restarts=int(restarts) if restarts else None,
        limit_s=_limit_s(value_of(lines[0], "TimeLimit")),
    )


def read_accounts(text: str, *, expand: "Expand") -> Sight:
    """What `sacct --parsable2 --noheader --format State,NodeList,Start,End` says."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    words = [row[0].split()[0] for row in rows]  # `CANCELLED by 0`
    nodes = rows[0][1]
    state = _whole(words)
    return Sight(
        state=state,
        detail=_detail(words, None),
        nodes=expand(nodes) if nodes and nodes != "None assigned" else (),
        started_at=min(filter(None, (_time(row[2]) for row in rows)), default=None),
        ended_at=max(filter(None, (_time(row[3]) for row in rows)), default=None),
    )


class Expand:
    """Host names of Slurm's short form: `node[0-2]`."""

    def __call__(self, listed: str) -> Sequence[str]:
        done = _ask("scontrol", "show", "hostnames", listed)
        return done.stdout.split() if done.returncode == 0 else [listed]


_expand = Expand()


def _whole(words: Sequence[str]) -> State:
    states = {_STATES.get(word, "failed") for word in words}
    return next((each for each in _FIRST if each in states), "unknown")


def _detail(words: Sequence[str], reason: str | None) -> str:
    counted = Counter(words)
    text = ", ".join(
        word if len(words) == 1 else f"{number} {word}" for word, number in counted.items()
    )
    return text if reason in (None, "None", "(null)") else f"{text} ({reason})"


def _time(text: str | None) -> float | None:
    """Unix time of what Slurm writes in local time; None for `Unknown` and the like."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _limit_s(text: str | None) -> float | None:
    """Seconds of `1-02:03:04`; None for UNLIMITED and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text or "")
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _escaped(path: str) -> str:
    """sbatch puts numbers in place of `%j`; a path means itself."""
    return path.replace("\\", "\\\\").replace("%", "%%")


def _id_of(placement: Placement) -> str:
    if placement.job_id is None or not re.fullmatch(r"\d+", placement.job_id):
        raise never_submitted("slurm")
    return placement.job_id


def _ask(*command: str, folder: str = ".") -> Answer:
    """A command of Slurm, to its end.

    Raises:
        RunError: `W011`, it does not answer, or is not here.
    """
    RunError.raise_for(check_tool(command[0], fix=_LOGIN))
    try:
        return ask_tool(command, limit_s=_PATIENCE_S, folder=folder)
    except Silent as error:
        raise RunError(_silent(command[0], str(error))) from None


def _silent(command: str, said: str) -> Problem:
    last = said.splitlines()[-1] if said else "it said nothing"
    return Problem(
        code="W011",
        what=f"Slurm cannot be asked: {last}",
        where=command,
        fix="see whether it is up: scontrol ping; what was submitted goes on without this command",
    )
