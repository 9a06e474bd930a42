"""What `paceline run` submits to a queue; with `--dry-run` it only shows that, and asks nothing."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from paceline.units import counted

if TYPE_CHECKING:
    from paceline.job import Job, Script
    from paceline.plan import Plan
    from paceline.record.run import RunFolder


def show_submission(
    place: str,
    job: "Job | Script",
    plan: "Plan | None",
    folder: Path,
    options: Sequence[str],
    *,
    as_json: bool,
) -> int:
    """What a queue would be given, or what an attached place would start."""
    from paceline.launch.handover import FOLDER, format_submission
    from paceline.launch.places import PLACES, queued
    from paceline.record.run import RunFolder

    run = RunFolder(folder.resolve())
    if PLACES[place].kind != "queued":
        if plan is None:
            return _show_program(place, cast("Script", job), run, as_json=as_json)
        return _show_starts(place, cast("Job", job), plan, run, as_json=as_json)
    submission = queued(place).prepare(job, plan, run, options)
    if as_json:
        found = {
            "place": place,
            "folder": str(run.path / FOLDER),
            "files": dict(submission.files),
            "command": list(submission.command),
            "notes": list(submission.notes),
        }
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(format_submission(submission, run))
    return 0


def _show_starts(place: str, job: "Job", plan: "Plan", run: "RunFolder", *, as_json: bool) -> int:
    """What an attached place would start. Nothing is started, made or asked."""
    from paceline.launch.places import PLACES, attached

    starts = attached(place).starts(job, plan, run)
    if as_json:
        found = {
            "place": place,
            "folder": str(run.path),
            "starts": [{"host": each.host, "command": list(each.command)} for each in starts],
        }
        click.echo(json.dumps(found, indent=2))
        return 0
    click.echo(f"run folder  {run.path}")
    click.echo(f"controller  this command, here; place: {PLACES[place].title}")
    for node, each in enumerate(starts):
        ranks = counted(plan.cluster.ranks_per_node, "rank")
        click.echo(f"==> node {node}: {ranks} on {each.host}, started by <==")
        click.echo(shlex.join(each.command))
    click.echo("ADDRESS:PORT is the controller's, which has one when it runs.")
    return 0


def _show_program(place: str, program: "Script", run: "RunFolder", *, as_json: bool) -> int:
    """The processes that would be started here, or the launcher of each node."""
    spec = program.spec
    if place != "local":
        starts = starts_of(program, run, place)
        found = {"place": place, "folder": str(run.path), "starts": starts}
        click.echo(json.dumps(found, indent=2) if as_json else "\n".join(format_starts(starts)))
        return 0
    if as_json:
        found = {"place": "local", "folder": str(program.folder), "command": list(spec.command)}
        click.echo(json.dumps(found | {"processes": spec.processes}, indent=2))
        return 0
    click.echo(f"==> {spec.processes} process(es) on this machine, each started by <==")
    click.echo(f"cd {shlex.quote(str(program.folder))} && {shlex.join(spec.command)}")
    return 0


def hand_to_place(
    place: str,
    job: "Job | Script",
    plan: "Plan | None",
    run: "RunFolder",
    options: Sequence[str],
    *,
    is_new: bool,
    as_json: bool,
) -> int:
    """Submit it. A new run that the queue refuses leaves nothing behind."""
    import shutil

    from paceline.errors import PacelineError
    from paceline.launch.handover import hand_over
    from paceline.launch.places import PLACES

    try:
        placement, submission = hand_over(place, job, plan, run, options)
    except PacelineError:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    if as_json:
        found = {"run": str(run.path), "place": place, "job_id": placement.job_id}
        click.echo(json.dumps(found, indent=2))
        return 0
    click.echo(f"job {placement.job_id} of {PLACES[place].title}")
    click.echo(f"run folder  {run.path}")
    for note in submission.notes:
        click.echo(note)
    for verb in ("status", "logs", "stop"):
        click.echo(f"  paceline {verb} {shlex.quote(str(run.path))}")
    return 0


def starts_of(script: "Script", run: "RunFolder", place: str) -> list[dict[str, object]]:
    """The command of each node's launcher; asks nobody."""
    from paceline.launch.program_nodes import planned_nodes

    nodes = planned_nodes(script, place)
    found: list[dict[str, object]] = []
    for node, host in enumerate(nodes.names):
        words = list(script.spec.command)
        if place != "local":
            words = nodes.command(script, str(run.path), node, attempt=1)
        shown = shlex.join(words)
        if place == "local":
            shown = f"cd {shlex.quote(str(script.folder))} && {shown}"
        found.append({"host": host, "command": words, "shown": shown})
    return found


def format_starts(starts: Sequence[Mapping[str, object]]) -> list[str]:
    """For people."""
    texts = [f"==> {each['host']}, started by <==\n{each['shown']}" for each in starts]
    note = "HEAD-ADDRESS is the first node's, looked up when the run starts."
    if any("RAY-NODE" in str(each["host"]) for each in starts):
        note += " So are Ray's nodes; where none has GPUs, --cpus takes the place of --gpus."
    return [*texts, note]
