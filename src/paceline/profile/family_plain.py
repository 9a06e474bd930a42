"""Decoders with LayerNorm and a feed-forward without a gate: GPT-2 and what came before Llama.

Parameters are those of the class with a language-model head in transformers 5; tests/profile builds
each. `profile_plain` knows one block of four biased linears and two norms; a family says what it
lacks or has besides.

Leaves out: buffers; MPT's fields that transformers does not read (`attn_config.kv_n_heads`,
`no_bias`, `expansion_ratio`); layers dropped at random.
"""

from dataclasses import dataclass, replace

from paceline.profile.block import Block
from paceline.profile.family_gated import every_layer, group
from paceline.profile.fields import MOST_LAYERS, Fields
from paceline.profile.model import ModelProfile


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
    """Of the token embedding where it is narrower than the stream."""

    qkv_bias: bool = True
    output_bias: bool = True
    ffn_bias: bool = True
    head_bias: bool = False

    block_norms: int = 2
    norm_vectors: int = 2
    """Vectors of a norm: weight and bias, weight only, or none."""

    relu: bool = False
    """Whether the activation is ReLU."""

    query_key_norm: bool = False
    """Whether query and key are normalised."""

    extra_vectors: int = 0
    """Besides, in one block."""

    has_embedding_norm: bool = False
    has_final_norm: bool = True

    windows: tuple[int, ...] = (0,)
    """Tokens that layers look back on, in turn; 0 is all."""


def profile_plain(fields: Fields, seq_len: int, name: str, it: Plain) -> ModelProfile:
    """A decoder of these sizes."""
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


def profile_gpt2(fields: Fields, seq_len: int) -> ModelProfile:
    """GPT-2 and GPT-3: learned positions, fused query, key and value."""
    hidden, heads = _stream(fields, "n_embd", "n_head")
    sizes = Plain(
        layers=fields.size("n_layer", "num_hidden_layers", most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        ffn=fields.size("n_inner", default=4 * hidden),
        vocab=fields.size("vocab_size"),
        positions=fields.size("n_positions", "n_ctx", default=1024),
        tied=fields.flag("tie_word_embeddings", default=True),
    )
    return profile_plain(fields, seq_len, "gpt2", sizes)


def profile_gptj(fields: Fields, seq_len: int) -> ModelProfile:
    """GPT-J: one norm a block, attention without biases, a head with one."""
    hidden, heads = _stream(fields, "n_embd", "n_head")
    sizes = Plain(
        layers=fields.size("n_layer", "num_hidden_layers", most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        ffn=fields.size("n_inner", default=4 * hidden),
        vocab=fields.size("vocab_size"),
        qkv_bias=False,
        output_bias=False,
        head_bias=True,
        block_norms=1,
        tied=fields.flag("tie_word_embeddings", default=False),
    )
    return profile_plain(fields, seq_len, "gptj", sizes)


def profile_gpt_neo(fields: Fields, seq_len: int) -> ModelProfile:
    """GPT-Neo: global and local layers in turn, no bias on query, key and value."""
    hidden, heads = _stream(fields, "hidden_size", "num_heads")
    window = fields.size("window_size", default=256)
    layers = fields.size("num_layers", "num_hidden_layers", most=MOST_LAYERS)
    kinds = _attention_kinds(fields)
    sizes = Plain(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=fields.size("intermediate_size", default=4 * hidden),
        vocab=fields.size("vocab_size"),
        positions=fields.size("max_position_embeddings", default=2048),
        qkv_bias=False,
        windows=tuple(window if kind == "local" else 0 for kind in kinds),
        tied=fields.flag("tie_word_embeddings", default=True),
    )
    return profile_plain(fields, seq_len, "gpt_neo", sizes)


def profile_gpt_neox(fields: Fields, seq_len: int) -> ModelProfile:
    """GPT-NeoX and Pythia."""
    hidden, heads = _stream(fields, "hidden_size", "num_attention_heads")
    has_bias = fields.flag("attention_bias", default=True)
    sizes = Plain(
        layers=fields.size("num_hidden_layers", most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        ffn=fields.size("intermediate_size"),
        vocab=fields.size("vocab_size"),
        qkv_bias=has_bias,
        output_bias=has_bias,
        tied=fields.flag("tie_word_embeddings", default=False),
    )
    return profile_plain(fields, seq_len, "gpt_neox", sizes)


def profile_bloom(fields: Fields, seq_len: int) -> ModelProfile:
    """BLOOM: positions by distance (ALiBi), a norm after the embedding."""
    hidden, heads = _stream(fields, "hidden_size", "n_head", older="n_embed")
    sizes = Plain(
        layers=fields.size("n_layer", "num_hidden_layers", most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        ffn=4 * hidden,
        vocab=fields.size("vocab_size"),
        has_embedding_norm=True,
        tied=fields.flag("tie_word_embeddings", default=True),
    )
    return profile_plain(fields, seq_len, "bloom", sizes)


def profile_opt(fields: Fields, seq_len: int) -> ModelProfile:
    """OPT: two more learned positions than it says; the 350M model has a narrower embedding."""
    hidden, heads = _stream(fields, "hidden_size", "num_attention_heads")
    has_bias = fields.flag("enable_bias", default=True)
    is_final_removed = fields.flag("_remove_final_layer_norm", default=False)
    is_norm_first = fields.flag("do_layer_norm_before", default=True)
    sizes = Plain(
        layers=fields.size("num_hidden_layers", most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        ffn=fields.size("ffn_dim"),
        relu=fields.text("activation_function", default="relu") == "relu",
        vocab=fields.size("vocab_size"),
        positions=fields.size("max_position_embeddings", default=2048) + 2,
        embedding_width=fields.size("word_embed_proj_dim", default=hidden),
        qkv_bias=has_bias,
        output_bias=has_bias,
        ffn_bias=has_bias,
        norm_vectors=2 * fields.flag("layer_norm_elementwise_affine", default=True),
        has_final_norm=is_norm_first and not is_final_removed,
        tied=fields.flag("tie_word_embeddings", default=True),
    )
    return profile_plain(fields, seq_len, "opt", sizes)


def profile_mpt(fields: Fields, seq_len: int) -> ModelProfile:
    """MPT: ALiBi, no biases at all, also none in the norms."""
    hidden, heads = _stream(fields, "d_model", "n_heads")
    sizes = Plain(
        layers=fields.size("n_layers", most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        ffn=4 * hidden,
        vocab=fields.size("vocab_size"),
        qkv_bias=False,
        output_bias=False,
        ffn_bias=False,
        norm_vectors=1,
        tied=fields.flag("tie_word_embeddings", default=True),
    )
    return profile_plain(fields, seq_len, "mpt", sizes)


def profile_falcon(fields: Fields, seq_len: int) -> ModelProfile:
    """Falcon: one key and value head, or groups in the newer form; norms shared by both halves."""
    hidden, heads = _stream(fields, "hidden_size", "num_attention_heads", older_heads="n_head")
    is_new = fields.flag("new_decoder_architecture", default=False)
    is_multi_query = fields.flag("multi_query", default=True)
    is_parallel = fields.flag("parallel_attn", default=True)
    groups = fields.size("num_kv_heads", "n_head_kv", default=heads)
    norms = fields.whole("num_ln_in_parallel_attn", default=2 if is_new else 1)
    has_bias = fields.flag("bias", default=False)
    sizes = Plain(
        layers=fields.size("num_hidden_layers", "n_layer", most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=groups if is_new else 1 if is_multi_query else heads,
        ffn=fields.size("ffn_hidden_size", default=4 * hidden),
        vocab=fields.size("vocab_size"),
        qkv_bias=has_bias,
        output_bias=has_bias,
        ffn_bias=has_bias,
        block_norms=2 if not is_parallel or norms == 2 else 1,
        tied=fields.flag("tie_word_embeddings", default=True),
    )
    return profile_plain(fields, seq_len, "falcon", sizes)


def profile_phi(fields: Fields, seq_len: int) -> ModelProfile:
    """Phi-1 and Phi-2: one norm for attention and feed-forward, a head with a bias."""
    hidden, heads = _stream(fields, "hidden_size", "num_attention_heads")
    head_dim = hidden // heads
    has_norms = fields.flag("qk_layernorm", default=False)
    sizes = Plain(
        layers=fields.size("num_hidden_layers", most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        query_key_norm=has_norms,
        kv_heads=fields.size("num_key_value_heads", default=heads),
        ffn=fields.size("intermediate_size"),
        vocab=fields.size("vocab_size"),
        head_bias=True,
        block_norms=1,
        extra_vectors=4 * head_dim * has_norms,
        tied=fields.flag("tie_word_embeddings", default=False),
    )
    return profile_plain(fields, seq_len, "phi", sizes)


def profile_starcoder2(fields: Fields, seq_len: int) -> ModelProfile:
    """StarCoder2: grouped queries, rotary positions, biases by one field."""
    hidden, heads = _stream(fields, "hidden_size", "num_attention_heads")
    has_bias = fields.flag("use_bias", default=True)
    sizes = Plain(
        layers=fields.size("num_hidden_layers", most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", default=2),
        ffn=fields.size("intermediate_size"),
        vocab=fields.size("vocab_size"),
        qkv_bias=has_bias,
        output_bias=has_bias,
        ffn_bias=has_bias,
        windows=(every_layer(0)(fields)(0),),
        tied=fields.flag("tie_word_embeddings", default=True),
    )
    return profile_plain(fields, seq_len, "starcoder2", sizes)


def _stream(
    fields: Fields, width: str, heads: str, *, older: str | None = None, older_heads: str = ""
) -> tuple[int, int]:
    """Width of the stream and heads, which must divide it."""
    also = {"n_embd": ("hidden_size",), "d_model": ("hidden_size",)}.get(width, ())
    names = (width, *also, *((older,) if older else ()))
    hidden = fields.size(*names)
    num_heads = fields.size(heads, *((older_heads,) if older_heads else ("num_attention_heads",)))
    fields.head_width(hidden, num_heads, heads, width)
    return hidden, min(num_heads, hidden)


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
