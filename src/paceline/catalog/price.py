"""What an hour of an accelerator costs, by provider, with the day and the source of each price.

List prices change, often weekly: the shipped ones are a dated sample, and a catalog file of the
reader's own replaces them. Leaves out: storage, traffic, taxes, discounts and regions.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from paceline.catalog import _rows as r
from paceline.catalog.provider import load_providers


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One row of a provider's price list."""

    provider: str
    instance: str = ""
    spelled: str
    """The accelerator as the source spells it."""

    accelerator: str | None
    """Our name of it; None where the catalog has none, or the source does not say enough."""

    num_accelerators: int = 1
    """In the instance."""

    per_hour_usd: float
    """The whole instance on demand, in US dollars."""

    spot_per_hour_usd: float | None = None
    """The whole instance when it may be taken away; None where the source has no such price."""

    as_of: str
    """The day of the price; `by` a day where only a later copy of the list has one."""

    source: str
    note: str = ""
    """How the name was read where the spelling left it open; empty where it did not."""

    num_vcpus: int | None = None
    """Virtual CPUs of the instance; None is unknown."""

    host_memory_bytes: int | None = None
    """Host memory of the instance; None is unknown, or chosen and paid apart."""

    @property
    def per_accelerator_hour_usd(self) -> float:
        """On demand, in US dollars."""
        return self.per_hour_usd / self.num_accelerators

    @property
    def spot_per_accelerator_hour_usd(self) -> float | None:
        """When it may be taken away, in US dollars."""
        if self.spot_per_hour_usd is None:
            return None
        return self.spot_per_hour_usd / self.num_accelerators


PRICE_KEYS: Mapping[str, r.Key] = {
    **r.keys_of(Price, without=("spelled", "note", "source", "as_of")),
    "as_of": r.Key(read=str, required=True),  # TOML has days too
    "source": r.Key(read=r.text),
}
"""Every key of a row of `[[prices]]`."""


def make_price(values: Mapping[str, Any], *, file: str) -> Price:
    """The price of a row that `read_row` found nothing wrong with."""
    return Price(
        **{
            "source": file,
            "spelled": values["accelerator"],
            **values,
        }
    )


@cache
def load_prices() -> tuple[Price, ...]:
    """Every price that is shipped, mapped to our names or not."""
    return read_prices((files("paceline.catalog") / "prices.csv").read_text(encoding="utf-8"))


def read_prices(text: str) -> tuple[Price, ...]:
    """The rows of a table with the columns of `PRICE_COLUMNS`, as the catalog's `prices.csv`.

    Raises:
        ValueError: A column is missing, or a number is not one; the message names the row.
    """
    rows = csv.DictReader(text.splitlines())
    missing = [name for name in PRICE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"the column {missing[0]} is missing")
    found: list[Price] = []
    for number, row in enumerate(rows, start=2):
        try:
            found.append(_price_of(row))
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {number}: {error}") from error
    return tuple(found)


def _price_of(row: Mapping[str, str]) -> Price:
    memory, spot = row["host_memory_gib"], row["spot_per_hour_usd"]
    return Price(
        provider=row["provider"],
        instance=row["instance"],
        spelled=row["spelled"],
        accelerator=row["name"] or None,
        num_accelerators=int(row["num_accelerators"]),
        per_hour_usd=float(row["per_hour_usd"]),
        spot_per_hour_usd=float(spot) if spot else None,
        as_of=row["as_of"],
        source=row["source"],
        note=row["note"],
        num_vcpus=int(float(row["vcpus"])) if row["vcpus"] else None,
        host_memory_bytes=int(float(memory) * 2**30) if memory else None,
    )


PRICE_COLUMNS = (
    *("provider", "instance", "spelled", "name", "num_accelerators", "memory_gib", "vcpus"),
    *("host_memory_gib", "per_hour_usd", "spot_per_hour_usd", "as_of", "source", "note"),
)
"""Columns of a table of prices. `name` is ours and may be empty; `memory_gib` is of one
accelerator."""


def find_prices(accelerator: str, *, prices: Iterable[Price] | None = None) -> tuple[Price, ...]:
    """Every price of an accelerator, the cheapest accelerator-hour on demand first.

    Args:
        accelerator: Our name, such as `H100-SXM`.
        prices: A catalog's own; the shipped ones when left out.

    >>> find_prices("H100-SXM")[0].accelerator
    'H100-SXM'
    """
    rows = load_prices() if prices is None else prices
    found = [row for row in rows if row.accelerator == accelerator]
    return tuple(sorted(found, key=lambda row: (row.per_accelerator_hour_usd, row.provider)))


def cheapest_prices(
    accelerator: str, *, prices: Iterable[Price] | None = None
) -> tuple[Price, ...]:
    """The cheapest row of each provider, the cheapest provider first."""
    cheapest: dict[str, Price] = {}
    for row in find_prices(accelerator, prices=prices):
        cheapest.setdefault(row.provider, row)
    return tuple(cheapest.values())


def price_day(as_of: str) -> str:
    """The day of a price for people; of some lists only the day of a later copy is known.

    >>> price_day("by 2026-11-21"), price_day("2026-09-06")
    ('2026-11-21 or earlier', '2026-09-06')
    """
    return f"{as_of.removeprefix('by ')} or earlier" if as_of.startswith("by ") else as_of


def offers_of_nodes(rows: Iterable[Price], accelerators_per_node: int) -> tuple[Price, ...]:
    """The rows of instances that hold a whole node of so many accelerators.

    Where a provider bills by the accelerator (`Provider.by_accelerator`), one of its rows stands
    for any number of them. Smaller instances lack the links inside a node and are left out.

    >>> {row.num_accelerators for row in offers_of_nodes(find_prices("T4"), 4)
    ...  if row.provider == "modal"}
    {4}
    """
    rows = sorted(rows, key=lambda row: (row.per_accelerator_hour_usd, row.provider))
    found = [row for row in rows if row.num_accelerators >= accelerators_per_node]
    exact = {row.provider for row in found if row.num_accelerators == accelerators_per_node}
    for row in rows:  # the cheapest of each provider first
        provider = load_providers().get(row.provider)
        if provider is None or not provider.by_accelerator or row.provider in exact:
            continue
        exact.add(row.provider)
        found.append(_times(row, accelerators_per_node))
    return tuple(found)


def _times(row: Price, count: int) -> Price:
    """The price of so many accelerators of a row, with what comes with each."""
    times = count / row.num_accelerators

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * times

    vcpus, memory = scaled(row.num_vcpus), scaled(row.host_memory_bytes)
    return replace(
        row,
        instance=f"{count}x {row.spelled}",
        num_accelerators=count,
        per_hour_usd=row.per_hour_usd * times,
        spot_per_hour_usd=scaled(row.spot_per_hour_usd),
        num_vcpus=None if vcpus is None else int(vcpus),
        host_memory_bytes=None if memory is None else int(memory),
    )
