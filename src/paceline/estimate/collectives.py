"""Seconds of one collective, by the links its group runs over.

A group is `degree` ranks that stand `stride` ranks apart. The part of it inside one scale-up domain
has `members` ranks; rings between domains share the members' network cards, so each rank sees
`members` times its own card, but never more than its link.

Ring volumes: all-gather and reduce-scatter move (n-1)/n of the whole through each rank, all-reduce
twice that, all-to-all (n-1)/n of what a rank holds.

Source: Patarasuk and Yuan, 2009; levels: design/planner.md 3.2, Hierarchy.
"""

from typing import Any

import numpy as np

from paceline.estimate.rates import Rates
from paceline.profile.block import Value

Column = Any
"""An array with one entry a row, as it broadcasts; numpy's types cannot say it."""


def gather_s(num_bytes: Value, degree: Value, stride: Value, rates: Rates) -> Column:
    """All-gather or reduce-scatter of `num_bytes` in all, over a group.

    Args:
        num_bytes: Whole payload: what each rank has after a gather, or before a scatter.
        degree: Ranks of the group.
        stride: Ranks between two neighbours of the group.
        rates: Of the cluster.
    """
    n = np.maximum(degree, 1)
    moved = (n - 1) / n * (num_bytes + rates.ramp_bytes * (n > 1))
    rate = _ring_bytes_per_s(n, stride, rates) * rates.gather_share
    return np.asarray(moved / rate + _latency_s(n, stride, rates))


def exchange_s(num_bytes: Value, degree: Value, stride: Value, rates: Rates) -> Column:
    """All-to-all: each rank holds `num_bytes` and sends an equal part to every other one.

    Only the part that leaves the domain uses the network, and each rank has only its own card.
    """
    n = np.maximum(degree, 1)
    members = _members(n, stride, rates)
    inside = (members - 1) / n * num_bytes / rates.link_bytes_per_s
    outside = (n - members) / n * num_bytes / rates.network_bytes_per_s
    ramp = (n > 1) * rates.ramp_bytes / rates.link_bytes_per_s
    return np.asarray(np.maximum(inside, outside) + ramp + _latency_s(n, stride, rates))


def dispatch_s(
    token_bytes: Value, copies: Value, degree: Value, stride: Value, rates: Rates
) -> Column:
    """Tokens to their experts: each goes to `copies` of the ranks of a group.

    A token with several experts in one other domain crosses the network once and is copied there.

    Args:
        token_bytes: All tokens of one rank, once each.
        copies: Experts of a token, spread evenly.
        degree: Ranks that share the experts.
        stride: Ranks between two neighbours of the group.
        rates: Of the cluster.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.2.2.
    """
    n = np.maximum(degree, 1)
    members = _members(n, stride, rates)
    domains = np.maximum(n / members, 1)
    reached = (domains - 1) * (1 - (1 - 1 / domains) ** copies)
    outside = token_bytes * reached / rates.network_bytes_per_s
    inside = token_bytes * copies * (members - 1) / members / rates.link_bytes_per_s
    ramp = (n > 1) * rates.ramp_bytes / rates.link_bytes_per_s
    return np.asarray(np.maximum(inside, outside) + ramp + _latency_s(n, stride, rates))


def send_s(num_bytes: Value, stride: Value, rates: Rates) -> Column:
    """One rank sends to one that stands `stride` ranks away."""
    inside = np.asarray(stride) < rates.domain
    rate = np.where(inside, rates.link_bytes_per_s, rates.network_bytes_per_s)
    latency = np.where(inside, rates.link_latency_s, rates.network_latency_s)
    return np.asarray(num_bytes / rate + latency)


def _members(n: Value, stride: Value, rates: Rates) -> Column:
    """Ranks of a group inside one scale-up domain."""
    return np.minimum(n, np.maximum(1, rates.domain // np.maximum(stride, 1)))


def _ring_bytes_per_s(n: Value, stride: Value, rates: Rates) -> Column:
    members = _members(n, stride, rates)
    between = np.minimum(rates.link_bytes_per_s, members * rates.network_bytes_per_s)
    between = np.where(members > 1, between, rates.network_bytes_per_s)
    return np.where(members >= n, rates.link_bytes_per_s, between)


def _latency_s(n: Value, stride: Value, rates: Rates) -> Column:
    is_inside = _members(n, stride, rates) >= n
    one = np.where(is_inside, rates.link_latency_s, rates.network_latency_s)
    return one * np.log2(np.maximum(n, 1))
