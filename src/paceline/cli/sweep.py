"""`paceline bench --all-reduce`: what ranks of this machine reach together, size by size."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.plan import Plan
    from paceline.record.sweep import Sweep


def print_sweeps(
    job_file: Path | None,
    ranks_text: str,
    overrides: tuple[str, ...],
    *,
    max_size: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Measure every number of ranks, and say what the plan of the job expects, if there is one.

    Raises:
        JobError, RunError: It cannot be measured.
    """
    from paceline.launch.bench import read_ranks
    from paceline.launch.sweep import sweep_all_reduce
    from paceline.plan.network import decide_network

    max_bytes = _read_size(max_size)
    counts = read_ranks(ranks_text)
    plan = None if job_file is None else _plan(job_file, overrides)
    sweeps = []
    for count in counts:
        click.echo(f"all-reduce over {count} rank{'s' if count > 1 else ''}", err=True)
        sweeps.append(sweep_all_reduce(count, max_bytes=max_bytes, limit_s=timeout_s))
    network = None if plan is None else decide_network(plan)
    if as_json:
        found = {
            "sweeps": [asdict(sweep) for sweep in sweeps],
            "network": None if network is None else asdict(network),
        }
        click.echo(json.dumps(found, indent=2))
        return
    for sweep in sweeps:
        click.echo("\n".join(_lines(sweep, plan)))
    if plan is not None and not plan.cluster.is_local:
        click.echo("\n".join(_expected(plan)))
    if network is not None and network.choice != "none":
        click.echo(network.reason)


def _lines(sweep: "Sweep", plan: "Plan | None") -> list[str]:
    from paceline.cli.table import format_table
    from paceline.units import format_bytes, format_seconds

    rows: list[tuple[str, ...]] = [("size", "time", "algbw GB/s", "busbw GB/s", "repeats")]
    for row in sweep.rows:
        rates = (row.algbw_bytes_per_s / 1e9, row.busbw_bytes_per_s / 1e9)
        rows.append(
            (
                format_bytes(row.bytes),
                format_seconds(row.seconds),
                *(f"{rate:.3f}" for rate in rates),
                str(row.repeats),
            )
        )
    best = sweep.best_bytes_per_s
    found = [
        f"{sweep.world_size} ranks, {sweep.backend} on {sweep.device}, torch {sweep.torch}",
        format_table(rows),
        f"best bus bandwidth: {best / 1e9:.3g} GB/s (measured)"
        if sweep.world_size > 1
        else "one rank sends nothing: there is no bus bandwidth, and algbw is its own memory's",
    ]
    link = None if plan is None else plan.cluster.link_bytes_per_s
    if plan is not None and sweep.world_size > 1 and link and plan.cluster.is_local:
        known = plan.cluster.known.get("link_bytes_per_s", "estimated")
        found.append(
            f"the plan takes {link / 1e9:.3g} GB/s between ranks of this machine ({known}): "
            f"{best / link:.0%} of it were reached"
        )
    return found


def _expected(plan: "Plan") -> list[str]:
    """What the plan takes for a cluster that is not this machine, which was measured."""
    cluster = plan.cluster
    rates = {
        "link_bytes_per_s": "between ranks of a node, each rank and direction",
        "network_bytes_per_s": "between nodes, each node and direction",
    }
    found = [f"the job's cluster is {cluster.accelerator}, and not this machine. Its plan expects:"]
    for field, between in rates.items():
        rate = getattr(cluster, field)
        if field == "network_bytes_per_s" and cluster.num_nodes == 1:
            continue
        known = cluster.known.get(field, "estimated")
        said = "unknown" if rate is None else f"{rate / 1e9:.3g} GB/s ({known})"
        found.append(f"  {between}: {said}")
    return found


def _plan(job_file: Path, overrides: tuple[str, ...]) -> "Plan":
    from paceline.cli.job_input import read_job
    from paceline.plan import plan_job

    return plan_job(read_job(job_file, overrides))


def _read_size(text: str) -> int:
    from paceline.units import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--max-size") from None
    if not _LEAST_BYTES <= size <= _MOST_BYTES:
        raise click.BadParameter("between 1 KiB and 16 GiB", param_hint="--max-size")
    return size


_LEAST_BYTES, _MOST_BYTES = 1024, 16 * 2**30
