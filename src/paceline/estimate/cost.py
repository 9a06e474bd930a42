"""What a run costs: accelerator-hours, and dollars by provider, on demand and spot.

Prices are data with a date and a source (`catalog/`); here they are only multiplied. A machine that
cannot run the job has no cost. Not covered: the hosts' own price where a provider bills it apart,
block storage, requests, taxes and discounts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from paceline.catalog import Price, Provider, load_providers
from paceline.catalog.mig import split_slice
from paceline.estimate.goodput import (
    Copies,
    Goodput,
    best_interval_s,
    goodput,
    goodput_with,
    job_mtbf_s,
)
from paceline.units import bytes_apart, counted, format_bytes

Way = Literal["on demand", "spot"]

_HOUR_S = 3600.0
_MONTH_H = 365 * 24 / 12
_GB = 1e9

_NEARLY = 0.9
"""A network counts as fast enough from this share of the planned rate on: a plan's own range is
wider."""

_OF_MACHINE = ("the network", "host", "card")
"""How the unknown facts begin that a machine's fitness hangs on."""

PROCESS_BYTES = 4 * 2**30
"""Host memory of one rank's process with its data loaders: a guess."""

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
    """Seconds of training between checkpoints; None is the best interval for the failures there
    are."""

    is_fixed: bool = False
    """Whether spot machines keep that interval too. Else theirs is the best for them."""

    background_s: float = 0.0
    """A checkpoint is written on while training goes on."""

    copies: Copies | None = None
    """That failures of accelerators recover from besides. What is taken away resumes from the
    checkpoint: often several instances go together."""

    def goodput(self, num_ranks: int, num_spot_instances: int = 0) -> Goodput:
        """The share of the time that is useful on so many ranks, on so many spot instances."""
        mtbf_s = job_mtbf_s(num_ranks, self.rank_mtbf_s)
        if num_spot_instances:
            taken_s = job_mtbf_s(num_spot_instances, self.spot_mtbf_s)
            mtbf_s = 1 / (1 / mtbf_s + 1 / taken_s)
        interval_s = None if num_spot_instances and not self.is_fixed else self.interval_s
        if interval_s is None:
            interval_s = best_interval_s(self.save_s, mtbf_s, background_s=self.background_s)
        seconds = {
            "mtbf_s": mtbf_s,
            "interval_s": interval_s,
            "save_s": self.save_s,
            "restart_s": self.restart_s,
            "background_s": min(self.background_s, interval_s),
        }
        if self.copies is None:
            return goodput(**seconds)
        # Those that are kept slow the steps down on spot, too.
        kept = replace(self.copies, covered=0.0) if num_spot_instances else self.copies
        return goodput_with(kept, **seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a rented machine must have to run a job as it was planned."""

    num_nodes: int = 1
    accelerators_per_node: int = 1
    host_memory_bytes: float = 0.0
    """Host memory of one node."""

    host_parts: Mapping[str, float] = field(default_factory=dict)
    """What that is for -> its bytes; empty where it is not told apart."""

    network_bytes_per_s: float | None = None
    """Network rate of one node, each direction; None where it does not matter."""

    is_rdma: bool = False
    """Whether the plan counts on a network with RDMA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What a run stores and sends out, besides computing."""

    stored_bytes: float = 0.0
    """On object storage, from the first step to the last."""

    sent_bytes: float = 0.0
    """Out of the provider, once: the finished model, for one."""


def cannot_run(price: Price, needs: Needs) -> str | None:
    """Why a machine cannot run the job; None where nothing is known against it.

    >>> price = Price(provider="here", instance="8x", spelled="H100", accelerator="H100-SXM",
    ...               num_accelerators=8, per_hour_usd=20.0, spot_per_hour_usd=None,
    ...               as_of="2026-01-01", source="a list", host_memory_bytes=128 * 2**30)
    >>> cannot_run(price, Needs(accelerators_per_node=8, host_memory_bytes=164 * 2**30))
    '128 GiB of host memory, a node needs 164 GiB'
    """
    return _alone(price, needs) or _lacks(price, needs)


def _alone(price: Price, needs: Needs) -> str | None:
    """Why its provider has no second node; None where it has one, or none is needed."""
    return _provider(price).one_machine if needs.num_nodes > 1 else None


def _lacks(price: Price, needs: Needs) -> str | None:
    """What a machine has less of than the job needs."""
    has = counted(price.num_accelerators, "accelerator")
    if price.num_accelerators < needs.accelerators_per_node:
        return f"{has}, a node of the run needs {needs.accelerators_per_node}"
    # An instance larger than a node holds several of them.
    nodes = min(needs.num_nodes, price.num_accelerators // needs.accelerators_per_node)
    host = price.host_memory_bytes
    if host is not None and host < needs.host_memory_bytes * nodes:
        there, needed = bytes_apart(host, needs.host_memory_bytes)
        parts = [f"{name} {format_bytes(size)}" for name, size in needs.host_parts.items() if size]
        told = f" ({', '.join(parts)})" if parts else ""
        return f"{there} of host memory, a node needs {needed}{told}"
    fabric = _provider(price).fabrics.get(price.instance)
    if needs.num_nodes <= nodes or fabric is None:
        return None
    if needs.is_rdma and not fabric.is_rdma:
        return "no RDMA between nodes, which the plan needs"
    wanted = needs.network_bytes_per_s
    if wanted is not None and fabric.bytes_per_s < _NEARLY * wanted:
        return (
            f"a network of {fabric.bytes_per_s * 8e-9:.4g} Gb/s a node, the run counts on "
            f"{wanted * 8e-9:.4g} Gb/s"
        )
    return None


def why_none(provider: str, prices: Iterable[Price], needs: Needs) -> str | None:
    """Why no machine of a provider can run the job: the last of the reasons of the one that comes
    nearest. None where it has no price of any, or one that can."""
    rows = [row for row in prices if row.provider.lower() == provider.lower()]
    if not rows:
        return None
    largest = max(
        rows,
        key=lambda row: (
            _lacks(row, needs) is None,
            row.num_accelerators,
            row.host_memory_bytes or 0,
        ),
    )
    lacks = _lacks(largest, needs)
    has = lacks and f"its largest machine in the price list ({largest.instance}) has {lacks}"
    return _alone(largest, needs) or has


def unknown_of(price: Price, needs: Needs) -> tuple[str, ...]:
    """What is not known of a machine and decides whether the job runs there as planned. Machines
    of a provider that the catalog does not have are the reader's own: nothing is asked of them."""
    provider = load_providers().get(price.provider)
    if provider is None:
        return ()
    found: list[str] = []
    several = needs.num_nodes * needs.accelerators_per_node > price.num_accelerators
    if several and needs.network_bytes_per_s and price.instance not in provider.fabrics:
        found.append(f"{_OF_MACHINE[0]} between instances")
    if price.host_memory_bytes is None and needs.host_memory_bytes:
        found.append(f"{_OF_MACHINE[1]} memory")
    if price.note.endswith("a guess"):
        found.append(f"{_OF_MACHINE[2]} ({price.note.removesuffix(' is a guess')} is assumed)")
    return tuple(found)


def why_no_cost(accelerator: str, prices: Iterable[Price], train_s: float | None) -> str:
    """Why a run on an accelerator has no price anywhere, for a person who then looks for one."""
    if train_s is None:
        return "a step's time is; `paceline bench` measures it on the machine itself"
    card, profile = split_slice(accelerator)
    if not any(prices) and profile is not None:
        return (
            f"the prices of {card} are for whole cards, and what a slice (MIG) of one costs is for "
            f"its owner to say: add [[prices]] of {accelerator} to paceline-catalog.toml"
        )
    if not any(prices):
        return (
            f"the catalog has no price of {accelerator}; name another accelerator, or add a price "
            "of your own ([[prices]] in paceline-catalog.toml)"
        )
    return "no machine with a price can run it"


def _provider(price: Price) -> Provider:
    return load_providers().get(price.provider) or Provider(name=price.provider, render="torchrun")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """A run at one provider, in one way of paying."""

    provider: str
    instance: str
    way: Way
    num_instances: int
    """Whole instances: what cannot be rented in part is paid in whole."""

    hours: float
    """Hours of wall time, failures included."""

    accelerator_hours: float
    """That are paid: of whole instances."""

    usd: float
    """The whole run."""

    usd_per_epoch: float | None
    """None where the number of epochs is not known."""

    usd_per_checkpoint: float | None
    """Price of the time that all instances wait for one checkpoint; None where no failures are
    given."""

    useful: float
    """Share of the time that trains steps which are kept."""

    per_instance_hour_usd: float
    as_of: str
    """Day of the price."""

    source: str

    terms: Mapping[str, float]
    """What `usd` is the sum of: `training`, `idle` (rented accelerators without a rank), `saving`,
    `lost`, `restart` and, where something is kept and its price is known, `storage`, `egress`."""

    unknown: tuple[str, ...] = ()
    """What is not known: of the machine, and prices that `usd` lacks."""

    is_by_hand: bool = False
    """The machines have more accelerators than a node of the run, and the files that `paceline
    render` writes for the provider rent only such as have as many: a person rents these."""

    @property
    def unknown_facts(self) -> tuple[str, ...]:
        """What is not known of the machine and decides whether it runs the job as planned."""
        return tuple(each for each in self.unknown if each.startswith(_OF_MACHINE))

    @property
    def runs_as_planned(self) -> bool:
        """Whether all is known that decides whether the machine runs the job as planned."""
        return not self.unknown_facts


def run_costs(
    *,
    num_accelerators: int,
    train_s: float,
    prices: Iterable[Price],
    failures: Failures | None = None,
    epochs: float | None = None,
    needs: Needs | None = None,
    keeping: Keeping | None = None,
) -> tuple[RunCost, ...]:
    """Cost of one run at every price, on demand and spot. Machines that are known to run it come
    first, among them those that `paceline render` writes files for, then the cheapest.

    Args:
        num_accelerators: Ranks of the job.
        train_s: Seconds of the run when nothing fails and no checkpoint is written.
        prices: Of the job's accelerator.
        failures: What they cost; None counts none, and leaves spot out, since its price alone
            says nothing.
        epochs: In the run.
        needs: What a machine must have; None takes every machine.
        keeping: What is stored and sent out; None counts neither.

    >>> price = Price(provider="here", instance="8x", spelled="H100", accelerator="H100-SXM",
    ...               num_accelerators=8, per_hour_usd=20.0, spot_per_hour_usd=None,
    ...               as_of="2026-01-01", source="a list")
    >>> (cost,) = run_costs(num_accelerators=12, train_s=36_000, prices=[price])
    >>> cost.num_instances, cost.accelerator_hours, cost.usd
    (2, 160.0, 400.0)
    """
    if num_accelerators < 1 or train_s < 0:
        raise ValueError("a run has at least one accelerator and no seconds below 0")
    run = _Run(num_accelerators, train_s, failures, epochs, needs or Needs(), keeping)
    ways: tuple[Way, ...] = ("on demand",) if failures is None else ("on demand", "spot")
    found = (run.cost(price, way) for price in prices for way in ways)
    return tuple(sorted((cost for cost in found if cost is not None), key=_order))


@dataclass(frozen=True, slots=True)
class _Run:
    """What all rows of prices are multiplied with."""

    num_accelerators: int
    train_s: float
    failures: Failures | None
    epochs: float | None
    needs: Needs
    keeping: Keeping | None

    def cost(self, price: Price, way: Way) -> RunCost | None:
        """None where the machine cannot run the job, or is not to be had so, or is taken away
        more often than it can restart."""
        rate = price.per_hour_usd if way == "on demand" else price.spot_per_hour_usd
        if rate is None or cannot_run(price, self.needs) is not None:
            return None
        needs, provider = self.needs, _provider(price)
        nodes_each = price.num_accelerators // needs.accelerators_per_node
        count = max(
            ceil(self.num_accelerators / price.num_accelerators), ceil(needs.num_nodes / nodes_each)
        )
        shares = {"training": 1.0}
        if self.failures is not None:
            good = self.failures.goodput(self.num_accelerators, count if way == "spot" else 0)
            if good.useful <= 0 or (way == "spot" and self.failures.restart_s >= good.mtbf_s):
                return None
            shares = {"training": good.useful, **good.terms}
        useful = shares["training"]
        hours = self.train_s / useful / _HOUR_S
        paid = hours * count * rate
        terms = {name: paid * share for name, share in shares.items()}
        idle = 1 - self.num_accelerators / (count * price.num_accelerators)
        if idle > 0:
            terms |= {"training": paid * useful * (1 - idle), "idle": paid * useful * idle}
        kept, lacking = _kept(price, self.keeping, hours)
        usd = paid + sum(kept.values())
        return RunCost(
            provider=price.provider,
            instance=price.instance,
            way=way,
            num_instances=count,
            hours=hours,
            accelerator_hours=hours * count * price.num_accelerators,
            usd=usd,
            usd_per_epoch=usd / self.epochs if self.epochs else None,
            usd_per_checkpoint=(
                None if self.failures is None else self.failures.save_s / _HOUR_S * count * rate
            ),
            useful=useful,
            per_instance_hour_usd=rate,
            as_of=price.as_of,
            source=price.source,
            terms=terms | kept,
            unknown=(*unknown_of(price, needs), *lacking),
            is_by_hand=(
                price.num_accelerators > needs.accelerators_per_node
                and provider.render != "torchrun"
            ),
        )


def _order(cost: RunCost) -> tuple[bool, bool, float, str, str]:
    return not cost.runs_as_planned, cost.is_by_hand, cost.usd, cost.provider, cost.instance


def _kept(
    price: Price, keeping: Keeping | None, hours: float
) -> tuple[dict[str, float], list[str]]:
    """Dollars of storage and of traffic out, and the prices that are not known. The reader's own
    prices come before those that are shipped."""
    shipped = _provider(price).rents
    storage = price.rents.storage or shipped.storage
    egress = price.rents.egress or shipped.egress
    terms: dict[str, float] = {}
    lacking: list[str] = []
    if keeping is not None and keeping.stored_bytes:
        if storage is None:
            lacking.append(f"{price.provider}'s price of storage")
        else:
            stored = keeping.stored_bytes / _GB
            terms["storage"] = storage.usd(stored, months=hours / _MONTH_H)
    if keeping is not None and keeping.sent_bytes:
        if egress is None:
            lacking.append(f"{price.provider}'s price of traffic out")
        else:
            terms["egress"] = egress.usd(keeping.sent_bytes / _GB)
    return terms, lacking


def cheapest_costs(costs: Iterable[RunCost]) -> tuple[RunCost, ...]:
    """The best of each provider and way of paying: machines that are known to run the job first,
    then the cheapest."""
    best: dict[tuple[str, str], RunCost] = {}
    for cost in sorted(costs, key=_order):
        best.setdefault((cost.provider, cost.way), cost)
    return tuple(sorted(best.values(), key=_order))


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
