"""The optimizer of a job, and its learning rate at each step.

Leaves out: clipping, which is in `strategy/`; stepping, which is the session's.
"""

import math
from typing import Any

import torch
from torch import nn

from paceline.spec import TrainSpec

ADAM_BETAS = (0.9, 0.95)
"""Decay of the two moments. Source: GPT-3, arXiv:2005.14165, appendix B; Llama uses the same."""

SGD_MOMENTUM = 0.9
"""The usual value; Goyal et al., arXiv:1706.02677, section 5.1."""


def make_optimizer(model: nn.Module, train: TrainSpec) -> torch.optim.Optimizer:
    """The job's optimizer over the parameters of a model, after `strategy.apply`.

    Only parameters of two or more dims decay: not norms, biases or other vectors. FSDP2 keeps a
    parameter's number of dims, so the groups are the same in every layout. Parameters keep the
    order of `named_parameters`, and a tied one is there once.

    AdamW is asked for its fused step, which reads and writes each tensor once, on CPU too. SGD's
    cannot run on sharded parameters (torch 2.13: no sharding strategy for `_fused_sgd_`).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate, momentum=SGD_MOMENTUM)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=ADAM_BETAS, fused=True)


def learning_rate_at(step: int, train: TrainSpec) -> float:
    """Learning rate of one optimizer step.

    Args:
        step: The step about to be taken, from 1 to `train.steps`.
        train: The job's `train` section.

    The warm-up's last step has the peak rate, the run's last step the final one. A warm-up longer
    than the run is cut off by the run's end.

    >>> train = TrainSpec(global_batch=8, steps=100, learning_rate=1.0, warmup_steps=10)
    >>> [round(learning_rate_at(step, train), 3) for step in (1, 10, 55, 100)]
    [0.1, 1.0, 0.55, 0.1]
    """
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    if train.schedule == "constant":
        return train.learning_rate
    progress = min(1.0, (step - train.warmup_steps) / (train.steps - train.warmup_steps))
    falling = (1 + math.cos(math.pi * progress)) / 2 if train.schedule == "cosine" else 1 - progress
    final = train.final_learning_rate
    return train.learning_rate * (final + (1 - final) * falling)
