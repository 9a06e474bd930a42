"""What each optimizer is and keeps, one row an optimizer.

A new optimizer is its word and row here, and its module in `runtime/optimizer/`, named for it;
engines that have it are listed in `abilities.toml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Optimizer = Literal["adamw", "adamw-8bit", "muon", "adafactor", "sgd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """One optimizer."""

    moment_bytes: float
    """Bytes of its moments for each parameter, where they are kept in float32."""

    root_moment_bytes: float | None = None
    """Its bytes for each parameter outside the blocks, where they are other ones."""

    as_weights: bool = True
    """Whether its moments have the type of the weights that it updates."""

    has_betas: bool = False
    """Whether `train.betas` and `train.eps` are its own."""


OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(moment_bytes=8.0, has_betas=True),
    # Two bytes and a float32 scale for each block of 256. Source: arXiv:2110.02861.
    "adamw-8bit": OptimizerFacts(moment_bytes=2.03, as_weights=False, has_betas=True),
    # One momentum for its matrices (Jordan et al., 2024); embedding and head are left to AdamW.
    "muon": OptimizerFacts(moment_bytes=4.0, root_moment_bytes=8.0, has_betas=True),
    # One row and one column for each matrix, arXiv:1804.04235; 0.02 is 8,192 x 8,192.
    "adafactor": OptimizerFacts(moment_bytes=0.02, as_weights=False),
    "sgd": OptimizerFacts(moment_bytes=4.0),  # its momentum
}
