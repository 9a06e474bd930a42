"""`paceline prove`: run the real sharding code on fake ranks, and say what it needs."""

import json
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import PathName, json_option, layout_option, set_option
from paceline.cli.screen import say, show


@click.command()
@click.argument("job_file", metavar="JOB", type=PathName(path_type=Path))
@set_option
@layout_option("Fix one field of the layout: --layout tensor=8.")
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
    """Check the layout of the job in JOB on fake ranks, without its cluster.

    One rank of every pipeline stage runs the model, the runtime's own sharding code and the
    optimizer step on this machine, with tensors that have no values, in a simulated world of all
    ranks. The result is the exact bytes in tensors at the peak and where the peak is, every
    collective, the FLOPs, and the step on a simulated clock, beside the planner's estimate. Needs
    PyTorch and less than 1 GiB, no accelerator.

    To prove a layout that does not fit by the estimate, give --layout; if several match, the one
    with the least memory is taken. Exit code 3 means that it does not fit. If the job names
    another engine, Paceline's own runtime is proved with the same layout; the exit code is then
    0, also where it does not fit.

    \b
    Examples:
      paceline prove job.yaml
      paceline prove job.yaml --layout tensor=8 --layout recompute=full
      paceline prove job.yaml --set cluster.nodes=8
      paceline prove job.yaml --plot memory.svg --trace step.json
    """
    from paceline.cli.job_input import read_plannable
    from paceline.cli.output_file import check_can_write
    from paceline.job.yaml_text import Given
    from paceline.launch.prove import proof_data, prove_job

    check_can_write(trace_file, "--trace")
    check_can_write(plot_file, "--plot")
    proof, compared = prove_job(
        lambda: read_plannable(
            job_file, (*overrides, *(Given("--layout", f"layout.{each}") for each in layout))
        ),
        must_fit=not layout,
        whole=whole,
        wants_trace=trace_file is not None,
        on_progress=say,
    )
    if trace_file is not None:
        events = {"traceEvents": proof.trace, "displayTimeUnit": "ms"}
        trace_file.write_text(json.dumps(events))
        show(f"wrote {trace_file}", err=True)
    if plot_file is not None:
        from paceline.report.proof_plot import draw_memory

        plot_file.write_text(draw_memory(proof))
        show(f"wrote {plot_file}", err=True)
    if as_json:
        click.echo(proof_data(proof, compared).decode())
    else:
        from paceline.report.proof_text import format_proof

        show(format_proof(proof, compared))
    if not compared.fits and not compared.engine:
        raise click.exceptions.Exit(3)


def prove_candidates(job: Any, facts: Any, plan: Any, count: int, *, as_json: bool) -> None:
    """Prove the first layouts of a plan and list them by what was proved: `plan --prove N`. It is
    always our own runtime (`proved`) that is proved, whatever the job's `engine`."""
    from paceline.errors import PacelineError
    from paceline.estimate import stage_memory
    from paceline.launch.prove import Prover
    from paceline.plan.case import case_of_plan
    from paceline.plan.plan import fastest_layouts
    from paceline.prove.compare import compare_with
    from paceline.prove.request import request_of
    from paceline.report.proof_text import whose_code
    from paceline.report.table import format_table
    from paceline.units import format_bytes, format_seconds

    case = case_of_plan(plan)
    rows: list[tuple[tuple[bool, float], dict[str, Any]]] = []
    for number, (layout, price) in enumerate(fastest_layouts(job, facts, count), start=1):
        show(f"{number} of {count}: {layout.name}", err=True)
        row: dict[str, Any] = {"layout": layout, "engine": plan.engine, "proved": "paceline"}
        row["estimated_step_s"] = price.step_s
        row["estimated_bytes"] = price.memory.allocated_bytes
        try:
            with Prover() as prover:
                proof = prover.prove(request_of(job, plan, layout=layout))
        except PacelineError as error:
            rows.append(
                (
                    (True, float("inf")),
                    {**row, "problem": error.problems[0].what.partition("\n")[0]},
                )
            )
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
    if plan.engine != "paceline":
        show("\n".join(whose_code(plan.engine)))
    show(format_table([header, *table]))
