"""What a training plan (contract 004) states, beside the answer to it: nothing is lost in silence.

A strategy becomes settings of the job where there is such a setting; a target is a goal, which the
answer's own number is held against. Everything that the answer has otherwise is a row with the
reason.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any

from paceline.job import Job
from paceline.units import parse_seconds

GOALS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "performance_targets.throughput": ("at least", "90 samples/sec", ("samples/sec", "samples/s")),
    "performance_targets.tokens_per_s": ("at least", "90K tokens/sec", ("tokens/sec", "tokens/s")),
    "performance_targets.gpu_utilization": ("at least", "90%", ("%",)),
    "performance_targets.checkpoint_overhead": ("at most", "5%", ("%",)),
    "checkpoint_strategy.expected_recovery_time": ("at most", "2m 30s", ()),
}
"""Key of a number that a plan aims at -> which side of it is good, how it is written, and its
units; none for a duration."""

COPIES = "a run writes to a disk first; only Paceline's engine then copies each checkpoint there"

_LENGTH = "how long an epoch is, the plan does not say"
_OTHER = "the job has another"
_FILES = "a run's own files are never compressed; its copies are, without loss, as the setting says"
SETTINGS: Mapping[str, Mapping[str, tuple[str, str, str]]] = {
    "strategy": {
        "nodes": ("a whole number", "cluster.nodes", _OTHER),
        "gpus_per_node": ("a whole number", "cluster.per_node", _OTHER),
        "total_gpus": ("a whole number", "cluster.nodes", "it is nodes x gpus_per_node"),
    },
    "batch_configuration": {
        "per_gpu_batch_size": (
            *("a whole number", "layout.micro_batch"),
            "the plan finds the micro-batch that fits",
        ),
        "total_batch_size": ("a whole number", "train.global_batch", _OTHER),
        "gradient_accumulation_steps": (
            *("a whole number", "layout.micro_batch"),
            "it follows from the micro-batch and the layout",
        ),
        "learning_rate": ("a number", "train.learning_rate", "it follows the batch"),
        "warmup_epochs": ("zero or more", "train.warmup_steps", _LENGTH),
        "warmup_steps": ("zero or more", "train.warmup_steps", _OTHER),
    },
    "checkpoint_strategy": {
        "compression": ("text", "checkpoint.compress", _FILES),
        "storage": ("text", "checkpoint.copy_to", COPIES),
        "frequency": ("text", "checkpoint.every", f"only every_N_steps is a setting: {_LENGTH}"),
        "retention": ("text", "checkpoint.keep_last", "only last_N_checkpoints is one"),
    },
}
"""Section -> key -> its kind, the setting that it becomes, and why the answer may have another."""

ASYNC = "Paceline's engine always writes in the background, and MLX's example program always waits"

_OWN: Mapping[str, str] = {
    "checkpoint_strategy.async": f"no setting: {ASYNC}",
    "checkpoint_strategy.approach": "said for the job's engine, which has one way to do it",
    "strategy.approach": "said for the layout that was planned: layout.* of the job fixes another",
    "verification_steps": "written for the plan's target, with commands and messages that exist",
    "rdma_config.env_vars": "none is set by hand: env_vars_reason",
    "version": "the answer's own",
}
"""Key -> why the answer has words of its own."""

_NOT_STATED = ("null_reasons", "stated")
"""Sections of an answer that state nothing when it is read as a plan."""

_SECTION = "written for this plan and its target; what was stated is no setting of a job"
_AIM = r"\s*(?:at least|at most|[<>~≥≤]?=?)\s*"
_NUMBER = re.compile(_AIM + r"(\d+(?:,\d{3})*(?:\.\d+)?)\s*([KMB]?)\s*(\S*?)\+?(?: |$)")
_DURATION = re.compile(_AIM + r"((?:[\d.]+\s*[A-Za-z]+(?:\s+|$|(?=\d)))+)")
_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A key whose answer is not what was stated."""

    key: str
    stated: object
    answer: object
    is_met: bool | None
    """Whether the answer's number reaches a goal; None where it is no goal."""

    reason: str


def goal_number(text: str, units: tuple[str, ...]) -> float | None:
    """The number in a goal, in its unit, or seconds without one; None where it has none.

    >>> goal_number(">80%", ("%",)), goal_number("135K tokens/sec", ("tokens/sec",))
    (80.0, 135000.0)
    >>> goal_number("< 5 minutes", ()), goal_number("5-10%", ("%",))
    (300.0, None)
    """
    found = (_NUMBER if units else _DURATION).match(text)
    if found is None or (units and found[3] not in units):
        return None
    try:
        number = float(found[1].replace(",", "")) if units else parse_seconds(found[1])
    except ValueError:
        return None
    return number * _SCALES[found[2]] if units else number


def compare_stated(
    stated: Mapping[str, Any], answer: Mapping[str, Any], job: Job
) -> Iterator[Stated]:
    """A row for each key of a training plan where the answer to it differs.

    Args:
        stated: The training plan that the job was made of.
        answer: The plan in the coordinator's words.
    """
    for key, value, found in _pairs(stated, answer):
        if not _is_same(value, found):
            is_met, reason = _judge(key, value, found) or (None, _reason(key, job, answer))
            yield Stated(key=key, stated=value, answer=found, is_met=is_met, reason=reason)


def _pairs(
    stated: Mapping[str, Any], answer: Any, before: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name, value in stated.items():
        if not before and name in _NOT_STATED:
            continue
        found = answer.get(name) if isinstance(answer, Mapping) else None
        if isinstance(value, Mapping) and value:
            yield from _pairs(value, found, f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", value, found


def _is_same(value: object, found: object) -> bool:
    if isinstance(value, int | float) and isinstance(found, int | float):
        return isclose(value, found)
    return value == found


def _judge(key: str, value: object, found: object) -> tuple[bool | None, str] | None:
    if key not in GOALS:
        return None
    side, example, units = GOALS[key]
    goal, estimate = (goal_number(str(each), units) for each in (value, found))
    if goal is None:
        return None, f"a goal that cannot be compared: write it like {example!r}"
    if estimate is None:
        return None, "a goal, and the answer's number is not known: null_reasons"
    is_met = estimate >= goal if side == "at least" else estimate <= goal
    verb = "reaches" if is_met else "misses"
    return is_met, f"a goal ({side}), no setting: the plan's estimate {verb} it"


def _reason(key: str, job: Job, answer: Mapping[str, Any]) -> str:
    section, _, name = key.partition(".")
    if (row := SETTINGS.get(section, {}).get(name)) is not None:
        _, setting, why = row
        if job.lines.get(tuple(setting.split("."))) == 0:
            return f"--set gives {setting}"
        return f"{why}; the setting is {setting}"
    own = _OWN.get(key) or _OWN.get(key.rpartition(".")[0])
    if own is not None:
        return own
    inner = answer.get(section) if name else answer
    is_known = isinstance(inner, Mapping) and (name.partition(".")[0] or section) in inner
    return _SECTION if is_known else "the contract has no such key, and nothing uses it"
