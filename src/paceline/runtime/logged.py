"""What a training function logs in a step: checked at once, read at the step's end.

Leaves out: where it is written (`loop.py`).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.errors import RunError
from paceline.record.media import MOST_PIXELS, Pixels
from paceline.record.metric_names import METRICS
from paceline.record.metrics import StepMetrics
from paceline.runtime.strategy import local_of

_NAME = re.compile(r"[A-Za-z][\w./-]{0,63}", re.ASCII)
"""Shown as it is in pages and other tools, and part of a file's name. The length is a guess."""

_OURS = {field.name for field in fields(StepMetrics)} - {"accuracy"} | set(METRICS)
_OURS -= {"eval/accuracy"}
"""Both accuracies are of built-in objectives; programs of one's own log theirs."""


class Logged:
    """What a training function has logged in the step being done."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

        self.media: dict[str, str | Pixels] = {}
        """Pictures and texts, as far as they are known on the host."""

        self._tensors: dict[str, Tensor] = {}
        self._is_open = False

    def open(self) -> None:
        """A step begins."""
        self.close()
        self._is_open = True

    def close(self) -> None:
        """No step is being done. What was logged is forgotten."""
        self._is_open = False
        self.numbers, self.media, self._tensors = {}, {}, {}

    def add(self, values: Mapping[str, Any], *, keep: bool, where: str) -> None:
        """Check some values and, where `keep`, take them; a tensor is copied and not waited for.

        Raises:
            RunError: R025, there is no step, a name cannot be used, or a value is none of a number,
                a text and a picture.
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
            for taken in (self.numbers, self.media, self._tensors):
                taken.pop(name, None)
            if isinstance(value, Tensor):
                self._tensors[name] = local_of(value.detach()).clone()
            elif isinstance(value, str):
                self.media[name] = value
            elif isinstance(value, Real):
                self.numbers[name] = float(value)
            else:
                self.media[name] = _as_rows(_array_of(value).copy())

    def read(self, settle: Callable[[], None]) -> None:
        """Read the tensors once `settle` has returned; nothing more is logged in this step."""
        self._is_open = False
        if not self._tensors:
            return
        settle()
        for name, tensor in self._tensors.items():
            if tensor.numel() == 1:
                self.numbers[name] = float(tensor)
            else:
                self.media[name] = _as_rows(tensor.cpu().numpy())
        self._tensors = {}


def _check(name: str, value: Any, where: str) -> None:
    if name in _OURS:
        what = f"session.log: a step's line has its own `{name}`"
        raise _refusal(what, where, f"log it under another name, such as own_{name}")
    if not _NAME.fullmatch(name):
        what = f"session.log: {name!r} cannot be a name"
        fix = "begin with a letter; then up to 63 letters, digits and _ . / -"
        raise _refusal(what, where, fix)
    if isinstance(value, Tensor):
        if value.dtype == torch.uint8 and value.ndim in (2, 3):
            _check_picture(name, tuple(value.shape), where)
            return
        if value.numel() != 1:
            size = " x ".join(map(str, value.shape))
            what = f"session.log: `{name}` is a tensor of {size} numbers"
            fix = f"log one number of it, such as {name}.mean(); a picture is of torch.uint8"
            raise _refusal(what, where, fix)
        if isinstance(value, DTensor) and not all(at.is_replicate() for at in value.placements):
            what = f"session.log: `{name}` is split over ranks, and no rank has its value"
            raise _refusal(what, where, f"log {name}.full_tensor(), which all ranks must call")
    if isinstance(value, Tensor) and not value.is_complex():
        return
    if isinstance(value, Real | str):
        return
    if hasattr(value, "__array_interface__"):
        array = _array_of(value)
        if array.dtype == np.uint8 and array.ndim in (2, 3):
            _check_picture(name, array.shape, where)
            return
    what = f"session.log: `{name}` is a {type(value).__name__}, and no number, text or picture"
    fix = "log an int, a float, a tensor of one number, a str, or a picture as an array of uint8"
    raise _refusal(what, where, fix)


_CHANNELS = (1, 3, 4)


def _check_picture(name: str, shape: tuple[int, ...], where: str) -> None:
    size = " x ".join(map(str, shape))
    if len(shape) == 3 and shape[2] not in _CHANNELS and shape[0] not in _CHANNELS:
        what = f"session.log: `{name}` is {size}, which is no picture"
        fix = "log height x width, or with 3 (RGB) or 4 (RGBA) colours first or last"
        raise _refusal(what, where, fix)
    if math.prod(shape) > 4 * MOST_PIXELS or 0 in shape:
        what = f"session.log: the picture `{name}` is {size}"
        raise _refusal(what, where, f"log one of 1 to {MOST_PIXELS:,} pixels")


def _array_of(value: Any) -> Pixels:
    return np.asarray(value.convert("RGB") if hasattr(value, "convert") else value)


def _as_rows(pixels: Pixels) -> Pixels:
    if pixels.ndim == 3 and pixels.shape[2] not in _CHANNELS:
        pixels = np.moveaxis(pixels, 0, 2)
    return pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels


def _refusal(what: str, where: str, fix: str) -> RunError:
    return RunError.of(code="R025", what=what, where=where, fix=fix)
