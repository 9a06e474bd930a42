"""`paceline run --script`: what is made of the command line, and the run to its end."""

import json
import shutil
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from paceline.job import Script
    from paceline.launch.program_nodes import ProgramNodes
    from paceline.record.run import RunFolder


def make_program(
    script: Path,
    arguments: list[str],
    nproc: int | None,
    silence: str | None,
    overrides: tuple[str, ...],
    *,
    profiles: bool,
) -> "Script":
    """The script as a job.

    Args:
        silence: As in `recovery.silence`; None is its default.
    """
    import re
    import sys

    from paceline.job import make_script

    _refuse_job_without_engine(arguments)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", script.stem).lstrip("._-")[:64] or "script"
    values: dict[str, Any] = {
        "name": name,
        "command": [sys.executable, str(script), *arguments],
        "processes": nproc or _num_accelerators(),
        "profile": profiles,
    }
    if silence is not None:
        values["recovery"] = {"silence": silence}
    return make_script(values, Path.cwd(), overrides)


def check_program(program: "Script", place: str) -> None:
    """
    Raises:
        UsageError: It is to run at a place that takes no scripts.
        JobError: It cannot be started.
    """
    from paceline.errors import JobError
    from paceline.launch.program_nodes import PLACES, check_place
    from paceline.launch.script_run import check_script

    if place not in PLACES or (place != "local" and program.spec.starts != "nodes"):
        raise click.UsageError(
            f"--on {place} starts no script of one rank: give it a launcher (`starts: nodes`), "
            "--with ENGINE, or --on slurm."
        )
    JobError.raise_for(
        [*check_script(program, is_here=place == "local"), *check_place(program, place)]
    )


def ranks_shown(asked: str | None, program: "Script") -> Collection[int]:
    """The ranks whose output `--ranks` wants on the screen; of launchers, the nodes. The last rank
    of a pipeline prints the loss, so that of nodes the first and the last are shown.

    Raises:
        UsageError: It is not `all`, `none` or numbers of ranks.
    """
    processes = program.num_watched
    if asked in ("all", "none"):
        return range(processes if asked == "all" else 0)
    usual = f"0,{processes - 1}" if program.spec.starts == "nodes" else "0"
    words = (asked or usual).split(",")
    if not all(word.isdecimal() and int(word) < processes for word in words):
        raise click.UsageError(
            f"--ranks takes all, none, or ranks from 0 to {processes - 1} such as 0,1: not {asked}"
        )
    return sorted({int(word) for word in words})


def run_program(
    program: "Script",
    run: "RunFolder",
    *,
    ranks: Collection[int],
    reports: bool,
    as_json: bool,
    nodes: "ProgramNodes | None" = None,
) -> int:
    """Run it to its end, on this machine or on nodes; the exit code."""
    from paceline.cli.report import try_report
    from paceline.cli.script_progress import ScriptView
    from paceline.launch.attached import versions
    from paceline.launch.engine_run import check_started
    from paceline.launch.script_run import run_script
    from paceline.record.run_row import read_row
    from paceline.record.script_profile import read_profile
    from paceline.report.script_text import profile_lines

    view = ScriptView(job=program, run=run, ranks=ranks, to_stderr=as_json)
    view.opening()
    state = run_script(
        program,
        run,
        versions=versions(),
        on_event=view.event,
        on_output=view.output,
        on_note=lambda text: click.echo(text, err=True),
        nodes=nodes,
    )
    view.ending(state)
    if state.outcome != "interrupted":
        check_started(program, run)
    if state.outcome == "failed":
        view.diagnosis(_diagnose(run))
    profile = read_profile(run.path)
    if profile is not None and program.spec.profile:
        view.profile(profile_lines(profile))
    report, why_not = try_report(run, wanted=reports)
    view.closing(state, report, why_not)
    if as_json:
        summary = asdict(read_row(run.path)) | {"report": str(report) if report else None}
        click.echo(json.dumps(summary, indent=2))
    return state.exit_code


def _diagnose(run: "RunFolder") -> list[str]:
    from paceline.check.diagnose.diagnose import diagnose
    from paceline.cli.diagnose import beside_script
    from paceline.record.log_files import find_logs
    from paceline.report.diagnose_text import brief_lines

    name, runs = str(run.path), run.path.parent
    return list(brief_lines(beside_script(diagnose(find_logs([name], runs)), None, [name], runs)))


def _num_accelerators() -> int:
    from paceline.topology.machine import find_local_machine

    return max(1, len(find_local_machine().gpus))


def _refuse_job_without_engine(given: list[str]) -> None:
    """A job file without --with would be an argument of a script that runs unplanned.

    What stands behind `--` is the script's own.
    """
    import sys

    first = given[0] if given else ""
    behind = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    if first not in behind and first.endswith((".yaml", ".yml")):
        raise click.UsageError(
            f"{first} would only be an argument of the script: did you mean --with ENGINE, which "
            f"plans the ranks for it? Arguments of the script's own follow `--`: -- {first}"
        )


def nodes_of(program: "Script", run: "RunFolder", place: str) -> "ProgramNodes | None":
    """The nodes that a launcher is started on; None on this machine.

    Raises:
        JobError: One of them cannot take part.
    """
    from paceline.launch.program_nodes import find_nodes
    from paceline.record.placement import Placement, write_placement

    if place == "local":
        return None
    nodes = find_nodes(program, run, place, lambda text: click.echo(text, err=True))
    if place != "srun":  # there the run is the queue's
        hosts = dict(enumerate(nodes.names))
        write_placement(run.path, Placement(place=place, hosts=hosts))
    return nodes


def discard(run: "RunFolder") -> None:
    """Remove a new run that was refused: nothing was started, and nothing stays."""
    shutil.rmtree(run.path, ignore_errors=True)
