"""Documents that share a sample and do not see each other: packed samples.

The step sets a micro-batch's `Documents` (`kept_apart`) around its forward pass, and around its
backward pass, where blocks may be recomputed. Attention and positions ask for them (`current`):
attention is computed for each document alone, and positions restart at each.

The state is the module's and not a thread's, because the backward pass of an accelerator runs in a
thread of its own.

Letters in tensor names: as in `ulysses`, and E documents in the fullest sample.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.parallel.layout import Layout
from paceline.runtime.strategy.context.tokens import local_tokens

_T = TypeVar("_T")

COMPILED = "_paceline_is_compiled"
"""Attribute of a block whose forward pass is compiled."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Documents:
    """Where the documents of a micro-batch's samples are."""

    def __init__(self, ends_BE: Tensor, seq_len: int, layout: Layout, context_rank: int) -> None:
        """Args:
        ends_BE: Where each document ends, ascending, in host memory; filled up with `seq_len`,
            which is also the last end.
        seq_len: Tokens in a whole sample.
        """
        self.seq_len = seq_len
        self._layout, self._rank = layout, context_rank
        self._kept: dict[object, Any] = {}
        self.was_asked = False  # by attention
        ends: list[list[int]] = ends_BE.tolist()
        self.spans = [
            [(start, stop) for start, stop in pairwise([0, *row]) if stop > start] for row in ends
        ]
        """First token of each document of each sample, and the one after its last."""

        covered = [spans[-1][1] if spans else 0 for spans in self.spans]
        assert covered == [seq_len] * len(ends), "the last document ends where the sample does"
        assert all(row == sorted(row) for row in ends), "ends ascend"

    def positions(self, device: torch.device | None) -> Tensor:
        """`positions_BS`: where in their documents this rank's tokens are."""

        def make() -> Tensor:
            rows = [
                torch.cat([torch.arange(stop - start) for start, stop in spans])
                for spans in self.spans
            ]
            return local_tokens(torch.stack(rows), self._layout, self._rank).to(device)

        return self.keep(("positions", device), make)

    def keep(self, key: object, make: Callable[[], _T]) -> _T:
        """What `make` returned the first time, for all blocks and both passes."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: _T = self._kept[key]
        return kept

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(stop - start for spans in self.spans for start, stop in spans)

    def edges(self, device: torch.device) -> Tensor:
        """Every document's first token in samples put one after another, and the end; int32."""

        def make() -> Tensor:
            ends = [
                sample * self.seq_len + stop
                for sample, spans in enumerate(self.spans)
                for _, stop in spans
            ]
            return torch.tensor([0, *ends], dtype=torch.int32).to(device, non_blocking=True)

        return self.keep(("edges", device), make)


_current: list[Documents | None] = [None]


def current() -> Documents | None:
    """The documents of the micro-batch that is being computed; None in samples that are whole."""
    return _current[-1]


@contextmanager
def kept_apart(documents: Documents | None) -> Iterator[None]:
    """While it lasts, attention and positions are of these documents."""
    _current.append(documents)
    try:
        yield
    finally:
        _current.pop()


def check_asked(documents: Documents | None) -> None:
    """After a forward pass.

    Raises:
        JobError: R030, the model did not ask, and its documents saw each other.
    """
    if documents is not None and not documents.was_asked:
        raise cannot_pack(
            "this model: its forward pass did not call paceline.runtime.strategy.attention, so "
            "documents in a sample see each other",
            "call it where attention is computed, or set data.pack to windows",
        )


def cannot_pack(what: str, fix: str) -> JobError:
    """The refusal of something that packed samples have no form for."""
    return JobError.of(
        code="R030", what=f"packed samples cannot be had with {what}", where="data.pack", fix=fix
    )


def check_not_compiled(model: nn.Module) -> None:
    """Raise `JobError` R030 where blocks are compiled: they would be again for every batch."""
    if any(hasattr(module, COMPILED) for module in model.modules()):
        raise cannot_pack(
            "train.compile: documents end elsewhere in every batch, and blocks would be compiled "
            "again for each",
            "leave train.compile out, or set data.pack to windows",
        )


def apart_attention(
    query_BNTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, documents: Documents, attend: Attend
) -> Tensor:
    """Attention of every document alone, where all tokens are on this rank."""
    documents.was_asked = True
    assert query_BNTD.shape[2] == documents.seq_len, "all tokens of each sample"
    heads = query_BNTD, key_BKTD, value_BKTD
    samples = []
    for sample, spans in enumerate(documents.spans):
        of_sample = [each[sample : sample + 1] for each in heads]
        parts = [attend(*(each[:, :, a:b] for each in of_sample)) for a, b in spans]
        samples.append(torch.cat(parts, dim=2))
    return torch.cat(samples)


def fused_attention(
    query_BNTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    documents: Documents,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor | None:
    """`apart_attention` in one kernel, `output_BNTD`; None where no kernel takes these tensors."""
    is_narrow = query_BNTD.dtype in (torch.bfloat16, torch.float16)
    if query_BNTD.device.type != "cuda" or not is_narrow or query_BNTD.shape[-1] % 8:
        return None
    # Here, because torch before 2.10 has none.
    from torch.nn.attention.varlen import varlen_attn

    documents.was_asked = True
    edges = documents.edges(query_BNTD.device)
    # Samples one after another, tokens before heads.
    flat = [each.transpose(1, 2).flatten(0, 1) for each in (query_BNTD, key_BKTD, value_BKTD)]
    times = query_BNTD.shape[1] // key_BKTD.shape[1]
    query, key, value = (flat[0], *(each.repeat_interleave(times, dim=1) for each in flat[1:]))
    output: Any = varlen_attn(
        query,
        key,
        value,
        edges,
        edges,
        documents.longest,
        documents.longest,
        scale=scale,
        window_size=(-1, 0) if is_causal else (-1, -1),
    )
    mixed_BTND: Tensor = output.unflatten(0, (len(query_BNTD), -1))
    return mixed_BTND.transpose(1, 2)
