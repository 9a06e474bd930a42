"""What a run costs: accelerator-hours, and dollars by provider, on demand and spot.

Prices are data with a date and a source (`catalog/`); here they are only multiplied. Leaves out:
the hosts' own price where a provider bills it apart, traffic, taxes and discounts; and storage,
unless its price is given.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

from paceline.catalog import Price
from paceline.estimate.goodput import Goodput, daly_interval_s, goodput, job_mtbf_s

_HOUR_S = 3600.0

DEFAULT_SPOT_MTBF_S = 10 * _HOUR_S
"""Seconds between two takings-away of one spot instance: a tenth of them each hour. A guess, at the
mild end of the traces that Bamboo (Thorpe et al., arXiv:2204.12013) replays. Rates differ by
instance, region and hour: give your own where you know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What failures and saves cost, in seconds: all that spot and on-demand time differ by."""

    save_s: float
    """Training stands still for a checkpoint."""

    restart_s: float
    """From a failure to the first step after it."""

    rank_mtbf_s: float
    """Between failures of one accelerator."""

    spot_mtbf_s: float = DEFAULT_SPOT_MTBF_S
    """Between two takings-away of one spot instance."""

    interval_s: float | None = None
    """Of training between checkpoints; None is the best one for the failures there are. On spot it
    is always the best one."""

    background_s: float = 0.0
    """A checkpoint is written on while training goes on."""

    def goodput(self, num_ranks: int, num_spot_instances: int = 0) -> Goodput:
        """The share of the time that is useful on so many ranks, on so many spot instances."""
        mtbf_s = job_mtbf_s(num_ranks, self.rank_mtbf_s)
        if num_spot_instances:
            taken_s = job_mtbf_s(num_spot_instances, self.spot_mtbf_s)
            mtbf_s = 1 / (1 / mtbf_s + 1 / taken_s)
        interval_s = None if num_spot_instances else self.interval_s
        if interval_s is None:
            interval_s = max(1.0, daly_interval_s(self.save_s, mtbf_s), self.background_s)
        return goodput(
            mtbf_s=mtbf_s,
            interval_s=interval_s,
            save_s=self.save_s,
            restart_s=self.restart_s,
            background_s=min(self.background_s, interval_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """A run at one provider, in one way of paying."""

    provider: str
    instance: str
    way: Literal["on demand", "spot"]
    num_instances: int
    """Whole instances: what cannot be rented in part is paid in whole."""

    hours: float
    """Of wall time, failures included."""

    accelerator_hours: float
    """That are paid: of whole instances."""

    usd: float
    """The whole run."""

    usd_per_epoch: float | None
    """None where the number of epochs is not known."""

    usd_per_checkpoint: float | None
    """Of the time that all instances wait for one checkpoint; None where no failures are given."""

    useful: float
    """Share of the time that trains steps which are kept."""

    per_instance_hour_usd: float
    as_of: str
    """Day of the price."""

    source: str

    terms: Mapping[str, float]
    """What `usd` is the sum of: `training`, `saving`, `lost`, `restart` and, where its price is
    given, `storage`."""


def run_costs(
    *,
    num_accelerators: int,
    train_s: float,
    prices: Iterable[Price],
    failures: Failures | None = None,
    epochs: float | None = None,
    storage_usd: float = 0.0,
) -> tuple[RunCost, ...]:
    """The same run at every price, on demand and spot, the cheapest first.

    Args:
        num_accelerators: Ranks of the job.
        train_s: Seconds of the run when nothing fails and no checkpoint is written.
        prices: Of the job's accelerator.
        failures: What they cost; None counts none, and leaves spot out, since its price alone
            says nothing.
        epochs: In the run.
        storage_usd: For the run's checkpoints, where a price is known.

    >>> price = Price(provider="here", instance="8x", spelled="H100", accelerator="H100-SXM",
    ...               num_accelerators=8, per_hour_usd=20.0, spot_per_hour_usd=None,
    ...               as_of="2026-01-01", source="a list")
    >>> (cost,) = run_costs(num_accelerators=12, train_s=36_000, prices=[price])
    >>> cost.num_instances, cost.accelerator_hours, cost.usd
    (2, 160.0, 400.0)
    """
    if num_accelerators < 1 or train_s < 0:
        raise ValueError("a run has at least one accelerator and no seconds below 0")
    found: list[RunCost] = []
    for price in prices:
        count = ceil(num_accelerators / price.num_accelerators)
        ways: list[tuple[Literal["on demand", "spot"], float | None]] = [
            ("on demand", price.per_hour_usd)
        ]
        if failures is not None:
            ways.append(("spot", price.spot_per_hour_usd))
        for way, rate in ways:
            if rate is None:
                continue
            good = (
                failures.goodput(num_accelerators, count if way == "spot" else 0)
                if failures is not None
                else None
            )
            if good is not None and good.useful <= 0:
                continue  # it is taken away more often than it can restart
            found.append(
                _cost(price, way, rate, count, train_s, good, failures, epochs, storage_usd)
            )
    return tuple(sorted(found, key=lambda cost: (cost.usd, cost.provider, cost.instance)))


def _cost(
    price: Price,
    way: Literal["on demand", "spot"],
    rate: float,
    count: int,
    train_s: float,
    good: Goodput | None,
    failures: Failures | None,
    epochs: float | None,
    storage_usd: float,
) -> RunCost:
    useful = good.useful if good is not None else 1.0
    hours = train_s / useful / _HOUR_S
    paid = hours * count * rate
    terms = {"training": paid * useful}
    if good is not None:
        terms |= {name: paid * share for name, share in good.terms.items()}
    if storage_usd:
        terms["storage"] = storage_usd
    return RunCost(
        provider=price.provider,
        instance=price.instance,
        way=way,
        num_instances=count,
        hours=hours,
        accelerator_hours=hours * count * price.num_accelerators,
        usd=paid + storage_usd,
        usd_per_epoch=(paid + storage_usd) / epochs if epochs else None,
        usd_per_checkpoint=(
            failures.save_s / _HOUR_S * count * rate if failures is not None else None
        ),
        useful=useful,
        per_instance_hour_usd=rate,
        as_of=price.as_of,
        source=price.source,
        terms=terms,
    )


def cheapest_costs(costs: Iterable[RunCost]) -> tuple[RunCost, ...]:
    """The cheapest of each provider and way of paying, the cheapest first."""
    best: dict[tuple[str, str], RunCost] = {}
    for cost in costs:
        key = (cost.provider, cost.way)
        if key not in best or cost.usd < best[key].usd:
            best[key] = cost
    return tuple(sorted(best.values(), key=lambda cost: cost.usd))


def accelerator_hours(num_accelerators: int, wall_s: float) -> float:
    """Accelerator-hours of a run.

    >>> accelerator_hours(16, 1800)
    8.0
    """
    return num_accelerators * wall_s / _HOUR_S


def training_flops(num_parameters: float, tokens: float, *, recompute: bool = False) -> float:
    """FLOPs of training on so many tokens: 6 for each parameter and token, 8 with full recompute.

    Leaves out: attention, which matters for long samples.

    Source: Kaplan et al., arXiv:2001.08361, section 2.1.

    >>> training_flops(7e9, 1e12)
    4.2e+22
    """
    return (8.0 if recompute else 6.0) * num_parameters * tokens
