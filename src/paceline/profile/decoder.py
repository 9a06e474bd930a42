"""The profile of the built-in decoder, by its sizes."""

from paceline.profile.block import Block, Written
from paceline.profile.model import ModelProfile
from paceline.profile.shape import DecoderShape


def profile_decoder(
    shape: DecoderShape, seq_len: int, *, name: str = "decoder", assumed: tuple[str, ...] = ()
) -> ModelProfile:
    """Costs of the built-in decoder on samples of `seq_len` tokens.

    >>> llama_3_8b = DecoderShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128,
    ...     ffn=14336, vocab=128256, tied_embeddings=False)
    >>> profile_decoder(llama_3_8b, 8192).num_parameters
    8030261248
    """
    embedding = shape.vocab * shape.hidden
    return ModelProfile(
        name=name,
        blocks=(_block(shape),),
        num_embedding_parameters=embedding,
        num_head_parameters=shape.hidden + (0 if shape.tied_embeddings else embedding),
        head_inputs=shape.hidden,
        head_outputs=shape.vocab,
        tied=shape.tied_embeddings,
        seq_len=seq_len,
        is_built_in=True,
        assumed=assumed,
    )


def _block(shape: DecoderShape) -> Block:
    bias = (shape.heads + 2 * shape.kv_heads) * shape.head_dim if shape.qkv_bias else 0
    return Block(
        name="decoder",
        count=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        ffn=shape.ffn,
        gated=True,
        written=Written(norm=1),
        vector_parameters=2 * shape.hidden + bias,
    )
