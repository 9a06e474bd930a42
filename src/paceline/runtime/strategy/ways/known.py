"""The ways of models Paceline knows: its own decoder, and decoders of Hugging Face by family.

tests/runtime/test_tensor.py compares each with the model on one rank.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from paceline.runtime.strategy.local import unwrapped
from paceline.runtime.strategy.ways.peft import is_peft, model_inside, peft_ways
from paceline.runtime.strategy.ways.ways import Way, Ways

OWN = Ways(
    blocks="blocks",
    first=("embedding",),
    last=("norm", "output"),
    tensor={
        "embedding": "embedding",
        "*.attention.query": "column",
        "*.attention.key": "column",
        "*.attention.value": "column",
        "*.attention.output": "row",
        "*.ffn.gate": "column",
        "*.ffn.up": "column",
        "*.ffn.down": "row",
        "output": "head",
    },
    attention="attention",
)
"""Of `runtime.decoder.Decoder`."""

_ENDS: Mapping[str, Way] = {"model.embed_tokens": "embedding", "lm_head": "head"}

_ATTENTION: Mapping[str, Way] = {
    "*.self_attn.q_proj": "column",
    "*.self_attn.k_proj": "column",
    "*.self_attn.v_proj": "column",
    "*.self_attn.o_proj": "row",
}

_GATED: Mapping[str, Way] = {
    "*.mlp.gate_proj": "column",
    "*.mlp.up_proj": "column",
    "*.mlp.down_proj": "row",
}

LLAMA = Ways(
    blocks="model.layers",
    first=("model.embed_tokens",),
    last=("model.norm", "lm_head"),
    tensor={**_ENDS, **_ATTENTION, **_GATED},
    attention="self_attn",
)

_EXPERTS: Mapping[str, Way] = {"*.mlp": "sum", "*.mlp.experts": "experts"}


_WIDE_NORMS: Mapping[str, Way] = {
    "*.self_attn.q_norm": "wide norm",
    "*.self_attn.k_norm": "wide norm",
}

OLMO2 = replace(LLAMA, tensor={**LLAMA.tensor, **_WIDE_NORMS})

MIXTRAL = replace(LLAMA, tensor={**_ENDS, **_ATTENTION, **_EXPERTS}, experts="mlp.experts")

MOE = replace(MIXTRAL, tensor={**MIXTRAL.tensor, **_GATED})
"""Llama with routed experts in some blocks; dense blocks give their sum at the same place."""

QWEN2_MOE = replace(
    MOE,
    tensor={
        **MOE.tensor,
        "*.mlp.shared_expert.gate_proj": "column",
        "*.mlp.shared_expert.up_proj": "column",
        "*.mlp.shared_expert.down_proj": "row",
    },
)

OLMOE = replace(MIXTRAL, tensor={**MIXTRAL.tensor, **_WIDE_NORMS})

STABLELM = replace(LLAMA, divided={"*.self_attn": ("num_heads", "num_key_value_heads")})


PHI3 = replace(
    LLAMA,
    tensor={
        **_ENDS,
        "*.self_attn.qkv_proj": "column",
        "*.self_attn.o_proj": "row",
        "*.mlp.gate_up_proj": "column",
        "*.mlp.down_proj": "row",
    },
    fused={
        "*.self_attn.qkv_proj": ("query", "key", "value"),
        "*.mlp.gate_up_proj": ("gate", "up"),
    },
    divided={"*.self_attn": ("config.num_attention_heads", "num_key_value_heads")},
)

GLM = replace(
    LLAMA,
    tensor={
        **_ENDS,
        **_ATTENTION,
        "*.mlp.gate_up_proj": "column",
        "*.mlp.down_proj": "row",
    },
    fused={"*.mlp.gate_up_proj": ("gate", "up")},
)

STARCODER2 = replace(
    LLAMA,
    tensor={**_ENDS, **_ATTENTION, "*.mlp.c_fc": "column", "*.mlp.c_proj": "row"},
)

NO_GATE = replace(
    LLAMA,
    tensor={**_ENDS, **_ATTENTION, "*.mlp.up_proj": "column", "*.mlp.down_proj": "row"},
)
"""Llama without a gate in the feed-forward."""

PHI = replace(
    LLAMA,
    last=("model.final_layernorm", "lm_head"),
    tensor={
        **_ENDS,
        "*.self_attn.q_proj": "column",
        "*.self_attn.k_proj": "column",
        "*.self_attn.v_proj": "column",
        "*.self_attn.dense": "row",
        "*.mlp.fc1": "column",
        "*.mlp.fc2": "row",
    },
)

_JOINED_END: Mapping[str, Way] = {"transformer.ln_f": "join", "lm_head": "head"}
"""Where the model's code gives the last norm's output the shape of its input."""

GPT2 = Ways(
    blocks="transformer.h",
    first=("transformer.wte", "transformer.wpe"),
    last=("transformer.ln_f", "lm_head"),
    tensor={
        "transformer.wte": "embedding",
        "*.attn.c_attn": "column",
        "*.attn.c_proj": "row",
        "*.mlp.c_fc": "column",
        "*.mlp.c_proj": "row",
        **_JOINED_END,
    },
    fused={"*.attn.c_attn": ("query", "key", "value")},
    divided={"*.attn": ("split_size", "num_heads")},
    attention="attn",
)

GPT_NEO = replace(
    GPT2,
    tensor={
        "transformer.wte": "embedding",
        "*.attn.attention.q_proj": "column",
        "*.attn.attention.k_proj": "column",
        "*.attn.attention.v_proj": "column",
        "*.attn.attention.out_proj": "row",
        "*.mlp.c_fc": "column",
        "*.mlp.c_proj": "row",
        **_JOINED_END,
    },
    fused={},
    divided={"*.attn.attention": ("num_heads",)},
    attention="attn.attention",
)

GPTJ = replace(
    GPT2,
    first=("transformer.wte",),
    tensor={
        "transformer.wte": "embedding",
        "*.attn.q_proj": "column",
        "*.attn.k_proj": "column",
        "*.attn.v_proj": "column",
        "*.attn.out_proj": "row",
        "*.mlp.fc_in": "column",
        "*.mlp.fc_out": "row",
        **_JOINED_END,
    },
    fused={},
    divided={"*.attn": ("num_attention_heads",)},
)

GPT_NEOX = Ways(
    blocks="gpt_neox.layers",
    first=("gpt_neox.embed_in",),
    last=("gpt_neox.final_layer_norm", "lm_head"),
    tensor={
        "gpt_neox.embed_in": "embedding",
        "*.attention.query_key_value": "column",  # by heads: query, key, value of each in turn
        "*.attention.dense": "row",
        "*.mlp.dense_h_to_4h": "column",
        "*.mlp.dense_4h_to_h": "row",
        "lm_head": "head",
    },
    attention="attention",
)

FALCON = Ways(
    blocks="transformer.h",
    first=("transformer.word_embeddings",),
    last=("transformer.ln_f", "lm_head"),
    tensor={
        "transformer.word_embeddings": "embedding",
        "*.self_attention.query_key_value": "column",  # by groups of heads
        "*.self_attention.dense": "row",
        "*.mlp.dense_h_to_4h": "column",
        "*.mlp.dense_4h_to_h": "row",
        "lm_head": "head",
    },
    divided={"*.self_attention": ("num_heads", "num_kv_heads")},
    attention="self_attention",
)

OPT = Ways(
    blocks="model.decoder.layers",
    first=(
        "model.decoder.embed_tokens",
        "model.decoder.embed_positions",
        "model.decoder.project_in",
    ),
    last=("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"),
    tensor={
        "model.decoder.embed_tokens": "embedding",
        "*.self_attn.q_proj": "column",
        "*.self_attn.k_proj": "column",
        "*.self_attn.v_proj": "column",
        "*.self_attn.out_proj": "row",
        "*.fc1": "column",
        "*.fc2": "row",
        "lm_head": "head",
    },
    divided={"*.self_attn": ("num_heads",)},
    attention="self_attn",
)

HUGGING_FACE: Mapping[str, Ways] = {
    "arcee": NO_GATE,
    "cohere": LLAMA,
    "cohere2": LLAMA,
    "cwm": LLAMA,
    "ernie4_5": LLAMA,
    "exaone4": LLAMA,
    "falcon": FALCON,
    "gemma": LLAMA,
    "gemma2": LLAMA,
    "gemma3_text": LLAMA,
    "glm": GLM,
    "glm4": GLM,
    "gpt2": GPT2,
    "gpt_neo": GPT_NEO,
    "gpt_neox": GPT_NEOX,
    "gptj": GPTJ,
    "granite": LLAMA,
    "helium": LLAMA,
    "llama": LLAMA,
    "ministral": LLAMA,
    "mistral": LLAMA,
    "mixtral": MIXTRAL,
    "nemotron": NO_GATE,
    "olmo": LLAMA,
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "olmoe": OLMOE,
    "opt": OPT,
    "phi": PHI,
    "phi3": PHI3,
    "qwen2": LLAMA,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": LLAMA,
    "qwen3_moe": MOE,
    "seed_oss": LLAMA,
    "smollm3": LLAMA,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
}
"""`model_type` -> ways of its class `...ForCausalLM`."""

UNSPLIT: Mapping[str, tuple[str, ...]] = {
    "cohere": ("use_qk_norm",),  # a norm with weights of its own for each head
    "falcon": ("alibi",),  # a slope for each head, made outside of the blocks
    "stablelm": ("qk_layernorm",),
}
"""`model_type` -> settings of its configuration with which matrices are not split."""


def ways_of(model: nn.Module) -> Ways | None:
    """How a model may be split: what it carries as `paceline_ways`, else what is known of its kind.

    None when nothing is known; `generic_ways` may find something.

    Args:
        model: As its factory made it, or inside DDP, which hides what it carries.
    """
    model = unwrapped(model)
    own = getattr(model, "paceline_ways", None)
    if isinstance(own, Ways):
        return own
    if is_peft(model):
        inside = ways_of(model_inside(model))
        return None if inside is None else peft_ways(model, inside)
    if type(model).__module__ == "paceline.runtime.decoder":
        return OWN
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if not isinstance(kind, str) or not hasattr(model, "lm_head"):
        return None
    ways = HUGGING_FACE.get(kind)
    if ways is None:
        return None
    if any(getattr(config, name, False) for name in UNSPLIT.get(kind, ())):
        ways = replace(ways, tensor={})
    first, last = (
        tuple(name for name in names if not _is_none(model, name))
        for names in (ways.first, ways.last)
    )
    return (
        ways if (first, last) == (ways.first, ways.last) else replace(ways, first=first, last=last)
    )


def _is_none(model: nn.Module, name: str) -> bool:
    """Whether a configuration leaves a module out: an attribute that is None, as OPT's projections
    are where embeddings are as wide as the residual stream."""
    found: Any = model
    for step in name.split("."):
        if not hasattr(found, step):
            return False
        found = getattr(found, step)
    return found is None
