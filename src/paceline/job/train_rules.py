"""Rules between the settings of `train` and `recovery`, and what follows from them."""

import math
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from paceline.choices.optimizers import OPTIMIZERS
from paceline.errors import Problem
from paceline.job.job import JobSpec
from paceline.job.non_defaults import settings_asked
from paceline.job.train import TrainSpec

_ADAM = tuple(word for word, facts in OPTIMIZERS.items() if facts.has_betas)

_ONLY_WITH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "train.betas": ("train.optimizer", _ADAM),
    "train.eps": ("train.optimizer", _ADAM),
    "train.decay_steps": ("train.schedule", ("wsd",)),
    "train.final_learning_rate": ("train.schedule", ("cosine", "linear", "wsd")),
    "train.powersgd_rank": ("train.gradient_compression", ("powersgd",)),
    "train.powersgd_start": ("train.gradient_compression", ("powersgd",)),
    "recovery.batch": ("recovery.shrink", ("true",)),
}
"""Setting -> the setting that must have one of these values for it to be used."""

_DECAY_SHARE = 0.1
"""Part of a run over which `wsd` lets the learning rate fall. Source: MiniCPM, arXiv:2404.06395,
section 4.3: a tenth of the tokens is enough."""


def decay_steps(train: TrainSpec) -> int:
    """Last steps over which the learning rate falls: all after the warm-up, except with `wsd`.

    >>> decay_steps(TrainSpec(global_batch=8, steps=100, schedule="wsd"))
    10
    """
    if train.schedule != "wsd":
        return train.steps - train.warmup_steps
    if train.decay_steps == "auto":
        return max(1, round(_DECAY_SHARE * train.steps))
    return train.decay_steps


def learning_rate_at(step: int, train: TrainSpec) -> float:
    """Learning rate of one optimizer step.

    The warm-up's last step has the peak rate, the run's last step the final one. A warm-up longer
    than the run is cut off by the run's end. `wsd` has the peak rate until `decay_steps` are left.

    >>> train = TrainSpec(global_batch=8, steps=100, learning_rate=1.0, warmup_steps=10)
    >>> [round(learning_rate_at(step, train), 3) for step in (1, 10, 55, 100)]
    [0.1, 1.0, 0.55, 0.1]
    """
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    if train.schedule == "constant":
        return train.learning_rate
    begin = max(train.warmup_steps, train.steps - decay_steps(train))
    progress = min(1.0, max(0, step - begin) / (train.steps - begin))
    falling = (1 + math.cos(math.pi * progress)) / 2 if train.schedule == "cosine" else 1 - progress
    final = train.final_learning_rate
    return train.learning_rate * (final + (1 - final) * falling)


_RATE = (
    *("train.learning_rate", "train.warmup_steps", "train.schedule", "train.final_learning_rate"),
    *("train.decay_steps", "train.steps"),
)
"""Settings that a step has its learning rate from."""

_STEP = (
    *("train.betas", "train.eps", "train.weight_decay", "train.clip_norm", "train.router_loss"),
    *("train.states", "train.gradient_compression", "train.powersgd_rank", "train.powersgd_start"),
)
"""Settings with which a step computes other numbers."""


def other_training(before: JobSpec, after: JobSpec, done: int) -> list[str]:
    """Settings with which the steps that are done would have been other ones, before and now.

    Args:
        before: What they were done with.
        after: What the run is resumed with.
        done: Steps that are done.
    """
    steps = range(1, done + 1)
    changed = {
        name: f"{name} was {old} and is {new}"
        for name in (*_RATE, *_STEP)
        if (old := attrgetter(name)(before)) != (new := attrgetter(name)(after))
    }
    if changed.keys() & set(_RATE) and all(
        learning_rate_at(step, before.train) == learning_rate_at(step, after.train)
        for step in steps
    ):
        changed = {name: text for name, text in changed.items() if name not in _RATE}
    return list(changed.values()) if done else []


def check_training(spec: JobSpec, where: Callable[[str], str]) -> Iterator[Problem]:
    """`J007` for what is given and would not be used.

    Args:
        where: The place of a setting in the job file.
    """
    asked = settings_asked(spec)
    for name, (decides, values) in _ONLY_WITH.items():
        value = attrgetter(decides)(spec)
        has = str(value).lower() if isinstance(value, bool) else value
        if name in asked and has not in values:
            yield Problem(
                code="J007",
                what=f"{name} is given, and with {decides}: {has} nothing uses it",
                where=where(name),
                fix=f"leave it out, or set {decides} to {' or '.join(values)}",
            )


def check_phases(spec: JobSpec, where: Callable[[str], str]) -> Iterator[Problem]:
    """`J007` for phases longer than the run, whose steps are known; as `check_training`."""
    train = spec.train
    if train.decay_steps != "auto" and train.warmup_steps + train.decay_steps > train.steps:
        yield Problem(
            code="J007",
            what=f"warmup_steps {train.warmup_steps} and decay_steps {train.decay_steps} are more "
            f"than the run's {train.steps} steps",
            where=where("train.decay_steps"),
            fix=f"set train.decay_steps to {max(1, train.steps - train.warmup_steps)} or less",
        )
