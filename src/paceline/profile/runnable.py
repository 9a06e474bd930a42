"""Which models of a config.json Paceline's own runtime can build, and what it would leave out.

The built-in decoder is Llama, Mistral and Qwen2 up to sizes and a bias on three projections.
Planning and other engines know many more families; those are refused by `paceline run` only.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.profile.shape import DecoderShape

RUNNABLE = ("llama", "mistral", "qwen2")
"""`model_type`s that are the built-in decoder up to sizes."""

_NORM_EPS = 1e-6
"""Used when `rms_norm_eps` is left out. Source: LlamaConfig in transformers."""

_ROPE_THETA = 10_000.0
"""Used when `rope_theta` is left out. Source: LlamaConfig in transformers."""


def reasons_against_running(config: Mapping[str, Any]) -> Iterator[str]:
    """Why the built-in decoder cannot be this model, one sentence each; none when it can."""
    kind = config.get("model_type")
    if kind not in RUNNABLE:
        yield f"the built-in decoder can be {', '.join(RUNNABLE)}, not {kind}"
        return
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        yield f"hidden_act is {config['hidden_act']!r}; the built-in decoder computes SwiGLU (silu)"
    if config.get("attention_bias"):
        yield "attention_bias is set; the built-in decoder has no bias on the attention's output"
    if config.get("mlp_bias"):
        yield "mlp_bias is set; the built-in decoder has no bias in the feed-forward"
    if config.get("quantization_config"):
        yield "quantization_config is set; the runtime trains parameters in float32"
    head_dim = shape_of_config(config).head_dim
    if head_dim % 2:
        yield f"a head is {head_dim} wide; rotary positions turn pairs, so it must be even"


def shape_of_config(config: Mapping[str, Any]) -> DecoderShape:
    """The built-in decoder's sizes from fields that `profile_config` found good."""
    kind = config["model_type"]
    heads = config["num_attention_heads"]
    rope = _rope(config)
    return DecoderShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or (8 if kind == "mistral" else heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        rope_theta=_number(config.get("rope_theta") or rope.get("rope_theta"), _ROPE_THETA),
        norm_eps=_number(config.get("rms_norm_eps"), _NORM_EPS),
    )


def left_out(config: Mapping[str, Any]) -> Iterator[str]:
    """What a model asks for that the built-in decoder does not do, one phrase each.

    None of it changes the parameters.
    """
    if config.get("model_type") not in RUNNABLE:
        return
    rope, scaling = _rope(config), config.get("rope_scaling")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    kind = scaling.get("rope_type") or scaling.get("type") or rope.get("rope_type") or "default"
    if kind != "default":
        yield f"scaling of rotary positions ({kind})"
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", config["model_type"] == "mistral"):
        yield f"sliding window of {window} tokens"
    if config.get("attention_dropout"):
        yield f"attention dropout of {config['attention_dropout']}"


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where transformers 5 writes rotary positions."""
    rope = config.get("rope_parameters")
    return rope if isinstance(rope, Mapping) else {}


def _number(value: object, default: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value > 0 else default  # type: ignore[arg-type, operator]
