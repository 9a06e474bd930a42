"""One kind of accelerator: what a row of accelerators.toml says."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.catalog import _rows as r

Backend = Literal["nccl", "gloo", "xla", "neuron", "hccl", "mlx"]
"""Library of the collectives. RCCL calls itself nccl."""

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
"""Precisions that a peak may be given for. fp8 and fp4 are whichever format is fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of accelerator. None is unknown, or for a CPU read from the machine."""

    name: str
    backend: Backend
    """Library of the collectives."""

    memory_bytes: int | None
    """Memory of one accelerator as its own tool reports it."""

    peak_flops_per_s: Mapping[str, float]
    """Dense peak by precision (one of `PRECISIONS`). A precision it lacks is not there."""

    memory_bytes_per_s: float | None = None
    """Peak bandwidth of its memory."""

    network_node_bytes_per_s: float
    """Usual network of a node, each direction, all its NICs together."""

    num_per_node: int
    """Usual number in a node."""

    overhead_bytes: int
    """Taken by a process before its first tensor."""

    smi_names: tuple[str, ...] = ()
    """How the device's own tool names it."""

    source: str
    """Where the numbers are from, and which are guesses; all of `sources` in one line."""

    vendor: str | None = None
    aliases: tuple[str, ...] = ()
    """Other spellings that are accepted, in any case."""

    link: str | None = None
    """Row of the links: the fast link that `scale_up_size` of them share."""

    host_link: str | None = None
    """Row of the links between those of a node that do not share `link`."""

    network: str | None = None
    """Row of the links: the usual network."""

    link_bytes_per_s: float | None = None
    """To the others in its node, each direction, all its links together; None: the rate of `link`,
    or of `host_link` where part of a node shares `link`."""

    scale_up_size: int = 1
    """How many share `link` at full rate: a node's 8, a rack's 72, a slice. 1 is none."""

    shares_host_memory: bool = False
    """Whether its memory is its host's."""

    host_memory_bytes: int | None = None
    """Memory of the CPU that is part of a superchip, for each accelerator. None: the host memory is
    as a node's maker has it."""

    num_multiprocessors: int | None = None
    """Streaming multiprocessors, compute units or GPU cores."""

    compute_capability: str | None = None
    """CUDA's, `9.0`, or AMD's, `gfx942`. A card that is not in the catalog is estimated from cards
    that share its own."""

    mig_profiles: tuple[str, ...] = ()
    """Slices that NVIDIA's drivers cut it into (MIG), `1g.10gb`, the smallest first; the last is
    all of it. Empty where it cannot be cut."""

    slice_of: str | None = None
    """Name of the whole card; None where this is one."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Group of numbers (peak, memory, link, network, overhead) -> where they are from."""


def _profiles(value: object) -> tuple[str, ...]:
    found = r.texts(value)
    if not all(re.fullmatch(r"[1-9]\d*g\.[1-9]\d*gb", each) for each in found):
        raise ValueError('profiles as nvidia-smi names them, such as ["1g.10gb", "7g.80gb"]')
    return found


ACCELERATOR_KEYS: Mapping[str, r.Key] = {
    **r.keys_of(Accelerator, without=("name", "peak_flops_per_s", "source", "slice_of")),
    **{f"peak_{precision}_flops_per_s": r.Key(read=r.number) for precision in PRECISIONS},
    "mig_profiles": r.Key(read=_profiles),
    "source": r.Key(read=r.text),
}
"""Every key of a row of `[accelerators.NAME]`. `memory_bytes` is missing for a CPU alone."""


def make_accelerator(name: str, values: Mapping[str, Any]) -> Accelerator:
    """The accelerator of a row that `read_row` found nothing wrong with."""
    sources: dict[str, str] = dict(values.get("sources", {}))
    if "source" in values:
        sources["all"] = values["source"]
    plain = {
        key: value
        for key, value in values.items()
        if not key.startswith("peak_") and key not in ("source", "sources")
    }
    return Accelerator(
        name=name,
        peak_flops_per_s=_by_precision(values, "peak_{}_flops_per_s"),
        source="; ".join(
            line if group == "all" else f"{group}: {line}" for group, line in sources.items()
        ),
        sources=sources,
        **{"memory_bytes": None, **plain},
    )


def _by_precision(values: Mapping[str, Any], key: str) -> Mapping[str, float]:
    found = {precision: values.get(key.format(precision)) for precision in PRECISIONS}
    return {precision: value for precision, value in found.items() if value is not None}
