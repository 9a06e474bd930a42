"""What providers of rented accelerators bill besides the hour, and which networks they have.

Leaves out: block storage, requests, taxes, discounts, and traffic inside a provider.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

from paceline.catalog.load import read_shipped


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

    storage: Rent | None = None
    egress: Rent | None = None
    fabrics: Mapping[str, Fabric] = field(default_factory=dict)
    """Instance -> the network between instances; one that is not there is unknown."""


@cache
def load_providers() -> Mapping[str, Provider]:
    """Every provider that is shipped, by the name that its prices have."""
    return {name: _provider(name, row) for name, row in read_shipped("providers.toml").items()}


def _provider(name: str, row: Mapping[str, Any]) -> Provider:
    egress = row.get("egress")
    steps = () if egress is None else tuple((up_to or inf, usd) for up_to, usd in egress["steps"])
    return Provider(
        name=name,
        render=row["render"],
        by_accelerator=row.get("by_accelerator", False),
        serverless=row.get("serverless", False),
        one_machine=row.get("one_machine"),
        storage=Rent(**row["storage"]) if "storage" in row else None,
        egress=None
        if egress is None
        else Rent(as_of=egress["as_of"], source=egress["source"], steps=steps),
        fabrics={instance: Fabric(**fabric) for instance, fabric in row.get("fabrics", {}).items()},
    )
