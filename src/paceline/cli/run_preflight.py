"""The look at the machines of a run before anything is started there: silent if all is well.

This machine is looked at in milliseconds before there is a run. Nodes of an attached place are
looked at on the one visit that each gets anyway; a job of a queue looks at its own nodes when it
has some. Everything is looked at by `paceline preflight`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.check.preflight.need import Need
    from paceline.check.preflight.preflight import Preflight
    from paceline.errors import Problem
    from paceline.launch.places import Inspection
    from paceline.plan import Plan
    from paceline.record.run import RunFolder
    from paceline.spec import Job
    from paceline.topology.node.facts import Gathered, Question

FILE = "preflight.json"
"""In the run's folder: every check of the last look, and what was allowed."""

_OWN_AGENTS = ("local", "ssh", "srun", "ray", "slurm")
"""Places where Paceline itself is on the machines, and can look at them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking:
    """What the command line says of the look."""

    wanted: bool | None
    """None is as far as it costs nothing; True lets nodes call each other too."""

    allowed: tuple[str, ...]
    """Names of checks, or of failures, that may be there."""

    def check(self, place: str, *, is_job: bool) -> None:
        """
        Raises:
            BadParameter: A name is of no check.
            UsageError: Nobody looks at such a run, so it cannot be told how.
        """
        from paceline.cli.preflight import check_allowed

        check_allowed(self.allowed)
        if not self.wanted and not self.allowed:
            return
        if not is_job:
            raise click.UsageError(
                "--preflight and --allow are for jobs: what a script needs is not known."
            )
        if place not in _OWN_AGENTS:
            raise click.UsageError(
                f"--preflight and --allow do nothing with --on {place}: its machines are not there "
                "before the job is, and run the program of its files. Put `paceline preflight JOB` "
                "where they set themselves up (docs/guides/preflight.md)."
            )

    @property
    def options(self) -> tuple[str, ...]:
        """The same, for the command that a queue starts."""
        wanted = {None: (), True: ("--preflight",), False: ("--no-preflight",)}[self.wanted]
        return *wanted, *(word for name in self.allowed for word in ("--allow", name))


def look_here(job: "Job", plan: "Plan", folder: Path, looking: Looking) -> "Preflight | None":
    """What was seen of this machine; None where nobody looks.

    Args:
        job: To be started here.
        plan: Its plan.
        folder: Where the run will write: its own, or the folder of all runs.
        looking: How.

    Raises:
        JobError: `W032`, a check fails that was not allowed.
    """
    if looking.wanted is False:
        return None
    from paceline.check.preflight.preflight import judge
    from paceline.errors import JobError
    from paceline.launch import gather

    question = replace(_question(job, folder), ports=(), code=(), data=())  # looked at by itself
    need = _need(job, plan, "local", folder)
    verdict = judge(gather.look_here(question), need, allowed=looking.allowed)
    if not verdict.is_fit:
        raise JobError(*_problems(verdict, where="this machine"))
    return verdict


def inspection_of(
    job: "Job", plan: "Plan", place: str, run: "RunFolder", looking: Looking
) -> "Inspection | None":
    """How the nodes of an attached place are looked at; None where nobody looks, or has already."""
    if looking.wanted is False or place == "local":
        return None
    from paceline.check.preflight.preflight import judge
    from paceline.launch.places import Inspection

    need = _need(job, plan, place, run.path)

    def judge_all(gathered: "Gathered", note: str | None) -> "Iterable[Problem]":
        verdict = judge(gathered, need, note=note, allowed=looking.allowed)
        if verdict.is_fit:
            keep_look(run, verdict)
        return _problems(verdict)

    return Inspection(
        question=_question(job, run.path), calls=looking.wanted is True, judge=judge_all
    )


def keep_look(run: "RunFolder", looked: "Preflight | None") -> None:
    """Write it into the run's folder, where there was a look."""
    from paceline.cli.preflight import preflight_data
    from paceline.record.lines import write_whole

    if looked is not None:
        data = json.dumps(preflight_data(looked), indent=2)
        write_whole(run.path / FILE, f"{data}\n".encode())


def _question(job: "Job", folder: Path) -> "Question":
    from paceline.launch.gather import question_of

    return question_of(job, folder, is_quick=True)


def _need(job: "Job", plan: "Plan", place: str, folder: Path) -> "Need":
    from paceline.check.preflight.need import need_of

    need = need_of(job, plan, place=place)
    # It may go on: those that are kept are there already, and old ones make room.
    return replace(need, num_checkpoints=1) if (folder / "checkpoints").is_dir() else need


def _problems(verdict: "Preflight", where: str | None = None) -> "list[Problem]":
    from paceline.errors import Problem

    return [
        Problem(
            code="W032",
            what=f"{each.name} [{each.id}]: {each.evidence}",
            where=where or each.node,
            fix=f"{each.fix}; or start all the same: --allow {each.name}",
        )
        for each in verdict.failing
    ]
