"""The nodes that a job would have at a place, and the files that what they said is kept in.

Leaves out what they are asked (`gather.py`, `measure.py`) and the judgement (`check/preflight/`).
"""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline.errors import JobError, Problem
from paceline.job import Job, Script
from paceline.launch.node_commands import Here, Nodes
from paceline.launch.places import find_place
from paceline.plan import Plan
from paceline.topology.node.facts import Gathered


def find_nodes(job: Job | Script, plan: Plan | None, place: str) -> Nodes:
    """The nodes that a run at this place would have; without a plan, all that the place has.

    Raises:
        JobError: The place is not ready, or cannot be asked before a job is there (`W031`).
    """
    find_place(place)  # a wrong name is answered with the nearest
    if place == "local":
        return Nodes(place=place, names=(socket.gethostname(),), way=Here())
    if place == "ssh":
        from paceline.job.hosts import find_hosts
        from paceline.launch import ssh

        JobError.raise_for(ssh.check(job, plan))
        names = tuple(host for host, _ in find_hosts(job))
        return Nodes(place=place, names=names, way=ssh.Ssh(job.spec.ssh, job.folder))
    if place in ("srun", "slurm"):
        from paceline.launch import srun

        if place == "slurm" and "SLURM_JOB_ID" not in os.environ:
            raise JobError(_no_nodes_yet(place, plan, "its nodes are not known before it runs"))
        JobError.raise_for(srun.check(job, plan))
        way = srun.Srun(job.spec.slurm.python or sys.executable)
        return Nodes(place=place, names=tuple(srun.node_names()), way=way)
    if place == "ray":
        from paceline.launch import ray

        JobError.raise_for(ray.check(job, plan))
        found = ray.find_nodes(job.spec.ray.address)
        through = ray.Through(0.0, 0.0, job.spec.ray.python or sys.executable, job.spec.ray.address)
        names = tuple(node.name for node in found)
        return Nodes(place=place, names=names, way=through)
    raise JobError(_no_nodes_yet(place, plan, "its machines do not exist before the job does"))


def read_gathered(paths: Sequence[Path]) -> Gathered:
    """What was recorded (`paceline preflight --record`), of one file or of several put together.

    Raises:
        JobError: `T021`, a file cannot be read, is no recording or was given before.
    """
    found: list[Gathered] = []
    problems = []
    for path in paths:
        try:
            read = msgspec.json.decode(path.read_bytes(), type=Gathered)
            if read in found:
                problems.append(_unreadable(path, "it was given before: its nodes count once"))
            found.append(read)
        except OSError as error:
            problems.append(_unreadable(path, error.strerror or str(error)))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(_unreadable(path, f"it is no recording of a preflight: {error}"))
    if problems:
        raise JobError(*problems)
    return replace(
        found[0],
        nodes=tuple(node for each in found for node in each.nodes),
        sweep=next((each.sweep for each in found if each.sweep is not None), None),
        is_quick=any(each.is_quick for each in found),
    )


def write_gathered(gathered: Gathered, path: Path) -> None:
    """Keep it, to be judged again or elsewhere.

    Raises:
        JobError: `T014`, it cannot be written.
    """
    try:
        path.write_bytes(dump_gathered(gathered) + b"\n")
    except OSError as error:
        raise JobError.of(
            code="T014",
            what=f"{path} cannot be written: {error.strerror}",
            where="--record",
            fix="give a file in a folder that exists and that you may write to",
        ) from None


def dump_gathered(gathered: Gathered) -> bytes:
    """The text of a recording."""
    return msgspec.json.format(msgspec.json.encode(gathered))


def _no_nodes_yet(place: str, plan: Plan | None, why: str) -> Problem:
    nodes = "N" if plan is None else plan.cluster.num_nodes
    fixes = {
        "slurm": f"salloc --no-kill --nodes={nodes}, and in it paceline preflight "
        "JOB --on srun; what `paceline run --on slurm` submits looks at its nodes by itself",
        "kubernetes": "kubectl exec POD -- paceline preflight JOB --record - > pod.json "
        "in every pod, and then: paceline preflight JOB --from pod.json ...",
    }
    fix = fixes.get(place, "log in to each machine, and paceline preflight JOB --record FILE")
    if plan is None:
        on_srun = f"salloc --no-kill --nodes={nodes}, and in it paceline detect --on srun"
        fix = on_srun if place == "slurm" else "log in to each machine, and run paceline detect"
    return Problem(
        code="W031",
        what=f"{place} cannot be looked at before the job is there: {why}",
        where="--on",
        fix=fix,
    )


def _unreadable(path: Path, why: str) -> Problem:
    return Problem(
        code="T021",
        what=f"{path} cannot be read: {why}",
        where="--from",
        fix="give files that `paceline preflight JOB --record FILE` wrote",
    )
