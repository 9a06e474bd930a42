"""`paceline smoke`: does every step of a training pipeline work, in under a minute?"""

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import PathName, json_option, set_option, timeout_option
from paceline.cli.output_file import kept_folder
from paceline.cli.screen import say, show

if TYPE_CHECKING:
    from paceline.check.smoke import Row, Smoke, Status
    from paceline.launch.smoke import Seen
    from paceline.launch.smoke_script import SeenScript


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
@click.option(
    "--in-place",
    is_flag=True,
    help="Run a script in its folder itself: its writes are real, also over a checkpoint.",
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
    in_place: bool,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Try every step of a training pipeline on this machine's CPU, in under a minute.

    A job is cut down to a few steps of four samples and really run: on one rank, again from its
    checkpoint, and on two ranks over gloo. Its own model is trained, or a small decoder where that
    is too slow here. Nine steps are timed and judged: data_loading, tokenization, model_loading,
    training_step, validation_step, checkpoint_save, checkpoint_load, inference, metrics. Then it
    checks the loss range, memory over the steps, gradients, NaN and Inf, and the losses of one and
    two ranks.

    A Python script runs in a copy of this folder: what it writes there is lost, and nothing of
    yours is overwritten. What it writes to an absolute path elsewhere is really written. Its torch
    optimizers, modules, DataLoaders and saves are observed, and it is stopped after --steps. It
    runs on one rank, and if it joins a process group, again on two. What cannot be judged is
    listed with the reason. Its arguments follow `--`.

    \b
    Examples:
      paceline smoke job.yaml
      paceline smoke job.yaml --loss-range 2:7 --steps 20
      paceline smoke job.yaml --set model.factory=model:small --json
      paceline smoke job.yaml --keep /tmp/smoke
      paceline smoke train.py -- --epochs 1

    \b
    Exit codes:
      0  nothing failed
      1  a step or a check failed, or no training step was judged
      2  the job is wrong
      3  no layout fits
    """
    from paceline.check.smoke import judge
    from paceline.check.smoke_script import judge_script
    from paceline.cli.standard_streams import reader_may_leave

    began = time.monotonic()
    seen: Seen | SeenScript
    with kept_folder(keep, "smoke") as folder:
        if target.suffix == ".py":
            seen = _script(target, arguments, steps, folder, limit_s, overrides, in_place=in_place)
            smoke = judge_script(seen, loss_range)
        else:
            if arguments or in_place:
                given = arguments[0] if arguments else "--in-place"
                raise click.UsageError(f"Arguments go with a script: {given} is one too many.")
            seen = _job(target, steps, folder, limit_s, overrides)
            smoke = judge(seen, loss_range)
    seconds = time.monotonic() - began
    with reader_may_leave():
        if as_json:
            data = {"verdict": smoke.verdict, "not_judged": _unjudged(smoke), "seconds": seconds}
            click.echo(json.dumps(data | {"about": seen.about} | asdict(smoke), indent=2))
        else:
            _show(smoke, seen.about, target, seconds)
    return 0 if smoke.verdict == "pass" else 1


def _job(
    path: Path, steps: int, folder: Path, limit_s: float, overrides: tuple[str, ...]
) -> "Seen":
    from paceline.cli.job_input import read_job
    from paceline.errors import JobError
    from paceline.job import load_script
    from paceline.job.length_rules import uncounted
    from paceline.launch.smoke import smoke_job

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
    *,
    in_place: bool,
) -> "SeenScript":
    from paceline.cli.run_script import check_program, make_program
    from paceline.errors import JobError
    from paceline.launch.smoke_script import smoke_script

    for override in overrides:
        if not override.startswith("environment."):
            raise click.UsageError(f"--set of a script takes environment.NAME=VALUE: {override}")
    given = ("recovery.max_restarts=0", *overrides)
    program = make_program(path, list(arguments), 1, None, given, profiles=False)
    check_program(program, "local")
    if not in_place and not path.resolve().is_relative_to(program.folder):
        raise JobError.of(
            code="R077",
            what=f"{path} is not in this folder, which is what is copied to try it in",
            where=str(path),
            fix=f"cd {path.resolve().parent}, or --in-place: it then writes where it stands",
        )
    return smoke_script(program, steps, folder, limit_s=limit_s, in_place=in_place, on_note=say)


def _show(smoke: "Smoke", about: list[str], target: Path, seconds: float) -> None:
    rows = (*smoke.steps, *smoke.checks)
    count = Counter(row.status for row in rows)
    missing = _unjudged(smoke)
    partly = " in part" if missing and smoke.verdict == "pass" else ""
    named = f" ({', '.join(missing)})" if partly else ""
    show(
        f"{_word(smoke.verdict)}{partly}  {target}: {count['pass']} passed, "
        f"{count['fail']} failed, {count['not judged']} not judged{named}, in {seconds:.0f} s"
    )
    for note in about:
        show(f"note  {note}")
    for row in rows:
        _show_row(row)


def _unjudged(smoke: "Smoke") -> list[str]:
    rows = (*smoke.steps, *smoke.checks)
    return [row.name for row in rows if row.status == "not judged"]


def _show_row(row: "Row") -> None:
    from paceline.report.table import wrapped
    from paceline.units import format_seconds

    took = "" if row.seconds is None else format_seconds(row.seconds)
    head = f"{_word(row.status):<10}  {row.name:<15}  {took:>8}  "
    for line in wrapped(head, row.found):
        show(line)
    if row.fix:
        for line in wrapped(" " * len(head) + "fix: ", row.fix, indent=len(head) + 5):
            show(line)


def _word(status: "Status") -> str:
    return "FAIL" if status == "fail" else status
