"""Nested levels of a cluster: which ranks share which link, innermost first.

The estimate prices every collective by them (`estimate/collectives.py`).

Not covered: rails, racks and oversubscription, which nobody declares yet; they are levels too, and
a later one goes between the node and the network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.catalog import Accelerator, Link
from paceline.catalog.link import Shape

Known = Literal["measured", "cited", "declared", "estimated"]
"""Read from this machine; from a source named in the catalog; written in the job file; or worked
out from something else by a stated rule."""


LevelName = Literal["node", "scale-up", "socket", "network"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Ranks that reach each other over one kind of link."""

    name: LevelName
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

    spare: float = 1.0
    """How many times that rate one rank reaches while the others of its node are silent: those of
    a node share its NICs, and one rank has no more than the NICs next to it."""

    is_rdma: bool = False
    """Whether the NIC moves data without the CPU."""

    seen: str | None = None
    """What the machine's own tool calls the path: `NV18`, `PHB`; None where it was not asked."""

    shape: Shape = "switch"
    """How the group is wired, which says how much of the rate a part of the group has."""

    num_links: int = 1
    """Links of a rank: to each other rank of a mesh, or to its neighbours in a torus. A switch has
    one that leads to every rank."""

    collective_share: float | None = None
    """Share of the rate that large all-gathers and reduce-scatters were measured to reach. None is
    unknown, here and in the next three fields."""

    all_reduce_share: float | None = None
    """Share that large all-reduces reach, in bytes on the wire."""

    all_to_all_share: float | None = None
    """Share that all-to-all and point-to-point transfers reach."""

    pair_share: float | None = None
    """Share that no collective of two ranks exceeds."""


def find_levels(
    accelerator: Accelerator,
    links: Mapping[str, Link],
    *,
    num_nodes: int,
    ranks_per_node: int,
    network_node_bytes_per_s: float,
    network_known: Known = "cited",
    network_kind: str | None = None,
    in_node: Sequence[Level] | None = None,
) -> tuple[Level, ...]:
    """The levels of a cluster of one kind of accelerator, innermost first.

    A fast link that reaches beyond a node (72 GB200, a slice of TPUs) is one level that holds
    several nodes. A level that would hold no more ranks than the one inside it is left out, so
    one rank has none, and 16 nodes of 4 GB200 have no network level.

    Args:
        links: The catalog's.
        network_node_bytes_per_s: Of a node and direction, all its NICs together.
        network_kind: Which, where it was declared; `rdma` is any with it.
        in_node: Those inside a node, where the machine showed them; the catalog's when left out.
    """
    num_ranks = num_nodes * ranks_per_node
    levels: list[Level] = []

    def add(level: Level) -> None:
        if level.size > (levels[-1].size if levels else 1):
            levels.append(level)

    if in_node is None:
        fast, around = links_of_node(accelerator, links)
        if accelerator.scale_up_size > 1 and fast is not None:
            beyond = accelerator.scale_up_size > accelerator.num_per_node
            reach = num_ranks if beyond else ranks_per_node
            add(level_of("scale-up", min(accelerator.scale_up_size, reach), fast, "cited"))
        if around is not None:
            add(level_of("node", ranks_per_node, around, "cited"))
    for level in in_node or ():
        add(level)
    between = links[accelerator.network] if accelerator.network else _UNKNOWN_NETWORK
    if network_known == "declared":
        between = link_of_rate(between, links, network_node_bytes_per_s, network_kind)
    most = _most_of_rank(between, accelerator, network_node_bytes_per_s, ranks_per_node)
    rate = min(network_node_bytes_per_s / ranks_per_node, most)
    level = level_of("network", num_ranks, replace(between, bytes_per_s=rate), network_known)
    add(replace(level, spare=most / rate))
    return tuple(levels)


def usual_network_bytes_per_s(
    accelerator: Accelerator, links: Mapping[str, Link], ranks_per_node: int
) -> float:
    """The usual network of a node, as far as so many ranks reach its NICs: one of eight H100 has
    one of eight."""
    usual = accelerator.network_node_bytes_per_s
    link = links[accelerator.network] if accelerator.network else _UNKNOWN_NETWORK
    return min(usual, ranks_per_node * _most_of_rank(link, accelerator, usual, ranks_per_node))


def _most_of_rank(
    link: Link, accelerator: Accelerator, node_bytes_per_s: float, ranks_per_node: int
) -> float:
    """What one rank reaches over the network, alone on its node: one port, or its share of them
    where there are more ports than accelerators. NCCL gives a GPU the NICs nearest to it."""
    share = node_bytes_per_s / max(ranks_per_node, accelerator.num_per_node)
    return min(node_bytes_per_s, max(link.bytes_per_s, share))


_UNKNOWN_IN_NODE = Link(
    name="unknown",
    kind="unknown",
    per="accelerator",
    bytes_per_s=1.0,
    latency_s=2.5e-6,
    is_rdma=False,
    source="the rate is the accelerator's own; latency: guess, as for PCIe",
)
_UNKNOWN_NETWORK = replace(
    _UNKNOWN_IN_NODE,
    per="port",
    latency_s=5e-6,
    source="the rate is the node's own; latency: guess, as for RoCE",
)


def links_of_node(
    accelerator: Accelerator, links: Mapping[str, Link]
) -> tuple[Link | None, Link | None]:
    """The link that `scale_up_size` accelerators share, and the link to the rest of their node.

    `link_bytes_per_s` of an accelerator, where a catalog file states it, is the rate between all
    of a node: of the first link where a whole node shares it, else of the second.
    """
    rate = accelerator.link_bytes_per_s
    fast = links[accelerator.link] if accelerator.link else None
    rest = links[accelerator.host_link] if accelerator.host_link else fast
    if rest is not None and rest.kind != "pcie":  # NVLink-C2C joins a GPU and its own host alone
        rest = fast
    if rate is None:
        return fast, rest
    if accelerator.scale_up_size >= accelerator.num_per_node:
        return replace(fast or _UNKNOWN_IN_NODE, bytes_per_s=rate), rest
    return fast, replace(rest or _UNKNOWN_IN_NODE, bytes_per_s=rate)


def host_bytes_per_s(accelerator: Accelerator, links: Mapping[str, Link]) -> float | None:
    """Between an accelerator and its host, each direction; None where no such link is known."""
    link = links.get(accelerator.host_link or accelerator.link or "")
    return link.bytes_per_s if link is not None and link.kind in _TO_HOST else None


_TO_HOST = ("pcie", "nvlink-c2c", "memory")

_COPY_SHARE = 0.8
"""Share of the host link's rate that pinned copies reach: some 12.5 of 15.75 GB/s over PCIe
3.0 x16, 25 of 31.5 over 4.0, 50 to 55 of 63 over 5.0, as commonly quoted. 360 of 450 GB/s is
cautious for GH200's NVLink-C2C."""

_USUAL_HOST_LINK_BYTES_PER_S = 31.5e9
"""PCIe 4.0 x16, where the catalog has no host link (TPU, Trainium): a guess."""


def copied_bytes_per_s(host_link_bytes_per_s: float | None) -> float:
    """What copies between an accelerator and its host reach of their link; None is not known."""
    return _COPY_SHARE * (host_link_bytes_per_s or _USUAL_HOST_LINK_BYTES_PER_S)


def node_bytes_per_s(accelerator: Accelerator, links: Mapping[str, Link]) -> float | None:
    """Between any two accelerators of one node, each direction; None where no link is known."""
    fast, rest = links_of_node(accelerator, links)
    link = fast if accelerator.scale_up_size >= accelerator.num_per_node else rest
    return None if link is None else link.bytes_per_s


def link_of_rate(
    usual: Link, links: Mapping[str, Link], node_bytes_per_s: float, kind: str | None = None
) -> Link:
    """The row that a declared rate of a node is most likely of, for its latency: of the kind that
    is given.

    The usual one when the rate is a whole number of its ports; else the fastest of its kind of
    which it is; else the Ethernet nearest to it, as a rate below every port of the usual kind has
    no RDMA to speak of. The rate itself stays as declared.
    """

    def is_whole(link: Link) -> bool:
        ports = node_bytes_per_s / link.bytes_per_s
        return ports > 0.99 and abs(ports - round(ports)) < 0.01

    if kind == "rdma":
        kind = usual.kind if usual.is_rdma else "roce"
    if kind is not None:
        rows = [row for row in links.values() if row.kind == kind and row.per == "port"]
        rows = [row for row in rows if is_whole(row)] or rows
        if usual in rows:
            return usual
        return min(rows, key=lambda row: (abs(row.bytes_per_s - node_bytes_per_s), row.name))
    if is_whole(usual):
        return usual
    same = [link for link in links.values() if link.kind == usual.kind and link.per == "port"]
    if any(is_whole(link) for link in same):
        return max((link for link in same if is_whole(link)), key=lambda link: link.bytes_per_s)
    if node_bytes_per_s > min((link.bytes_per_s for link in same), default=0.0):
        return usual
    wired = [link for link in links.values() if link.kind == "tcp"] or [usual]
    return min(wired, key=lambda link: abs(link.bytes_per_s - node_bytes_per_s))


def level_of(name: LevelName, size: int, link: Link, known: Known) -> Level:
    """A level of ranks that a link joins, `link.bytes_per_s` being the rate of a rank."""
    return Level(
        name=name,
        size=size,
        bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        link=link.name,
        known=known,
        is_rdma=link.is_rdma,
        shape=link.shape,
        num_links=link.num_links,
        collective_share=link.collective_share,
        all_reduce_share=link.all_reduce_share,
        all_to_all_share=link.all_to_all_share,
        pair_share=link.pair_share,
    )
