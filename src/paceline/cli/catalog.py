"""`paceline catalog`: what is known about accelerators, links, prices and models."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import PathName, force_option, json_option
from paceline.cli.output_file import write_new
from paceline.cli.screen import show
from paceline.report.table import format_table
from paceline.units import format_count, significant

if TYPE_CHECKING:
    from paceline.catalog import Accelerator, Catalog, Price
    from paceline.catalog.configs import PublishedConfig

_KINDS = ("accelerators", "links", "prices", "models")


@click.command()
@click.argument("kind", required=False, metavar="[KIND]")
@click.argument("name", required=False)
@click.option(
    "--file",
    "file",
    type=PathName(path_type=Path),
    help="Your own catalog file: check it, and show what is known with it.",
)
@click.option(
    "--write",
    "write",
    metavar="FILE",
    type=PathName(path_type=Path),
    help="Write a commented catalog file to start from.",
)
@force_option
@json_option
def command(
    kind: str | None,
    name: str | None,
    file: Path | None,
    write: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Show what Paceline knows about hardware and models, each number with its source.

    KIND is accelerators, links, prices or models; NAME is one of them, or for prices an
    accelerator. Peak rates are dense; rates of links are for one direction. A catalog file of your
    own, paceline-catalog.toml beside the job file, changes or adds any of it.

    \b
    Examples:
      paceline catalog                          how much there is
      paceline catalog accelerators             all accelerators, one line each
      paceline catalog accelerators H100-SXM    all its numbers, with sources
      paceline catalog links infiniband-ndr
      paceline catalog prices H100-SXM          cheapest first, with dates
      paceline catalog prices H100-SXM --json
      paceline catalog --write paceline-catalog.toml
      paceline catalog --file paceline-catalog.toml
    """
    from paceline.catalog import load_catalog

    if write is not None:
        from paceline.catalog.user import catalog_example

        write_new(write, catalog_example(), force=force)
        show(f"wrote {write}; edit it, then: `paceline catalog --file {write}`", err=True)
        return
    catalog = load_catalog(file)
    wanted = None if kind is None else _kind(kind)
    data = _data(catalog, wanted, name)
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    for line in _lines(catalog, wanted, name):
        show(line)


def _kind(kind: str) -> str:
    """`accelerator` and `acc` are `accelerators`."""
    import difflib

    found = [each for each in _KINDS if each.startswith(kind.lower())]
    if kind and len(found) == 1:
        return found[0]
    near = difflib.get_close_matches(kind.lower(), _KINDS, n=1)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    raise click.UsageError(f"There is no kind `{kind}`.{hint} Kinds are {', '.join(_KINDS)}.")


def _data(catalog: "Catalog", kind: str | None, name: str | None) -> Any:
    """What is shown, for machines: the fields of the dataclasses."""
    from paceline.catalog import find_accelerator, find_link, find_prices
    from paceline.catalog.configs import find_published, load_published_configs

    if kind is None:
        return {each: _data(catalog, each, None) for each in _KINDS} | {
            "efficiencies": catalog.efficiencies,
            "file": str(catalog.source) if catalog.source else None,
            "changed": sorted(catalog.changed),
        }
    if kind == "accelerators":
        if name is not None:
            return asdict(find_accelerator(name, where="NAME", catalog=catalog))
        return [asdict(each) for each in catalog.accelerators.values()]
    if kind == "links":
        if name is not None:
            return asdict(find_link(name, where="NAME", catalog=catalog))
        return [asdict(each) for each in catalog.links.values()]
    if kind == "models":
        if name is not None:
            return _model(find_published(name, where="NAME"))
        return [_model(each) for each in load_published_configs().values()]
    rows = catalog.prices
    if name is not None:
        known = find_accelerator(name, where="NAME", catalog=catalog)
        rows = find_prices(known.name, prices=catalog.prices)
    return [
        asdict(row)
        | {
            "per_accelerator_hour_usd": row.per_accelerator_hour_usd,
            "spot_per_accelerator_hour_usd": row.spot_per_accelerator_hour_usd,
        }
        for row in rows
    ]


def _lines(catalog: "Catalog", kind: str | None, name: str | None) -> Iterator[str]:
    if kind is None:
        yield from _overview(catalog)
    elif kind == "accelerators":
        yield from _one_accelerator(catalog, name) if name else _accelerators(catalog)
    elif kind == "links":
        yield from _one_row(_data(catalog, kind, name)) if name else _links(catalog)
    elif kind == "models":
        yield from _one_model(_data(catalog, kind, name)) if name else _models()
    else:
        yield from _prices_of(catalog, name) if name else _prices(catalog)


def _overview(catalog: "Catalog") -> Iterator[str]:
    from paceline.catalog.configs import load_published_configs

    mapped = sum(price.accelerator is not None for price in catalog.prices)
    yield f"accelerators  {len(catalog.accelerators)}"
    yield f"links         {len(catalog.links)}"
    others = len(catalog.prices) - mapped
    yield f"prices        {len(catalog.prices)}: {mapped} of these accelerators, {others} of others"
    yield f"models        {len(load_published_configs())}"
    if catalog.source is not None:
        yield f"file          {catalog.source}: no problem found"
        yield f"changes       {', '.join(sorted(catalog.changed)) or 'no accelerator and no link'}"
        own = sum(price.source == catalog.source.name for price in catalog.prices)
        if own:
            yield f"adds          {own} prices"
        measured = [name for name, row in catalog.efficiencies.items() if set(row) != {"family"}]
        if measured:
            yield f"efficiencies  {', '.join(measured)}"
    yield ""
    yield "paceline catalog accelerators | links | prices | models; add a name for all its numbers"


def _accelerators(catalog: "Catalog") -> Iterator[str]:
    from paceline.topology.levels import node_bytes_per_s
    from paceline.units import format_bytes, format_flops_per_s

    head = ("NAME", "MEMORY", "BANDWIDTH", "BF16", "FP8", "LINK", "SHARED BY", "NETWORK", "VENDOR")
    rows = [head]
    for name, known in catalog.accelerators.items():
        peaks = known.peak_flops_per_s
        rows.append(
            (
                name + ("*" if f"accelerators.{name}" in catalog.changed else ""),
                "read here" if known.memory_bytes is None else format_bytes(known.memory_bytes),
                _rate(known.memory_bytes_per_s),
                format_flops_per_s(peaks["bf16"]) if "bf16" in peaks else "-",
                format_flops_per_s(peaks["fp8"]) if "fp8" in peaks else "-",
                f"{known.link or '?'} {_rate(node_bytes_per_s(known, catalog.links))}",
                str(known.scale_up_size) if known.scale_up_size > 1 else "-",
                f"{_bits(known.network_node_bytes_per_s)} x node of {known.num_per_node}",
                known.vendor or "?",
            )
        )
    yield format_table(rows, keep=4)
    if catalog.changed:
        yield "* changed or added by your file"


def _one_accelerator(catalog: "Catalog", name: str) -> Iterator[str]:
    from paceline.catalog import cheapest_prices, find_accelerator

    known = find_accelerator(name, where="NAME", catalog=catalog)
    yield from (f"{key:<20} {value}" for key, value in _numbers(known, catalog))
    offers = cheapest_prices(known.name, prices=catalog.prices)
    if offers:
        yield f"{'cheapest':<20} {_offer(offers[0])}"
    yield ""
    yield "Sources"
    yield from (f"  {group:<18} {text}" for group, text in known.sources.items())
    if f"accelerators.{known.name}" in catalog.changed and catalog.source is not None:
        yield f"  changed by         {catalog.source}"


def _numbers(known: "Accelerator", catalog: "Catalog") -> Iterator[tuple[str, str]]:
    from paceline.catalog.mig import num_slices
    from paceline.topology.levels import node_bytes_per_s
    from paceline.units import format_bytes, format_flops_per_s

    yield "name", known.name
    yield "vendor", known.vendor or "unknown"
    yield "also written", ", ".join(known.aliases) or "-"
    yield "reported as", ", ".join(known.smi_names) or "-"
    memory = known.memory_bytes
    shown = "read from the machine" if memory is None else f"{format_bytes(memory)} ({memory:,} B)"
    yield "memory", shown
    yield "memory bandwidth", _rate(known.memory_bytes_per_s)
    for precision, peak in known.peak_flops_per_s.items():
        yield f"peak {precision}", f"{format_flops_per_s(peak)}, dense"
    yield "link", f"{known.link or 'unknown'}, shared by {known.scale_up_size}"
    if known.host_link is not None:
        yield "host link", known.host_link
    if known.host_memory_bytes is not None:
        yield "host memory", f"{format_bytes(known.host_memory_bytes)} for each"
    yield "in a node", f"{_rate(node_bytes_per_s(known, catalog.links))} each direction"
    network = _bits(known.network_node_bytes_per_s)
    yield "network of a node", f"{known.network or 'unknown'}, {network} each direction"
    yield "per node", str(known.num_per_node)
    if known.num_multiprocessors is not None:
        yield "multiprocessors", str(known.num_multiprocessors)
    if known.mig_profiles:
        cut = (f"{num_slices(known, each)} of {each}" for each in known.mig_profiles)
        yield "slices (MIG)", ", ".join(cut)
    yield "collectives", known.backend
    yield "process overhead", format_bytes(known.overhead_bytes)


def _links(catalog: "Catalog") -> Iterator[str]:
    rows = [("NAME", "KIND", "RATE", "PER", "LATENCY", "RDMA", "COLLECTIVES REACH")]
    for name, link in catalog.links.items():
        share = link.collective_share
        rows.append(
            (
                name + ("*" if f"links.{name}" in catalog.changed else ""),
                link.kind,
                _rate(link.bytes_per_s),
                link.per,
                f"{link.latency_s * 1e6:.3g} us",
                "yes" if link.is_rdma else "-",
                "unknown" if share is None else f"{share:.0%}",
            )
        )
    yield format_table(rows)
    yield "Rates are raw and for one direction; `paceline catalog links NAME` has the sources."


def _models() -> Iterator[str]:
    from paceline.catalog.configs import load_published_configs

    rows: list[tuple[str, ...]] = [("NAME", "FAMILY", "PARAMETERS", "SOURCE")]
    for model in map(_model, load_published_configs().values()):
        count = format_count(model["num_parameters"])
        rows.append((model["name"], model["config"]["model_type"], count, model["source"]))
    yield format_table(rows, keep=3)


def _model(published: "PublishedConfig") -> dict[str, Any]:
    from paceline.profile import profile_config

    counted = profile_config(published.config, 1).num_parameters
    return asdict(published) | {"num_parameters": counted}


def _one_model(row: dict[str, Any]) -> Iterator[str]:
    yield from _one_row({key: value for key, value in row.items() if key != "config"})
    yield ""
    yield from _one_row(row["config"])


def _prices(catalog: "Catalog") -> Iterator[str]:
    """The cheapest of each accelerator, and what has no name of ours."""
    from paceline.catalog import cheapest_prices

    rows = [("ACCELERATOR", "FROM $/H", "PROVIDERS", "CHEAPEST", "AS OF")]
    for name in catalog.accelerators:
        offers = cheapest_prices(name, prices=catalog.prices)
        if offers:
            best = offers[0]
            price = f"{best.per_accelerator_hour_usd:.2f}"
            shown = f"{best.provider} {best.instance}".strip()
            rows.append((name, price, str(len(offers)), shown, best.as_of))
    yield format_table(rows)
    unmapped = sorted({price.spelled for price in catalog.prices if price.accelerator is None})
    if unmapped:
        yield f"Not in the catalog, or not told apart by the source: {', '.join(unmapped)}"
    yield _CAUTION


def _prices_of(catalog: "Catalog", name: str) -> Iterator[str]:
    from paceline.catalog import find_accelerator, find_prices

    known = find_accelerator(name, where="NAME", catalog=catalog)
    offers = find_prices(known.name, prices=catalog.prices)
    if not offers:
        yield f"no price of {known.name}; add your own: paceline catalog --write FILE"
        return
    rows = [("$/H", "SPOT", "PROVIDER", "GPUS", "AS OF", "INSTANCE", "SOURCE")]
    for offer in offers:
        spot = offer.spot_per_accelerator_hour_usd
        rows.append(
            (
                f"{offer.per_accelerator_hour_usd:.2f}",
                "-" if spot is None else f"{spot:.2f}",
                offer.provider,
                str(offer.num_accelerators),
                offer.as_of,
                offer.instance,
                offer.source + (f" ({offer.note})" if offer.note else ""),
            )
        )
    yield format_table(rows, keep=6)
    yield _CAUTION


_CAUTION = "Dollars an accelerator-hour, from price lists of that day; they change weekly."


def _one_row(row: dict[str, Any]) -> Iterator[str]:
    for key, value in row.items():
        shown = f"{value:,.10g}" if isinstance(value, float) else value
        yield f"{key:<20} {'unknown' if value is None else shown}"


def _offer(offer: "Price") -> str:
    from paceline.catalog.price import price_day

    return (
        f"{offer.per_accelerator_hour_usd:.2f} $/h at {offer.provider} ({offer.instance}), "
        f"as of {price_day(offer.as_of)}" + (f"; {offer.note}" if offer.note else "")
    )


def _rate(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return "unknown"
    if bytes_per_s >= 1e12:
        return f"{significant(bytes_per_s / 1e12)} TB/s"
    return f"{bytes_per_s / 1e9:.4g} GB/s"


def _bits(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.4g} Gb/s"
