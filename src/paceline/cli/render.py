"""`paceline render`: the plan as the files of another engine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import PathName, json_option, set_option

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.render import Gap


@click.command()
@click.argument("job_file", metavar="[JOB]", required=False, type=PathName(path_type=Path))
@click.option("--for", "engine", metavar="ENGINE", help="The engine, or `list`; else the job's.")
@click.option(
    "--out",
    type=PathName(path_type=Path, file_okay=False),
    help="Write the files into this folder; left out, they are printed.",
)
@click.option("--force", is_flag=True, help="Overwrite files in --out that differ.")
@set_option
@json_option
def command(
    job_file: Path | None,
    engine: str | None,
    out: Path | None,
    force: bool,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the plan of the job in JOB, made for ENGINE, as its files.

    What the engine cannot express is listed, with the nearest setting that it has; where it has
    none, no file is written and the exit code is 3. `--for list` shows the engines, the versions
    that the files are for, and what they were checked with.

    \b
    Examples:
      paceline render --for list
      paceline render job.yaml --for torchrun
      paceline render job.yaml --for accelerate --out launch
      paceline render job.yaml --for slurm --out launch --force
    """
    from paceline.render import find, is_only_estimated, render_job, renderer_of

    if engine == "list":
        _list(as_json=as_json)
        return
    if engine not in (None, "paceline") and (job_file is None or not is_only_estimated(engine)):
        find(engine)
    if job_file is None:
        raise click.UsageError("Name the job file: paceline render job.yaml --for ENGINE")
    from paceline.cli.job_input import read_plannable
    from paceline.cli.screen import say
    from paceline.launch.plannable import check_planned, planned
    from paceline.render.example import needs_own_program
    from paceline.topology.places import at_place

    job = read_plannable(job_file, overrides, files_for=engine or "")
    engine = engine or renderer_of(job.spec.engine) or job.spec.engine
    if engine == "paceline":
        raise click.UsageError("Name the engine (--for list shows them); `run` needs no files.")
    plan = planned(at_place(job, engine))
    rendered = render_job(engine, plan, _with_hosts(job, plan.cluster.ranks_per_node))
    notes = check_planned(job, plan) if renderer_of(plan.engine) == engine else []
    for note in notes:
        say(f"note: {note}")
    if out is not None:
        _write(rendered.files, out, force=force)
    if as_json:
        gaps = [
            {
                "what": gap.what,
                "why": gap.why,
                "nearest": gap.nearest,
                "fix": gap.fix,
                "where": gap.where,
            }
            for gap in rendered.gaps
        ]
        where = None if out is None else str(out)
        click.echo(
            json.dumps(
                {
                    "engine": engine,
                    "layout": plan.layout_name,
                    "out": where,
                    "files": dict(rendered.files),
                    "gaps": gaps,
                },
                indent=2,
            )
        )
        return
    for gap in rendered.gaps:
        if notes and needs_own_program(gap):  # said above
            continue
        say_left_out(gap)
    for path, text in sorted(rendered.files.items()):
        click.echo(f"{out / path}" if out is not None else f"==> {path} <==\n{text}")
    if (
        out is not None
        and engine in ("torchrun", renderer_of(plan.engine))
        and "launch.sh" in rendered.files
    ):
        where = " on every node" if plan.cluster.num_nodes > 1 else ""
        own = "TRAIN_SCRIPT=$PWD/my.py " if any(map(needs_own_program, rendered.gaps)) else ""
        say(f"start it{where}: {own}bash {out / 'launch.sh'}")


def say_left_out(gap: "Gap") -> None:
    """Print what files leave out, what they have instead and the fix, on standard error."""
    from paceline.cli.screen import say
    from paceline.render.example import STOPS

    if gap.nearest is not None and gap.nearest.startswith(STOPS):
        fixes = [gap.fix, gap.nearest.removeprefix(f"{STOPS}; ")]
        say(f"warning: {STOPS}: {gap.what}: {gap.why}")
    else:
        fixes = [gap.fix]
        say(f"left out: {gap.what}: {gap.why}\n  instead: {gap.nearest}")
    if any(fixes):
        say(f"  fix: {'; or '.join(filter(None, fixes))}")


def _with_hosts(job: "Job", ranks_per_node: int) -> "Job":
    """The job with the hosts of its hostfile, if it names one."""
    from paceline.errors import JobError
    from paceline.job.hosts import check_slots, with_hosts

    if job.spec.ssh.hostfile is None:
        return job
    JobError.raise_for(check_slots(job, ranks_per_node))
    return with_hosts(job)


def _list(*, as_json: bool) -> None:
    from paceline.cli.screen import show
    from paceline.render import ENGINES
    from paceline.report.table import format_table

    if as_json:
        rows = [
            {
                "name": name,
                "title": engine.title,
                "versions": engine.versions,
                "validated": engine.validated,
            }
            for name, engine in ENGINES.items()
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    header = ("engine", "what", "versions", "validated by")
    table = [
        (name, engine.title, engine.versions, engine.validated) for name, engine in ENGINES.items()
    ]
    show(format_table([header, *table], keep=3))


def _write(files: Any, out: Path, *, force: bool) -> None:
    """All of the files, or none.

    Raises:
        JobError: `H004`, a file is there and differs; `H005`, the folder cannot be written.
    """
    from paceline.errors import JobError

    try:
        differing = [
            name
            for name, text in files.items()
            if (out / name).exists() and (out / name).read_bytes() != text.encode()
        ]
        if differing and not force:
            raise JobError.of(
                code="H004",
                what=f"{', '.join(sorted(differing))} in {out} would be overwritten",
                where="--out",
                fix="name a new folder, or overwrite with --force",
            )
        for name, text in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if text.startswith("#!"):
                path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise JobError.of(
            code="H005",
            what=f"{error.filename or out} cannot be written: "
            f"{(error.strerror or str(error)).lower()}",
            where="--out",
            fix="name a folder that you may write to",
        ) from None
