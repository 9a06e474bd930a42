"""`paceline.log`: steps, numbers and checkpoints of any training script, for its run's record.

Under `paceline run` the environment names a file, and rank 0 appends a line for each call; whoever
watches the run reads it. Without that variable a call does nothing.
"""

import json
import math
import operator
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from typing import SupportsFloat, SupportsIndex

VARIABLE = "PACELINE_LOG"
"""Names the file that calls are appended to: set by `paceline run`, or by hand."""


def log(
    values: Mapping[str, SupportsFloat] | None = None,
    /,
    *,
    step: SupportsIndex | None = None,
    steps: SupportsIndex | None = None,
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
        step: Left out, a call is of the last step that was given; where none ever was, calls with
            training numbers count up.
        steps: How many the run will have, for the time that is left.
        checkpoint: Path of a checkpoint that is complete.
        more: Numbers by name. `loss`, `grad_norm`, `learning_rate` (`lr`), `tokens_per_s`, `mfu`,
            `accuracy`, `eval_loss` and `eval_accuracy` are known; others are curves of their own.

    It raises nothing: what is no number, or a step below 0, is said once on standard error, and
    that call is not recorded.
    """
    path = os.environ.get(VARIABLE)
    if path and os.environ.get("RANK", "0") == "0":
        _WRITER.write(path, values, more, step, steps, checkpoint)


def is_evaluation(name: str) -> bool:
    """Whether a name is of an evaluation's number: `val_loss` is, `value_loss` is not."""
    return re.match(r"(?i)(?:val|valid|validation|eval|test)[_/ ]", name) is not None


class _Writer:
    """Appends lines to the file, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step, self._counts = 0, True
        self._has_failed = False

    def write(
        self,
        path: str,
        values: Mapping[str, SupportsFloat] | None,
        more: Mapping[str, SupportsFloat],
        step: SupportsIndex | None,
        steps: SupportsIndex | None,
        checkpoint: str | os.PathLike[str] | None,
    ) -> None:
        try:
            numbers = {name: float(value) for name, value in {**(values or {}), **more}.items()}
            step, steps = _count("step", step), _count("steps", steps)
            saved = os.fspath(checkpoint) if checkpoint is not None else None
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            self._say(f"{error}; this call is not recorded")  # RuntimeError: a tensor of several
            return
        trains = any(not is_evaluation(name) for name in numbers)
        with self._lock:
            self._counts &= step is None
            self._step = step if step is not None else self._step + (trains and self._counts)
            line = {
                "step": self._step or None,
                "steps": steps,
                "at": time.time(),
                "values": {k: v if math.isfinite(v) else None for k, v in numbers.items()},
                "checkpoint": str(saved) if saved is not None else None,
            }
            self._append(path, json.dumps(line) + "\n")

    def _append(self, path: str, line: str) -> None:
        """A disk that is full or gone never ends the training; the first time is printed."""
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            self._say(f"{path}: {error.strerror}")

    def _say(self, text: str) -> None:
        if not self._has_failed:
            print(f"paceline.log: {text}; training continues", file=sys.stderr)
        self._has_failed = True


def _count(name: str, number: SupportsIndex | None) -> int | None:
    """
    Raises:
        TypeError: It is no whole number.
        ValueError: It is below 0, or of more than 53 bits.
    """
    if number is None:
        return None
    whole = operator.index(number)
    if not 0 <= whole < 2**53:
        raise ValueError(f"{name} {whole} is none")
    return whole


_WRITER = _Writer()
