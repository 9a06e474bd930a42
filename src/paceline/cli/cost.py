"""`paceline cost`: what a run costs at every provider, side by side."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from paceline import units
from paceline.cli.options import FiniteRange, PathName, json_option, set_option
from paceline.cli.screen import show

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.catalog import Accelerator, Catalog, Price
    from paceline.estimate.cost import Keeping
    from paceline.plan.bill import Bill

_OTHER_LOADS = (10_000.0, 100_000.0, 1_000_000.0)
"""Requests a day that serving is shown at besides the ones asked for."""

_REQUESTS = FiniteRange(min=0, max=1e12, min_open=True)
_SHARE = FiniteRange(min=0, max=1, min_open=True)


def _read(
    parse: "Callable[[str], float]",
) -> "Callable[[click.Context, click.Parameter, str | None], float | None]":
    def read(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
        if text is None:
            return None
        try:
            number = parse(text)
        except (ValueError, OverflowError) as error:
            raise click.BadParameter(str(error)) from error
        if number <= 0:
            raise click.BadParameter(f"{text} comes to {number:g}; write more than that")
        return number

    return read


@click.command()
@click.argument("job_file", metavar="[JOB]", required=False, type=PathName(path_type=Path))
@set_option
@click.option("--params", callback=_read(units.parse_count), help="Parameters of the model: 7B.")
@click.option(
    "--active-params",
    callback=_read(units.parse_count),
    help="Mixture of experts: parameters that a token uses: 37B. [default: all]",
)
@click.option("--tokens", callback=_read(units.parse_count), help="Tokens of the whole run: 1T.")
@click.option("--accelerator", metavar="NAME", help="From the catalog: H100-SXM.")
@click.option("--ranks", type=click.IntRange(min=1, max=10_000_000), help="How many accelerators.")
@click.option("--mfu", type=_SHARE, help="Model FLOPs utilisation: 0.4. [default: assumed]")
@click.option(
    "--tokens-per-s", callback=_read(units.parse_count), help="Measured speed of all ranks."
)
@click.option(
    "--recompute",
    type=click.Choice(["none", "full"]),
    default="none",
    show_default=True,
    help="How much of the forward pass the backward pass recomputes.",
)
@click.option("--store", callback=_read(units.parse_bytes), help="Data on object storage: 2TB.")
@click.option("--send", callback=_read(units.parse_bytes), help="Data downloaded once: 140GB.")
@click.option("--provider", multiple=True, metavar="NAME", help="Only this provider; repeatable.")
@click.option("--requests-per-day", type=_REQUESTS, help="Cost of serving instead: requests a day.")
@click.option("--latency", callback=_read(units.parse_seconds), help="Serving: a request's time.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Serving: requests that a machine answers at once.",
)
@json_option
def command(
    job_file: Path | None,
    overrides: tuple[str, ...],
    params: float | None,
    active_params: float | None,
    tokens: float | None,
    accelerator: str | None,
    ranks: int | None,
    mfu: float | None,
    tokens_per_s: float | None,
    recompute: Literal["none", "full"],
    store: float | None,
    send: float | None,
    provider: tuple[str, ...],
    requests_per_day: float | None,
    latency: float | None,
    concurrency: int,
    as_json: bool,
) -> None:
    """Show what a run costs at every provider, on demand and spot.

    With JOB, the run as planned. Without JOB, a model of --params is trained on --tokens, with 6
    FLOPs for each parameter (or each of --active-params) and token, at --mfu or at the measured
    --tokens-per-s. With --requests-per-day and --latency, what it costs to answer requests, and the
    break-even load between always-on and per-request machines. Nothing is rented. Every price is
    printed with its date; paceline-catalog.toml adds or replaces prices of machines, storage and
    egress.

    \b
    Examples:
      paceline cost job.yaml
      paceline cost job.yaml --provider aws --provider oci
      paceline cost --params 7B --tokens 1T --accelerator H100-SXM --ranks 64
      paceline cost --params 671B --active-params 37B --tokens 14.8T \\
        --accelerator H100-SXM --ranks 2048
      paceline cost --accelerator L4 --requests-per-day 10000 --latency 500ms
    """
    from paceline.report.cost_text import format_bill

    _check_options(job_file is not None, requests_per_day is not None or latency is not None)
    if requests_per_day is not None or latency is not None:
        if requests_per_day is None or latency is None or accelerator is None:
            asked = {
                "--requests-per-day": requests_per_day,
                "--latency": latency,
                "--accelerator": accelerator,
            }
            lacking = [name for name, value in asked.items() if value is None]
            raise click.UsageError(f"serving needs {' and '.join(lacking)} too")
        _show_serving(
            accelerator, ranks or 1, (requests_per_day, latency, concurrency), provider, as_json
        )
        return
    from paceline.estimate.cost import Keeping

    kept = None
    if store is not None or send is not None:
        kept = Keeping(stored_bytes=store or 0.0, sent_bytes=send or 0.0)
    if job_file is not None:
        bill = _of_job(job_file, overrides, kept, provider)
    else:
        if params is None or tokens is None or accelerator is None or ranks is None:
            raise click.UsageError(
                "name a JOB, or give --params, --tokens, --accelerator and --ranks"
            )
        if mfu is not None and tokens_per_s is not None:
            raise click.UsageError("give --mfu or --tokens-per-s, not both")
        from paceline.plan.bill import Size

        size = Size(
            num_parameters=params,
            num_active=active_params,
            tokens=tokens,
            num_ranks=ranks,
            mfu=mfu,
            tokens_per_s=tokens_per_s,
            recompute=recompute,
        )
        bill = _of_size(size, accelerator, kept, provider)
    if as_json:
        click.echo(json.dumps(_for_machines(bill), indent=2))
        return
    show(format_bill(bill))


_ONLY_SERVING = {"concurrency"}
_ONLY_JOB = {"overrides"}
_ONLY_SIZE = {"params", "active_params", "tokens", "mfu", "tokens_per_s", "recompute"}
_NOT_SERVING = {*_ONLY_JOB, *_ONLY_SIZE, "job_file", "store", "send"}
_NOT_JOB = {*_ONLY_SIZE, *_ONLY_SERVING, "accelerator", "ranks"}


def _check_options(has_job: bool, serves: bool) -> None:
    """Refuse an option that the question asked does not read."""
    context = click.get_current_context()
    if serves:
        wrong, of = _NOT_SERVING, "is not for --requests-per-day"
    elif has_job:
        wrong, of = _NOT_JOB, "is for a run without JOB; use --set instead"
    else:
        wrong, of = _ONLY_JOB | _ONLY_SERVING, "is for a JOB, or for --requests-per-day"
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in wrong and source is ParameterSource.COMMANDLINE:
            name = parameter.opts[-1] if isinstance(parameter, click.Option) else "JOB"
            raise click.UsageError(f"{name} {of}")


def _of_job(
    job_file: Path,
    overrides: tuple[str, ...],
    kept: "Keeping | None",
    providers: tuple[str, ...],
) -> "Bill":
    from paceline.catalog import find_catalog_file, load_catalog
    from paceline.cli.job_input import read_plannable
    from paceline.launch.plannable import check_planned, planned
    from paceline.plan.bill import bill_of_plan

    job = read_plannable(job_file, overrides)
    plan = planned(job)
    for note in check_planned(job, plan):  # what `plan` refuses has no price
        click.echo(f"note: {note}", err=True)
    catalog = load_catalog(find_catalog_file(job.folder, job.spec.cluster.catalog))
    return bill_of_plan(
        plan,
        job,
        _prices(plan.cluster.accelerator, catalog.prices, providers),
        keeping=kept,
    )


def _of_size(size: Any, name: str, kept: "Keeping | None", providers: tuple[str, ...]) -> "Bill":
    from paceline.plan.bill import bill_of_size

    catalog, accelerator = _named(name)
    try:
        return bill_of_size(
            size,
            accelerator,
            _prices(accelerator.name, catalog.prices, providers),
            links=catalog.links,
            keeping=kept,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _named(name: str) -> "tuple[Catalog, Accelerator]":
    """The accelerator of `--accelerator`, in the catalog with the file that lies here."""
    from paceline.catalog import find_accelerator, find_catalog_file, load_catalog

    catalog = load_catalog(find_catalog_file(Path(), None))
    return catalog, find_accelerator(name, where="--accelerator", catalog=catalog)


def _prices(
    accelerator: str, prices: "tuple[Price, ...]", providers: tuple[str, ...]
) -> "tuple[Price, ...]":
    from paceline.catalog import find_prices

    rows = find_prices(accelerator, prices=prices)
    wanted = {name.lower() for name in providers}
    unknown = sorted(wanted - {row.provider.lower() for row in rows})
    if unknown:
        known = ", ".join(sorted({row.provider for row in rows})) or "nobody"
        raise click.UsageError(
            f"no price of {accelerator} at {unknown[0]} is known; known: {known}"
        )
    return tuple(row for row in rows if not wanted or row.provider.lower() in wanted)


def _show_serving(
    name: str,
    ranks: int,
    asked: tuple[float, float, int],
    providers: tuple[str, ...],
    as_json: bool,
) -> None:
    from paceline.catalog import offers_of_nodes
    from paceline.estimate.serving import Load, break_even, serving_costs
    from paceline.report.cost_text import format_serving

    catalog, known = _named(name)
    accelerator = known.name
    rows = [
        row
        for row in offers_of_nodes(_prices(accelerator, catalog.prices, providers), ranks)
        if row.num_accelerators == ranks
    ]
    cheapest: dict[str, Price] = {}
    for row in sorted(rows, key=lambda row: row.per_hour_usd):
        cheapest.setdefault(row.provider, row)
    load = Load(requests_per_day=asked[0], latency_s=asked[1], concurrency=asked[2])
    costs, even = serving_costs(cheapest.values(), load), break_even(cheapest.values(), load)
    at = {
        requests: serving_costs(cheapest.values(), replace(load, requests_per_day=requests))
        for requests in _OTHER_LOADS
        if requests != load.requests_per_day
    }
    if as_json:
        shown = {
            "accelerator": accelerator,
            "accelerators_per_machine": ranks,
            "load": asdict(load),
            "costs": [asdict(cost) for cost in costs],
            "break_even": None if even is None else {**asdict(even), "busy": even.busy},
            "at_requests_per_day": {
                f"{requests:.0f}": [asdict(cost) for cost in found]
                for requests, found in at.items()
            },
        }
        click.echo(json.dumps(shown, indent=2))
        return
    show(format_serving(costs, load, even, f"{ranks} x {accelerator}", at))


def _for_machines(bill: "Bill") -> dict[str, Any]:
    """The fields of the dataclasses."""
    found = asdict(bill)
    for row, cost in zip(found["costs"], bill.costs, strict=True):
        row["runs_as_planned"] = cost.runs_as_planned
    return found
