"""One kind of transformer block by its sizes, and the matrices those sizes make.

Every function here is plain arithmetic without branches, so that it also takes a `Block` whose
sizes are columns of numbers: one model a row. `benchmarks/planner_accuracy.py` prices thousands of
published runs of different models at once that way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, Literal, NamedTuple, TypeVar

Column = Any
"""An array with one entry a row of a table that is priced at once, or fewer, as it broadcasts: of
numbers, of places in a list of words, or of booleans. A number where all rows have the same one.
`Any`, as mypy finds no `~` or `&` in `ndarray | float`, and `ndarray` alone takes no number."""

Value = Column
"""A `Column` that comes from outside: a size, a rate or a fact of an engine."""

Split = Literal["column", "row", "whole"]
"""How tensor parallelism divides a matrix: its outputs, its inputs, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """What a helper process measured of a block whose inside is not known."""

    num_parameters: int
    """Parameters of one block."""

    forward_flops: float | None
    """FLOPs of one sample's forward pass through one block; None when it could not be run."""

    saved_bytes: int | None
    """Bytes one sample leaves for the backward pass in one block, in float32; None as above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the block's class in transformers writes out in several kernels, of which each keeps
    its tensors. 0 is one kernel, as other software has it."""

    norm: int = 0
    """1: Llama's RMSNorm, a float32 copy and a product in the stream's type. 2: Gemma's, whose
    product is float32 as well."""

    activation: int = 0
    """Tensors of the feed-forward's width besides input and output: 3 of `gelu_new`."""

    drops: int = 0
    """1 where what attention and feed-forward give is dropped in part: a mask of each."""

    joined: int = 0
    """1 where query, key and value are one matrix, and gate and up."""

    capped: int = 0
    """1 where scores are capped, which no flash kernel of torch does."""

    rotated: float = 0
    """Share of query and key that positions rotate."""

    ops: int = 30
    """Operations of its forward pass without routing, which the host launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Sizes of one kind of block. 0 means that it has no such part."""

    name: str
    """What the family calls it: `decoder`, `dense`, `moe`, `encoder`."""

    count: int
    hidden: int
    """Width of the residual stream."""

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    """Width of one head's value; `head_dim` unless attention is latent."""

    query_rank: int = 0
    """Latent attention: width the query is squeezed through; 0 when it is not."""

    kv_rank: int = 0
    """Latent attention: width that key and value are squeezed through; 0 without latents."""

    rope_dim: int = 0
    """Latent attention: the part of `head_dim` that carries positions; its key is shared by all
    heads."""

    causal: bool = True
    """Whether a token attends only to those before it, so that half of the scores are computed."""

    window: int = 0
    """Tokens that attention looks back on; 0 is all."""

    cross_heads: int = 0
    """Heads of a second attention, over an encoder's output of as many tokens."""

    ffn: int = 0
    gated: bool = False
    """Whether the feed-forward layer has a gate (SwiGLU, GeGLU): two matrices up instead of one."""

    experts: int = 0
    experts_per_token: int = 0
    """Experts that a token is sent to."""

    expert_groups: int = 1
    groups_per_token: int = 1
    """Equal parts of the experts, and how many of them a token's experts may be in: node-limited
    routing (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of all experts together that every token goes through."""

    relu: bool = False
    """Whether the feed-forward's activation is ReLU, which needs only its output to go backward."""

    parallel: bool = False
    """Whether attention and feed-forward share one norm and read the same input."""

    extra_norm_width: int = 0
    """Width of all norms besides the one before each part: twice `hidden` where a norm follows
    attention and feed-forward as well."""

    query_key_norm: bool = False
    """Whether query and key are normalised."""

    vector_parameters: int = 0
    """Norms, biases and whatever else is no matrix, in one block."""

    written: Written = Written()
    """As transformers writes it; other software has kernels of its own."""

    measured: MeasuredCosts | None = None
    """Set when the inside is not known; the sizes are then 0."""


class Matrix(NamedTuple):
    """A weight matrix that tokens are multiplied with."""

    name: str
    inputs: int
    """K: width of what comes in."""

    outputs: int
    """N: width of what goes out. 0 where the block has no such matrix."""

    split: Split
    """What tensor parallelism divides."""

    copies: int = 1
    """Matrices of this shape: one for each expert."""

    used: int = 1
    """Matrices of the `copies` that a token goes through."""

    is_routed: bool = False
    """Whether it belongs to routed experts, which expert parallelism divides."""


T = TypeVar("T")


def _once(count: Callable[[Block], T]) -> Callable[[Block], T]:
    """A count that is kept: a search asks for it of the same few blocks again for each grid."""
    kept = lru_cache(256)(count)

    @wraps(count)
    def counted(block: Block) -> T:
        try:
            return kept(block)
        except TypeError:  # a column of models
            return count(block)

    return counted


@_once
def matrices(block: Block) -> tuple[Matrix, ...]:
    """Every matrix a block may have, in the order they are applied; absent ones are 0 wide.

    >>> block = Block(name="decoder", count=32, hidden=4096, heads=32, kv_heads=8, head_dim=128,
    ...     value_dim=128, ffn=14336, gated=True, vector_parameters=2 * 4096)
    >>> [(each.name, each.inputs, each.outputs) for each in matrices(block) if each.outputs]
    [('query', 4096, 4096), ('key_value', 4096, 2048), ('attention_output', 4096, 4096), \
('up', 4096, 28672), ('down', 14336, 4096)]
    """
    h, latent = block.hidden, block.kv_rank > 0
    grouped = 1 - latent
    query = block.heads * block.head_dim
    squeezed = block.query_rank > 0
    key_value = block.kv_heads * (block.head_dim + block.value_dim)
    key_value_up = block.heads * (block.head_dim - block.rope_dim + block.value_dim)
    cross = block.cross_heads * block.head_dim
    ways_up = 1 + block.gated
    copies, used = block.experts, block.experts_per_token
    has_experts = block.experts > 0
    return (
        Matrix("query_down", h, block.query_rank, "whole"),
        Matrix("query", h + squeezed * (block.query_rank - h), query, "column"),
        Matrix("key_value", h, grouped * key_value, "column"),
        Matrix("key_value_down", h, latent * (block.kv_rank + block.rope_dim), "whole"),
        Matrix("key_value_up", block.kv_rank, latent * key_value_up, "column"),
        Matrix("attention_output", block.heads * block.value_dim, (block.heads > 0) * h, "row"),
        Matrix("cross_query", h, cross, "column"),
        Matrix("cross_key_value", h, 2 * cross, "column"),
        Matrix("cross_output", cross, (block.cross_heads > 0) * h, "row"),
        Matrix("up", h, ways_up * block.ffn, "column"),
        Matrix("down", block.ffn, (block.ffn > 0) * h, "row"),
        Matrix("router", h, block.experts, "whole"),
        Matrix(
            "expert_up", h, has_experts * ways_up * block.expert_ffn, "column", copies, used, True
        ),
        Matrix("expert_down", block.expert_ffn, has_experts * h, "row", copies, used, True),
        Matrix("shared_up", h, ways_up * block.shared_ffn, "column"),
        Matrix("shared_down", block.shared_ffn, (block.shared_ffn > 0) * h, "row"),
    )


def second_shares(block: Block) -> tuple[Value, ...]:
    """Share of the outputs of each of `matrices(block)` that every second product gives: those that
    are applied second, fourth and so on, key and value (and gate and up) counted apart.

    The router and the routed experts are not among them. Source: torchtitan 0.2.2,
    distributed/activation_checkpoint.py: it counts `aten.mm`, and saves the first, third and so on.

    >>> block = Block(name="decoder", count=1, hidden=8, heads=2, kv_heads=2, head_dim=4,
    ...     value_dim=4, ffn=16, gated=True)
    >>> [(each.name, float(share)) for each, share in zip(matrices(block), second_shares(block))
    ...     if share]
    [('key_value', 0.5), ('attention_output', 1.0), ('up', 0.5)]
    """
    count: Value = 0
    shares: list[Value] = []
    for matrix in matrices(block):
        is_there = (matrix.outputs > 0) * (matrix.inputs > 0) * 1
        if matrix.is_routed or matrix.name == "router":
            shares.append(0 * is_there)
            continue
        is_gated = block.gated * 1 if matrix.name in ("up", "shared_up") else 0
        is_two = 1 if matrix.name in ("key_value", "cross_key_value") else is_gated
        # It is applied after `count` others; of two products one is a second one.
        shares.append(is_there * ((1 - is_two) * (count % 2) + is_two * 0.5))
        count = count + is_there * (1 + is_two)
    return tuple(shares)


def block_parameters(block: Block) -> int:
    """Parameters of one block, all experts included.

    >>> block_parameters(Block(name="mlp", count=1, hidden=8, ffn=32, vector_parameters=40))
    552
    """
    return dense_parameters(block) + expert_parameters(block)


@_once
def dense_parameters(block: Block) -> int:
    """Parameters of one block outside its routed experts; all of a measured block."""
    if block.measured is not None:
        return block.measured.num_parameters
    inside = sum(m.inputs * m.outputs for m in matrices(block) if not m.is_routed)
    return inside + block.vector_parameters


@_once
def expert_parameters(block: Block) -> int:
    """Parameters of all routed experts of one block."""
    return sum(m.inputs * m.outputs * m.copies for m in matrices(block) if m.is_routed)


def attention_flops(block: Block, seq_len: Value) -> Value:
    """FLOPs of scores and weighted values of one sample's forward pass through one block.

    A multiplication and an addition are two. Causal attention counts the half that is computed,
    a window only what it sees.
    """
    seen = block.window + (block.window == 0) * seq_len
    seen = seen + (seen > seq_len) * (seq_len - seen)
    causal = block.causal * 1
    # Of the S x S scores: all; the lower half with its diagonal; or a band of that half.
    half = seen * (seen + 1) / 2 + (seq_len - seen) * seen
    pairs = causal * half + (1 - causal) * seq_len * seq_len
    widths = block.heads * (block.head_dim + block.value_dim)
    cross = 2 * block.cross_heads * block.head_dim * seq_len * seq_len
    return 2.0 * (pairs * widths + cross)


def block_flops(block: Block, seq_len: Value) -> Value:
    """FLOPs of one sample's forward pass through one block: matrices and attention.

    Leaves out: norms, rotary positions, softmax, activation functions, recomputation.

    Source: Kaplan et al., arXiv:2001.08361, table 1 (there without the causal half).
    """
    used = sum(m.inputs * m.outputs * m.used for m in matrices(block))
    return 2.0 * used * seq_len + attention_flops(block, seq_len)
