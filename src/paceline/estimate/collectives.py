"""Seconds of one collective, by the links its group runs over.

A group is `degree` ranks that stand `stride` ranks apart. At each level of links it has some
members inside one block (a pair, a node, a rack); rings between blocks use the links of all
members, so each rank sees as many of them as its block has members, but never more than it has
inside the block.

Ring volumes: all-gather and reduce-scatter move (n-1)/n of the whole through each rank, all-reduce
twice that, all-to-all (n-1)/n of what a rank holds. Latency is counted in hops: a ring has n-1,
those between blocks over the outer link.

A part of a mesh has a part of its links, and a part of a torus as many rings as it has axes.

Not covered: NVLink SHARP beyond its measured all-reduce, PAT (NCCL 2.23, one rank a node), and
groups that share links with another one at the same time.

Source: Patarasuk and Yuan, 2009; NCCL's own model, NVIDIA/nccl src/graph/tuning.cc (version 2.21).
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple

import numpy as np

from paceline.estimate.rates import LinkRates, Rates
from paceline.profile.block import Column, Value


def all_gather_s(num_bytes: Value, degree: Value, stride: Value, rates: Rates) -> Column:
    """All-gather or reduce-scatter of `num_bytes` in all, over a group.

    Args:
        num_bytes: Whole payload: what each rank has after a gather, or before a scatter.
        degree: Ranks of the group.
        stride: Ranks between two neighbours of the group.
        rates: The cluster's.
    """
    n = np.maximum(degree, 1)
    ring = _ring(n, stride, rates, lambda level: level.gather_bytes_per_s)
    return np.asarray((n - 1) / n * num_bytes * ring.s_per_byte + ring.latency_s)


def all_reduce_s(num_bytes: Value, degree: Value, stride: Value, rates: Rates) -> Column:
    """All-reduce of `num_bytes`: twice a gather's bytes, over a ring or, where hops decide, a tree.

    Source: tuning.cc: a ring has 2(n-1) hops; a tree 2 log2(n), each taking about twice as long
    (8.5 us between nodes, where a ring's take 4.0).
    """
    n = np.maximum(degree, 1)
    ring = _ring(n, stride, rates, lambda level: level.all_reduce_bytes_per_s)
    start = (n > 1) * rates.collective_s
    latency = np.minimum(2 * ring.latency_s - start, 2 * _TREE_HOP * ring.tree_s + start)
    return np.asarray(2 * (n - 1) / n * num_bytes * ring.s_per_byte + latency)


_TREE_HOP = 2.1
"""Time of a tree's hop for one of a ring. Source: tuning.cc, hwLat, NET, LL128: 8.5 and 4.0."""


def all_to_all_s(num_bytes: Value, degree: Value, stride: Value, rates: Rates) -> Column:
    """All-to-all: each rank holds `num_bytes` and sends an equal part to every other one.

    Only the part that leaves a block uses the outer links, where each rank has only its own card.
    In a torus a message passes the chips between, a quarter of each ring on the way.
    """
    n = np.maximum(degree, 1)
    slowest, latency = np.asarray(0.0), (n > 1) * rates.collective_s
    for level, inside, members in _blocks(n, stride, rates):
        rate = level.all_to_all_bytes_per_s * _part(level, members / inside)
        sent = (members - inside) / n * num_bytes * _links_passed(level, members / inside)
        slowest = np.maximum(slowest, sent / rate)
        latency = latency + (members > inside) * level.latency_s
    return np.asarray(slowest + latency)


def dispatch_s(
    token_bytes: Value,
    copies: Value,
    degree: Value,
    stride: Value,
    rates: Rates,
    *,
    groups: tuple[Value, Value] = (1, 1),
) -> Column:
    """Tokens to their experts: each goes to `copies` of the ranks of a group.

    A token with several experts in one other node crosses the network once and is copied there.

    Args:
        token_bytes: All tokens of one rank, once each.
        copies: Experts of a token, spread evenly.
        degree: Ranks that share the experts.
        stride: Ranks between two neighbours of the group.
        rates: The cluster's.
        groups: Equal parts of the experts, consecutive ranks each, and in how many of them a
            token's experts are.

    Source: DeepSeek-V3, arXiv:2412.19437, sections 2.1.2 and 3.2.2.
    """
    n = np.maximum(degree, 1)
    slowest, latency = np.asarray(0.0), (n > 1) * rates.collective_s
    for level, inside, members in _blocks(n, stride, rates):
        nodes = np.maximum(members / inside, 1)
        # Nodes that have some of the groups a token may go to, and those that get the token.
        outside = (1 - groups[1] / groups[0]) ** np.maximum(groups[0] / nodes, 1)
        near = np.maximum(nodes * (1 - outside), 1)
        once = near * (1 - (1 - 1 / near) ** copies)
        reached = np.where(np.asarray(level.size) > rates.domain, once, copies) * (1 - 1 / nodes)
        rate = level.all_to_all_bytes_per_s * _part(level, nodes)
        slowest = np.maximum(slowest, token_bytes * reached / rate)
        latency = latency + (members > inside) * level.latency_s
    return np.asarray(slowest + latency)


def p2p_s(num_bytes: Value, span: Value, rates: Rates, *, crossing: Value = inf) -> Column:
    """One rank sends to another one, both within the same `span` consecutive ranks.

    Of a chain of ranks the slowest boundary counts: `span` is then the ranks of the whole chain.

    Args:
        num_bytes: Of one rank.
        span: Ranks among which both are.
        rates: The cluster's.
        crossing: Consecutive ranks that send to as many others at once. Where they are fewer than a
            node has, they have its NICs to themselves.
    """
    last = rates.levels[-1]
    on_node = rates.levels[-2].size if len(rates.levels) > 1 else 1.0
    shared = np.clip(on_node / np.maximum(crossing, 1), 1, last.spare)
    rate, latency = _of_one_link(last) * shared, np.asarray(last.latency_s)
    for level in reversed(rates.levels[:-1]):
        is_inside = np.asarray(span) <= level.size
        rate = np.where(is_inside, _of_one_link(level), rate)
        latency = np.where(is_inside, level.latency_s, latency)
    return np.asarray(num_bytes / rate + rates.collective_s + latency)


def ranks_within(span: Value, rates: Rates) -> Column:
    """Consecutive ranks that need none of the slowest links among `span` of them."""
    within = np.asarray(1.0)
    for level in rates.levels[:-1]:
        within = np.where(np.asarray(span) > level.size, level.size, within)
    return within


class _Ring(NamedTuple):
    s_per_byte: Column
    """Seconds for each byte that passes a rank: the inverse of the slowest link's rate."""

    latency_s: Column
    """One collective's start, and one hop for each other rank."""

    tree_s: Column
    """Hops from the leaves of a tree to its root."""


def _ring(n: Column, stride: Value, rates: Rates, rate_of: Callable[[LinkRates], Value]) -> _Ring:
    slowest: Column = np.asarray(0.0)
    hops, tree = (n > 1) * rates.collective_s, np.asarray(0.0)
    for level, inside, members in _blocks(n, stride, rates):
        blocks = members / inside
        rate = rate_of(level) * _part(level, blocks)
        rate = np.where(blocks == 2, np.minimum(rate, level.pair_bytes_per_s), rate)
        each = 1 / (inside * rate)
        slowest = np.maximum(slowest, (members > inside) * each)
        hops = hops + (n / inside - n / members) * level.latency_s
        tree = tree + np.log2(blocks) * level.latency_s
    return _Ring(slowest, hops, tree)


def _blocks(n: Column, stride: Value, rates: Rates) -> Iterator[tuple[LinkRates, Column, Column]]:
    """Each level, with a group's members in one block inside it and in one block of its own."""
    inside: Column = np.ones(())
    apart = np.maximum(stride, 1)
    for level in rates.levels[:-1]:
        members = np.minimum(n, np.maximum(level.size // apart, inside))
        yield level, inside, members
        inside = members
    yield rates.levels[-1], inside, n


def _part(level: LinkRates, blocks: Column) -> Column:
    """Share of a level's links that a group of so many blocks can use."""
    if np.ndim(level.peers) == 0 and level.peers == 1 == level.axes:
        return 1.0
    mesh = np.clip((blocks - 1) / level.peers, 1 / np.maximum(level.peers, 1), 1)
    return mesh * _axes(level, blocks) / level.axes


def _axes(level: LinkRates, blocks: Column) -> Column:
    """Axes of a torus that a group fills: whole rings one after another."""
    side = np.maximum(np.asarray(level.size, float), 2) ** (1 / np.asarray(level.axes))
    axes = np.ceil(np.log(np.maximum(blocks, 2)) / np.log(side) - 1e-9)
    return np.clip(axes, 1, level.axes)


def _links_passed(level: LinkRates, blocks: Column) -> Column:
    """Links of a torus that a message between two random ranks passes: a quarter of each ring."""
    if np.ndim(level.axes) == 0 and level.axes == 1:
        return 1.0
    axes = _axes(level, blocks)
    return np.where(np.asarray(level.axes) > 1, np.maximum(axes * blocks ** (1 / axes) / 4, 1), 1)


def _of_one_link(level: LinkRates) -> Column:
    """Rate between two ranks: a torus has two links on each axis, a mesh one to each rank."""
    links = level.peers * np.where(np.asarray(level.axes) > 1, 2 * np.asarray(level.axes), 1)
    return np.asarray(level.all_to_all_bytes_per_s / links)
