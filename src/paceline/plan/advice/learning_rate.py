"""How the learning rate follows the batch, and how long to warm up."""

from dataclasses import dataclass
from math import ceil, sqrt
from typing import Literal

Rule = Literal["linear", "sqrt"]

_RULES: dict[str, Rule] = {
    "sgd": "linear",
    **dict.fromkeys(("adam", "adamw", "adamw-8bit", "adafactor", "muon"), "sqrt"),
}
"""Adafactor divides by the size of the gradient as Adam does, and Muon's update has the size of
AdamW's: the square root is a guess for these two, which no paper is known to have tried."""
_WARMUP_SAMPLES_SHARE = 0.02
"""A guess: share of the run's steps. Published runs warm up over 0.1 to 5 % of their steps."""
_IMAGENET_EPOCHS = 5
"""Epochs of warm-up that Goyal et al. used, section 2.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRate:
    """A learning rate for another batch, by both rules."""

    base_rate: float
    base_batch: int
    batch: int
    linear_rate: float
    """Rate x (batch / base batch)."""

    sqrt_rate: float
    """Rate x the square root of (batch / base batch)."""

    rule: Rule
    """The rule that fits the optimizer."""

    reason: str
    """Why that rule, with its source."""

    warmup_steps: int | None
    """Steps over which to rise from the base rate; None when the run's length is not known."""

    warmup_reason: str

    @property
    def learning_rate(self) -> float:
        """The rate by the rule that fits."""
        return self.linear_rate if self.rule == "linear" else self.sqrt_rate


def scale_learning_rate(
    base_rate: float,
    *,
    base_batch: int,
    batch: int,
    optimizer: str,
    rule: Rule | None = None,
    samples: int | None = None,
    steps: int | None = None,
) -> ScaledRate:
    """The learning rate for another batch: linear for SGD, by the square root for Adam(W).

    Both hold up to a batch size that depends on the task, and neither beyond it (see
    `critical_batch`). Under accumulation, the batch is that of a whole optimizer step.

    Args:
        base_rate: A rate that is known to train well.
        base_batch: Samples a step it was found at.
        batch: Samples a step now.
        optimizer: `sgd`, `adam`, `adamw`, `adamw-8bit`, `adafactor` or `muon`.
        rule: Instead of the optimizer's own.
        samples: In one epoch: warm-up is then five epochs, 10 % of `steps` at most.
        steps: In the whole run.

    Source: linear and warm-up: Goyal et al., arXiv:1706.02677, sections 2.1 and 2.2. Square root:
    Malladi et al., arXiv:2205.10287, which also moves Adam's betas (1 - beta times the ratio) and
    epsilon; at large ratios do the same.

    >>> rate = scale_learning_rate(0.001, base_batch=64, batch=512, optimizer="adamw")
    >>> rate.linear_rate, round(rate.sqrt_rate, 5), round(rate.learning_rate, 5)
    (0.008, 0.00283, 0.00283)
    """
    if not base_rate > 0 or base_batch < 1 or batch < 1:
        raise ValueError("the learning rate is above 0 and both batches are at least 1")
    if optimizer not in _RULES:
        raise ValueError(f"no rule is known for {optimizer!r}; known are {', '.join(_RULES)}")
    ratio = batch / base_batch
    chosen = rule or _RULES[optimizer]
    warmup, why = _warmup(batch, ratio, samples, steps)
    return ScaledRate(
        base_rate=base_rate,
        base_batch=base_batch,
        batch=batch,
        linear_rate=base_rate * ratio,
        sqrt_rate=base_rate * sqrt(ratio),
        rule=chosen,
        reason="as asked" if rule is not None else _reason(optimizer),
        warmup_steps=warmup,
        warmup_reason=why,
    )


def _reason(optimizer: str) -> str:
    if _RULES[optimizer] == "linear":
        return (
            "SGD's step is as long as its gradient, and k small steps are about one of k times the "
            "length (Goyal et al., arXiv:1706.02677)"
        )
    if optimizer in ("adafactor", "muon"):
        return f"as for AdamW, whose updates are about as large: a guess for {optimizer}"
    return (
        "Adam divides by the size of the gradient, so its step keeps its noise when the rate grows "
        "with the square root of the batch (Malladi et al., arXiv:2205.10287)"
    )


def _warmup(
    batch: int, ratio: float, samples: int | None, steps: int | None
) -> tuple[int | None, str]:
    if ratio <= 1:
        return 0, "the batch does not grow, so the rate needs no warm-up that it did not have"
    if samples is not None:
        epochs = ceil(_IMAGENET_EPOCHS * samples / batch)
        if steps is None or epochs <= steps // 10:
            return epochs, f"{_IMAGENET_EPOCHS} epochs of {samples} samples (Goyal et al.)"
        return max(1, steps // 10), f"a tenth of {steps} steps, which is less than 5 epochs"
    if steps is not None:
        warmup = max(1, round(_WARMUP_SAMPLES_SHARE * steps * sqrt(ratio)))
        why = f"2 % of {steps} steps, longer for the larger batch, a tenth at most: a habit, no law"
        return min(warmup, max(1, steps // 10)), why
    return None, "give the run's steps or the epoch's samples"
