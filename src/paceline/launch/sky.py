"""A cloud as a place, by SkyPilot: it rents the machines, starts the run and gives them back.

SkyPilot's own command is used, so it can be in an environment of its own (it wants an older click).
The machines run the files of `render/sky.py`, not Paceline's own agents: torchrun restarts ranks,
and a managed job on spot machines is recovered by SkyPilot, both from the program's checkpoints.
"""

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.errors import JobError, Problem, RunError
from paceline.job import Job, Script
from paceline.job.packages import install_line
from paceline.launch.places import Sight, State, Submission
from paceline.launch.tools import Answer, Silent, ask_tool, check_tool, never_submitted
from paceline.plan import Plan
from paceline.record.placement import Placement
from paceline.record.run import RunFolder
from paceline.render import render_job
from paceline.render.sky import offers_of

PLACE_FOLDER = "place"
MANAGED = "jobs"
"""In place of a cluster's name: a managed job, whose clusters come and go."""

_SUBMIT_S = 3600.0
"""Renting large machines takes long, and SkyPilot tries one cloud after the other."""

_ASK_S = 300.0
"""A question starts SkyPilot's API server where none runs."""

_NOTE = (
    "The machines run the program of these files: a rank is started again by torchrun, from its "
    "newest checkpoint. Records and drills are of Paceline's own agents, which are not there; "
    "Paceline does not check the machines before the start (`paceline explain preflight`)."
)

_WORDS: dict[State, str] = {
    "waiting": "INIT PENDING SUBMITTED STARTING",
    "running": "SETTING_UP RUNNING WINDING_DOWN RECOVERING CANCELLING",
    "finished": "SUCCEEDED",
    "cancelled": "CANCELLED",
}
_STATES = {word: state for state, words in _WORDS.items() for word in words.split()}
"""States of SkyPilot 0.14: sky/skylet/job_lib.py and sky/jobs/state.py; all others begin with
FAILED."""


def check(job: Job | Script, plan: Plan | None) -> Iterator[Problem]:
    """Whether SkyPilot is here, and the secrets that the job names."""
    yield from check_tool(
        "sky",
        fix=f"{install_line('sky')} and your cloud's part, such as 'skypilot[aws]', here "
        "or in an environment of its own; or see what would be submitted with --dry-run",
    )
    if isinstance(job, Job):
        missing = [name for name in job.spec.cloud.secrets if not os.environ.get(name)]
        if missing:
            yield Problem(
                code="H042",
                what=f"{', '.join(missing)} is not set in your environment",
                where=job.where("cloud.secrets"),
                fix="export it where you submit; it goes to the machines and into no file",
            )


def prepare(
    job: Job | Script, plan: Plan | None, run: RunFolder, options: Sequence[str] = ()
) -> Submission:
    """SkyPilot's task, what it copies to the machines, and the command that rents them."""
    if not isinstance(job, Job) or plan is None:
        raise JobError.of(
            code="W014",
            what="a program without a job file says nothing of what to rent",
            where="--on sky",
            fix="describe model, data and cluster in a job file, render it for sky, and set "
            "TRAIN_SCRIPT in its task.yaml",
        )
    found = render_job("sky", plan, job, own_program=False)
    files = {name: text for name, text in found.files.items() if name != "submit.sh"}
    secrets = [word for name in job.spec.cloud.secrets for word in ("--secret", name)]
    # The price that was agreed to is in task.yaml.
    options = ["--detach-run", "--yes", *secrets, "task.yaml"]
    name = cluster_name(run)
    command = (
        ["sky", "jobs", "launch", "--name", name, *options]
        if job.spec.plan.spot
        else ["sky", "launch", "--cluster", name, *options]
    )
    costs = offers_of(plan, job)[1].lines
    left_out = [gap.line for gap in found.gaps]
    return Submission(files=files, command=command, notes=[*costs, _NOTE, *left_out])


def cluster_name(run: RunFolder) -> str:
    """A name of this run alone that every cloud takes: lower case, at most 30 characters.

    Runs of one account share its clusters, so the folder's machine and path are in the name as a
    hash: two runs of one name would train on, and give back, the same machines.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", run.path.name.lower()).strip("-")
    place = f"{socket.gethostname()}:{run.path.resolve()}"
    of_run = hashlib.sha256(place.encode()).hexdigest()[:10]
    return f"pl-{plain[:15].rstrip('-')}-{of_run}"


def submit(submission: Submission, run: RunFolder) -> str:
    """`CLUSTER:ID`, or `jobs:ID` of a managed job."""
    done = _ask(*submission.command, folder=str(run.path / PLACE_FOLDER), limit_s=_SUBMIT_S)
    said = done.stdout + done.stderr
    is_managed = submission.command[1] == MANAGED
    name = MANAGED if is_managed else submission.command[3]
    numbers = re.findall(r"(?:Job submitted, ID|[Jj]ob ID): *(\d+)", said)
    if done.returncode or not numbers:
        # What was rented in part, or runs under a number that was not read, is given back.
        if is_managed:
            _ask("sky", "jobs", "cancel", "--yes", "--name", submission.command[4])
        else:
            _ask("sky", "down", "--yes", name)
        raise JobError.of(
            code="H043",
            what=f"SkyPilot does not take the run: {_last(said)}",
            where="sky",
            fix="`sky check` says which clouds it can use, `sky show-gpus` what they have",
        )
    return f"{name}:{numbers[-1]}"


def look(placement: Placement) -> Sight:
    name, number = _parts(placement)
    if name == MANAGED:
        rows = _read("sky", "jobs", "queue", "--all", "--output", "json")
    else:
        found = _read("sky", "queue", name, "--output", "json")
        rows = found.get(name, []) if isinstance(found, dict) else []
    rows = [row for row in rows if row.get("job_id") == number]
    if not rows:
        raise RunError.of(
            code="W012",
            what=f"SkyPilot knows no job {number} of {name} (any more)",
            where="sky queue",
            fix="its cluster has been given back; the logs were on it",
        )
    return read_job(rows[0], cluster=name)


def read_job(row: dict[str, Any], *, cluster: str) -> Sight:
    """One job of `sky queue --output json` or `sky jobs queue --output json`."""
    word = str(row.get("status") or "UNKNOWN")
    state = _STATES.get(word, "failed" if word.startswith("FAILED") else "unknown")
    why = row.get("failure_reason") or row.get("details")
    nodes = str(row.get("node_names") or "").split(",") if row.get("node_names") else []
    over = state in ("finished", "failed", "cancelled")
    where = nodes or ([] if cluster == MANAGED or over else [cluster])
    return Sight(
        state=state,
        detail=f"{word} ({' '.join(str(why).split())[:200]})" if why else word,
        nodes=where,
        started_at=row.get("start_at"),
        ended_at=row.get("end_at"),
        restarts=row.get("recovery_count"),
    )


def cancel(placement: Placement) -> None:
    """The job ends, and its machines are given back."""
    name, number = _parts(placement)
    words = (
        ["sky", "jobs", "cancel", "--yes", str(number)]
        if name == MANAGED
        else ["sky", "down", "--yes", name]
    )
    done = _ask(*words)
    if done.returncode:
        raise RunError(_refused(words, done.stdout + done.stderr))


def log_command(placement: Placement, rank: int | None, follow: bool) -> Sequence[str] | None:
    """SkyPilot's own: what all nodes print."""
    name, number = _parts(placement)
    words = ["sky", "jobs", "logs"] if name == MANAGED else ["sky", "logs", name]
    return [*words, str(number), "--follow" if follow else "--no-follow"]


def _parts(placement: Placement) -> tuple[str, int]:
    name, colon, number = (placement.job_id or "").rpartition(":")
    if not colon or not number.isdecimal() or not re.fullmatch(r"[a-z0-9-]+", name):
        raise never_submitted("sky")
    return name, int(number)


def _read(*words: str) -> Any:
    done = _ask(*words)
    start = min((at for at in map(done.stdout.find, "[{") if at >= 0), default=-1)
    try:
        return json.JSONDecoder().raw_decode(done.stdout[start:])[0] if start >= 0 else []
    except ValueError:
        raise RunError(_refused(words, done.stdout + done.stderr)) from None


def _ask(*words: str, folder: str = ".", limit_s: float = _ASK_S) -> Answer:
    """A command of SkyPilot, to its end.

    Raises:
        RunError: It is not there, or does not end.
    """
    try:
        return ask_tool(words, limit_s=limit_s, folder=folder)
    except Silent as error:
        raise RunError(_refused(words, str(error))) from None


def _refused(words: Sequence[str], said: str) -> Problem:
    return Problem(
        code="H043",
        what=f"SkyPilot says: {_last(said)}",
        where=" ".join(words[:3]),
        fix="`sky api info` says whether its API server answers",
    )


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return re.sub(r"\x1b\[[0-9;]*m", "", lines[-1])[:300] if lines else "nothing"
