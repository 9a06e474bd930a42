"""Do tasks of lm-evaluation-harness with an exported model: request on stdin, answer on stdout.

    python -m paceline.runtime.harness < request.json

A process of its own, on one device. Both are JSON; the answer is stdout's last line.
"""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from paceline.job.packages import import_package
from paceline.record.outputs import Score
from paceline.runtime.answer import answer

_BATCH = 4
"""Texts in a pass. A guess: four of 4,096 tokens by a vocabulary of 128,000 are 8 GiB of logits."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be evaluated."""

    folder: str
    tasks: tuple[dict[str, Any], ...]
    """As their YAML has them, with whole paths."""


def evaluate(asked: Request) -> list[Score]:
    """What the harness measures of each task, each metric."""
    lm_eval = import_package("lm_eval", "evaluate.tasks needs lm_eval", where="", extra="eval")
    managing = import_package("lm_eval.tasks", "tasks need lm_eval", where="", extra="eval")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": asked.folder},
        tasks=list(asked.tasks),
        device=str(device),
        batch_size=_BATCH,
        log_samples=False,
        # Without the built-in tasks: none of theirs is taken for one of ours by its name.
        task_manager=managing.TaskManager(include_defaults=False),
    )
    scores: list[Score] = []
    for task in asked.tasks:
        name = task["task"]
        num_samples = found["n-samples"][name]["effective"]
        measured = dict(found["results"][name])
        # The harness leaves out metrics that it does not know; here they come back without a value.
        known = {key.partition(",")[0] for key in measured}
        asked_for = [each.get("metric") for each in task.get("metric_list") or ()]
        measured |= {f"{metric},none": None for metric in asked_for if metric not in known}
        scores += _scores(name, measured, num_samples)
    return scores


def _scores(task: str, measured: dict[str, Any], num_samples: int) -> Iterator[Score]:
    """Keys are `acc,none` and `acc_stderr,none`: metric and filter of the answers."""
    for key, value in measured.items():
        metric, comma, answers = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        yield Score(
            task=task,
            metric=metric if answers == "none" else f"{metric} ({answers})",
            value=_number(value),
            error=_number(measured.get(f"{metric}_stderr,{answers}")),
            num_samples=num_samples,
        )


def _number(value: Any) -> float | None:
    """None for what is no finite number: the harness writes N/A where it has no standard error."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


if __name__ == "__main__":
    answer(Request, evaluate)
