"""What answering requests costs: a machine that is always on against one billed by the request.

Leaves out: cold starts, the seconds a serverless machine waits before it is let go, load that
comes in peaks, and what else a provider bills (CPU, memory, requests, traffic).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from paceline.catalog import Price, load_providers

_DAY_S = 86_400.0
_DAY_H = 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests that are answered."""

    requests_per_day: float
    latency_s: float
    """Seconds of one request, on one machine."""

    concurrency: int = 1
    """Requests that a machine answers at once, each still in that time."""

    @property
    def busy_s(self) -> float:
        """Seconds of one machine that a request takes.

        >>> Load(requests_per_day=1, latency_s=2.0, concurrency=4).busy_s
        0.5
        """
        return self.latency_s / self.concurrency


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One machine's way of answering the requests."""

    provider: str
    instance: str
    serverless: bool
    num_instances: int | None
    """That are always on; None where nothing is."""

    usd_per_day: float
    usd_per_1000_requests: float
    busy: float | None
    """Share of the time that its machines answer; None where only that is billed."""

    as_of: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """From which load on machines that are always on are cheaper. They come whole: `n` of them
    are cheaper from `n * requests_per_day` up to `n * most_per_day`, which all of them answer."""

    requests_per_day: float
    """From which on one machine is cheaper."""

    most_per_day: float
    """Requests a day that one machine answers."""

    always_on: str
    serverless: str

    @property
    def busy(self) -> float:
        """Share of the day that one machine answers at that load. From 1 on it never is cheaper:
        the load needs a second one first."""
        return self.requests_per_day / self.most_per_day

    @property
    def machines_for_good(self) -> int:
        """Machines from whose break-even on no load is cheaper by the request: one more costs less
        from where these answer all, `(n + 1) * requests_per_day <= n * most_per_day`.

        >>> BreakEven(
        ...     requests_per_day=75, most_per_day=100, always_on="a", serverless="b"
        ... ).machines_for_good  # two from 150 to 200, three from 225 to 300, four from 300 on
        3
        """
        return max(1, ceil(self.requests_per_day / (self.most_per_day - self.requests_per_day)))


def serving_costs(prices: Iterable[Price], load: Load) -> tuple[Serving, ...]:
    """The load at every price, the cheapest first."""
    found = [_serving(price, load) for price in prices]
    return tuple(sorted(found, key=lambda each: (each.usd_per_day, each.provider)))


def _serving(price: Price, load: Load) -> Serving:
    requests, busy_s = load.requests_per_day, load.busy_s
    serverless = _is_serverless(price)
    count = max(1, ceil(requests * busy_s / _DAY_S))
    hours = requests * busy_s / 3600 if serverless else count * _DAY_H
    usd = hours * price.per_hour_usd
    return Serving(
        provider=price.provider,
        instance=price.instance,
        serverless=serverless,
        num_instances=None if serverless else count,
        usd_per_day=usd,
        usd_per_1000_requests=1000 * usd / requests,
        busy=None if serverless else requests * busy_s / (count * _DAY_S),
        as_of=price.as_of,
        source=price.source,
    )


def break_even(prices: Iterable[Price], load: Load) -> BreakEven | None:
    """The load from which the cheapest machine that is always on costs no more than the cheapest
    that is billed by the request. None where one of the two has no price.

    >>> from paceline.catalog import find_prices
    >>> found = break_even(find_prices("L4"), Load(requests_per_day=1, latency_s=1.0))
    >>> round(found.requests_per_day) == round(found.busy * found.most_per_day)
    True
    """
    rows = tuple(prices)
    on = min(
        (row for row in rows if not _is_serverless(row)),
        key=lambda row: row.per_hour_usd,
        default=None,
    )
    off = min(
        (row for row in rows if _is_serverless(row)),
        key=lambda row: row.per_hour_usd,
        default=None,
    )
    if on is None or off is None:
        return None
    per_request = load.busy_s / 3600 * off.per_hour_usd
    return BreakEven(
        requests_per_day=_DAY_H * on.per_hour_usd / per_request,
        most_per_day=_DAY_S / load.busy_s,
        always_on=f"{on.provider} {on.instance}",
        serverless=f"{off.provider} {off.instance}",
    )


def _is_serverless(price: Price) -> bool:
    provider = load_providers().get(price.provider)
    return provider is not None and provider.serverless
