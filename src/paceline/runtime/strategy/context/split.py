"""Context parallelism: a sample's tokens are split over the ranks of `layout.context`.

How a model is made to attend over all tokens, and what cannot be computed so. Which tokens a rank
has is in `context_tokens`.

Everything but attention works on one token at a time, and so on a rank's tokens as on all. That is
the assumption: a module that mixes tokens in another way (a convolution along the sample, a
recurrence) is computed wrongly, and is refused where it can be recognised.

A person's own module takes part by calling `attention` from here, and `positions` if it needs
them; both are the ordinary thing in a layout without context parallelism.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.parallel.layout import Layout
from paceline.parallel.layout_laws import check_sample
from paceline.profile.ways import Ways
from paceline.runtime.strategy.context.documents import (
    cannot_pack,
    check_not_compiled,
    current,
)
from paceline.runtime.strategy.context.ring import ring_attention
from paceline.runtime.strategy.context.tokens import (
    local_positions,
    local_spans,
    local_tokens,
)
from paceline.runtime.strategy.context.ulysses import Scores, ulysses_attention, whole_attention
from paceline.runtime.strategy.mesh import Meshes
from paceline.runtime.strategy.pipeline.stages import ENTERS_AT_BLOCKS
from paceline.runtime.strategy.ways.ways import block_modules

_APART = "_paceline_keeps_documents_apart"
"""Attribute of a model that has been given a packed sample."""

__all__ = [
    "Context",
    "attention",
    "cannot",
    "keep_apart",
    "local_positions",
    "local_spans",
    "local_tokens",
    "positions",
    "split_context",
]


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
        # Here, because transformers is optional and only its models need it.
        from paceline.runtime.strategy.context.huggingface import split_huggingface

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
            from paceline.runtime.strategy.context.huggingface import split_huggingface

            split_huggingface(part, Context(layout, 0, None), cannot_pack)


class Context:
    """The ranks that share this rank's samples, and attention over all their tokens."""

    def __init__(self, layout: Layout, rank: int, group: dist.ProcessGroup | None) -> None:
        """Args:
        group: All of them; None when there is one, which has all tokens.
        """
        self.layout = layout
        self.rank = rank
        self.group = group
        self.was_asked = False  # by `attention`, since a watched module was entered

    def attend(
        self,
        query_BNSD: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        **scores: Unpack[Scores],
    ) -> Tensor:
        """Attention of this rank's tokens to all tokens of their samples, `output_BNSD`.

        Under autocast it runs in autocast's type, as torch's own attention does.

        Raises:
            JobError: What the arguments ask for cannot be computed in this layout.
        """
        if query_BNSD.shape[2] != key_BKSD.shape[2]:
            raise cannot(
                f"attention of {query_BNSD.shape[2]} queries to {key_BKSD.shape[2]} keys: a token "
                "attends to tokens of another sequence, or a key cache is in use",
                "turn key caches off (use_cache=False), or set layout.context to 1",
            )
        device_type = query_BNSD.device.type
        if torch.is_autocast_enabled(device_type):
            narrow = torch.get_autocast_dtype(device_type)
            query_BNSD, key_BKSD = query_BNSD.to(narrow), key_BKSD.to(narrow)
            value_BKSD = value_BKSD.to(narrow)
        heads = (query_BNSD, key_BKSD, value_BKSD)
        if self.layout.context == 1:
            return whole_attention(*heads, **scores)
        if self.layout.context_kind == "ring":
            is_causal = scores.get("is_causal", True)
            self._check_ring(query_BNSD.shape[2], is_causal, scores)
            assert self.group is not None
            mixed: Tensor = ring_attention(
                *heads,
                self.group,
                is_causal=is_causal,
                scale=scores.get("scale"),
                documents=current(),
            )
            return mixed
        self._check_heads(query_BNSD.shape[1])
        assert self.group is not None
        return ulysses_attention(*heads, self.group, **scores)

    def positions(self, num_tokens: int, device: torch.device | None = None) -> Tensor:
        """Where in their samples this rank's tokens are, given how many it has of each; in packed
        samples `positions_BS`, in their documents."""
        if (documents := current()) is not None:
            return documents.positions(device)
        seq_len = num_tokens * self.layout.context
        return local_positions(seq_len, self.layout, self.rank, device)

    def _check_ring(self, num_tokens: int, is_causal: bool, scores: Scores) -> None:
        """The ring's blocks have no form for these."""
        seq_len = num_tokens * self.layout.context
        fix = "set layout.context_kind to ulysses"
        if num_tokens % 2 and is_causal:
            raise JobError(*check_sample(seq_len, None, None, self.layout))
        if (dropout := scores.get("dropout", 0.0)) > 0:
            raise cannot(
                f"a ring with dropout {dropout:g} of attention weights",
                f"{fix}, or the model's attention dropout (attention_dropout, attn_pdrop) to 0",
            )
        if (window := scores.get("window")) is not None and window < seq_len:
            raise cannot(f"a ring with a window of {window} of {seq_len} tokens", fix)
        if (softcap := scores.get("softcap")) is not None:
            raise cannot(f"a ring with scores capped at {softcap:g}", fix)

    def _check_heads(self, heads: int) -> None:
        if heads % self.layout.context:
            raise JobError(*check_sample(None, heads * self.layout.tensor, None, self.layout))


def cannot(what: str, fix: str) -> JobError:
    """The refusal of something that context parallelism has no form for."""
    return JobError.of(
        code="R030",
        what=f"context parallelism cannot do {what}",
        where="layout.context",
        fix=fix,
    )


_ACTIVE: list[Context] = []
"""Contexts of the modules being called, innermost last. Pushed and popped around `forward`, so
that another model in the same process, or a block that is recomputed in the backward pass, gets
its own."""


def attention(
    query_BNSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention for a person's own module: torch's own, and over all ranks of a sample when its
    tokens are split.

    Args:
        query_BNSD: samples x query heads x tokens x width.
        key_BKSD: As the query; fewer heads, each shared by N / K query heads, are not repeated.
        value_BKSD: As the key.
        is_causal: Whether a token sees only itself and earlier ones.
        scale: Of the scores; 1 / sqrt(D) when None.
        dropout: Share of the attention weights that is dropped; 0 outside training. Not in a ring.
        window: How many tokens a token sees, itself included, or all. Not in a ring.
        softcap: Scores are kept below this by a tangens hyperbolicus, or as they are. Not in a
            ring.
    """
    if _ACTIVE:
        _ACTIVE[-1].was_asked = True
    attend: Callable[..., Tensor] = _ACTIVE[-1].attend if _ACTIVE else whole_attention
    return attend(
        query_BNSD,
        key_BKSD,
        value_BKSD,
        is_causal=is_causal,
        scale=scale,
        dropout=dropout,
        window=window,
        softcap=softcap,
    )


def positions(num_tokens: int, device: torch.device | None = None) -> Tensor:
    """Where in their samples the tokens are that a person's own module is given: 0, 1, 2, ...
    unless they are split. In packed samples `positions_BS`, from 0 in each document."""
    if _ACTIVE:
        return _ACTIVE[-1].positions(num_tokens, device)
    if (documents := current()) is not None:
        return documents.positions(device)
    return torch.arange(num_tokens, device=device)


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
    _ACTIVE.append(context)
    if must_ask:
        context.was_asked = False
    try:
        output = forward(*args, **kwargs)
    finally:
        _ACTIVE.pop()
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
