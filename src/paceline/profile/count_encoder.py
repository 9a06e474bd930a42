"""Models with an encoder: BERT and its kin, T5, and the vision transformer.

Parameters are those of `...ForMaskedLM`, `T5ForConditionalGeneration` and
`ViTForImageClassification` in transformers 5; tests/profile builds each. T5's source and target
are taken to be as long as one another; ViT's tokens follow from its image and are not `seq_len`.

A T5 whose file unties the output matrix has one of its own, as the files of version 1.1 have and
transformers 4 builds; transformers 5 ties it all the same.

Leaves out: buffers; FLOPs of BERT's transform before the output matrix and of ViT's projection of
patches, each below 1 % of the whole.
"""

from collections.abc import Mapping
from typing import Any

from paceline.profile.block import Block, Written
from paceline.profile.count_plain import longer_than
from paceline.profile.fields import MOST_LAYERS, Fields
from paceline.profile.model import ModelProfile
from paceline.profile.written import written_of


def profile_masked(
    fields: Fields, seq_len: int, *, name: str, row: Mapping[str, Any]
) -> ModelProfile:
    """BERT and its kin with the masked-word head, of the sizes that a row names."""
    hidden, heads = fields.size(*row["hidden"]), fields.size(*row["heads"])
    fields.head_width(hidden, heads, row["heads"][0], row["hidden"][0])
    vocab = fields.size("vocab_size")
    positions = fields.size("max_position_embeddings", default=512)
    types = fields.size(row["types"], default=2) if "types" in row else 0
    tied = fields.flag("tie_word_embeddings", default=True)
    layers = fields.size(*row["layers"], most=MOST_LAYERS)
    ffn, written = fields.size(row["ffn"]), written_of(fields, row["written"])
    own_head = 0 if tied else vocab * (hidden + row.get("head_bias", False))
    return ModelProfile(
        name=name,
        blocks=(_encoder(layers, hidden, heads, ffn, written=written),),
        num_embedding_parameters=(vocab + positions + types + 2) * hidden,
        num_head_parameters=_masked_head(hidden, vocab) + own_head,
        head_inputs=hidden,
        head_outputs=vocab,
        tied=tied,
        seq_len=seq_len,
        assumed=longer_than(seq_len, positions),
    )


def profile_t5(fields: Fields, seq_len: int, *, name: str) -> ModelProfile:
    """T5: an encoder, and a decoder that attends to it; also version 1.1 with its gate."""
    hidden, heads = fields.size("d_model"), fields.size("num_heads")
    head_dim, ffn = fields.size("d_kv"), fields.size("d_ff")
    vocab = fields.size("vocab_size")
    encoders = fields.size("num_layers", most=MOST_LAYERS)
    decoders = fields.size("num_decoder_layers", default=encoders, most=MOST_LAYERS)
    tied = fields.flag("tie_word_embeddings", default=True)
    buckets = fields.size("relative_attention_num_buckets", default=32)
    activation = fields.text("feed_forward_proj", default="relu")
    written = written_of(fields, {"norm": 1, "dropout": ["dropout_rate", 0.1]})

    def block(name: str, count: int, norms: int, cross_heads: int) -> Block:
        return Block(
            name=name,
            count=count,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            value_dim=head_dim,
            causal=cross_heads > 0,
            cross_heads=cross_heads,
            ffn=ffn,
            gated=activation.startswith("gated-"),
            relu=activation == "relu",
            written=written,
            vector_parameters=norms * hidden,
        )

    return ModelProfile(
        name=name,
        blocks=(
            block("encoder", encoders, norms=2, cross_heads=0),
            block("decoder", decoders, norms=3, cross_heads=heads),
        ),
        # The first block of either stack holds the distances for all of them.
        num_embedding_parameters=vocab * hidden + 2 * buckets * heads,
        num_head_parameters=2 * hidden + (0 if tied else vocab * hidden),
        head_inputs=hidden,
        head_outputs=vocab,
        tied=tied,
        seq_len=seq_len,
        assumed=(f"source and target of {seq_len} tokens each",),
    )


def profile_vit(fields: Fields, seq_len: int, *, name: str) -> ModelProfile:
    """The vision transformer with a linear classifier; `seq_len` is not used."""
    hidden = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    fields.head_width(hidden, heads, "num_attention_heads", "hidden_size")
    image, patch = fields.size("image_size", default=224), fields.size("patch_size", default=16)
    fields.at_most("patch_size", patch, "image_size", image)
    patches = (image // patch) ** 2
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    classes = _num_classes(fields)
    projection = fields.size("num_channels", default=3) * patch**2 * hidden + hidden
    has_bias = fields.flag("qkv_bias", default=True)
    return ModelProfile(
        name=name,
        blocks=(
            _encoder(
                layers, hidden, heads, fields.size("intermediate_size"), has_qkv_bias=has_bias
            ),
        ),
        num_embedding_parameters=projection + (1 + patches + 1) * hidden,
        num_head_parameters=2 * hidden + (classes * (hidden + 1)),
        head_inputs=hidden,
        head_outputs=classes,
        tied=False,
        seq_len=patches + 1,
        head_tokens=1,
        assumed=(f"images of {image} x {image}: {patches} patches of {patch} x {patch}, and one",),
    )


def _encoder(
    count: int,
    hidden: int,
    heads: int,
    ffn: int,
    *,
    has_qkv_bias: bool = True,
    written: Written = Written(),  # noqa: B008
) -> Block:
    """A block with biases everywhere and two LayerNorms, whose tokens see all others."""
    biases = 3 * hidden * has_qkv_bias + hidden + ffn + hidden
    return Block(
        name="encoder",
        count=count,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        value_dim=hidden // heads,
        causal=False,
        ffn=ffn,
        written=written,
        vector_parameters=biases + 4 * hidden,
    )


def _masked_head(hidden: int, vocab: int) -> int:
    """A square linear and a norm before the output matrix, and that matrix's bias."""
    return hidden * (hidden + 1) + 2 * hidden + vocab


def _num_classes(fields: Fields) -> int:
    labels = fields.values.get("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels)
    return fields.size("num_labels", default=2)
