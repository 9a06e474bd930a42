"""An accelerator that the catalog does not have, from what `nvidia-smi` reports.

Its memory and PCIe link are its own. Its rates are the middle of the cards of its compute
capability that the catalog has, with the factor that the farthest of them is away: no card's
numbers are taken for another's without that range. Where the catalog has none of that capability,
or the driver reports none, the range is that of all cards that it may be like.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, log

from paceline.catalog import PRECISIONS, Accelerator, Catalog, Link
from paceline.topology.read_nvidia import FoundGpu

_OLDEST_PCIE, _NEWEST_PCIE = 3, 6
"""Generations that the catalog has rows of. Where the tool does not say, the oldest is taken: the
slowest of cards that train."""

_FIRST_WITH_BF16 = 8
"""First generation of CUDA cards with bf16, and the last that a driver knows which does not report
the compute capability. Sources: CUDA C++ programming guide, arithmetic by compute capability;
`QUERY_MORE`."""

_NETWORK_BYTES_PER_S = 1.25e9
"""Network rate of a node, where the job does not give one: 10 Gb/s, a guess."""


_LEAST_AWAY = 2.0
"""Times that a rate may be off where few cards are known of its kind. Cards of one compute
capability in the catalog differ by up to three times (8.9: 121 and 364 TFLOP/s in bf16, 300 and
1,008 GB/s), each side of their middle by 1.8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedCard:
    """Numbers for a card that nobody has looked up."""

    accelerator: Accelerator
    rates_within: float
    """How many times higher or lower its rates may be."""

    like: tuple[str, ...]
    """Catalog names of the cards of its kind."""


def estimate_card(gpu: FoundGpu, num_per_node: int, catalog: Catalog) -> EstimatedCard | None:
    """The card as an accelerator; None where it is older than any card of the catalog."""
    near = _near(gpu.compute_capability, catalog)
    if not near:
        return None
    peaks: dict[str, float] = {}
    within = _LEAST_AWAY
    for precision in PRECISIONS:
        rates = [card.peak_flops_per_s.get(precision) for card in near]
        known = [rate for rate in rates if rate is not None]
        if len(known) == len(near):  # what some of them lack, this one may lack too
            peaks[precision], away = _middle(known)
            within = max(within, away)
    bandwidths = [card.memory_bytes_per_s for card in near if card.memory_bytes_per_s]
    bandwidth, away = _middle(bandwidths)
    names = tuple(card.name for card in near)
    source = f"estimated: the middle of {', '.join(names)}"
    return EstimatedCard(
        accelerator=Accelerator(
            name=gpu.name,
            backend="nccl",
            memory_bytes=gpu.memory_bytes,
            peak_flops_per_s=peaks,
            memory_bytes_per_s=bandwidth,
            link=_pcie_row(gpu),
            link_bytes_per_s=pcie_bytes_per_s(gpu, catalog.links),
            network_node_bytes_per_s=_NETWORK_BYTES_PER_S,
            num_per_node=num_per_node,
            overhead_bytes=max(card.overhead_bytes for card in near),
            smi_names=(gpu.name,),
            source=source,
            compute_capability=gpu.compute_capability,
        ),
        rates_within=max(within, away),
        like=names,
    )


def pcie_bytes_per_s(gpu: FoundGpu, links: Mapping[str, Link]) -> float:
    """Rate of a card's PCIe link, one direction: its generation's, for the lanes that it has."""
    return links[_pcie_row(gpu)].bytes_per_s * (gpu.pcie_lanes or 16) / 16


def pcie_link(gpu: FoundGpu, known: Accelerator, links: Mapping[str, Link]) -> Link:
    """A card's PCIe link: as its tool reports it, else the catalog's."""
    own = links.get(known.host_link or known.link or "")
    if own is None or own.kind != "pcie":
        own = links[_pcie_row(gpu)]
    elif gpu.pcie_generation is None:
        return own
    return replace(own, bytes_per_s=pcie_bytes_per_s(gpu, links))


def _pcie_row(gpu: FoundGpu) -> str:
    generation = gpu.pcie_generation or _OLDEST_PCIE
    return f"pcie-{min(max(generation, _OLDEST_PCIE), _NEWEST_PCIE)}-x16"


def _near(capability: str | None, catalog: Catalog) -> list[Accelerator]:
    """The cards of a compute capability, else of its generation, else of all that it may be."""
    cards = [card for card in catalog.accelerators.values() if card.compute_capability]
    if capability is None:  # drivers that report none are older than its cards of 8.9
        return [card for card in cards if _major(card) <= _FIRST_WITH_BF16]
    same = [card for card in cards if card.compute_capability == capability]
    if same:
        return same
    major = int(capability.partition(".")[0])
    generation = [card for card in cards if _major(card) == major]
    if generation or major < _FIRST_WITH_BF16:
        return generation
    return [card for card in cards if _major(card) >= _FIRST_WITH_BF16]


def _major(card: Accelerator) -> int:
    return int((card.compute_capability or "").partition(".")[0])


def _middle(rates: list[float]) -> tuple[float, float]:
    """The geometric middle of the least and the most, and how many times each is away from it.

    >>> _middle([100.0, 150.0, 400.0])
    (200.0, 2.0)
    """
    low, high = min(rates), max(rates)
    middle = exp((log(low) + log(high)) / 2)
    return round(middle, 6), round(high / middle, 6)
