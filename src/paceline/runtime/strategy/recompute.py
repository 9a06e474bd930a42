"""What is computed again in the backward pass instead of kept.

A block's `forward` is replaced in place, so parameters and modules keep their names and hooks of
FSDP2 stay outside: in the backward pass the block is gathered once for both.

Random numbers are drawn again as they were drawn first, so dropout is the same.
"""

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
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return recomputing


def _keep(_: SelectiveCheckpointContext, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    if operation in KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_keeping = partial(create_selective_checkpoint_contexts, _keep)
"""torch.compile takes a partial of this function, and no other."""

_OPTIONS: Mapping[Recompute, Mapping[str, Any] | None] = {
    "none": None,
    "selective": {"context_fn": _keeping},
    "full": {},
}
"""What `checkpoint` is called with, by policy; None where nothing is recomputed."""
