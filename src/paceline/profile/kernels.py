"""What Paceline's own runtime keeps in memory, by the way it multiplies.

Read off torch 2.13 with `torch.autograd.graph.saved_tensors_hooks`; tests/profile holds it to the
real module. The residual stream is float32 in fp32 and under autocast (the embedding is float32),
bfloat16 with FSDP2 in bf16. RMSNorm is one fused kernel on a GPU and keeps its input; on a CPU it
is a chain of operations that keeps a float32 copy of its input and the normalised tensor.

Leaves out: attention without a flash kernel, which keeps S x S scores (float32 with grouped
queries on a GPU); the kernels of other software, which `estimate/` knows by its name.
"""

from typing import Literal, NamedTuple

from paceline.profile.saved import FLOAT32, Kernels

ComputeMode = Literal["fp32", "bf16-autocast", "bf16-sharded"]
"""How the matrices are multiplied: all in float32; float32 parameters under autocast (DDP, or one
rank); or FSDP2 gathering bfloat16 parameters. The last two save different tensors."""


class _Mode(NamedTuple):
    computed: int
    """Bytes of one element that goes into or out of a matrix or attention."""

    stream: int
    """Bytes of one element of the residual stream."""

    has_casts: bool
    """Whether each linear keeps a cast of its input of its own."""


_MODES: dict[ComputeMode, _Mode] = {
    "fp32": _Mode(computed=4, stream=4, has_casts=False),
    "bf16-autocast": _Mode(computed=2, stream=4, has_casts=True),
    "bf16-sharded": _Mode(computed=2, stream=2, has_casts=False),
}


def runtime_kernels(mode: ComputeMode, *, fused_norm: bool) -> Kernels:
    """What the built-in decoder keeps; `fused_norm` is true on a GPU and false on a CPU.

    >>> runtime_kernels("bf16-autocast", fused_norm=True).attention_casts  # query, key, value
    3
    """
    computed, stream, has_casts = _MODES[mode]
    return Kernels(
        compute_bytes=computed,
        stream_bytes=stream,
        norm_bytes=stream if fused_norm else 2 * FLOAT32,
        attention_casts=3 if has_casts else 1,
        ffn_casts=2 if has_casts else 1,
    )
