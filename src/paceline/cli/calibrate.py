"""`paceline calibrate`: what this machine reaches, written where planning reads it."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from paceline.cli.options import FiniteRange, PathName, json_option
from paceline.cli.screen import say, show
from paceline.report.table import format_table


@click.command()
@click.option(
    "--seconds",
    type=FiniteRange(min=2, max=3600),
    default=60.0,
    show_default=True,
    help="How long to measure. With less, large shapes are left out.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Processes that measure at the same time. Left out: one for each GPU, or as many as "
    "`cluster.per_node: auto` gives on a CPU.",
)
@click.option(
    "--out",
    "out",
    type=PathName(path_type=Path, dir_okay=False),
    default=Path("paceline-catalog.toml"),
    show_default=True,
    help="The catalog file to write, new or with other tables; only [efficiencies.NAME] of this "
    "machine's accelerator changes.",
)
@click.option(
    "--force", is_flag=True, help="Replace [efficiencies.NAME] though it was written by hand."
)
@json_option
def command(seconds: float, ranks: int | None, out: Path, force: bool, as_json: bool) -> None:
    """Measure this machine's real speed, and write it where `plan` reads it.

    Times products of matrices, attention, memory and collectives on all ranks at once, and fits
    the planner's constants to them. Under torchrun it measures between machines too. Needs
    PyTorch, and a machine that does nothing else.

    \b
    Examples:
      paceline calibrate                        writes paceline-catalog.toml
      paceline calibrate --seconds 300 --out ours.toml
      paceline calibrate --ranks 1              one rank alone
      torchrun --nnodes 2 --nproc-per-node 8 ... -m paceline calibrate
    """
    from paceline.catalog import load_catalog
    from paceline.catalog.efficiencies import load_efficiencies
    from paceline.catalog.engines import load_engines
    from paceline.catalog.measured_file import check_writable, write_measured
    from paceline.estimate.fit_rates import fit_rates
    from paceline.launch.calibrate import find_own_cluster, find_place, measure_machine
    from paceline.report.calibrate_text import (
        calibration_lines,
        error_lines,
        file_comments,
        measured_by,
    )

    catalog = load_catalog(out if out.exists() else None)
    place = find_place(os.environ, ranks)
    cluster = find_own_cluster(place, out.resolve().parent, catalog)
    check_writable(out, cluster.accelerator, force=force)
    measured = measure_machine(cluster, place, seconds=seconds, on_progress=say)
    if measured is None:  # another rank than 0
        return
    shipped = load_efficiencies()
    fitted = fit_rates(measured, cluster, load_engines()["paceline"], shipped)
    row = {"source": measured_by(measured), **fitted.row}
    comments = file_comments(measured, fitted)
    write_measured(out, fitted.accelerator, row, comments[1:], force=force)
    if as_json:
        data = {"file": str(out), "measured": asdict(measured), "fitted": asdict(fitted)}
        click.echo(json.dumps(data, indent=2))
    else:
        show(format_table(calibration_lines(measured, fitted, cluster, shipped)))
        show("")
        for line in error_lines(fitted):
            show(line)
    show(f"wrote [efficiencies.{fitted.accelerator}] to {out}", err=True)
