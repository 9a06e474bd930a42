"""Context parallelism and packed samples in Hugging Face models.

Their attention is looked up by a name in the config, so ours is registered under a name. For a name
that has no mask function transformers builds no mask, which is what is wanted: whether a token is
seen follows from its position. The base model is given this rank's position ids, from which rotary
tables and position embeddings are read.
"""

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from paceline.errors import JobError
from paceline.runtime.strategy.context.attention import Context, cannot
from paceline.units import with_article

NAME = "paceline_context"

_CONTEXT = "paceline_context"
"""Attribute of every module with a config: the ranks that share its samples."""

_FULL = {"full_attention", "sliding_attention", "attention"}
"""Layer types, as configs name them, whose tokens are mixed by attention and by nothing else."""

_NOT_SPLIT = ("s_aux", "position_bias", "cache", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of transformers' attention functions, beyond ours, that change the result."""


def split_huggingface(
    model: nn.Module, context: Context, refusal: Callable[[str, str], JobError] = cannot
) -> None:
    """Make a Hugging Face model attend over all tokens while it is given this rank's, and to each
    document alone in packed samples.

    The model gets copies of its configs, which other models may share.

    Args:
        refusal: From what cannot be done, and how to do without.

    Raises:
        JobError: R030, the model is of a kind whose tokens cannot be split.
    """
    _check_model(model, refusal)
    _register()
    memo: dict[int, Any] = {}
    module: Any
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            module.config = deepcopy(config, memo)
            # The internal attribute: the public one also looks whether a kernel can be fetched.
            module.config._attn_implementation_internal = NAME
            setattr(module, _CONTEXT, context)
    model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)

    def place(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, _placed(args, kwargs, context)

    _base(model).register_forward_pre_hook(place, with_kwargs=True)


def _check_model(model: nn.Module, cannot: Callable[[str, str], JobError]) -> None:
    config: Any = model.config
    whole = "set layout.context to 1, or data.pack to windows where samples are packed"
    kind = f"{with_article(config.model_type)} model"
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is None or not can_set():
        raise cannot(f"{kind}: transformers has one fixed attention for it", whole)
    if getattr(config, "is_encoder_decoder", False):
        raise cannot(f"{kind}: an encoder and a decoder have tokens of their own", whole)
    if getattr(config, "attention_chunk_size", None) is not None:
        raise cannot(f"{kind}: its attention is in chunks of {config.attention_chunk_size}", whole)
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = sorted(set(types) - _FULL)
    if others:
        raise cannot(f"{kind}: layers of type {', '.join(others)} mix its tokens as well", whole)

    if "position_ids" not in inspect.signature(_base(model).forward).parameters:
        raise cannot(f"{kind}: it counts its tokens' positions itself", whole)


def _base(model: nn.Module) -> nn.Module:
    base: nn.Module = getattr(model, str(model.base_model_prefix), model)
    return base


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def _attend(
    module: nn.Module,
    query_BNSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention functions; `output_BSND`."""
    context: Context = getattr(module, _CONTEXT)
    if attention_mask is not None:
        raise cannot("an attention mask", "leave it out, and fill samples up with real tokens")
    for name in _NOT_SPLIT:
        if others.get(name) is not None:
            raise cannot(
                f"{type(module).__name__}: it passes {name} to attention", "set layout.context to 1"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output_BNSD = context.attend(
        query_BNSD,
        key_BKSD,
        value_BKSD,
        is_causal=bool(causal),
        scale=scaling,
        dropout=dropout,
        window=sliding_window,
        softcap=softcap,
    )
    return output_BNSD.transpose(1, 2).contiguous(), None


def _refuse_labels(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """transformers would shift them within a rank's tokens; the token after those is elsewhere."""
    if kwargs.get("labels") is not None:
        raise cannot("labels given to the model", "compute the loss from its logits")


def _placed(args: tuple[Any, ...], kwargs: dict[str, Any], context: Context) -> dict[str, Any]:
    """The base model's arguments with this rank's position ids."""
    if kwargs.get("attention_mask") is not None:
        raise cannot("an attention mask", "leave it out, and fill samples up with real tokens")
    if kwargs.get("position_ids") is not None:
        raise cannot("position ids of the caller's", "leave them out: they are filled in")
    tokens = kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    tokens = args[0] if tokens is None else tokens
    positions = context.positions(tokens.shape[1], tokens.device)
    return {**kwargs, "position_ids": positions if positions.dim() == 2 else positions[None]}
