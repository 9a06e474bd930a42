"""AdamW: torch's own."""

from typing import Any

import torch

from paceline.job import TrainSpec


def make(groups: list[dict[str, Any]], train: TrainSpec) -> torch.optim.Optimizer:
    """Its fused step reads and writes each tensor once, on CPU too."""
    rate, betas, eps = train.learning_rate, train.betas, train.eps
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=True)
