"""Attention of some queries to some keys, with what is needed to merge it with other blocks.

A block's forward pass also returns the log-sum-exp of each query's scores. Given the log-sum-exp
over *all* keys, and the merged output, its backward pass gives exactly this block's share of the
gradients, so blocks can be computed one at a time, on whatever rank, and added up.

torch's public attention returns no log-sum-exp, its kernels do: the one it would choose is called.

Letters in tensor names:
    B  samples    N  query heads (K: key and value heads)    S  queries    T  keys    D  head width
    G  query heads that share a key and value head, N / K
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.runtime import _torch_private as torch_private

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
"""(query_BNSD, key_BKTD, value_BKTD, is_causal, scale) -> (output_BNSD, lse_BNS)."""

Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""(query_BNSD, key_BKTD, value_BKTD, output_BNSD, lse_BNS)."""

Backward = Callable[[Tensor, Kept, bool, float], tuple[Tensor, Tensor, Tensor]]
"""(grad_BNSD, kept, is_causal, scale) -> the gradients of query, key and value."""


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """One way to compute a block. The log-sum-exp is float32, or float64 for float64 inputs."""

    name: str
    forward: Forward
    backward: Backward


def choose_kernel(query_BNSD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor) -> BlockKernel:
    """The fastest kernel that takes tensors of these types and widths.

    On CUDA flash comes before memory-efficient; what neither takes (float64, a value width of its
    own) is written out with all its scores, S x T of them.
    """
    if key_BKTD.shape[-1] == value_BKTD.shape[-1]:
        if query_BNSD.device.type in ("cpu", "meta"):
            return FLASH_CPU
        if query_BNSD.device.type == "cuda":
            return _choose_for_cuda(query_BNSD, key_BKTD, value_BKTD)
    return WRITTEN_OUT


def _choose_for_cuda(query_BNSD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor) -> BlockKernel:
    cuda = torch.backends.cuda
    is_shared = query_BNSD.shape[1] != key_BKTD.shape[1]
    takes = cuda.SDPAParams(query_BNSD, key_BKTD, value_BKTD, None, 0.0, False, is_shared)
    # torch pads narrower heads to a multiple of 8 before it calls flash; that is not done here.
    if query_BNSD.shape[-1] % 8 == 0 and cuda.can_use_flash_attention(takes):
        return FLASH_CUDA
    key, value = _repeated(query_BNSD, key_BKTD), _repeated(query_BNSD, value_BKTD)
    takes = cuda.SDPAParams(query_BNSD, key, value, None, 0.0, False, False)
    return EFFICIENT if cuda.can_use_efficient_attention(takes) else WRITTEN_OUT


def _flash_cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    output, lse = torch_private.FLASH_CPU(query, key, value, 0.0, is_causal, scale=scale)
    return output, lse


def _flash_cpu_backward(
    grad: Tensor, kept: Kept, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = torch_private.FLASH_CPU_BACKWARD(
        grad, *kept, 0.0, is_causal, scale=scale
    )
    return grads


FLASH_CPU = BlockKernel("flash on CPU", _flash_cpu_forward, _flash_cpu_backward)
"""Takes float64 too, and shared heads without repeating them."""


def _flash_cuda_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    output, lse, *_ = torch_private.FLASH(query, key, value, 0.0, is_causal, False, scale=scale)
    return output, lse


def _flash_cuda_backward(
    grad: Tensor, kept: Kept, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, output, lse = kept
    seed = query.new_zeros(2, dtype=torch.uint64)  # of dropout, which there is none of
    held = query, key, value, output, lse.contiguous(), None, None, query.shape[2], key.shape[2]
    offset = query.new_zeros((), dtype=torch.uint64)
    grads: tuple[Tensor, Tensor, Tensor] = torch_private.FLASH_BACKWARD(
        grad, *held, 0.0, is_causal, seed, offset, scale=scale
    )
    return grads


FLASH_CUDA = BlockKernel("flash", _flash_cuda_forward, _flash_cuda_backward)
"""float16 and bfloat16; shared heads without repeating them."""


_LSE_ROWS = 32
"""The memory-efficient kernel reads log-sum-exps in rows of this many. Source: torch's
kernel_forward.h, kAlignLSE."""


def _efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    key, value = _repeated(query, key), _repeated(query, value)
    output, lse, *_ = torch_private.EFFICIENT(
        query, key, value, None, True, 0.0, is_causal, scale=scale
    )
    return output, lse[..., : query.shape[2]]


def _efficient_backward(
    grad: Tensor, kept: Kept, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, output, lse = kept
    seed = query.new_zeros((), dtype=torch.int64)
    # Infinity gives the rows that are not there a weight of exp(-infinity), as the forward does.
    padded_lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=float("inf")).contiguous()
    heads = query, _repeated(query, key), _repeated(query, value)
    wanted = [True, True, True, False]
    grad_query, grad_key, grad_value, _ = torch_private.EFFICIENT_BACKWARD(
        grad, *heads, None, output, padded_lse, seed, seed, 0.0, wanted, is_causal, scale=scale
    )
    shared = (key.shape[1], -1)
    return (
        grad_query,
        torch.unflatten(grad_key, 1, shared).sum(2),
        torch.unflatten(grad_value, 1, shared).sum(2),
    )


EFFICIENT = BlockKernel("memory-efficient", _efficient_forward, _efficient_backward)
"""float32 as well; shared heads are repeated."""


def _written_out_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores_BKGST = _scores(query, key, is_causal, scale)
    lse_BKGS = scores_BKGST.logsumexp(-1)
    weights_BKGST = (scores_BKGST - lse_BKGS.unsqueeze(-1)).exp()
    output_BKGSD = weights_BKGST @ _wide(value).unsqueeze(2)
    return output_BKGSD.flatten(1, 2).to(query.dtype), lse_BKGS.flatten(1, 2)


def _written_out_backward(
    grad: Tensor, kept: Kept, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, output, lse = kept
    shared = (key.shape[1], -1)
    query_BKGSD, grad_BKGSD = (torch.unflatten(_wide(each), 1, shared) for each in (query, grad))
    along_BKGS = torch.unflatten((_wide(grad) * _wide(output)).sum(-1), 1, shared)
    lse_BKGS = torch.unflatten(lse, 1, shared)
    weights_BKGST = (_scores(query, key, is_causal, scale) - lse_BKGS.unsqueeze(-1)).exp()
    grad_weights_BKGST = grad_BKGSD @ _wide(value).unsqueeze(2).mT
    grad_scores_BKGST = weights_BKGST * (grad_weights_BKGST - along_BKGS.unsqueeze(-1)) * scale
    grad_query = (grad_scores_BKGST @ _wide(key).unsqueeze(2)).flatten(1, 2)
    grad_key = (grad_scores_BKGST.mT @ query_BKGSD).sum(2)
    grad_value = (weights_BKGST.mT @ grad_BKGSD).sum(2)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    query_BKGSD = torch.unflatten(_wide(query), 1, (key.shape[1], -1))
    scores_BKGST = query_BKGSD @ _wide(key).unsqueeze(2).mT * scale
    if is_causal:
        is_later = torch.ones(scores_BKGST.shape[-2:], dtype=torch.bool, device=query.device)
        scores_BKGST = scores_BKGST.masked_fill(is_later.triu(1), -torch.inf)
    return scores_BKGST


WRITTEN_OUT = BlockKernel("written out", _written_out_forward, _written_out_backward)
"""Any type, device and width, with every score in memory: float32, or float64 for float64."""


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _repeated(query: Tensor, heads: Tensor) -> Tensor:
    times = query.shape[1] // heads.shape[1]
    return heads if times == 1 else heads.repeat_interleave(times, dim=1)
