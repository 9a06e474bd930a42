"""Look at a job's machines and judge them: all of it (`paceline preflight`), or what takes no time
before a run starts there.

This machine is looked at in milliseconds before there is a run. Nodes of an attached place are
looked at on the one visit that each gets anyway; a job of a queue looks at its own nodes when it
has some.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.check.preflight.layers import layers_of
from paceline.check.preflight.names import fold_names
from paceline.check.preflight.need import Need, need_of
from paceline.check.preflight.preflight import Preflight, judge
from paceline.errors import JobError, Problem
from paceline.job import Job
from paceline.launch import gather
from paceline.launch.measure import ask_torch, measure
from paceline.launch.node_commands import Here, Nodes
from paceline.launch.places import Inspection
from paceline.launch.preflight import find_nodes
from paceline.plan import Plan
from paceline.record.lines import write_whole
from paceline.record.run import RunFolder
from paceline.topology.node.facts import Gathered, Question

FILE = "preflight.json"
"""In the run's folder: every check of the last look, and what was allowed."""


def look(
    job: Job,
    plan: Plan,
    place: str,
    *,
    runs: Path,
    allowed: Sequence[str],
    limit_s: float,
    is_quick: bool,
    measures: bool,
    on_note: Callable[[str], None],
) -> tuple[Gathered, Preflight]:
    """What every node of a place said, and what it means for the job.

    Args:
        runs: The folder of all runs, which every node must see.
        allowed: Names of checks, or ids of failures, whose fail is a warning here.
        limit_s: After it a node that has not answered is given up.
        is_quick: Ask no tool and measure nothing.
        measures: Multiply matrices and all-reduce, once all else passes.
        on_note: Called with what is being done.
    """
    need = need_of(job, plan, place=place)
    nodes = find_nodes(job, plan, place)
    question = gather.question_of(job, runs, is_quick=is_quick)
    if is_quick and place == "local":
        gathered = gather.look_here(question)
        return gathered, judge(gathered, need, allowed=allowed)
    with gather.left_note(question) as (asked, left):
        gathered = gather.gather(nodes, asked, limit_s=limit_s, on_note=on_note)
    verdict = judge(gathered, need, note=left, allowed=allowed)
    if is_quick or not measures:
        return gathered, verdict
    if not verdict.is_fit:
        on_note("nothing is measured until what fails is repaired, or allowed by name (--allow)")
        return gathered, verdict
    gathered = measure(nodes, gathered, plan, limit_s=limit_s, on_note=on_note)
    return gathered, judge(gathered, need, note=left, allowed=allowed)


def look_at_machine(
    folders: Sequence[Path],
    ports: Sequence[int],
    *,
    asks_torch: bool,
    on_note: Callable[[str], None],
) -> Gathered:
    """What this machine says of itself, without a job.

    Args:
        folders: Whose room is asked, and whether files can be written there.
        ports: That are tried.
        asks_torch: Import PyTorch in a process of its own, and multiply matrices.
        on_note: Called with what is being done.
    """
    question = Question(folders=tuple(str(each.absolute()) for each in folders), ports=tuple(ports))
    gathered = gather.look_here(question)
    (answer,) = gathered.nodes
    if not asks_torch or answer.facts is None or answer.facts.torch_build is None:
        return gathered
    on_note("importing PyTorch, multiplying matrices")
    nodes = Nodes(place="local", names=(answer.name,), way=Here())
    return replace(gathered, nodes=ask_torch(nodes, gathered))


def look_before_run(job: Job, plan: Plan, folder: Path, allowed: Sequence[str]) -> Preflight:
    """What was seen of this machine, before the job is started here.

    Args:
        folder: Where the run will write: its own, or the folder of all runs.
        allowed: Names of checks, or ids of failures, that may be there.

    Raises:
        JobError: `W032`, a check fails that was not allowed.
    """
    question = gather.question_of(job, folder, is_quick=True)
    question = replace(question, ports=(), code={}, data=())  # looked at by itself
    need = _need_of_run(job, plan, "local", folder)
    verdict = judge(gather.look_here(question), need, allowed=allowed)
    if not verdict.is_fit:
        raise JobError(*_problems(verdict, where="this machine"))
    return verdict


def inspection_of(
    job: Job, plan: Plan, place: str, run: RunFolder, *, calls: bool, allowed: Sequence[str]
) -> Inspection:
    """How the nodes of an attached place are looked at on the visit that each gets anyway.

    Args:
        calls: Whether they call each other too, which costs a visit more.
        allowed: Names of checks, or ids of failures, that may be there.
    """
    need = _need_of_run(job, plan, place, run.path)

    def judge_all(gathered: Gathered, note: str | None) -> Iterable[Problem]:
        verdict = judge(gathered, need, note=note, allowed=allowed)
        if verdict.is_fit:
            keep_look(run, verdict, job)
        return _problems(verdict)

    question = gather.question_of(job, run.path, is_quick=True)
    return Inspection(question=question, calls=calls, judge=judge_all)


def keep_look(run: RunFolder, looked: Preflight, job: Job) -> None:
    """Write it into the run's folder."""
    data = preflight_data(looked, job.words)
    write_whole(run.path / FILE, f"{json.dumps(data, indent=2)}\n".encode())


def preflight_data(verdict: Preflight, job: str = "JOB") -> dict[str, Any]:
    """What `--json` prints of a verdict, and a run keeps of it.

    Args:
        job: The job as words of a command.
    """
    return {
        "fit": verdict.is_fit,
        "pass": list(verdict.good_nodes),
        "fail": list(verdict.bad_nodes),
        "slurm": {
            "pass": fold_names(verdict.good_nodes),
            "fail": fold_names(verdict.bad_nodes),
        },
        "allowed": list(verdict.allowed),
        "rates": [asdict(each) for each in verdict.rates],
        "hashes": verdict.hashes,
        "layers": layers_of(verdict.results, job),
        "results": [asdict(each) for each in verdict.results],
    }


def _need_of_run(job: Job, plan: Plan, place: str, folder: Path) -> Need:
    need = need_of(job, plan, place=place)
    # A run may be resumed: the checkpoints that are kept are there, and old ones make room.
    return replace(need, num_checkpoints=1) if (folder / "checkpoints").is_dir() else need


def _problems(verdict: Preflight, where: str | None = None) -> list[Problem]:
    return [
        Problem(
            code="W032",
            what=f"{each.name} [{each.id}]: {each.evidence}",
            where=where or each.node,
            fix=f"{each.fix}; or start all the same: --allow {each.name}",
        )
        for each in verdict.failing
    ]
