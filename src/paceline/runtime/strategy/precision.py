"""Which type the matrix multiplications run in. Parameters and optimizer state stay float32, and
gradients are reduced in float32.

========  ==================================================================================
`fp32`    all in float32
`tf32`    float32, whose products round their inputs to 10 bits of mantissa; Nvidia from Ampere
`bf16`    bfloat16: autocast, or the type that FSDP2 gathers parameters in
`fp16`    float16 in the same way, with a `LossScaler`
`fp8`     bf16, with the linears of the blocks in float8: `fp8.py`
========  ==================================================================================
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from paceline.choices import Precision
from paceline.errors import Problem
from paceline.parallel.layout import Layout

_NARROW: dict[Precision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}

TF32_CAPABILITY, FP8_CAPABILITY = (8, 0), (9, 0)
"""Ampere; Hopper, for float8 with a scale for each row. Source: CUDA C++ Programming Guide, compute
capabilities; `aten/src/ATen/native/cuda/Blas.cpp` of torch 2.13, `_scaled_mm`."""


def narrow_type(precision: Precision) -> torch.dtype | None:
    """The 16-bit type of activations and gathered parameters, or None."""
    return _NARROW.get(precision)


def autocast(
    precision: Precision, device: torch.device | str, layout: Layout
) -> AbstractContextManager[object]:
    """The context for the forward pass and the loss of one micro-batch.

    A narrow type is autocast where every rank holds whole float32 parameters. FSDP2 casts the
    gathered parameters itself (half the bytes on the wire), so there it is nothing at all.
    """
    narrow = narrow_type(precision)
    if narrow is None or casts_itself(layout):
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=narrow)


def casts_itself(layout: Layout) -> bool:
    """Whether the wrapped model casts its own parameters, as FSDP2 does."""
    return layout.keeps_shards


def set_up_precision(precision: Precision) -> None:
    """Say once, before the first step, what float32 products may round to. Of the whole process."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def check_precision(
    precision: Precision, layout: Layout, device_type: str, capability: tuple[int, int] | None
) -> Iterator[Problem]:
    """What the hardware, or a layout, cannot do.

    Args:
        capability: `torch.cuda.get_device_capability()` of the weakest accelerator; None on a CPU.
    """
    needed = {"tf32": TF32_CAPABILITY, "fp8": FP8_CAPABILITY}.get(precision)
    if needed is not None and (capability is None or capability < needed):
        has = "a CPU" if capability is None else f"compute capability {_version(capability)}"
        yield Problem(
            code="R034",
            what=f"precision {precision} needs an Nvidia GPU of compute capability "
            f"{_version(needed)} or newer, and this machine has {has}",
            where="train.precision",
            fix="set train.precision to fp32" + ("" if device_type == "cpu" else " or bf16"),
        )
    if precision == "fp8" and layout.tensor > 1:
        yield Problem(
            code="R034",
            what="float8 linears are not split over tensor ranks: a row's scale would need the "
            "largest value of all ranks",
            where="train.precision",
            fix="set train.precision to bf16, or layout.tensor to 1",
        )


def _version(capability: tuple[int, int]) -> str:
    return ".".join(str(number) for number in capability)


LEAST_SCALE, MOST_SCALE = 2.0**-14, 2.0**24
"""Bounds of the loss scale. A guess, torch has none: 2^-14 is fp16's least normal number, so
gradients that overflow even there are not the scale's doing; 2^24 is 256 times where it begins,
eight doublings, and further ones would only be taken back by the next overflow."""


class LossScaler:
    """Keeps fp16 gradients inside fp16's range: the loss is multiplied before the backward pass,
    the gradients divided after it.

    The scale is halved after a step whose gradients are not finite, which is not applied, and
    doubled after `patience` good steps in a row. Every rank must be told the same: whether *any*
    rank found one, by the vote that all ranks take before a step is applied.

        (loss * scaler.factor).backward()
        norm = gradient_norm(model) / scaler.factor   # and gradients with it
        scaler.update(found_inf=vote(...))

    Source: Micikevicius et al., arXiv:1710.03740, section 3.2; `torch.amp.GradScaler` has the same
    rule and numbers, and cannot be told what other ranks found.
    """

    def __init__(self, *, initial: float = 2.0**16, patience: int = 2000) -> None:
        self._scale = initial
        self._patience = patience
        self._num_good = 0

    @property
    def is_least(self) -> bool:
        """Whether it is at the bound below which it is not lowered."""
        return self._scale <= LEAST_SCALE

    @property
    def factor(self) -> float:
        """What the loss is multiplied by now; a power of two, so that nothing is rounded."""
        return self._scale

    def update(self, *, found_inf: bool) -> None:
        """Args:
        found_inf: Whether any rank's gradients were not finite, so that none applied the step.
        """
        self._num_good = 0 if found_inf else self._num_good + 1
        if found_inf:
            self._scale = max(self._scale / 2, LEAST_SCALE)
        elif self._num_good == self._patience:
            self._num_good = 0
            self._scale = min(self._scale * 2, MOST_SCALE)

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint: the same on every rank."""
        return {"scale": self._scale, "num_good": self._num_good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._scale, self._num_good = state["scale"], int(state["num_good"])
