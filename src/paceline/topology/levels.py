"""Nested levels of a cluster: which ranks share which link, innermost first.

Leaves out: rails, racks and oversubscription, which nobody declares yet; they are levels too, and
a later one goes between the node and the network.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.catalog import Accelerator, Link

Known = Literal["measured", "cited", "declared", "estimated"]
"""Read from this machine; from a source named in the catalog; written in the job file; or worked
out from something else by a stated rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Ranks that reach each other over one kind of link."""

    name: Literal["socket", "node", "scale-up", "rail", "rack", "network"]

    size: int
    """Ranks inside one group of this level, those of the levels inside it included."""

    bytes_per_s: float
    """For each rank and direction when all ranks of the group use it at once; raw, nothing taken
    off for what collectives reach."""

    latency_s: float
    """One small message between two ranks through the communication library."""

    link: str
    """Row of the catalog's links."""

    known: Known
    """How the rate is known."""


def find_levels(
    accelerator: Accelerator,
    links: Mapping[str, Link],
    *,
    num_nodes: int,
    ranks_per_node: int,
    network_node_bytes_per_s: float,
    network_known: Known = "cited",
) -> tuple[Level, ...]:
    """The levels of a cluster of one kind of accelerator, innermost first.

    A fast link that reaches beyond a node (72 GB200, a slice of TPUs) is one level that holds
    several nodes. A level that would hold no more ranks than the one inside it is left out, so
    one rank has none, and 16 nodes of 4 GB200 have no network level.

    Args:
        accelerator: Of every rank.
        links: The catalog's.
        num_nodes: Nodes of the cluster.
        ranks_per_node: Ranks on each.
        network_node_bytes_per_s: Of a node and direction, all its NICs together.
        network_known: How that is known.
    """
    num_ranks = num_nodes * ranks_per_node
    in_node, between = _row(links, accelerator.link), _row(links, accelerator.network)
    around = _row(links, accelerator.host_link) or in_node
    levels: list[Level] = []

    def add(level: Level) -> None:
        if level.size > (levels[-1].size if levels else 1):
            levels.append(level)

    if accelerator.scale_up_size > 1 and in_node is not None:
        reach = (
            num_ranks if accelerator.scale_up_size > accelerator.num_per_node else ranks_per_node
        )
        size = min(accelerator.scale_up_size, reach)
        # A link's own rate where only some of a node share it, else the accelerator's, which a
        # reader may have changed.
        part = accelerator.scale_up_size < accelerator.num_per_node
        rate = in_node.bytes_per_s if part else accelerator.link_bytes_per_s
        add(_level("scale-up", size, rate, in_node, "cited"))
    if around is not None:
        alone = accelerator.scale_up_size < accelerator.num_per_node
        rate = accelerator.link_bytes_per_s if alone else around.bytes_per_s
        add(_level("node", ranks_per_node, rate, around, "cited"))
    if between is not None:
        if network_known == "declared":
            between = link_of_rate(between, links, network_node_bytes_per_s)
        rate = network_node_bytes_per_s / ranks_per_node
        add(_level("network", num_ranks, rate, between, network_known))
    return tuple(levels)


def link_of_rate(usual: Link, links: Mapping[str, Link], node_bytes_per_s: float) -> Link:
    """The row that a declared rate of a node is most likely of, for its latency.

    The usual one when the rate is a whole number of its ports; else the fastest of its kind of
    which it is; else the Ethernet nearest to it, as a rate below every port of the usual kind has
    no RDMA to speak of. The rate itself stays as declared.
    """

    def is_whole(link: Link) -> bool:
        ports = node_bytes_per_s / link.bytes_per_s
        return ports > 0.99 and abs(ports - round(ports)) < 0.01

    if is_whole(usual):
        return usual
    same = [link for link in links.values() if link.kind == usual.kind and link.per == "port"]
    if any(is_whole(link) for link in same):
        return max((link for link in same if is_whole(link)), key=lambda link: link.bytes_per_s)
    if node_bytes_per_s > min((link.bytes_per_s for link in same), default=0.0):
        return usual
    wired = [link for link in links.values() if link.kind == "tcp"] or [usual]
    return min(wired, key=lambda link: abs(link.bytes_per_s - node_bytes_per_s))


def _row(links: Mapping[str, Link], name: str | None) -> Link | None:
    return None if name is None else links[name]


def _level(
    name: Literal["node", "scale-up", "network"], size: int, rate: float, link: Link, known: Known
) -> Level:
    return Level(
        name=name,
        size=size,
        bytes_per_s=rate,
        latency_s=link.latency_s,
        link=link.name,
        known=known,
    )
