"""What is computed again in the backward pass instead of kept.

A block's `forward` is replaced in place, so parameters and modules keep their names and hooks of
FSDP2 stay outside: in the backward pass the block is gathered once for both.

Random numbers are drawn again as they were drawn first, so dropout is the same.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from paceline.choices import Recompute
from paceline.parallel.layout import Layout
from paceline.runtime._torch_private import (
    TorchDispatchMode,
    detached_in_mode,
    tree_map_only,
    version_of,
)
from paceline.runtime.strategy.blocks import HasBlocks, numbered_blocks

_KEPT_NAMES = (
    "aten.mm",
    "aten.addmm",
    "aten._grouped_mm",
    "aten._scaled_mm",
    "aten.convolution",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
)
"""Operations whose outputs selective recompute keeps: products of matrices, and attention that does
not write down its scores. As `profile/saved.py` counts; `aten.bmm`, by which other attention makes
its scores, is not among them."""


def _operations(names: tuple[str, ...]) -> frozenset[Any]:
    """The default overloads; some exist only in some builds of torch."""
    found = (getattr(torch.ops.aten, name.removeprefix("aten."), None) for name in names)
    return frozenset(packet.default for packet in found if packet is not None)


KEPT = _operations(_KEPT_NAMES)


def recompute_blocks(model: nn.Module, layout: Layout, ways: HasBlocks | None = None) -> nn.Module:
    """Have a model's blocks recomputed as the layout says; returns the model. After the splits,
    before `shard`.

    `full` keeps of every `recompute_every`-th block (counted in the whole model, from the first)
    only its input; `selective` keeps of every block its input and the outputs of `KEPT`.
    Gradients are the same bits as without: the same operations run on the same numbers.

    Source: Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198.
    """
    options = _OPTIONS[layout.recompute]
    if options is None:
        return model
    for index, block in numbered_blocks(model, ways):
        if index % layout.recompute_every == 0:
            block.forward = _recomputed(block.forward, **options)
    return model


def _recomputed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        chosen = dict(options)
        if "context_fn" in chosen and not torch.compiler.is_compiling():
            chosen["context_fn"] = _keep_and_give
        return checkpoint(forward, *args, use_reentrant=False, **chosen, **kwargs)

    return recomputing


def _keep(_: SelectiveCheckpointContext, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    if operation in KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class _Kept:
    """A tensor, and which version of its numbers it was."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = detached_in_mode(tensor), version_of(tensor)

    def given(self) -> torch.Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "the output of a kept operation was written over in place: recompute nothing, or "
                "all (layout.recompute=full)"
            )
        return self.tensor


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around the forward pass: the outputs of `KEPT` are kept, in order."""

    def __init__(self, kept: Mapping[Any, deque[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in KEPT:
            self.kept[func].append(tree_map_only(torch.Tensor, _Kept, out))
        return out


class _Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around the recomputation: the kept outputs stand for their operations.

    Everything else simply runs. torch's own mode holds every operation against the forward pass,
    and FSDP2's hooks of experts inside a block do other things in a backward pass.
    """

    def __init__(self, kept: Mapping[Any, deque[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KEPT:
            return func(*args, **(kwargs or {}))
        if not self.kept[func]:
            raise RuntimeError(
                f"{func} is called more often in the backward pass than in the forward pass: the "
                "block depends on something that changed between them. Recompute nothing, or all "
                "(layout.recompute=full)"
            )
        return tree_map_only(_Kept, _Kept.given, self.kept[func].popleft())


def _keep_and_give() -> tuple[_Keeping, _Giving]:
    kept: Mapping[Any, deque[Any]] = defaultdict(deque)
    return _Keeping(kept), _Giving(kept)


_keeping = partial(create_selective_checkpoint_contexts, _keep)
"""torch.compile takes a partial of this function, and no other."""

_OPTIONS: Mapping[Recompute, Mapping[str, Any] | None] = {
    "none": None,
    "selective": {"context_fn": _keeping},
    "full": {},
}
"""What `checkpoint` is called with, by policy; None where nothing is recomputed."""
