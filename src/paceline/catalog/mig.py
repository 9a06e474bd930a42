"""Slices of a card (MIG): what NVIDIA's drivers name `1g.10gb` has a part of a card.

A profile names its compute slices and its memory: `1g.10gb` of an H100 has 1 of 7 and 10 GB of 80.
Leaves out: compute instances of a slice (`1c.3g.40gb`), which share its memory.
"""

import re
from dataclasses import replace
from fractions import Fraction

from paceline.catalog.accelerator import Accelerator

RATES_WITHIN = 1.2
"""How many times higher or lower a slice's rates may be than its share. NVIDIA's table gives 1/7 of
the multiprocessors; `nvidia-smi mig -lgip` prints 14 of an A100's 108 for 1g.10gb, and 42 for
3g.40gb."""

_USABLE = 0.975
"""Part of its share of the memory that a slice has: 9.75 GiB of an A100's 80 for 1g.10gb and 39.5
for 3g.40gb (`nvidia-smi mig -lgip`)."""

_SLICE = re.compile(
    r"(?P<card>.*?)([\s:-]+MIG)?[\s:]+(?P<profile>\d+g\.\d+gb)([.+-](me(\.all)?|gfx))?", re.I
)
"""`+me` and such are the same slice with other engines for video."""


def split_slice(name: str) -> tuple[str, str | None]:
    """The card that a name means, and the profile of its slice; None where it is a whole card.

    >>> split_slice("H100-SXM 1g.10gb"), split_slice("NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    (('H100-SXM', '1g.10gb'), ('NVIDIA H100 80GB HBM3', '3g.40gb'))
    >>> split_slice("H100-SXM")
    ('H100-SXM', None)
    """
    found = _SLICE.fullmatch(name.strip())
    if found is None:
        return name, None
    return found["card"], found["profile"].lower()


def num_slices(card: Accelerator, profile: str) -> int:
    """How many slices of a profile fit on one card: by compute and by memory.

    Source: NVIDIA MIG user guide, supported MIG profiles, Number of Instances Available.
    """
    compute, memory = _parts(card, profile)
    return min(int(1 / compute), round(1 / memory))


def slice_of(card: Accelerator, profile: str) -> Accelerator | None:
    """A slice as an accelerator: its share of the rates and of the memory. None where the card has
    no such profile.

    Slices do not reach each other over NVLink or PCIe, so it shares no fast link. Source: NVIDIA
    MIG user guide, application considerations.
    """
    if profile not in card.mig_profiles:
        return None
    compute, memory = _parts(card, profile)
    multiprocessors, bandwidth = card.num_multiprocessors, card.memory_bytes_per_s
    size = card.memory_bytes or 0
    shares = (
        f"estimated: {compute} of {card.name}'s multiprocessors and {memory} of its memory (NVIDIA "
        "MIG user guide)"
    )
    return replace(
        card,
        name=f"{card.name} {profile}",
        slice_of=card.name,
        aliases=(),
        smi_names=tuple(f"{name} MIG {profile}" for name in card.smi_names),
        memory_bytes=int(size * float(memory) * _USABLE),
        peak_flops_per_s={
            kind: float(compute) * rate for kind, rate in card.peak_flops_per_s.items()
        },
        memory_bytes_per_s=None if bandwidth is None else float(memory) * bandwidth,
        num_multiprocessors=None if multiprocessors is None else int(compute * multiprocessors),
        scale_up_size=1,
        mig_profiles=(),
        source=f"{shares}; {card.source}",
        sources={
            **card.sources,
            **{
                group: f"{shares}; the card's: {card.sources.get(group, card.source)}"
                for group in ("peak", "memory")
            },
        },
    )


def _parts(card: Accelerator, profile: str) -> tuple[Fraction, Fraction]:
    """Shares of the card's compute slices and of its memory: of 8 parts where it has 7 slices."""
    (compute, size), (slices, whole) = map(_numbers, (profile, card.mig_profiles[-1]))
    parts = 8 if slices == 7 else slices
    return Fraction(compute, slices), Fraction(round(parts * size / whole), parts)


def _numbers(profile: str) -> tuple[int, int]:
    compute, memory = profile.removesuffix("gb").split("g.")
    return int(compute), int(memory)
