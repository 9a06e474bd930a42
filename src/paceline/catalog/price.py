"""What an hour of an accelerator costs, by provider, with the day and the source of each price.

List prices change, often weekly: the shipped ones are a dated sample, and a catalog file of the
reader's own replaces them. Leaves out: storage, traffic, taxes, discounts and regions.
"""

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from paceline.catalog import _rows as r
from paceline.catalog.accelerator import Accelerator
from paceline.catalog.load import accelerator_named, accelerator_spellings, load_accelerators
from paceline.catalog.provider import Rents, load_providers
from paceline.errors import JobError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One row of a provider's price list."""

    provider: str
    instance: str = ""
    """Its name at the provider; where that is not given, `8x H100-SXM`."""

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

    rents: Rents = field(default_factory=Rents)
    """The provider's storage and traffic out as the reader's own file has them."""

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
    **r.keys_of(Price, without=("spelled", "note", "source", "as_of", "rents")),
    "as_of": r.Key(read=r.past_day, required=True),
    "source": r.Key(read=r.text),
}
"""Every key of a row of `[[prices]]`."""


def make_price(values: Mapping[str, Any], *, file: str) -> Price:
    """The price of a row that `read_row` found nothing wrong with."""
    return Price(
        **{
            "source": file,
            "spelled": values["accelerator"],
            "instance": f"{values.get('num_accelerators', 1)}x {values['accelerator']}",
            **values,
        }
    )


@cache
def load_prices() -> tuple[Price, ...]:
    """Every price that is shipped, mapped to our names or not."""
    text = (files("paceline.catalog") / "prices.csv").read_text(encoding="utf-8")
    return read_prices(text, file="prices.csv", accelerators=load_accelerators(), day=r.day)


def read_prices(
    text: str,
    *,
    file: str,
    accelerators: Mapping[str, Accelerator],
    day: Callable[[object], str] = r.past_day,
) -> tuple[Price, ...]:
    """The rows of a table with the columns of `PRICE_COLUMNS`, as the catalog's `prices.csv`.

    Args:
        file: Its name, for messages.
        day: Reads the day of a price; one that has not come is refused.

    Raises:
        JobError: Every mistake of the table at once, `T001` and `T011` to `T013`.
    """
    rows = csv.DictReader(text.splitlines())
    columns = list(rows.fieldnames or ())
    head = dict.fromkeys(PRICE_COLUMNS, r.Key(read=r.text, required=True))
    _, problems = r.read_row(head, {name: name for name in columns}, where="line 1", file=file)
    JobError.raise_for(problems)
    keys = {**_CELLS, "as_of": r.Key(read=day, required=True)}
    found: list[Price] = []
    for row in rows:
        where = f"line {rows.line_num}"
        if None in row or None in row.values():
            problems.append(
                Problem(
                    code="T013",
                    what=f"the row has not {len(columns)} cells, as line 1 has",
                    where=f"{where} in {file}",
                    fix='write a comma for each empty cell, and "..." around a text with a comma',
                )
            )
            continue
        cells = {name: cell.strip() for name, cell in row.items() if cell.strip()}
        values, wrong = r.read_row(keys, cells, where=where, file=file)
        name, unknown = name_of_price(values.get("name"), accelerators, f"{where}.name in {file}")
        problems += wrong + unknown
        if not wrong + unknown:
            found.append(_price_of({**values, "name": name}))
    JobError.raise_for(problems)
    return tuple(found)


def name_of_price(
    spelled: str | None, accelerators: Mapping[str, Accelerator], where: str
) -> tuple[str | None, list[Problem]]:
    """The catalog's name of a price's accelerator, and the problem where it has none."""
    if spelled is None:
        return None, []
    known = accelerator_named(spelled, accelerators)
    if known is not None:
        return known.name, []
    spellings = accelerator_spellings(accelerators)
    return None, [r.no_such("T001", "accelerator", spelled, spellings, where)]


def _price_of(values: Mapping[str, Any]) -> Price:
    vcpus, memory = values.get("vcpus"), values.get("host_memory_gib")
    return Price(
        provider=values["provider"],
        instance=values.get("instance", f"{values['num_accelerators']}x {values['name']}"),
        spelled=values["spelled"],
        accelerator=values["name"],
        num_accelerators=values["num_accelerators"],
        per_hour_usd=values["per_hour_usd"],
        spot_per_hour_usd=values.get("spot_per_hour_usd"),
        as_of=values["as_of"],
        source=values["source"],
        note=values.get("note", ""),
        num_vcpus=None if vcpus is None else int(vcpus),
        host_memory_bytes=None if memory is None else int(memory * 2**30),
    )


def _number(cell: str) -> float:
    """A number above 0, as text."""
    try:
        number = float(cell)
    except ValueError:
        number = -1.0
    return r.number(number)


def _count(cell: str) -> int:
    """A whole number above 0, as text."""
    return r.count(int(cell) if cell.isdecimal() else None)


_CELLS: Mapping[str, r.Key] = {
    "provider": r.Key(read=r.text, required=True),
    "instance": r.Key(read=r.text),
    "spelled": r.Key(read=r.text, required=True),
    "name": r.Key(read=r.text),
    "num_accelerators": r.Key(read=_count, required=True),
    "memory_gib": r.Key(read=_number),
    "vcpus": r.Key(read=_number),
    "host_memory_gib": r.Key(read=_number),
    "per_hour_usd": r.Key(read=_number, required=True),
    "spot_per_hour_usd": r.Key(read=_number),
    "as_of": r.Key(read=r.day, required=True),
    "source": r.Key(read=r.text, required=True),
    "note": r.Key(read=r.text),
}

PRICE_COLUMNS = tuple(_CELLS)
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
