"""`paceline prove`: run the real sharding code on fake ranks, and say what it needs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import PathName, json_option, set_option


@click.command()
@click.argument("job_file", metavar="JOB", type=PathName(path_type=Path))
@set_option
@click.option(
    "--layout",
    "layout",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Fix one field of the layout: --layout tensor=8. May be given again.",
)
@click.option(
    "--whole", is_flag=True, help="Trace every block, instead of a few that stand for all."
)
@click.option(
    "--trace",
    "trace_file",
    metavar="FILE",
    type=PathName(path_type=Path, dir_okay=False),
    help="Write the simulated step for chrome://tracing or ui.perfetto.dev.",
)
@click.option(
    "--plot",
    "plot_file",
    metavar="FILE",
    type=PathName(path_type=Path, dir_okay=False),
    help="Draw memory over the step, as SVG.",
)
@json_option
def command(
    job_file: Path,
    overrides: tuple[str, ...],
    layout: tuple[str, ...],
    whole: bool,
    trace_file: Path | None,
    plot_file: Path | None,
    as_json: bool,
) -> None:
    """Prove the layout of the job in JOB without its cluster.

    The model, the runtime's own sharding code and the optimizer step run on this machine with
    tensors that have no values, in a world of as many ranks as the job has, for one rank of every
    pipeline stage: exact bytes in tensors at the fullest instant and where that is, every
    collective, FLOPs, and the step on a simulated clock, beside the planner's estimate. Needs
    PyTorch and less than 1 GiB, no accelerator. A layout that does not fit by the estimate is
    proved when --layout fixes it, the leanest where that leaves a choice. Exit code 3 means that it
    does not fit.

    \b
    Examples:
      paceline prove job.yaml
      paceline prove job.yaml --layout tensor=8 --layout recompute=full
      paceline prove job.yaml --set cluster.accelerator=H100-SXM --set cluster.nodes=8
      paceline prove job.yaml --plot memory.svg --trace step.json
    """
    from paceline.cli.job_input import read_plannable
    from paceline.cli.output_file import check_can_write
    from paceline.launch.prove import Prover
    from paceline.prove.compare import compare
    from paceline.prove.request import request_of
    from paceline.units import format_bytes

    check_can_write(trace_file, "--trace")
    check_can_write(plot_file, "--plot")
    with Prover(on_progress=lambda line: click.echo(line, err=True)) as prover:
        job = read_plannable(job_file, (*overrides, *(f"layout.{each}" for each in layout)))
        plan = _plan(job, must_fit=not layout)
        request = request_of(job, plan, whole=whole, wants_trace=trace_file is not None)
        proof = prover.prove(request)
    compared = compare(proof, plan)
    needed = plan.estimate.memory.known_bytes
    if needed > plan.limit_bytes:
        note = (
            f"by the estimate this layout does not fit: {format_bytes(needed)} a rank, of "
            f"{format_bytes(plan.limit_bytes)} that may be used"
        )
        proof = replace(proof, notes=(*proof.notes, note))
    if trace_file is not None:
        events = {"traceEvents": proof.trace, "displayTimeUnit": "ms"}
        trace_file.write_text(json.dumps(events))
        click.echo(f"wrote {trace_file}", err=True)
    if plot_file is not None:
        from paceline.report.proof_plot import draw_memory

        plot_file.write_text(draw_memory(proof))
        click.echo(f"wrote {plot_file}", err=True)
    if as_json:
        import msgspec

        data = {"proof": proof, "compared": compared, "fits": compared.fits}
        click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
    else:
        from paceline.report.proof_text import format_proof

        click.echo(format_proof(proof, compared))
    if not compared.fits:
        raise click.exceptions.Exit(3)


def _plan(job: Any, *, must_fit: bool) -> Any:
    from paceline.launch.factory import measure_factory
    from paceline.plan import plan_job

    return plan_job(job, measure_factory(job), must_fit=must_fit)


def prove_candidates(job: Any, facts: Any, plan: Any, count: int, *, as_json: bool) -> None:
    """Prove the first layouts of a plan and list them by what was proved: `plan --prove N`."""
    from paceline.cli.table import format_table
    from paceline.errors import PacelineError
    from paceline.estimate import stage_memory
    from paceline.launch.prove import Prover
    from paceline.plan.plan import fastest_layouts
    from paceline.prove.compare import compare_with
    from paceline.prove.request import case_of_plan, request_of
    from paceline.units import format_bytes, format_seconds

    case = case_of_plan(job, plan)
    rows: list[tuple[tuple[bool, float], dict[str, Any]]] = []
    for number, (layout, price) in enumerate(fastest_layouts(job, facts, count), start=1):
        click.echo(f"{number} of {count}: {layout.name}", err=True)
        row: dict[str, Any] = {"layout": layout, "estimated_step_s": price.step_s}
        row["estimated_bytes"] = price.memory.allocated_bytes
        try:
            with Prover() as prover:
                proof = prover.prove(request_of(job, plan, layout=layout))
        except PacelineError as error:
            rows.append(((True, float("inf")), {**row, "problem": error.problems[0].what}))
            continue
        compared = compare_with(
            proof,
            tuple(stage_memory(layout, case)),
            limit_bytes=plan.limit_bytes,
            estimated_step_s=price.step_s,
        )
        row |= {"proved_bytes": compared.proved_bytes, "fits": compared.fits}
        row["simulated_step_s"] = compared.step_s
        key = compared.step_s if compared.step_s is not None else float("inf")
        rows.append(((not compared.fits, key), row))
    rows.sort(key=lambda each: each[0])
    if as_json:
        import msgspec

        data = msgspec.json.encode([row for _, row in rows])
        click.echo(msgspec.json.format(data, indent=2).decode())
        return

    def seconds(value: float | None) -> str:
        return "?" if value is None else format_seconds(value)

    table = [
        (
            row["layout"].name,
            f"{row['layout'].micro_batch} x {row['layout'].accumulation}",
            row["layout"].recompute,
            seconds(row.get("simulated_step_s")),
            seconds(row["estimated_step_s"]),
            format_bytes(row["proved_bytes"]) if "proved_bytes" in row else "not proved",
            format_bytes(row["estimated_bytes"]),
            ("yes" if row["fits"] else "NO") if "fits" in row else row["problem"],
        )
        for _, row in rows
    ]
    header = (
        "layout",
        "batch",
        "recompute",
        "simulated",
        "estimated",
        "proved",
        "estimate",
        "fits",
    )
    click.echo(format_table([header, *table]))
