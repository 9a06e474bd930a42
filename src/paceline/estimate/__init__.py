"""What it predicts: bytes and seconds of each layout."""

from paceline.estimate.estimate import Estimate, estimate
from paceline.estimate.memory import MemoryEstimate, estimate_memory

__all__ = ["Estimate", "MemoryEstimate", "estimate", "estimate_memory"]
