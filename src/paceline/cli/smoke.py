"""`paceline smoke`: does every step of a training pipeline work, in under a minute?"""

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import PathName, json_option, set_option, timeout_option
from paceline.cli.output_file import kept_folder
from paceline.cli.screen import say

if TYPE_CHECKING:
    from paceline.check.smoke import Row, Smoke
    from paceline.launch.smoke import Seen


def _range(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[float, float] | None:
    if value is None:
        return None
    low, colon, high = value.partition(":")
    try:
        found = float(low), float(high)
    except ValueError:
        colon = ""
        found = 0.0, 0.0
    if not colon or not found[0] <= found[1]:
        raise click.BadParameter(f"{value} is not LOW:HIGH; write it like 0.5:6")
    return found


@click.command()
@click.argument("target", metavar="JOB|SCRIPT", type=PathName(path_type=Path))
@click.argument("arguments", metavar="[-- ARGUMENTS]", required=False, nargs=-1)
@click.option(
    "--steps",
    type=click.IntRange(min=8, max=200),
    default=10,
    show_default=True,
    help="Optimizer steps of each run.",
)
@click.option(
    "--loss-range",
    callback=_range,
    metavar="LOW:HIGH",
    help="Fail when a training loss is outside: 0.5:6.",
)
@timeout_option(120.0, "Seconds after which one run, or the script, is ended.")
@click.option(
    "--keep",
    type=PathName(path_type=Path, file_okay=False),
    help="Keep the runs in this new or empty folder. [default: removed at the end]",
)
@set_option
@json_option
def command(
    target: Path,
    arguments: tuple[str, ...],
    steps: int,
    loss_range: tuple[float, float] | None,
    limit_s: float,
    keep: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Try every step of a training pipeline on this machine's CPU, in under a minute.

    A job is cut down to a few steps of four samples and really run: on one rank, again from its
    checkpoint, and on two ranks over gloo. Its own model is trained, or a small decoder where that
    is too slow here. Nine steps are timed and judged: data_loading, tokenization, model_loading,
    training_step, validation_step, checkpoint_save, checkpoint_load, inference, metrics. Then the
    loss range, memory over the steps, gradients, NaN and Inf, and the losses of one and two ranks.

    A Python script is started as it is, in this folder, and stopped after a few steps, as Ctrl-C
    does: what it writes is really written, also over a checkpoint of that name. What it does not
    print is listed as not seen, with the reason. Its arguments follow `--`.

    \b
    Examples:
      paceline smoke job.yaml
      paceline smoke job.yaml --loss-range 2:7 --steps 20
      paceline smoke job.yaml --set model.factory=model:small --json
      paceline smoke job.yaml --keep /tmp/smoke
      paceline smoke train.py -- --epochs 1

    \b
    Exit codes: 0 nothing failed; 1 a step or a check failed, or no training step was seen; 2 and 3
    it cannot be run.
    """
    from paceline.check.smoke import judge
    from paceline.cli.standard_streams import reader_may_leave

    began = time.monotonic()
    with kept_folder(keep, "smoke") as folder:
        seen = (
            _script(target, arguments, steps, folder, limit_s, overrides)
            if target.suffix == ".py"
            else _job(target, arguments, steps, folder, limit_s, overrides)
        )
    smoke = judge(seen, loss_range)
    seconds = time.monotonic() - began
    with reader_may_leave():
        if as_json:
            data = {"passed": smoke.passed, "seconds": seconds, "about": seen.about}
            click.echo(json.dumps(data | asdict(smoke), indent=2))
        else:
            _show(smoke, seen, target, seconds)
    return 0 if smoke.passed else 1


def _job(
    path: Path,
    arguments: tuple[str, ...],
    steps: int,
    folder: Path,
    limit_s: float,
    overrides: tuple[str, ...],
) -> "Seen":
    from paceline.cli.job_input import read_job
    from paceline.errors import JobError
    from paceline.job import load_script
    from paceline.job.length import uncounted
    from paceline.launch.smoke import smoke_job

    if arguments:
        raise click.UsageError(f"Arguments go with a script: {arguments[0]} is one too many.")
    if path.suffix in (".yaml", ".yml") and load_script(path, overrides) is not None:
        raise JobError.of(
            code="J012",
            what="`command` is a program of its own, which no step can be taken out of",
            where=str(path),
            fix="give its Python script: paceline smoke train.py -- ARGUMENTS",
        )
    job = read_job(path, overrides, count=uncounted)
    return smoke_job(job, steps, folder, limit_s=limit_s, on_note=say)


def _script(
    path: Path,
    arguments: tuple[str, ...],
    steps: int,
    folder: Path,
    limit_s: float,
    overrides: tuple[str, ...],
) -> "Seen":
    from paceline.cli.run_script import check_program, make_program
    from paceline.launch.smoke import smoke_script

    given = ("recovery.max_restarts=0", *overrides)
    program = make_program(path, list(arguments), 1, None, given, profiles=False)
    check_program(program, "local")
    say(f"{steps} steps of {path} in {Path.cwd()}: files that it writes are really written")
    return smoke_script(program, steps, folder, limit_s=limit_s)


def _show(smoke: "Smoke", seen: "Seen", target: Path, seconds: float) -> None:
    rows = (*smoke.steps, *smoke.checks)
    count = {word: sum(row.status == word for row in rows) for word in ("fail", "pass", "not seen")}
    click.echo(
        f"{'pass' if smoke.passed else 'FAIL'}  {target}: {count['pass']} passed, "
        f"{count['fail']} failed, {count['not seen']} not seen, in {seconds:.0f} s on the CPU"
    )
    for note in seen.about:
        click.echo(f"note  {note}")
    for row in rows:
        _show_row(row)


def _show_row(row: "Row") -> None:
    from paceline.report.table import wrapped
    from paceline.units import format_seconds

    took = "" if row.seconds is None else format_seconds(row.seconds)
    word = "FAIL" if row.status == "fail" else row.status
    head = f"{word:<8}  {row.name:<15}  {took:>8}  "
    width = shutil.get_terminal_size().columns
    for line in wrapped(head, row.found, width=width):
        click.echo(line)
    if row.fix:
        for line in wrapped(" " * len(head) + "fix: ", row.fix, width=width, indent=len(head) + 5):
            click.echo(line)
