"""How the matrices and stages of known kinds of models may be split: a table without torch.

Paceline's own decoder, and decoders of Hugging Face by family. What a model of another kind may
carry as `paceline_ways`, and what is done with any of them, is in `runtime.strategy.ways`;
tests/runtime/test_tensor.py compares each with the model on one rank.

    Ways(
        blocks="layers",
        first=("embedding",),
        last=("norm", "head"),
        tensor={
            "embedding": "embedding",
            "*.attention.q": "column",
            "*.attention.k": "column",
            "*.attention.v": "column",
            "*.attention.o": "row",
            "*.mlp.up": "column",
            "*.mlp.down": "row",
            "head": "head",
        },
        attention="attention",
    )

Names are dotted module names from the model; one that starts with `*.` is inside every block. What
is not named is held whole by every tensor rank, and its gradients are summed where the ranks see
different tokens or heads: norms and dropout need no entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from paceline.errors import PlanError

Way = Literal[
    "column",
    "row",
    "embedding",
    "head",
    "sequence",
    "gather",
    "sum",
    "join",
    "experts",
    "wide norm",
    "behind",
]
"""How a module's matrices are split over the tensor ranks.

`column`: by output features; needs its whole input, gives this rank's features.
`row`: by input features; takes this rank's, gives the sum over the ranks.
`embedding`: by rows of the vocabulary.
`head`: by rows of the vocabulary, and the logits stay split (a DTensor).
`sequence`: whole; said only to be explicit, as it holds for all that is not named.
`gather`: a container whose input must be whole. The parent of a `row` is one without being named,
unless that is the block itself.
`sum`: a `gather` whose output is the sum over the ranks; the rows in it give terms of that.
`experts`: routed experts, split by expert; inside a `sum`.
`join`: the last module that runs on its share of the tokens, for models whose code after it needs
the sample's length. Unnamed, that is the head's input.
`wide norm`: an RMSNorm over the features of all heads, which the ranks share.
`behind`: whole, and inside a container: takes the sum that a row gives, as LoRA's second matrix.
"""

WAYS: frozenset[str] = frozenset(get_args(Way))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How one kind of model may be split."""

    blocks: str
    """Name of the list of blocks, each of which takes hidden states and gives hidden states."""

    first: tuple[str, ...]
    """Modules only the first pipeline stage needs, before the blocks."""

    last: tuple[str, ...]
    """Modules only the last stage needs, after the blocks."""

    tensor: Mapping[str, Way] = field(default_factory=dict)
    """Name of a module -> its way. Empty where matrices cannot be split."""

    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a linear whose output is several ones after each other -> their names. Each part is
    split by itself, so each becomes a linear of its own: `*.mlp.gate_up` with (`gate`, `up`)."""

    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a module -> its attributes that count heads or their features, which the model's
    code needs as this rank has them. `config.num_heads` is one of a configuration it holds."""

    experts: str | None = None
    """Name inside a block of the routed experts' module."""

    attention: str | None = None
    """Name inside a block of the attention module. With sequence parallelism it must be known, as
    all else in a block may see a share of the tokens only."""

    def __post_init__(self) -> None:
        unknown = {way for way in self.tensor.values() if way not in WAYS}
        if unknown:
            raise PlanError.of(
                code="L020",
                what=f"Ways.tensor has {', '.join(sorted(unknown))}, which is no way to split",
                where="paceline_ways",
                fix=f"write one of {', '.join(sorted(WAYS))}",
            )


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
"""Ways of `runtime.decoder.Decoder`."""

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
