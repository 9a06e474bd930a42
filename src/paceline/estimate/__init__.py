"""What it predicts: bytes, seconds and dollars of layouts."""

from paceline.estimate.estimate import (
    Case,
    Estimate,
    MemoryEstimate,
    Prices,
    case_of,
    checkpoint_bytes,
    exchanged_bytes,
    mfu_at,
    price,
    price_one,
    stage_memory,
    useful_passes,
)
from paceline.estimate.step import PART_NAMES, TERM_NAMES

__all__ = [
    "PART_NAMES",
    "TERM_NAMES",
    "Case",
    "Estimate",
    "MemoryEstimate",
    "Prices",
    "case_of",
    "checkpoint_bytes",
    "exchanged_bytes",
    "mfu_at",
    "price",
    "price_one",
    "stage_memory",
    "useful_passes",
]
