"""`paceline plan --phases`: the sixteen phases, printed or written into a folder."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from paceline.cli.screen import show
from paceline.contracts.phases import (
    Goals,
    PhasePlan,
    exit_code,
    format_gates,
    gate_rows,
    make_phases,
)
from paceline.contracts.phases.make import INDEX, PHASES
from paceline.errors import JobError, PlanError
from paceline.job import Job
from paceline.launch.plannable import planned
from paceline.profile import ModuleFacts

_SCRIPT_MODE = 0o755


def show_phases(
    job: Job,
    facts: ModuleFacts | None = None,
    *,
    out: Path | None = None,
    only: int | None = None,
    goals: Goals | None = None,
    yes: bool = False,
    fail_on_gate: bool = False,
    as_json: bool = False,
) -> int:
    """Print the phases of a job's plan, or write them; returns the exit code.

    Args:
        job: What is asked.
        facts: Of a model of one's own, as `planned` takes them.
        out: Folder for the files. What was made there from the same input stays as it is.
        only: Number of the one phase that is wanted.
        goals: Budget and deadline, in place of the job's.
        yes: Take reviews as approved.
        fail_on_gate: Exit with 3 when a gate failed, or wants a review that is not approved.
        as_json: Print phases and gates as JSON.

    Raises:
        JobError: The folder holds something else, or cannot be written.
        PlanError: The job cannot be planned, for another reason than memory.
    """
    if only is not None and only not in PHASES:
        raise click.UsageError(f"--only takes a number from 1 to {len(PHASES)}.")
    index = _index_of(out) if out is not None else None
    made = make_phases(
        job,
        partial(planned, facts=facts),
        goals=goals,
        only=only,
        index=index,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if out is not None:
        _write(out, made)
    if as_json:
        click.echo(json.dumps(_as_json(made), indent=2))
    elif out is None and only is not None and made.phases:
        click.echo(json.dumps(dict(made.phases[0].output), indent=2))
    else:
        _print(made, out)
    return exit_code(made.gates, yes=yes, fail_on_gate=fail_on_gate)


def refusal_of(job: Job, facts: ModuleFacts | None, error: PlanError) -> dict[str, Any]:
    """The contract's answer for a job that cannot be planned: the phase, what it would need and the
    changes with which it fits; where memory is not the reason, the problems alone."""
    try:
        made = make_phases(job, partial(planned, facts=facts))
        found: dict[str, Any] = json.loads(made.files["final-training-plan.json"])
    except PlanError:
        found = {"success": False}
    return found | {"problems": [asdict(problem) for problem in error.problems]}


def _as_json(made: PhasePlan) -> dict[str, Any]:
    return {
        "phases": {phase.name: dict(phase.output) for phase in made.phases},
        "gates": gate_rows(made.gates),
    }


def _print(made: PhasePlan, out: Path | None) -> None:
    if out is None:
        click.echo(made.files.get("final-training-plan.md", ""), nl=False)
        problems = [gate for gate in made.gates if gate.problem is not None]
        if problems:
            show(format_gates(tuple(problems)), err=True)
        return
    show(format_gates(made.gates))
    for name in made.files:
        show(f"written   {out / name}")
    for name in made.kept:
        show(f"unchanged {out / name}")


def _index_of(out: Path) -> str | None:
    """The folder's index, None for a new folder; a folder of something else is refused."""
    try:
        if (out / INDEX).is_file():
            return (out / INDEX).read_text(encoding="utf-8")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise _refused(out, "holds something else, and nothing is ever written over")
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(out, f"cannot be read: {error}") from None
    return None


def _write(out: Path, made: PhasePlan) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in made.files.items():
            path = out / name
            path.write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                path.chmod(_SCRIPT_MODE)
    except OSError as error:
        raise _refused(out, f"cannot be written: {error.strerror or error}") from None


def _refused(out: Path, why: str) -> JobError:
    return JobError.of(
        code="J025",
        what=f"the folder {out} {why}",
        where="--out",
        fix="give a new folder, or one that `paceline plan --phases` made",
    )
