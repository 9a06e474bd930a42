"""From which random numbers dropout draws: the generator's state before each dropout module.

Ranks with the same state drop the same places of what they hold. The masks themselves would not
tell: what is 0 before dropout is 0 after it, dropped or not.

Leaves out: dropout inside a fused attention, which is no module.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.runtime._torch_private import backward_node
from paceline.runtime.verify.model import dropouts


class Masks:
    """The states of one step."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def clear(self) -> None:
        self.digests, self.counts = {}, {}

    @contextmanager
    def over(self, model: nn.Module) -> Iterator[None]:
        hooks = [
            module.register_forward_pre_hook(self._before(name.removeprefix("module.")))
            for name, module in dropouts(model).items()
            if module.p > 0
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, name: str) -> Any:
        def read(_: nn.Module, args: tuple[Any, ...]) -> None:
            if backward_node() is not None or not isinstance(args[0], Tensor):
                return
            given = args[0].to_local() if isinstance(args[0], DTensor) else args[0]
            state = (
                torch.cuda.get_rng_state(given.device) if given.is_cuda else torch.get_rng_state()
            )
            before = self.digests.get(name, "").encode()
            self.digests[name] = hashlib.sha256(before + state.numpy().tobytes()).hexdigest()
            self.counts[name] = self.counts.get(name, 0) + given.numel()

        return read
