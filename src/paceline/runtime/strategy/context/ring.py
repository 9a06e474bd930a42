"""Ring attention: queries stay, keys and values travel round the ranks of a sample.

Each rank holds two chunks of its sample, rank r of W the chunks r and 2W-1-r ("zigzag"), so that
causal attention gives every rank the same work. Source: Liu et al., arXiv:2310.01889; the order
from Brandon et al., arXiv:2311.09431 and Llama 3, arXiv:2407.21783, section 3.3.2.

In step s a rank holds the keys and values of rank (r - s) mod W. They are sent on while they are
used. In the backward pass their gradients travel one step behind them, and arrive at home.

Sends and receives are `c10d.send` and `c10d.recv_` to a dispatch mode. In one pass over W ranks:
forward W-1 messages of the rank's keys and values, backward the same again and W messages of their
gradients in float32 (float64 for float64).

Letters in tensor names:
    B  samples    N  query heads (K: key and value heads)    S  tokens of this rank    D  head width
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.runtime.strategy.context.documents import Documents
from paceline.runtime.strategy.context.kernels import BlockKernel, choose_kernel

_HEADS, _GRADIENTS = 0, 1
"""Tags, so that the two kinds of messages between the same ranks cannot be mistaken."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(
    query_BNSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    group: dist.ProcessGroup,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Attention of this rank's tokens to all tokens of the sample, `output_BNSD`.

    Keeps only query, key, value, output and the log-sum-exp for the backward pass. Collective:
    every rank of the group calls it, and calls backward, in the same order.

    Args:
        query_BNSD: Of this rank's tokens: its chunk r, then its chunk 2W-1-r.
        key_BKSD: The same tokens' keys. N is a multiple of K.
        group: The ranks that share the sample, in the order of their chunks.
        is_causal: Whether a token sees only itself and earlier ones. Needs an even S.
        scale: Of the scores; 1 / sqrt(D) when None.
        documents: Where they are in packed samples: blocks are cut at their edges.
    """
    scale = query_BNSD.shape[-1] ** -0.5 if scale is None else scale
    heads = (query_BNSD, key_BKSD, value_BKSD)
    blocks = _Blocks(group.rank(), group.size(), query_BNSD.shape[2], is_causal, documents)
    output: Tensor = _Ring.apply(*heads, group, blocks, scale)  # type: ignore[no-untyped-call]
    return output


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: dist.ProcessGroup,
        blocks: "_Blocks",
        scale: float,
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            output, lse = _forward(query, key, value, group, blocks, scale)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.group, ctx.blocks, ctx.scale = group, blocks, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            grads = _backward(grad, ctx.saved_tensors, ctx.group, ctx.blocks, ctx.scale)
        return (*grads, None, None, None)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    blocks: "_Blocks",
    scale: float,
) -> tuple[Tensor, Tensor]:
    kernel = choose_kernel(query, key, value)
    world, rank = group.size(), group.rank()
    held = _Pair.of(key, value)
    merged, merged_lse = torch.empty(0), torch.empty(0)
    for step in range(world):
        coming = held.send_on(group, _HEADS) if step < world - 1 else None
        for block in blocks.of((rank - step) % world):
            output, lse = kernel.forward(
                query[block.queries],
                held.first[block.keys],
                held.second[block.keys],
                block.is_causal,
                scale,
            )
            if block.is_all:  # its own block comes first, so every query has seen a key
                # Copies, because selective recompute may have kept these.
                merged, merged_lse = output.to(lse.dtype, copy=True), lse.clone()
                continue
            if not len(merged):
                merged = torch.zeros(*query.shape[:3], value.shape[3]).to(lse)
                merged_lse = merged.new_full(query.shape[:3], -torch.inf)
            _merge(merged[block.queries], merged_lse[block.queries], output, lse)
        if coming is not None:
            held = coming.arrived()
    return merged.to(query.dtype), merged_lse


def _backward(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    group: dist.ProcessGroup,
    blocks: "_Blocks",
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, _, lse = saved
    kernel = choose_kernel(query, key, value)
    world, rank = group.size(), group.rank()
    # A gradient that was expanded, as that of a sum is, has strides which the kernels do not read.
    grad = grad if grad.stride(-1) == 1 and 0 not in grad.stride() else grad.contiguous()
    held = _Pair.of(key, value)
    grad_query = torch.zeros_like(query, dtype=lse.dtype)
    behind: _Exchange | None = None
    for step in range(world):
        coming = held.send_on(group, _HEADS) if step < world - 1 else None
        parts = [
            (block, _block_gradients(kernel, grad, saved, held, block, scale))
            for block in blocks.of((rank - step) % world)
        ]
        gradients = _Pair.zeros(key, value, lse.dtype) if behind is None else behind.arrived()
        for block, (of_query, of_key, of_value) in parts:
            grad_query[block.queries].add_(of_query)
            gradients.first[block.keys].add_(of_key)
            gradients.second[block.keys].add_(of_value)
        behind = gradients.send_on(group, _GRADIENTS)
        if coming is not None:
            held = coming.arrived()
    assert behind is not None
    gradients = behind.arrived()
    return (
        grad_query.to(query.dtype),
        gradients.first.to(key.dtype),
        gradients.second.to(value.dtype),
    )


def _block_gradients(
    kernel: BlockKernel,
    grad: Tensor,
    saved: tuple[Tensor, ...],
    held: "_Pair",
    block: "_Block",
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    query, _, _, output, lse = (each[block.queries] for each in saved)
    kept = query, held.first[block.keys], held.second[block.keys], output, lse
    return kernel.backward(grad[block.queries], kept, block.is_causal, scale)


_Rows = tuple[slice, slice, slice]


@dataclass(frozen=True, slots=True)
class _Block:
    """What of this rank's queries sees what of another's keys: the rest is masked, and skipped."""

    queries: _Rows
    keys: _Rows
    is_causal: bool
    is_all: bool = False
    """Whether every query is in it."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of one rank."""

    rank: int
    world: int
    num_tokens: int
    is_causal: bool
    documents: Documents | None

    def of(self, source: int) -> list[_Block]:
        """Blocks of this rank's queries with a source's keys.

        Chunks r and 2W-1-r, and a source's s and 2W-1-s: r > s sees its first chunk with both of
        its own, r < s sees both with its second.
        """
        if self.documents is not None:
            self.documents.was_asked = True
            key = ("ring", self.rank, source, self.is_causal)
            return self.documents.keep(key, lambda: list(self._cut(source)))
        whole, half = slice(None), self.num_tokens // 2
        first, second = (whole, whole, slice(0, half)), (whole, whole, slice(half, None))
        both = (whole, whole, whole)
        if source == self.rank or not self.is_causal:
            is_own = source == self.rank
            return [_Block(both, both, is_own and self.is_causal, is_all=is_own)]
        if source < self.rank:
            return [_Block(both, first, False)]
        return [_Block(second, both, False)]

    def _cut(self, source: int) -> Iterator[_Block]:
        """The blocks with documents apart: for each pair of chunks the documents that are in
        both."""
        assert self.documents is not None
        chunk = self.num_tokens // 2
        for sample, spans in enumerate(self.documents.spans):
            for (query_at, query_chunk), (key_at, key_chunk) in product(
                enumerate((self.rank, 2 * self.world - 1 - self.rank)),
                enumerate((source, 2 * self.world - 1 - source)),
            ):
                if self.is_causal and key_chunk > query_chunk:
                    continue
                for span in spans:
                    queries = _inside(span, query_chunk * chunk, chunk, query_at * chunk)
                    keys = _inside(span, key_chunk * chunk, chunk, key_at * chunk)
                    if queries.start < queries.stop and keys.start < keys.stop:
                        of_sample = slice(sample, sample + 1), slice(None)
                        is_diagonal = self.is_causal and key_chunk == query_chunk
                        yield _Block((*of_sample, queries), (*of_sample, keys), is_diagonal)


def _inside(span: tuple[int, int], chunk_start: int, chunk: int, at: int) -> slice:
    start, stop = (min(max(edge - chunk_start, 0), chunk) for edge in span)
    return slice(at + start, at + stop)


def _merge(merged: Tensor, merged_lse: Tensor, output: Tensor, lse: Tensor) -> None:
    """Add a block to what has been merged, in place, in the precision of the log-sum-exp.

    Each is a mean of values weighted by the exponentials that its log-sum-exp is of.
    """
    share = torch.sigmoid(lse - merged_lse)
    merged.lerp_(output.to(merged.dtype), share.unsqueeze(-1))
    merged_lse.copy_(torch.logaddexp(merged_lse, lse))


class _Pair:
    """Two tensors in one buffer, so that they travel as one message."""

    def __init__(self, buffer: Tensor, first_shape: torch.Size, second_shape: torch.Size) -> None:
        split = first_shape.numel()
        self.buffer = buffer
        self.first = buffer[:split].view(first_shape)
        self.second = buffer[split:].view(second_shape)

    @staticmethod
    def of(first: Tensor, second: Tensor) -> "_Pair":
        buffer = torch.cat((first.flatten(), second.flatten()))
        return _Pair(buffer, first.shape, second.shape)

    @staticmethod
    def zeros(first: Tensor, second: Tensor, dtype: torch.dtype) -> "_Pair":
        buffer = first.new_zeros(first.numel() + second.numel(), dtype=dtype)
        return _Pair(buffer, first.shape, second.shape)

    def send_on(self, group: dist.ProcessGroup, tag: int) -> "_Exchange":
        """Start to send it to the next rank, and to receive the previous rank's."""
        world, rank = group.size(), group.rank()
        coming = _Pair(torch.empty_like(self.buffer), self.first.shape, self.second.shape)
        to_next = dist.P2POp(
            dist.isend, self.buffer, group=group, group_peer=(rank + 1) % world, tag=tag
        )
        from_previous = dist.P2POp(
            dist.irecv, coming.buffer, group=group, group_peer=(rank - 1) % world, tag=tag
        )
        return _Exchange(self, coming, dist.batch_isend_irecv([to_next, from_previous]))


class _Exchange:
    """A pair on its way. The one that is sent is held here until it has been."""

    def __init__(self, going: _Pair, coming: _Pair, works: list[dist.Work]) -> None:
        self.going, self.coming, self.works = going, coming, works

    def arrived(self) -> _Pair:
        for work in self.works:
            work.wait()
        return self.coming
