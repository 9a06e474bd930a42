"""Numbers that a training function logs in a step: checked at once, read at the step's end.

Leaves out: where they are written (`loop.py`, `tensorboard.py`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Real
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.errors import RunError
from paceline.record.metric_names import METRICS
from paceline.record.metrics import StepMetrics
from paceline.runtime.strategy import local_of

_NAME = re.compile(r"[A-Za-z][\w./-]{0,63}", re.ASCII)
"""Shown as it is in a page, a picture and a TensorBoard tag. The length is a guess."""

_OURS = {field.name for field in fields(StepMetrics)} - {"accuracy"} | set(METRICS)
_OURS -= {"eval/accuracy"}
"""Both accuracies are of built-in objectives; programs of one's own log theirs."""


class Logged:
    """What a training function has logged in the step being done."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        """Those whose values are known on the host."""

        self._tensors: dict[str, Tensor] = {}
        self._is_open = False

    def open(self) -> None:
        """A step begins."""
        self.close()
        self._is_open = True

    def close(self) -> None:
        """No step is being done. What was logged is forgotten."""
        self._is_open = False
        self.numbers, self._tensors = {}, {}

    def add(self, values: Mapping[str, Any], *, keep: bool, where: str) -> None:
        """Check some numbers and, where `keep`, take them; a tensor is copied and not waited for.

        Raises:
            RunError: R025, there is no step, a name cannot be used, or a value is no number.
        """
        if not self._is_open:
            raise _refusal(
                "session.log was called outside a step",
                where,
                "call it between `for step in session.steps(...)` and the next step; an evaluation "
                "returns its numbers as the loss of a source",
            )
        for name, value in values.items():
            _check(name, value, where)
            if not keep:
                continue
            self.numbers.pop(name, None)
            self._tensors.pop(name, None)
            if isinstance(value, Tensor):
                self._tensors[name] = local_of(value.detach()).clone()
            else:
                self.numbers[name] = float(value)

    def read(self, settle: Callable[[], None]) -> None:
        """Read the tensors once `settle` has returned; nothing more is logged in this step."""
        self._is_open = False
        if not self._tensors:
            return
        settle()
        self.numbers |= {name: float(tensor) for name, tensor in self._tensors.items()}
        self._tensors = {}


def _check(name: str, value: Any, where: str) -> None:
    if name in _OURS:
        what = f"session.log: a step's line has its own `{name}`"
        raise _refusal(what, where, f"log it under another name, such as own_{name}")
    if not _NAME.fullmatch(name):
        what = f"session.log: {name!r} cannot be the name of a number"
        fix = "begin with a letter; then up to 63 letters, digits and _ . / -"
        raise _refusal(what, where, fix)
    if isinstance(value, Tensor):
        if value.numel() != 1:
            size = " x ".join(map(str, value.shape))
            what = f"session.log: `{name}` is a tensor of {size} numbers"
            raise _refusal(what, where, f"log one number of it, such as {name}.mean()")
        if isinstance(value, DTensor) and not all(at.is_replicate() for at in value.placements):
            what = f"session.log: `{name}` is split over ranks, and no rank has its value"
            raise _refusal(what, where, f"log {name}.full_tensor(), which all ranks must call")
    if isinstance(value, Tensor) and not value.is_complex():
        return
    if not isinstance(value, Real):
        what = f"session.log: `{name}` is a {type(value).__name__}, not a number"
        raise _refusal(what, where, "log an int, a float or a tensor of one number")


def _refusal(what: str, where: str, fix: str) -> RunError:
    return RunError.of(code="R025", what=what, where=where, fix=fix)
