"""Decoders with RMSNorm and a gated feed-forward: Llama and its descendants, also with experts.

They differ in a few traits: which linears have a bias, how many norms a block has, whether query
and key are normalised, which layers look back only on a window, and which layers have experts.
Parameters are those of the class `...ForCausalLM` in transformers 5; tests/profile builds each.

Leaves out: buffers, also the one that balances DeepSeek-V3's experts; DeepSeek-V3's extra module
that predicts a second token, which transformers leaves out as well.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.profile.block import Block
from paceline.profile.fields import MOST_LAYERS, Fields
from paceline.profile.model import ModelProfile
from paceline.profile.written import written_of

Flag = bool | Sequence[Any]
"""Whether a linear has a bias: always so, or by a field and its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What a layer with experts has."""

    num: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    groups: int = 1
    groups_per_token: int = 1
    vectors: int = 0
    """Biases of router and experts, and gates that are no matrix."""

    is_sparse: Callable[[int], bool] = lambda layer: True
    """Whether the layer of that number, from 0, has experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What one family does otherwise than Llama."""

    tied: bool = False
    """Whether the output matrix is the embedding when the file does not say."""

    qkv_bias: Flag = False
    output_bias: Flag = False
    ffn_bias: Flag = False

    norms: int = 2
    """Norms of the stream's width in one block."""

    query_key_norm: Literal["none", "head", "wide"] = "none"
    """Norms of query and key: none, over one head, or over all heads together."""

    kv_heads: int | None = None
    """Key and value heads when the file does not say; None is as many as heads."""

    head_dim: int | None = None
    """Width of a head when the file does not say; None is hidden / heads."""

    window: Callable[[Fields], Callable[[int], int]] = lambda fields: lambda layer: 0
    """Tokens that the layer of that number looks back on; 0 is all."""

    written: Mapping[str, Any] = field(default_factory=dict)
    """Facts of its class in transformers for `written_of`."""

    experts: Callable[[Fields], Experts] | None = None
    """Set for a family with experts."""


def profile_gated(
    fields: Fields, seq_len: int, *, name: str, row: Mapping[str, Any]
) -> ModelProfile:
    """A decoder of the Llama kind with the traits of a row."""
    traits = traits_of(row)
    hidden = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=traits.kv_heads or heads)
    head_dim = fields.optional("head_dim") or traits.head_dim
    head_dim = head_dim or fields.head_width(hidden, heads, "num_attention_heads", "hidden_size")
    fields.grouped(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    query, key_value = heads * head_dim, kv_heads * head_dim
    norms = (
        traits.norms * hidden
        + {
            "none": 0,
            "head": 2 * head_dim,
            "wide": query + key_value,
        }[traits.query_key_norm]
    )
    biases = flag(fields, traits.qkv_bias) * (query + 2 * key_value)
    biases += flag(fields, traits.output_bias) * hidden
    attention = Block(
        name="decoder",
        count=1,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        gated=True,
        extra_norm_width=(traits.norms - 2) * hidden,
        query_key_norm=traits.query_key_norm != "none",
        written=written_of(fields, traits.written, norm=1, rotated=1),
        vector_parameters=norms + biases,
    )
    return finish(fields, seq_len, name, attention, traits)


def profile_latent(
    fields: Fields, seq_len: int, *, name: str, row: Mapping[str, Any]
) -> ModelProfile:
    """A DeepSeek decoder: query, key and value are squeezed through narrow latents."""
    traits = traits_of(row)
    hidden = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    has_whole_query = "q_lora_rank" in fields.values and fields.values["q_lora_rank"] is None
    query_rank = 0 if has_whole_query else fields.whole("q_lora_rank", default=1536)
    kv_rank = fields.size("kv_lora_rank")
    rope_dim = fields.size("qk_rope_head_dim")
    value_dim = fields.size("v_head_dim")
    biases = flag(fields, ("attention_bias", False)) * (query_rank + kv_rank + rope_dim + hidden)
    attention = Block(
        name="decoder",
        count=1,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=fields.size("qk_nope_head_dim") + rope_dim,
        value_dim=value_dim,
        query_rank=query_rank,
        kv_rank=kv_rank,
        rope_dim=rope_dim,
        gated=True,
        written=written_of(fields, traits.written, norm=1, rotated=1),
        vector_parameters=traits.norms * hidden + query_rank + kv_rank + biases,
    )
    return finish(fields, seq_len, name, attention, traits)


def finish(
    fields: Fields, seq_len: int, name: str, attention: Block, traits: Traits
) -> ModelProfile:
    """Feed-forward layers on this attention, then the embedding and the head."""
    hidden = attention.hidden
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    experts = traits.experts(fields) if traits.experts is not None else None
    is_always_sparse = experts is not None and all(map(experts.is_sparse, range(layers)))
    dense = moe = attention
    if not is_always_sparse:
        ffn = fields.size("intermediate_size")
        ffn_bias = flag(fields, traits.ffn_bias) * (2 * ffn + hidden)
        dense = replace(
            attention,
            name="decoder" if experts is None else "dense",
            ffn=ffn,
            vector_parameters=attention.vector_parameters + ffn_bias,
        )
    if experts is not None:
        fields.at_most(
            "num_experts_per_tok", experts.per_token, "the number of experts", experts.num
        )
        moe = replace(
            attention,
            name="moe",
            experts=experts.num,
            experts_per_token=experts.per_token,
            expert_groups=experts.groups,
            groups_per_token=experts.groups_per_token,
            expert_ffn=experts.ffn,
            shared_ffn=experts.shared_ffn,
            vector_parameters=attention.vector_parameters + experts.vectors,
        )
    window = traits.window(fields)
    vocab = fields.size("vocab_size")
    tied = fields.flag("tie_word_embeddings", default=traits.tied)
    return ModelProfile(
        name=name,
        blocks=group(
            replace(moe if experts and experts.is_sparse(layer) else dense, window=window(layer))
            for layer in range(layers)
        ),
        num_embedding_parameters=vocab * hidden,
        num_head_parameters=hidden + (0 if tied else vocab * hidden),
        head_inputs=hidden,
        head_outputs=vocab,
        tied=tied,
        seq_len=seq_len,
        caps_logits=bool(
            attention.written.capped and fields.number("final_logit_softcapping", 30.0)
        ),
    )


def group(layers: Iterable[Block]) -> tuple[Block, ...]:
    """Equal blocks counted together, in the order they first come."""
    return tuple(replace(block, count=number) for block, number in Counter(layers).items())


def flag(fields: Fields, rule: Flag) -> bool:
    """A bias by its rule."""
    return rule if isinstance(rule, bool) else fields.flag(rule[0], default=rule[1])


def every_layer(default: int) -> Callable[[Fields], Callable[[int], int]]:
    """One window for every layer, null for none (Mistral)."""

    def windows(fields: Fields) -> Callable[[int], int]:
        is_null = "sliding_window" in fields.values and fields.values["sliding_window"] is None
        window = 0 if is_null else fields.whole("sliding_window", default=default)
        return lambda layer: window

    return windows


def upper_layers(fields: Fields) -> Callable[[int], int]:
    """A window in the layers from `max_window_layers` on, where it is switched on (Qwen)."""
    if not fields.flag("use_sliding_window", default=False):
        return lambda layer: 0
    window = fields.whole("sliding_window", default=4096)
    first = fields.whole("max_window_layers", default=28)
    return by_types(fields, window, lambda layer: layer >= first)


def where_used(fields: Fields) -> Callable[[int], int]:
    """A window in every layer, where it is switched on (Qwen with experts)."""
    is_used = fields.flag("use_sliding_window", default=False)
    window = fields.whole("sliding_window", default=4096) if is_used else 0
    return lambda layer: window


def all_but_every(period: int, default: int) -> Callable[[Fields], Callable[[int], int]]:
    """A window in all layers but each `period`-th (Gemma 2 and 3, gpt-oss)."""

    def windows(fields: Fields) -> Callable[[int], int]:
        window = fields.whole("sliding_window", default=default)
        every = fields.size("sliding_window_pattern", default=period)
        return by_types(fields, window, lambda layer: (layer + 1) % every != 0)

    return windows


def by_types(fields: Fields, window: int, otherwise: Callable[[int], bool]) -> Callable[[int], int]:
    """A window where `layer_types` says so; where it says nothing, by a rule."""
    types = fields.listed("layer_types")
    if types is None:
        return lambda layer: window if otherwise(layer) else 0
    return lambda layer: window if layer < len(types) and types[layer] == "sliding_attention" else 0


def mixtral_experts(fields: Fields) -> Experts:
    """Every layer has them, as wide as a dense feed-forward."""
    return Experts(
        num=fields.size("num_local_experts", "num_experts"),
        per_token=fields.size("num_experts_per_tok"),
        ffn=fields.size("intermediate_size"),
    )


def gpt_oss_experts(fields: Fields) -> Experts:
    """Mixtral's experts with biases in router and experts."""
    plain = mixtral_experts(fields)
    width = 2 * plain.ffn + fields.size("hidden_size")
    heads = fields.size("num_attention_heads")  # one sink for each, in the attention
    return replace(plain, vectors=plain.num + plain.num * width + heads)


def qwen_experts(fields: Fields) -> Experts:
    """In each `decoder_sparse_step`-th layer; Qwen2 has one wide shared expert with a gate."""
    step = fields.size("decoder_sparse_step", default=1)
    dense_only = set(map(repr, fields.listed("mlp_only_layers") or ()))
    shared = fields.whole("shared_expert_intermediate_size", default=0)
    return Experts(
        num=fields.size("num_experts", "num_local_experts"),
        per_token=fields.size("num_experts_per_tok"),
        ffn=fields.size("moe_intermediate_size"),
        shared_ffn=shared,
        vectors=fields.size("hidden_size") if shared else 0,
        is_sparse=lambda layer: repr(layer) not in dense_only and (layer + 1) % step == 0,
    )


def deepseek_experts(
    first_sparse: int, groups: tuple[int, int] = (1, 1)
) -> Callable[[Fields], Experts]:
    """In all layers but the first few; shared experts are one wide layer. `groups` are those of
    experts, and those of a token, where the file does not say."""

    def experts(fields: Fields) -> Experts:
        first = fields.whole("first_k_dense_replace", default=first_sparse)
        ffn = fields.size("moe_intermediate_size")
        shared = ffn * fields.whole("n_shared_experts", default=0)
        has_bias = first_sparse == 0 and fields.flag("mlp_bias", default=False)
        return Experts(
            num=fields.size("n_routed_experts", "num_local_experts"),
            per_token=fields.size("num_experts_per_tok"),
            ffn=ffn,
            shared_ffn=shared,
            groups=fields.whole("n_group", default=groups[0]) or 1,
            groups_per_token=fields.whole("topk_group", default=groups[1]) or 1,
            vectors=has_bias * (2 * shared + fields.size("hidden_size")),
            is_sparse=lambda layer: layer >= first,
        )

    return experts


WINDOWS: Mapping[str, Callable[..., Any]] = {
    "every layer": every_layer,
    "upper layers": lambda: upper_layers,
    "where used": lambda: where_used,
    "all but every": all_but_every,
}
"""`window.by` of a row of families.toml -> what makes the window of the other keys there."""

EXPERTS: Mapping[str, Callable[..., Any]] = {
    "mixtral": lambda: mixtral_experts,
    "gpt_oss": lambda: gpt_oss_experts,
    "qwen": lambda: qwen_experts,
    "deepseek": deepseek_experts,
}
"""`experts.by` -> what makes the experts."""


def traits_of(row: Mapping[str, Any]) -> Traits:
    """The traits of a row of families.toml."""
    others = ("form", "trains", "run", "split")
    traits = {key: value for key, value in row.items() if key not in others}
    for key, makers in (("window", WINDOWS), ("experts", EXPERTS)):
        if key in traits:
            given = dict(traits[key])
            traits[key] = makers[given.pop("by")](**given)
    return Traits(**traits)
