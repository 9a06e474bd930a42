"""One kind of link: what a row of links.toml says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.catalog import _rows as r


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

    collective_share: float | None = None
    """Share of the rate that large collectives were measured to reach. None is unknown."""

    collective_source: str | None = None
    """Who measured it."""

    source: str
    """Where rate and latency are from, and which are guesses."""


LINK_KEYS: Mapping[str, r.Key] = {
    "kind": r.Key(read=r.text, required=True),
    "per": r.Key(read=r.one_of("accelerator", "port"), required=True),
    "bytes_per_s": r.Key(read=r.rate, required=True),
    "latency_s": r.Key(read=r.number, required=True),
    "is_rdma": r.Key(read=r.truth, required=True),
    "collective_share": r.Key(read=r.share),
    "collective_source": r.Key(read=r.text),
    "source": r.Key(read=r.text, required=True),
}
"""Every key of a row of `[links.NAME]`."""


def make_link(name: str, values: Mapping[str, Any]) -> Link:
    """The link of a row that `read_row` found nothing wrong with."""
    return Link(name=name, **values)
