"""Random numbers for dropout when the tensor ranks hold different parts of a tensor.

All tensor ranks of a group start from the same seed, so that what they all hold gets one mask.
Between `enter` and `leave` each draws numbers of its own. What follows `leave` is again the same
on all. Nothing is kept between two stretches but the generator's own state, which checkpointing
restores: a recomputed stretch draws the same masks.
"""

import torch
from torch import Tensor

from paceline.runtime._torch_private import FakeTensor

_STRIDE = 0x9E3779B97F4A7C15
"""Distance between the ranks' seeds. Source: the increment of SplitMix64 (Steele et al., 2014)."""

_SEEDS = 2**63


class SplitRandom:
    """The default generator of a device, switched between shared and this rank's own numbers."""

    def __init__(self, tensor_rank: int) -> None:
        self.tensor_rank = tensor_rank
        self._own_seed: int | None = None
        self._shared_seed = 0
        self._shared_state = torch.empty(0, dtype=torch.uint8)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, near: Tensor) -> None:
        """Draw this rank's own numbers from here on, on the device of `near`."""
        if _has_no_values(near) or self._is_inside(near):
            return
        generator = _generator(near)
        if near.is_cuda:  # seed and offset: no number is drawn, so nothing waits for the device
            self._shared_seed, offset = generator.initial_seed(), generator.get_offset()
            self._own_seed = self._seed_from(self._shared_seed)
            generator.manual_seed(self._own_seed)
            generator.set_offset(offset)
        else:
            drawn = int(torch.randint(_SEEDS - 1, (), generator=generator))
            self._own_seed = self._seed_from(drawn)
            self._shared_state = generator.get_state()
            generator.manual_seed(self._own_seed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, near: Tensor) -> None:
        """Draw shared numbers again."""
        if _has_no_values(near) or not self._is_inside(near):
            return
        generator = _generator(near)
        if near.is_cuda:
            offset = generator.get_offset()
            generator.manual_seed(self._shared_seed)
            generator.set_offset(offset)
        else:
            generator.set_state(self._shared_state)

    def _is_inside(self, near: Tensor) -> bool:
        return _generator(near).initial_seed() == self._own_seed

    def _seed_from(self, seed: int) -> int:
        return (seed + (self.tensor_rank + 1) * _STRIDE) % _SEEDS


def _generator(near: Tensor) -> torch.Generator:
    if near.is_cuda:
        generator: torch.Generator = torch.cuda.default_generators[near.device.index or 0]
        return generator
    return torch.default_generator


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)
