"""One kind of link: what a row of links.toml says."""

from dataclasses import dataclass
from typing import Literal

from paceline.catalog import _rows as r

Shape = Literal["switch", "mesh", "torus"]
"""How accelerators are wired: through a switch, each to each other, or to neighbours in rings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects accelerators, in a node or between nodes."""

    name: str
    kind: str
    """`nvlink`, `pcie`, `infiniband`, `roce`, `efa`, `tcp`, ..."""

    per: Literal["accelerator", "port"]
    """What the rate is of: all links of an accelerator together, or one NIC."""

    bytes_per_s: float
    """Raw rate in one direction."""

    latency_s: float
    """One small message between two ranks through the communication library."""

    is_rdma: bool
    """Whether the NIC moves data without the CPU."""

    shape: Shape = "switch"
    """How the accelerators are wired. In a mesh or a torus a part of them has a part of the rate:
    2 of 8 in a mesh have one link of seven."""

    num_links: int = 1
    """Links of an accelerator that `bytes_per_s` adds up: one to each other accelerator of a mesh,
    two for each axis of a torus. Behind a switch they all lead everywhere: 1."""

    collective_share: float | None = None
    """Share of the rate that large all-gathers and reduce-scatters were measured to reach. None is
    unknown."""

    all_reduce_share: float | None = None
    """Share that large all-reduces were measured to reach, in bytes on the wire; None: as
    `collective_share`."""

    all_to_all_share: float | None = None
    """Share that large all-to-alls and sends were measured to reach; None: as
    `collective_share`."""

    pair_share: float | None = None
    """Share that no collective of two ranks exceeds; None: two reach what many do."""

    collective_source: str | None = None
    """Who measured the shares."""

    source: str
    """Where rate and latency are from, and which are guesses."""


LINK_KEYS = r.keys_of(Link, without=("name",))
"""Every key of a row of `[links.NAME]`."""
