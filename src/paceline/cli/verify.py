"""`paceline verify`: does the layout compute what one device computes?"""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.job_input import read_job
from paceline.cli.options import PathName, json_option, layout_option, set_option, timeout_option
from paceline.cli.output_file import check_can_write
from paceline.cli.screen import say, show

if TYPE_CHECKING:
    from paceline.check.verify.judge import Verdict
    from paceline.job import Job
    from paceline.plan import Plan
    from paceline.record.verification import Case


@click.command()
@click.argument("job_file", metavar="JOB", type=PathName(path_type=Path))
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Processes to start, at most. Left out: 4, or what --layout needs.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=2, max=100),
    default=4,
    show_default=True,
    help="Optimizer steps of each run.",
)
@layout_option("Change the layout that is run: --layout tensor=2.")
@click.option(
    "--facts",
    "facts_file",
    type=PathName(path_type=Path, dir_okay=False),
    help="Also write everything the ranks saw into this JSON file.",
)
@timeout_option(900.0, "Seconds after which the ranks are ended.")
@set_option
@json_option
def command(
    job_file: Path,
    ranks: int | None,
    steps: int,
    layout: tuple[str, ...],
    facts_file: Path | None,
    limit_s: float,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Compare JOB's layout, run on a few real ranks, with a single device.

    The model and the layout are made small, the code is the same as in training. Everything is run
    in float64, where only rounding may differ, and in the job's precision. A fault is named by its
    first step and module. Ranks are processes on this machine: over gloo, or NCCL where there are
    GPUs.

    \b
    Examples:
      paceline verify job.yaml
      paceline verify job.yaml --ranks 8
      paceline verify job.yaml --layout tensor=2 --layout data=2
      paceline verify job.yaml --json --facts facts.json

    \b
    Exit codes:
      0  the layout is right
      1  something is wrong
      2  the job is wrong
      3  the layout does not fit
      4  a rank failed
    """
    from paceline.check.verify.judge import judge
    from paceline.check.verify.small import small_case
    from paceline.launch.verify import verify_on_ranks
    from paceline.record.lines import write_facts
    from paceline.report.verify_text import verdict_lines

    check_can_write(facts_file, "--facts")
    job = read_job(job_file, overrides)
    plan = _plan(job)
    case = _on_device(small_case(job, plan, ranks=ranks, steps=steps, overrides=layout))
    facts = verify_on_ranks(case, limit_s=limit_s, on_progress=say)
    if facts_file is not None:
        write_facts(facts_file, facts)
    verdict = judge(facts)
    if as_json:
        click.echo(json.dumps(_data(verdict, case), indent=2))
    else:
        for line in verdict_lines(verdict, facts):
            show(line)
    return 0 if verdict.is_right else 1


def _plan(job: "Job") -> "Plan":
    from paceline.launch.plannable import planned

    return planned(job)


def _on_device(case: "Case") -> "Case":
    """On this machine's GPUs, where there is one for each rank; else on its cores, shared."""
    from paceline.topology.machine import find_local_machine

    ranks, num_gpus = case.layout.num_ranks, len(find_local_machine().gpus)
    if num_gpus >= ranks:
        return replace(case, device="cuda")
    threads = max(1, (os.cpu_count() or 1) // ranks)
    notes = case.notes
    if num_gpus:
        notes = (*notes, f"on the CPU: NCCL needs a GPU for each of {ranks} ranks, not {num_gpus}")
    return replace(case, device="cpu", threads=threads, notes=notes)


def _data(verdict: "Verdict", case: "Case") -> dict[str, Any]:
    return {
        "right": verdict.is_right,
        "layout": asdict(case.layout),
        "precision": case.precision,
        "steps": case.steps,
        "notes": list(verdict.notes),
        "lines": [asdict(line) for line in verdict.lines],
    }
