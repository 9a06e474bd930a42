"""A decoder from its number of parameters alone: `7B`.

Nobody trains "a 7B model" of arbitrary form: widths of published decoders are interpolated, the
rest follows from Llama's proportions, and the feed-forward takes up what is left so that the
parameters are within 2 % of what was asked.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

from paceline.errors import JobError
from paceline.profile.shape import DecoderShape

LEAST, MOST = 5_000_000, 20 * 10**12
"""Below, the embedding is the model; above, nothing is published to go by."""

_WIDTHS = (
    (14e6, 128),
    (70e6, 512),
    (160e6, 768),
    (410e6, 1024),
    (1.3e9, 2048),
    (2.7e9, 2560),
    (6.7e9, 4096),
    (13e9, 5120),
    (33e9, 6656),
    (67e9, 8192),
    (175e9, 12288),
    (405e9, 16384),
    (530e9, 20480),
    (1008e9, 25600),
)
"""Parameters and hidden width. Source: Pythia, arXiv:2304.01373, table 1 (to 410M); GPT-3,
arXiv:2005.14165, table 2.1; Llama, arXiv:2302.13971, table 2 (33B, 65B); Llama 3, arXiv:2407.21783,
table 3 (405B); MT-NLG, arXiv:2201.11990, section 2 (530B); arXiv:2104.04473, table 1 (1008B)."""

_GROUPED_FROM = 8 * 10**9
"""From here on the form is Llama 3's (8 key and value heads, 128,256 tokens), below it Llama 2's
(as many as heads, 32,000 tokens). Source: arXiv:2407.21783, table 3; arXiv:2307.09288, table 1."""


def shape_of_size(num_parameters: int, *, where: str) -> DecoderShape:
    """A Llama-like decoder of about that many parameters.

    Raises:
        JobError: `M008`: the number is far outside what anyone trains.

    >>> shape = shape_of_size(70_000_000_000, where="model.size")
    >>> shape.layers, shape.hidden, shape.heads, shape.kv_heads
    (80, 8192, 64, 8)
    """
    if not LEAST <= num_parameters <= MOST:
        raise JobError.of(
            code="M008",
            what=f"model.size is {num_parameters:,} parameters; sizes from {LEAST / 1e6:.0f}M "
            f"to {MOST / 1e12:.0f}T are known",
            where=where,
            fix="write it with its unit, like 350M or 7B; for other sizes use model.decoder",
        )
    is_grouped = num_parameters >= _GROUPED_FROM
    vocab = 128_256 if is_grouped else 32_000
    tied = num_parameters < 10**9
    hidden = _hidden(num_parameters, multiple=1024 if is_grouped else 256)
    head_dim = 128 if hidden >= 2048 else 64
    heads = hidden // head_dim
    kv_heads = 8 if is_grouped else heads
    inside = num_parameters - (1 if tied else 2) * vocab * hidden
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * head_dim
    usual = attention + 3 * hidden * hidden * (3.5 if is_grouped else 8 / 3)
    layers = max(2, round(inside / usual))
    if layers >= 16:  # pipelines divide them
        layers = round(layers / 4) * 4
    ffn = (inside / layers - attention) / (3 * hidden)
    step = 128 if hidden >= 2048 else 16
    return DecoderShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=max(step, round(ffn / step) * step),
        vocab=vocab,
        tied_embeddings=tied,
    )


def assumed_of_size(num_parameters: int, shape: DecoderShape) -> Iterator[str]:
    """What `shape_of_size` assumed, one phrase each."""
    like = "Llama 3" if num_parameters >= _GROUPED_FROM else "Llama 2"
    yield f"built like {like}: RMSNorm, rotary positions, SwiGLU"
    yield f"{shape.layers} layers of width {shape.hidden}, between those of published decoders"
    shared = "" if shape.kv_heads == shape.heads else f", {shape.kv_heads} for key and value"
    yield f"{shape.heads} heads of {shape.head_dim}{shared}; feed-forward {shape.ffn} wide"
    tied = "the output matrix is the embedding" if shape.tied_embeddings else "untied"
    yield f"{shape.vocab:,} tokens in the vocabulary, {tied}"


def _hidden(num_parameters: int, *, multiple: int) -> int:
    """The width between the published neighbours, on a logarithmic scale of both."""
    pairs = list(pairwise(_WIDTHS))
    (low, narrow), (high, wide) = next(
        (pair for pair in pairs if num_parameters <= pair[1][0]), pairs[-1]
    )
    share = math.log(num_parameters / low) / math.log(high / low)
    width: float = narrow * math.pow(wide / narrow, share)
    if width < 1024:
        multiple = 64
    return max(64, round(width / multiple) * multiple)
