"""The sizes of a decoder-only transformer, all resolved: what `model.decoder` asks for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of the built-in decoder: RMSNorm, rotary positions, SwiGLU, grouped queries."""

    layers: int
    """Decoder blocks."""

    hidden: int
    """Width of the residual stream."""

    heads: int
    """Query heads."""

    kv_heads: int
    """Key and value heads."""

    head_dim: int
    """Width of one head."""

    ffn: int
    """Width of the feed-forward layer."""

    vocab: int
    """Size of the vocabulary."""

    tied_embeddings: bool
    """Whether the output layer reuses the input embedding."""

    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias (Qwen2 has)."""

    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""

    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""
