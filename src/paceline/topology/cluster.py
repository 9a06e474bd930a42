"""One `Cluster`: what each rank has, and how each number is known."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.catalog import Backend, Link
from paceline.topology.levels import Known, Level, copied_bytes_per_s, level_of

__all__ = ["Cluster", "Known", "Level"]


_COPY_IN_MEMORY_BYTES_PER_S = 10e9
"""Rate at which one core copies in memory: a guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Ranks that train together. None is unknown, and stays so."""

    accelerator: str
    """Name in the catalog, or as the machine reports it."""

    is_local: bool
    """Whether it is this machine; several nodes are then simulated on it."""

    num_nodes: int
    ranks_per_node: int

    backend: Backend
    """Library of the collectives."""

    cores_per_rank: float | None
    """CPU cores for each rank; None on a declared cluster."""

    memory_bytes: int
    """Memory of one rank's accelerator; on a CPU, its share of the machine's memory."""

    usable_bytes: int
    """The part of it that was free when it was looked at; all of it on a declared cluster. A plan
    uses `Plan.limit_bytes` of it: its head room stays free."""

    overhead_bytes: int
    """Taken on each rank before the first tensor of ours: the process or the device context, and
    the libraries' buffers."""

    peak_flops_per_s: Mapping[str, float]
    """Dense peak of one rank by precision (`fp32`, `bf16`); a missing one is unsupported or
    unknown."""

    memory_bytes_per_s: float | None
    """Peak bandwidth of the memory of one rank."""

    link_bytes_per_s: float | None
    """Bandwidth between ranks of a node: each rank, each direction."""

    network_bytes_per_s: float | None
    """Bandwidth between nodes: each node, each direction."""

    known: Mapping[str, Known]
    """Field of this class -> how its number is known."""

    levels: tuple[Level, ...] = ()
    """Which ranks share which link, innermost first; empty when there is one rank, or when the
    links are unknown. The estimate prices every collective by them."""

    host_link_bytes_per_s: float | None = None
    """Between one accelerator and its host, each direction, raw; None on a CPU and where the
    catalog has no such link."""

    host_bytes: int | None = None
    """Memory of one node's host, where it was looked at or declared; None is unknown."""

    num_multiprocessors: int | None = None
    """Multiprocessors of one accelerator; None is unknown."""

    rates_within: float = 1.0
    """How many times higher or lower the accelerator's rates may be; 1 where they are its own."""

    resembles: tuple[str, ...] = ()
    """Catalog names of the accelerators that its rates were estimated from; empty where the
    catalog has it."""

    @property
    def num_ranks(self) -> int:
        """Ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def has_host(self) -> bool:
        """Whether its accelerators have memory of their own beside the host's, so that something
        can be offloaded."""
        return self.backend not in ("gloo", "mlx")

    @property
    def copy_bytes_per_s(self) -> float:
        """From one accelerator to its host as copies reach it: what offloading, snapshots and
        checkpoints are estimated by."""
        if self.backend == "gloo":  # from memory to memory: read and written
            return (self.memory_bytes_per_s or 2 * _COPY_IN_MEMORY_BYTES_PER_S) / 2
        return copied_bytes_per_s(self.host_link_bytes_per_s)

    @property
    def network_link(self) -> str | None:
        """The catalog's name of the link between nodes; None on one node, or when it is unknown."""
        has_network = self.levels and self.levels[-1].name == "network"
        return self.levels[-1].link if has_network else None

    @property
    def uses_rdma(self) -> bool:
        """Whether the nodes reach each other over a link with remote memory access."""
        return self.network_link is not None and self.levels[-1].is_rdma

    @property
    def domain(self) -> int:
        """Ranks that reach each other without the network: a node's, a rack's or a slice's."""
        inside = [level.size for level in self.levels if level.name != "network"]
        return max(self.ranks_per_node, *inside, 1)

    def over_network(self, link: Link) -> "Cluster":
        """A cluster of these ranks, with one port of another link in each node."""
        rate = link.bytes_per_s / self.ranks_per_node
        levels = tuple(
            replace(
                level_of("network", level.size, replace(link, bytes_per_s=rate), "estimated"),
                spare=float(self.ranks_per_node),
            )
            if level.name == "network"
            else level
            for level in self.levels
        )
        return replace(self, network_bytes_per_s=link.bytes_per_s, levels=levels)

    def with_network_share(self, share: float) -> "Cluster":
        """These ranks on a network of the same kind with a share of its rate."""
        levels = tuple(
            replace(level, bytes_per_s=level.bytes_per_s * share)
            if level.name == "network"
            else level
            for level in self.levels
        )
        rate = self.network_bytes_per_s
        return replace(self, network_bytes_per_s=rate and rate * share, levels=levels)

    @property
    def name(self) -> str:
        """For people: `2 nodes x 8 H100-SXM`."""
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        kind = f"{self.accelerator} rank" if self.accelerator == "cpu" else self.accelerator
        plural = "s" if self.accelerator == "cpu" and self.ranks_per_node > 1 else ""
        return f"{nodes} x {self.ranks_per_node} {kind}{plural}"
