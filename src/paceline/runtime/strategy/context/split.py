"""Context parallelism: a sample's tokens are split over the ranks of `layout.context`.

How a model is made to attend over all tokens (`attention.py`). Which tokens a rank has is in
`tokens.py`.

Everything but attention works on one token at a time, and so on a rank's tokens as on all. That is
the assumption: a module that mixes tokens in another way (a convolution along the sample, a
recurrence) is computed wrongly, and is refused where it can be recognised.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from paceline.parallel.layout import Layout
from paceline.profile.ways import Ways
from paceline.runtime.strategy.context.attention import ACTIVE, Context, cannot
from paceline.runtime.strategy.context.documents import cannot_pack, check_not_compiled
from paceline.runtime.strategy.context.huggingface import split_huggingface
from paceline.runtime.strategy.context.tokens import local_spans
from paceline.runtime.strategy.mesh import Meshes
from paceline.runtime.strategy.pipeline.stages import ENTERS_AT_BLOCKS
from paceline.runtime.strategy.ways.ways import block_modules

_APART = "_paceline_keeps_documents_apart"
"""Attribute of a model that has been given a packed sample."""


def split_context(
    model: nn.Module, layout: Layout, meshes: Meshes, ways: Ways | None = None
) -> None:
    """Make a model attend over all tokens of its samples while it is given this rank's.

    In place, and nothing when the layout has one context rank. Modules are taken in the first of
    these ways that there is one for:

    - a module with an attribute `attend` gets this rank's attention there; one with `seq_len` and
      `keep_tokens(spans)` is told its tokens (the built-in decoder);
    - a Hugging Face model gets it as its attention implementation, and position ids;
    - any other module's calls of `attention` and `positions` are answered for this layout.

    Args:
        model: Whole or split otherwise, before DDP or FSDP2. On any device, also meta.
        ways: Whose `attention` names a person's own attention modules inside a block, so that one
            which does not call `attention` is found.

    Raises:
        JobError: The model has something that cannot be computed on a part of the tokens.
    """
    if layout.context == 1:
        return
    context = Context(layout, meshes.place.context, meshes.context)
    replaceable = [module for module in model.modules() if hasattr(module, "attend")]
    if replaceable:
        for module in replaceable:
            setattr(module, "attend", context.attend)  # noqa: B010 - a module may not declare it
        for module in model.modules():
            keep_tokens = getattr(module, "keep_tokens", None)
            if keep_tokens is not None:
                keep_tokens(local_spans(int(module.seq_len), layout, context.rank))  # type: ignore[arg-type]
    elif hasattr(getattr(model, "config", None), "_attn_implementation"):
        split_huggingface(model, context)
    else:
        _answer_calls(model, context, ways)


def keep_apart(model: nn.Module, layout: Layout) -> None:
    """Make a model of transformers ask for documents, the first time it is given a packed sample.

    Other models ask by calling `attention`, and those that are split over context ranks have ours
    already.

    Raises:
        JobError: R030, it cannot keep documents apart.
    """
    if getattr(model, _APART, False):
        return
    setattr(model, _APART, True)
    check_not_compiled(model)
    for part in model.modules() if layout.context == 1 else ():
        if hasattr(part, "base_model_prefix") and hasattr(part, ENTERS_AT_BLOCKS):
            split_huggingface(part, Context(layout, 0, None), cannot_pack)


def _answer_calls(model: nn.Module, context: Context, ways: Ways | None) -> None:
    """Have `attention` and `positions` answered for this context in all modules of the model.

    `forward` is replaced, and not hooked: blocks that are recomputed in the backward pass are run
    by `forward`, past their hooks.
    """
    watched = {id(module) for module in _watched(model, context, ways)}
    for module in model.modules():
        must_ask = id(module) in watched
        if must_ask or not type(module).__module__.startswith("torch."):
            name = type(module).__name__ if must_ask else None
            module.forward = partial(_answered, context, name, module.forward)


def _answered(
    context: Context, must_ask: str | None, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A module's forward pass, and a refusal if one that must call `attention` has not."""
    ACTIVE.append(context)
    if must_ask:
        context.was_asked = False
    try:
        output = forward(*args, **kwargs)
    finally:
        ACTIVE.pop()
    if must_ask and not context.was_asked:
        raise cannot(
            f"{must_ask}: its forward pass did not call paceline.runtime.strategy.attention, so "
            "its tokens see only their rank's",
            "call it where attention is computed, or set layout.context to 1",
        )
    return output


def _watched(model: nn.Module, context: Context, ways: Ways | None) -> list[nn.Module]:
    """The modules that must call `attention`: those that are named, or else the model. A pipeline
    stage may have none."""
    if ways is not None and ways.attention is not None:
        return [block.get_submodule(ways.attention) for _, block in block_modules(model, ways)]
    return [model] if context.layout.pipeline == 1 else []
