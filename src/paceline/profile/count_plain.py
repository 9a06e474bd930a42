"""Decoders with LayerNorm and a feed-forward without a gate: GPT-2 and what came before Llama.

Parameters are those of the class with a language-model head in transformers 5; tests/profile builds
each. `profile_plain` knows one block of four biased linears and two norms; a family says what it
lacks or has besides.

Leaves out: buffers; MPT's fields that transformers does not read (`attn_config.kv_n_heads`,
`no_bias`, `expansion_ratio`); layers dropped at random.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.profile.block import Block
from paceline.profile.count_gated import every_layer, flag, group
from paceline.profile.fields import MOST_LAYERS, Fields
from paceline.profile.model import ModelProfile
from paceline.profile.written import written_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Sizes of such a decoder, and which vectors it has."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    tied: bool

    kv_heads: int | None = None
    positions: int = 0
    """Rows of learned positions; 0 without."""

    embedding_width: int | None = None
    """Width of the token embedding where it is narrower than the stream."""

    qkv_bias: bool = True
    output_bias: bool = True
    ffn_bias: bool = True
    head_bias: bool = False

    block_norms: int = 2
    norm_vectors: int = 2
    """Vectors of a norm: weight and bias, weight only, or none."""

    relu: bool = False
    query_key_norm: bool = False
    extra_vectors: int = 0
    """Besides, in one block."""

    has_embedding_norm: bool = False
    has_final_norm: bool = True

    windows: tuple[int, ...] = (0,)
    """Tokens that layers look back on, in turn; 0 is all."""


def profile_plain(
    fields: Fields, seq_len: int, *, name: str, row: Mapping[str, Any]
) -> ModelProfile:
    """A decoder of the sizes that a row names."""
    it = sizes_of(fields, row)
    if name in _BESIDES:
        it = _BESIDES[name](fields, it)
    head_dim = it.hidden // it.heads
    kv_heads = it.kv_heads or it.heads
    fields.grouped(it.heads, kv_heads, "heads", "key and value heads")
    norm = it.norm_vectors * it.hidden
    vectors = (
        it.block_norms * norm
        + it.qkv_bias * (it.hidden + 2 * kv_heads * head_dim)
        + it.output_bias * it.hidden
        + it.ffn_bias * (it.ffn + it.hidden)
        + it.extra_vectors
    )
    block = Block(
        name="decoder",
        count=1,
        hidden=it.hidden,
        heads=it.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        ffn=it.ffn,
        relu=it.relu,
        parallel=it.block_norms == 1,
        query_key_norm=it.query_key_norm,
        written=written_of(fields, row.get("written", {})),
        vector_parameters=vectors,
    )
    width = it.embedding_width or it.hidden
    squeeze = 0 if width == it.hidden else width * it.hidden
    tokens = it.vocab * width
    embedding = tokens + it.positions * it.hidden + it.has_embedding_norm * norm + squeeze
    head = it.has_final_norm * norm + squeeze + it.head_bias * it.vocab
    return ModelProfile(
        name=name,
        blocks=group(
            replace(block, window=it.windows[at % len(it.windows)]) for at in range(it.layers)
        ),
        num_embedding_parameters=embedding,
        num_head_parameters=head + (0 if it.tied else tokens),
        head_inputs=width,
        head_outputs=it.vocab,
        tied=it.tied,
        seq_len=seq_len,
        assumed=longer_than(seq_len, it.positions),
    )


def longer_than(seq_len: int, positions: int) -> tuple[str, ...]:
    """What to say of samples longer than the table of learned positions."""
    if not positions or seq_len <= positions:
        return ()
    return (f"samples of {seq_len} tokens, though the model has {positions} learned positions",)


def sizes_of(fields: Fields, row: Mapping[str, Any]) -> Plain:
    """The sizes that a config.json has in the fields that a row of families.toml names."""
    hidden, num_heads = fields.size(*row["hidden"]), fields.size(*row["heads"])
    fields.head_width(hidden, num_heads, row["heads"][0], row["hidden"][0])
    heads, positions, ffn = min(num_heads, hidden), row.get("positions", ()), 4 * hidden
    return Plain(
        layers=fields.size(*row["layers"], most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.size(*row.get("kv_heads", ()), default=row.get("kv_heads_default", heads)),
        ffn=fields.size(row["ffn"], default=ffn if "ffn_default" in row else None)
        if "ffn" in row
        else ffn,
        vocab=fields.size("vocab_size"),
        positions=fields.size(*positions, default=row["positions_default"]) if positions else 0,
        qkv_bias=flag(fields, row.get("qkv_bias", True)),
        output_bias=flag(fields, row.get("output_bias", True)),
        ffn_bias=flag(fields, row.get("ffn_bias", True)),
        tied=fields.flag("tie_word_embeddings", default=row["tied"]),
        **row.get("has", {}),
    )


def _opt(fields: Fields, it: Plain) -> Plain:
    is_final_removed = fields.flag("_remove_final_layer_norm", default=False)
    is_norm_first = fields.flag("do_layer_norm_before", default=True)
    return replace(
        it,
        relu=fields.text("activation_function", default="relu") == "relu",
        positions=it.positions + 2,
        embedding_width=fields.size("word_embed_proj_dim", default=it.hidden),
        norm_vectors=2 * fields.flag("layer_norm_elementwise_affine", default=True),
        has_final_norm=is_norm_first and not is_final_removed,
    )


def _falcon(fields: Fields, it: Plain) -> Plain:
    is_new = fields.flag("new_decoder_architecture", default=False)
    is_multi_query = fields.flag("multi_query", default=True)
    is_parallel = fields.flag("parallel_attn", default=True)
    norms = fields.whole("num_ln_in_parallel_attn", default=2 if is_new else 1)
    return replace(
        it,
        kv_heads=it.kv_heads if is_new else 1 if is_multi_query else it.heads,
        block_norms=2 if not is_parallel or norms == 2 else 1,
    )


def _phi(fields: Fields, it: Plain) -> Plain:
    has_norms = fields.flag("qk_layernorm", default=False)
    vectors = 4 * (it.hidden // it.heads) * has_norms
    return replace(it, query_key_norm=has_norms, extra_vectors=vectors)


def _gpt_neo(fields: Fields, it: Plain) -> Plain:
    window = fields.size("window_size", default=256)
    kinds = _attention_kinds(fields)
    return replace(it, windows=tuple(window if kind == "local" else 0 for kind in kinds))


def _starcoder2(fields: Fields, it: Plain) -> Plain:
    return replace(it, windows=(every_layer(0)(fields)(0),))


_BESIDES: Mapping[str, Callable[[Fields, Plain], Plain]] = {
    "opt": _opt,
    "falcon": _falcon,
    "phi": _phi,
    "gpt_neo": _gpt_neo,
    "starcoder2": _starcoder2,
}
"""What a family has that no name of a field and no constant says."""


def _attention_kinds(fields: Fields) -> list[str]:
    """GPT-Neo's `[[["global", "local"], 12]]` written out: the kinds in turn."""
    listed = fields.listed("attention_types") or [[["global", "local"], 1]]
    kinds: list[str] = []
    for entry in listed:
        match entry:
            case [[*names], int(times)] if 0 < times <= MOST_LAYERS:
                kinds += [str(each) for each in names] * times
            case _:
                fields.refuse(
                    f"{fields.source} says attention_types is {listed!r}",
                    'write attention_types like [[["global", "local"], 12]]',
                )
    return kinds or ["global"]
