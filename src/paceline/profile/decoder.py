"""The profile of the built-in decoder, counted from its list of operations.

Letters, per sample and for B = 1:
    S  tokens       H  hidden      N  heads      K  kv_heads
    D  head_dim     F  ffn         V  vocab      c  bytes of the type that is multiplied in

What autograd saves in one block, in elements a token (torch 2.13, read off with
`torch.autograd.graph.saved_tensors_hooks`; tests/profile holds it to the real module):

    ===========================  =================  ==================================
    operation                    saves              type
    ===========================  =================  ==================================
    RMSNorm, twice               H  its input       that of the residual stream
                                 1  1/rms           float32
                                 H  normalised      float32, only where not fused (CPU)
    query, key, value            H  their input     c; under autocast one cast for each
    attention (flash)            ND + 2KD           c: rotated query and key, and value
                                 ND  its output     c; also the input of the output matrix
                                 N  log-sum-exp     float32
    gate, up                     H  their input     c; under autocast one cast for each
    silu                         F  its input       c
    product                      2F  both factors   c
    down                         F  its input       c
    ===========================  =================  ==================================

The residual stream is float32 in fp32 and under autocast (the embedding is float32), bfloat16 with
FSDP2 in bf16; the unfused RMSNorm then saves a float32 copy of its input instead. Additions and
rotary positions save nothing of their own. Outside the blocks: token ids and targets (int64), the
final RMSNorm, the output matrix's input, and the log-softmax (V, float32).

Leaves out: attention without a flash kernel, which saves S x S scores (float32 with grouped
queries on a GPU); the parameters themselves and their copies, which `estimate/` counts.
"""

from typing import Literal, NamedTuple

from paceline.profile.model import ActivationBytes, ComputeMode, ModelProfile
from paceline.profile.shape import DecoderShape

Kernels = Literal["cpu", "gpu"]
"""Whose kernels run: RMSNorm is one fused kernel on a GPU and a chain of operations on a CPU."""

_FLOAT32, _INT64 = 4, 8


def profile_decoder(shape: DecoderShape, seq_len: int, *, kernels: Kernels = "cpu") -> ModelProfile:
    """Costs of the built-in decoder on samples of `seq_len` tokens."""
    block = block_parameters(shape)
    root = root_parameters(shape)
    return ModelProfile(
        num_parameters=shape.layers * block + root,
        num_block_parameters=block,
        num_blocks=shape.layers,
        num_root_parameters=root,
        seq_len=seq_len,
        forward_flops_per_sample=forward_flops(shape, seq_len),
        activation_bytes={
            name: _activation_bytes(shape, seq_len, mode, kernels) for name, mode in _MODES.items()
        },
    )


def block_parameters(shape: DecoderShape) -> int:
    """Parameters of one block: four attention matrices, three feed-forward ones, two norms.

    >>> llama_3_8b = DecoderShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128,
    ...     ffn=14336, vocab=128256, tied_embeddings=False)
    >>> block_parameters(llama_3_8b)
    218112000
    """
    bias = (shape.heads + 2 * shape.kv_heads) * shape.head_dim if shape.qkv_bias else 0
    return _block_matrix_elements(shape) + bias + 2 * shape.hidden


def root_parameters(shape: DecoderShape) -> int:
    """Parameters outside the blocks: embedding, final norm, and the output matrix unless tied."""
    matrices = 1 if shape.tied_embeddings else 2
    return matrices * shape.vocab * shape.hidden + shape.hidden


def forward_flops(shape: DecoderShape, seq_len: int) -> float:
    """FLOPs of one sample's forward pass.

    Every matrix element is one multiplication and one addition a token; the embedding is a lookup
    and counts nothing. Attention has two products of S x S x D for each head; causal kernels
    compute the lower half, so half is counted.

    Leaves out: norms, rotary positions, softmax, silu, and recomputation.

    Source: Kaplan et al., arXiv:2001.08361, table 1 (there without the causal half).
    """
    matrices = shape.layers * _block_matrix_elements(shape) + shape.vocab * shape.hidden
    attention = shape.layers * 2 * shape.heads * shape.head_dim * seq_len * (seq_len + 1)
    return float(2 * matrices * seq_len + attention)


def _block_matrix_elements(shape: DecoderShape) -> int:
    query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.hidden * (2 * query_width + 2 * kv_width + 3 * shape.ffn)


class _Mode(NamedTuple):
    """Bytes of one element, by what it is."""

    computed: int
    """c: inputs and outputs of matrices and attention."""

    stream: int
    """The residual stream."""

    casts: int
    """Casts of one linear input kept: under autocast, each linear makes its own."""


_MODES: dict[ComputeMode, _Mode] = {
    "fp32": _Mode(computed=4, stream=4, casts=1),
    "bf16-autocast": _Mode(computed=2, stream=4, casts=3),
    "bf16-sharded": _Mode(computed=2, stream=2, casts=1),
}


def _activation_bytes(
    shape: DecoderShape, seq_len: int, mode: _Mode, kernels: Kernels
) -> ActivationBytes:
    norm = _norm_bytes(shape.hidden, mode, kernels)
    linear_inputs = min(mode.casts, 3) + min(mode.casts, 2)  # query, key, value; gate, up
    query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    block = (
        2 * norm
        + mode.computed * linear_inputs * shape.hidden
        + mode.computed * (2 * query_width + 2 * kv_width)
        + _FLOAT32 * shape.heads
        + mode.computed * 4 * shape.ffn
    )
    outside = norm + mode.computed * shape.hidden + _FLOAT32 * shape.vocab + 2 * _INT64
    return ActivationBytes(
        block=seq_len * block,
        outside=seq_len * outside,
        # Gradients of the log-softmax and of the logits; the logits themselves, and their float32
        # copy, are as large just before.
        loss_peak=seq_len * 2 * _FLOAT32 * shape.vocab,
        # Gradients of the product and of both its factors, and of the stream.
        block_peak=seq_len * (mode.computed * 3 * shape.ffn + mode.stream * 2 * shape.hidden),
    )


def _norm_bytes(hidden: int, mode: _Mode, kernels: Kernels) -> int:
    """Saved by one RMSNorm for one token."""
    if kernels == "gpu":
        return mode.stream * hidden + _FLOAT32
    return _FLOAT32 * 2 * hidden + _FLOAT32
