"""SGD with momentum: torch's own. Its fused step cannot run on sharded parameters (torch 2.13: no
sharding strategy for `_fused_sgd_`).
"""

from typing import Any

import torch

from paceline.job import TrainSpec

MOMENTUM = 0.9
"""The usual value; Goyal et al., arXiv:1706.02677, section 5.1."""


def make(groups: list[dict[str, Any]], train: TrainSpec) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=train.learning_rate, momentum=MOMENTUM)
