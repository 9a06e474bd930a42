"""What providers of rented accelerators bill besides the hour, and which networks they have.

Leaves out: block storage, requests, taxes, discounts, and traffic inside a provider.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

from paceline.catalog import _rows as r
from paceline.catalog.load import read_shipped
from paceline.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Rent:
    """A price besides the hour, with its day and source."""

    as_of: str
    source: str
    usd_per_gb_month: float | None = None
    """Price of object storage, in decimal gigabytes; None for traffic."""

    steps: tuple[tuple[float, float], ...] = ()
    """Price of traffic out of the provider: (gigabytes up to here, dollars a gigabyte)."""

    def usd(self, gigabytes: float, months: float = 1.0) -> float:
        """Dollars for so many gigabytes: stored for so many months, or sent out in one.

        >>> Rent(as_of="", source="", steps=((100, 0.0), (inf, 0.09))).usd(200)
        9.0
        """
        if self.usd_per_gb_month is not None:
            return gigabytes * months * self.usd_per_gb_month
        paid, below = 0.0, 0.0
        for up_to, rate in self.steps:
            paid += max(0.0, min(gigabytes, up_to) - below) * rate
            below = up_to
        return paid


@dataclass(frozen=True, slots=True, kw_only=True)
class Rents:
    """What a provider bills besides the hour; None is unknown."""

    storage: Rent | None = None
    egress: Rent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The network between instances of one kind, rented so that they form a cluster."""

    bytes_per_s: float
    """A node's, one direction, all its NICs together."""

    is_rdma: bool
    """Whether the NICs move data without the CPU."""

    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Who rents accelerators. None is unknown."""

    name: str
    render: str
    """The engine of `paceline render` that writes the files for it."""

    by_accelerator: bool = False
    """Whether its price is that of one accelerator times their number."""

    serverless: bool = False
    """Whether it bills the seconds in which requests are served, and nothing between them."""

    one_machine: str | None = None
    """Why a run there has one machine alone; None where several can be joined."""

    rents: Rents = field(default_factory=Rents)
    fabrics: Mapping[str, Fabric] = field(default_factory=dict)
    """Instance -> the network between instances; one that is not there is unknown."""


@cache
def load_providers() -> Mapping[str, Provider]:
    """Every provider that is shipped, by the name that its prices have."""
    return {name: _provider(name, row) for name, row in read_shipped("providers.toml").items()}


def _provider(name: str, row: Mapping[str, Any]) -> Provider:
    file, own = "providers.toml", dict(row)
    rented = {key: own.pop(key) for key in _RENTS if key in own}
    rents, problems = read_rents(rented, where=name, file=file, day=r.day)
    if problems:
        raise ValueError("; ".join(map(str, problems)))
    return r.make_row(Provider, own, where=name, file=file, name=name, rents=rents)


def read_rents(
    row: Mapping[str, Any],
    *,
    where: str,
    file: str,
    day: Callable[[object], str] = r.past_day,
) -> tuple[Rents, list[Problem]]:
    """The storage and traffic prices of one provider; one without a source has its file as source.

    Args:
        row: `storage` and `egress`, as in `providers.toml`.
        where: The row for messages, such as `providers.mylab`.
        day: Reads the day of a price; one that has not come is refused.
    """
    found, problems = r.read_row(
        dict.fromkeys(_RENTS, r.Key(read=_table)), row, where=where, file=file
    )
    dated = {"as_of": r.Key(read=day, required=True), "source": r.Key(read=r.text)}
    made: dict[str, Rent] = {}
    for name, values in found.items():
        keys, place = _RENTS[name] | dated, f"{where}.{name}"
        read, wrong = r.read_row(keys, values, where=place, file=file)
        problems += wrong
        if not wrong:
            made[name] = Rent(**{"source": file, **read})
    return (Rents() if problems else Rents(**made)), problems


def _table(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("a table, such as {usd_per_gb_month = 0.02, as_of = 2026-09-01}")
    return value


def _steps(value: object) -> tuple[tuple[float, float], ...]:
    """Prices up to so many gigabytes, each above the one before; the last has no end."""
    pairs = value if isinstance(value, list) else []
    try:
        steps = tuple((r.amount(up_to) or inf, r.amount(usd)) for up_to, usd in pairs)
    except (TypeError, ValueError):
        steps = ()
    ends = [up_to for up_to, _ in steps]
    if not ends or ends[-1] != inf or ends != sorted(set(ends)):
        raise ValueError("[[100, 0.0], [0, 0.09]]: up to so many GB, dollars a GB; 0 is no end")
    return steps


_RENTS: Mapping[str, dict[str, r.Key]] = {
    "storage": {"usd_per_gb_month": r.Key(read=r.amount, required=True)},
    "egress": {"steps": r.Key(read=_steps, required=True)},
}
"""Keys of `[providers.NAME.storage]` and `[providers.NAME.egress]` beside day and source."""
