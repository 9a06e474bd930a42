"""Draws what fails and when, from a failure process.

Nodes fail one by one as renewal processes that have run for ever before the job starts, so that the
mean rate is the process's at every moment. Infant mortality comes on top; repeat offenders take
their share of the rate from the others. A failure of a rack or a switch takes the node that failed
and those beside it.

Leaves out: failures that depend on the load, and a repaired node being younger than before.
"""

from dataclasses import dataclass
from math import gamma
from typing import Any, Literal

import numpy as np

from paceline.job.failure_rates import FailuresSpec

DAY_S = 86_400.0
Kind = Literal["process", "hang", "node", "rack", "switch"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something fails."""

    at_s: float
    """Since the start."""

    kind: Kind
    first_node: int
    num_nodes: int
    """That are lost, from `first_node` on; for a process or a hang the one it is on."""

    @property
    def takes_nodes(self) -> bool:
        """Whether nodes are gone, with their memory, until they are repaired."""
        return self.kind not in ("process", "hang")


def draw_faults(
    spec: FailuresSpec, num_nodes: int, horizon_s: float, rng: np.random.Generator
) -> list[Fault]:
    """Every fault of a job on so many nodes until the horizon, in order of time."""
    rates = _rates_per_s(spec, num_nodes, rng)
    times, nodes = _renewals(rates, spec.shape, horizon_s, rng)
    more_times, more_nodes = _infants(spec, rates, horizon_s, rng)
    times, nodes = np.concatenate([times, more_times]), np.concatenate([nodes, more_nodes])
    order = np.argsort(times, kind="stable")
    kinds, shares = _kinds(spec)
    drawn = rng.choice(len(kinds), size=len(order), p=shares)
    return [
        _fault(spec, num_nodes, float(times[place]), int(nodes[place]), kinds[kind])
        for place, kind in zip(order, drawn, strict=True)
    ]


def expected_per_s(spec: FailuresSpec, num_nodes: int) -> float:
    """Failures of the whole job in a second, on the mean and without infant mortality."""
    return num_nodes * spec.at(num_nodes) / DAY_S


def _rates_per_s(spec: FailuresSpec, num_nodes: int, rng: np.random.Generator) -> Any:
    """Failures a second of every node; their mean is the process's."""
    factors = np.ones(num_nodes)
    offenders = round(spec.repeat_share * num_nodes)
    if offenders:
        factors[rng.choice(num_nodes, offenders, replace=False)] = spec.repeat_factor
    return spec.at(num_nodes) / DAY_S * factors / factors.mean()


def _renewals(
    rates: Any, shape: float, horizon_s: float, rng: np.random.Generator
) -> tuple[Any, Any]:
    """Times and nodes of stationary Weibull renewals.

    The gap that the start falls into is drawn by its length, which for a Weibull is
    scale x Gamma(1 + 1/shape)^(1/shape), and the start falls anywhere in it.
    Source: Cox, Renewal Theory, 1962, section 5.2.
    """
    scales = 1 / rates / gamma(1 + 1 / shape)
    first_gaps = scales * rng.gamma(1 + 1 / shape, size=len(rates)) ** (1 / shape)
    times = first_gaps * rng.random(len(rates))
    nodes = np.arange(len(rates))
    all_times, all_nodes = [], []
    while len(times):
        is_in = times < horizon_s
        times, nodes = times[is_in], nodes[is_in]
        all_times.append(times)
        all_nodes.append(nodes)
        times = times + scales[nodes] * rng.weibull(shape, size=len(nodes))
    return np.concatenate(all_times), np.concatenate(all_nodes)


def _infants(
    spec: FailuresSpec, rates: Any, horizon_s: float, rng: np.random.Generator
) -> tuple[Any, Any]:
    """Times and nodes of the failures that the start adds."""
    tau_s = spec.infant_days * DAY_S
    expected = (spec.infant - 1) * rates.sum() * tau_s
    times = rng.exponential(tau_s, size=rng.poisson(expected))
    nodes = rng.choice(len(rates), size=len(times), p=rates / rates.sum())
    is_in = times < horizon_s
    return times[is_in], nodes[is_in]


def _kinds(spec: FailuresSpec) -> tuple[list[Kind], list[float]]:
    shares: dict[Kind, float] = {
        "process": spec.process,
        "hang": spec.hang,
        "rack": spec.rack,
        "switch": spec.switch,
    }
    shares["node"] = max(0.0, 1 - sum(shares.values()))
    return list(shares), [share / sum(shares.values()) for share in shares.values()]


def _fault(spec: FailuresSpec, num_nodes: int, at_s: float, node: int, kind: Kind) -> Fault:
    size = {"rack": spec.rack_size, "switch": spec.switch_size}.get(kind, 1)
    first = node // size * size
    return Fault(at_s, kind, first, min(size, num_nodes - first))
