"""`paceline.log`: steps, numbers and checkpoints of any training script, for its run's record.

Under `paceline run` the environment names a file, and rank 0 appends a line for each call; whoever
watches the run reads it. Without that variable a call does nothing.
"""

import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from typing import SupportsFloat

VARIABLE = "PACELINE_LOG"
"""Names the file that calls are appended to: set by `paceline run`, or by hand."""


def log(
    values: Mapping[str, SupportsFloat] | None = None,
    /,
    *,
    step: int | None = None,
    steps: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **more: SupportsFloat,
) -> None:
    """Record numbers of a training step, or a checkpoint, in the run's `metrics.jsonl` and events.

    Call it on every rank or on rank 0: the others' calls do nothing. Nothing is recorded where the
    environment has no PACELINE_LOG, as under torchrun or plain Python; set it to a file's path to
    have one JSON line a call there.

    Args:
        values: Number by name, for names that are not Python's, such as `reward/mean`. A tensor
            with one element will do; reading it waits for its device.
        step: From 1. Left out, calls with training numbers count up, and others are of the last.
        steps: How many the run will have, for the time that is left.
        checkpoint: Path of a checkpoint that is complete.
        more: Numbers by name. `loss`, `grad_norm`, `learning_rate` (`lr`), `tokens_per_s`, `mfu`,
            `accuracy`, `eval_loss` and `eval_accuracy` are known; others are curves of their own.

    Raises:
        TypeError: A value is not a number.
    """
    path = os.environ.get(VARIABLE)
    if path and os.environ.get("RANK", "0") == "0":
        _WRITER.write(path, {**(values or {}), **more}, step, steps, checkpoint)


def is_evaluation(name: str) -> bool:
    """Whether a name is of an evaluation's number: `val_loss` is, `value_loss` is not."""
    return re.match(r"(?i)(?:val|valid|validation|eval|test)[_/ ]", name) is not None


class _Writer:
    """Appends lines to the file, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = 0
        self._has_failed = False

    def write(
        self,
        path: str,
        values: Mapping[str, SupportsFloat],
        step: int | None,
        steps: int | None,
        checkpoint: str | os.PathLike[str] | None,
    ) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        trains = any(not is_evaluation(name) for name in numbers)
        with self._lock:
            self._step = step if step is not None else self._step + trains
            line = {
                "step": self._step or None,
                "steps": steps,
                "at": time.time(),
                "values": {k: v if math.isfinite(v) else None for k, v in numbers.items()},
                "checkpoint": os.fspath(checkpoint) if checkpoint is not None else None,
            }
            self._append(path, json.dumps(line) + "\n")

    def _append(self, path: str, line: str) -> None:
        """A disk that is full or gone never ends the training; the first time is printed."""
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if not self._has_failed:
                print(
                    f"paceline.log: {path}: {error.strerror}; training continues", file=sys.stderr
                )
            self._has_failed = True


_WRITER = _Writer()
