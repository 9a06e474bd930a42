"""How an adapted script is started: the command, and the job file for Paceline."""

import json
import re
import shlex
from pathlib import PurePath

from paceline.adapt.result import Target

_RANKS = 2
"""Ranks of the job file and the printed command: to be changed to the devices that there are."""


def start_command(to: Target, name: str, ranks: int | str = _RANKS) -> str:
    """What starts the adapted script, for a shell, in the script's folder.

    Args:
        ranks: Processes; `N` in a comment.
    """
    script = shlex.quote(name)
    return {
        Target.DDP: f"torchrun --nproc-per-node {ranks} {script}",
        Target.FSDP2: f"torchrun --nproc-per-node {ranks} {script}",
        Target.ACCELERATE: f"accelerate launch --num_processes {ranks} {script}",
        Target.PACELINE: f"paceline run {shlex.quote(job_file_name(name))}",
    }[to]


def job_file_name(name: str) -> str:
    """Name of the job file beside a script."""
    return f"{PurePath(name).stem}.yaml"


def job_file(name: str) -> str:
    """The job file of a script of that name, which need not be a name that a run may have."""
    run = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(name).stem).strip("._-")[:64] or "script"
    script = name if re.fullmatch(r"[A-Za-z0-9._/-]+", name) else json.dumps(name)
    return f"""\
# Started, watched and started again after a failure: {start_command(Target.PACELINE, name)}
name: {run}
command: [python, {script}]
processes: {_RANKS}                      # one a device of this machine; the batch is shared by them
recovery: {{max_restarts: 3, backoff: 1s}}
"""
