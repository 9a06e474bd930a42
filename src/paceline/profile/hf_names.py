"""Names of the built-in decoder's parameters, and those of the Hugging Face model it can be.

The decoder computes what `LlamaForCausalLM` does (`Qwen2ForCausalLM` with biases of query, key and
value), so a checkpoint goes from one to the other by names alone.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.profile.shape import DecoderShape

_PARTS = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
"""Ours -> theirs, without the block before and `.weight` after it."""

_THEIRS = {theirs: ours for ours, theirs in _PARTS.items()}
_BLOCK = re.compile(r"(?:blocks|model\.layers)\.(\d+)\.(.+)")


def to_hf_name(name: str) -> str | None:
    """Hugging Face's name of a parameter of the built-in decoder; None for no name of it.

    >>> to_hf_name("blocks.3.attention.query.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    return _renamed(name, _PARTS, "model.layers")


def from_hf_name(name: str) -> str | None:
    """The built-in decoder's name of a parameter of a Llama; None for no name of one.

    >>> from_hf_name("model.embed_tokens.weight")
    'embedding.weight'
    """
    return _renamed(name, _THEIRS, "blocks")


def are_built_in(names: Iterable[str]) -> bool:
    """Whether all names are the built-in decoder's."""
    return all(to_hf_name(name) is not None for name in names)


def hf_config_of(shape: DecoderShape, seq_len: int) -> dict[str, Any]:
    """The config.json of the Hugging Face model that a built-in decoder is."""
    kind = "qwen2" if shape.qkv_bias else "llama"
    architecture = "Qwen2ForCausalLM" if shape.qkv_bias else "LlamaForCausalLM"
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": seq_len,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied_embeddings,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return config


def _renamed(name: str, parts: Mapping[str, str], blocks: str) -> str | None:
    match = _BLOCK.fullmatch(name)
    stem, dot, kind = (match[2] if match else name).rpartition(".")
    other = parts.get(stem)
    if other is None or not dot:
        return None
    return f"{blocks}.{match[1]}.{other}.{kind}" if match else f"{other}.{kind}"
