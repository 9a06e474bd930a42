"""What an hour of an accelerator costs, by provider, with the day and the source of each price.

List prices change, often weekly: the shipped ones are a dated sample, and a catalog file of the
reader's own replaces them. Leaves out: storage, traffic, taxes, discounts and regions.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from paceline.catalog import _rows as r


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
    """The day, or the commit of the list where the day is not known."""

    source: str
    note: str = ""
    """How the name was read where the spelling left it open; empty where it did not."""

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
    text = (files("paceline.catalog") / "prices.csv").read_text(encoding="utf-8")
    return tuple(
        Price(
            provider=row["provider"],
            instance=row["instance"],
            spelled=row["spelled"],
            accelerator=row["name"] or None,
            num_accelerators=int(row["num_accelerators"]),
            per_hour_usd=float(row["per_hour_usd"]),
            spot_per_hour_usd=float(row["spot_per_hour_usd"]) if row["spot_per_hour_usd"] else None,
            as_of=row["as_of"],
            source=row["source"],
            note=row["note"],
        )
        for row in csv.DictReader(text.splitlines())
    )


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
