"""`paceline preflight`: are the machines fit for the job?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import (
    PathName,
    hosts_options,
    json_option,
    runs_option,
    set_option,
    timeout_option,
)
from paceline.cli.screen import say, show
from paceline.units import counted

if TYPE_CHECKING:
    from paceline.check.preflight.preflight import Preflight
    from paceline.job import Job
    from paceline.plan import Plan
    from paceline.topology.node.facts import Gathered


@click.command()
@click.argument("job_file", metavar="JOB", type=PathName(path_type=Path))
@hosts_options(
    "nodes", "With --on ssh: node-a,node-b or a hostfile, instead of the job's ssh.hosts."
)
@click.option(
    "--quick",
    is_flag=True,
    help="Only checks that take no time, as before every `paceline run`.",
)
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Multiply matrices on every device and all-reduce over all ranks, once all else passes.",
)
@click.option(
    "--allow",
    "allowed",
    multiple=True,
    metavar="NAME",
    help="Make a failure of this check a warning. May be given again.",
)
@timeout_option(40.0, "Seconds for a node to answer; one that does not fails.")
@click.option(
    "--record",
    type=PathName(path_type=Path),
    help="Write what the nodes answered to this file, for --from; - prints it alone.",
)
@click.option(
    "--from",
    "recorded",
    multiple=True,
    type=PathName(path_type=Path),
    help="Check recorded answers, not machines. May be given again, for more nodes.",
)
@click.option(
    "--nodes-file",
    type=PathName(path_type=Path),
    help="Write the nodes that pass, one a line: a hostfile for --hosts or srun --nodefile.",
)
@click.option("--all", "shows_all", is_flag=True, help="Show what passes too, with its evidence.")
@runs_option
@set_option
@json_option
def command(
    job_file: Path,
    place: str,
    hosts: str | None,
    quick: bool,
    measure: bool,
    allowed: tuple[str, ...],
    limit_s: float,
    record: Path | None,
    recorded: tuple[Path, ...],
    nodes_file: Path | None,
    shows_all: bool,
    runs: Path,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Check every node of JOB before it is started, and list those that are fit for it.

    All nodes are asked at the same time: accelerators and their errors, drivers and versions,
    memory, /dev/shm, limits, the run's folder and its room, names, ports, whether each node reaches
    every other, RDMA, PCIe, clocks, harmful variables, and whether code, packages and data are the
    same everywhere. Then every device multiplies matrices and all ranks all-reduce. Nothing is
    changed. Ends with 1 where a check fails; `paceline explain ID` has more about each.

    \b
    Examples:
      paceline preflight job.yaml
      paceline preflight job.yaml --on ssh --hosts node-a,node-b
      paceline preflight job.yaml --on srun --nodes-file good.txt
      paceline preflight job.yaml --allow clock --allow kernel-log
      paceline preflight job.yaml --record node-a.json
      paceline preflight job.yaml --from node-a.json --from node-b.json --json
    """
    from paceline.check.preflight.look import look
    from paceline.check.preflight.need import need_of
    from paceline.check.preflight.preflight import judge
    from paceline.launch.preflight import dump_gathered, read_gathered, write_gathered

    check_allowed(allowed)
    if hosts is not None and place != "ssh":
        raise click.UsageError("--hosts goes with --on ssh.")
    job, plan = _job_and_plan(job_file, overrides, hosts)
    if recorded:
        gathered = read_gathered(recorded)
        need = need_of(job, plan, place=gathered.place if len(gathered.nodes) < 2 else "ssh")
        verdict = judge(gathered, need, allowed=allowed)
    else:
        gathered, verdict = look(
            job,
            plan,
            place,
            runs=runs,
            allowed=allowed,
            limit_s=limit_s,
            is_quick=quick,
            measures=measure,
            on_note=say,
        )
    if record is not None and str(record) != "-":
        write_gathered(gathered, record)
    if nodes_file is not None:
        _write_nodes(nodes_file, verdict)
    if record is not None and str(record) == "-":
        click.echo(dump_gathered(gathered).decode())
    else:
        _show(verdict, gathered, job.words, as_json=as_json, shows_all=shows_all)
    return 0 if verdict.is_fit else 1


def _job_and_plan(
    job_file: Path, overrides: tuple[str, ...], hosts: str | None
) -> "tuple[Job, Plan]":
    from paceline.cli.job_input import read_job
    from paceline.launch.handover import with_hosts
    from paceline.launch.plannable import planned

    job = read_job(job_file, overrides)
    if hosts is not None:
        job = with_hosts(job, hosts)
    return job, planned(job)


def _write_nodes(path: Path, verdict: "Preflight") -> None:
    from paceline.errors import JobError

    try:
        path.write_text("".join(f"{node}\n" for node in verdict.good_nodes), encoding="utf-8")
    except OSError as error:
        raise JobError.of(
            code="T014",
            what=f"{path} cannot be written: {error.strerror}",
            where="--nodes-file",
            fix="give a file in a folder that exists and that you may write to",
        ) from None


def _show(
    verdict: "Preflight", gathered: "Gathered", words: str, *, as_json: bool, shows_all: bool
) -> None:
    from paceline.check.preflight.look import preflight_data
    from paceline.report.preflight_text import format_preflight

    if as_json:
        click.echo(json.dumps(preflight_data(verdict, words) | _about(gathered), indent=2))
        return
    for line in format_preflight(verdict, shows_all=shows_all):
        show(line)
    checks, nodes = counted(len(verdict.results), "check"), counted(len(verdict.nodes), "node")
    click.echo(f"{checks} of {nodes} in {gathered.seconds:.1f} s", err=True)


def check_allowed(allowed: tuple[str, ...]) -> None:
    """
    Raises:
        BadParameter: A name is of no check and of no failure.
    """
    if not allowed:  # nothing is read for nothing
        return
    import difflib

    from paceline.catalog.failure import load_failures
    from paceline.check.preflight.preflight import check_names

    known = {*check_names(), *load_failures()}
    for name in allowed:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise click.BadParameter(f"there is no check {name}.{hint}", param_hint="--allow")


def _about(gathered: "Gathered") -> dict[str, Any]:
    return {
        "place": gathered.place,
        "at": gathered.at,
        "seconds": gathered.seconds,
        "quick": gathered.is_quick,
    }
