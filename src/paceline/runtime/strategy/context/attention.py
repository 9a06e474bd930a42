"""Attention of a model's tokens to all tokens of their samples, wherever those are.

A person's own module takes part by calling `attention` from here, and `positions` if it needs
them; both are the ordinary thing in a layout without context parallelism.

Leaves out how a model is made to call them (`split.py`).
"""

from collections.abc import Callable
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import JobError
from paceline.parallel.layout import Layout
from paceline.parallel.layout_laws import check_sample
from paceline.runtime.strategy.context.documents import current
from paceline.runtime.strategy.context.ring import ring_attention
from paceline.runtime.strategy.context.tokens import local_positions
from paceline.runtime.strategy.context.ulysses import Scores, ulysses_attention, whole_attention


class Context:
    """The ranks that share this rank's samples, and attention over all their tokens."""

    def __init__(self, layout: Layout, rank: int, group: dist.ProcessGroup | None) -> None:
        """Args:
        group: All of them; None when there is one, which has all tokens.
        """
        self.layout = layout
        self.rank = rank
        self.group = group
        self.was_asked = False  # by `attention`, since a watched module was entered

    def attend(
        self,
        query_BNSD: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        **scores: Unpack[Scores],
    ) -> Tensor:
        """Attention of this rank's tokens to all tokens of their samples, `output_BNSD`.

        Under autocast it runs in autocast's type, as torch's own attention does.

        Raises:
            JobError: What the arguments ask for cannot be computed in this layout.
        """
        if query_BNSD.shape[2] != key_BKSD.shape[2]:
            raise cannot(
                f"attention of {query_BNSD.shape[2]} queries to {key_BKSD.shape[2]} keys: a token "
                "attends to tokens of another sequence, or a key cache is in use",
                "turn key caches off (use_cache=False), or set layout.context to 1",
            )
        device_type = query_BNSD.device.type
        if torch.is_autocast_enabled(device_type):
            narrow = torch.get_autocast_dtype(device_type)
            query_BNSD, key_BKSD = query_BNSD.to(narrow), key_BKSD.to(narrow)
            value_BKSD = value_BKSD.to(narrow)
        heads = (query_BNSD, key_BKSD, value_BKSD)
        if self.layout.context == 1:
            return whole_attention(*heads, **scores)
        if self.layout.context_kind == "ring":
            is_causal = scores.get("is_causal", True)
            self._check_ring(query_BNSD.shape[2], is_causal, scores)
            assert self.group is not None
            mixed: Tensor = ring_attention(
                *heads,
                self.group,
                is_causal=is_causal,
                scale=scores.get("scale"),
                documents=current(),
            )
            return mixed
        self._check_heads(query_BNSD.shape[1])
        assert self.group is not None
        return ulysses_attention(*heads, self.group, **scores)

    def positions(self, num_tokens: int, device: torch.device | None = None) -> Tensor:
        """Where in their samples this rank's tokens are, given how many it has of each; in packed
        samples `positions_BS`, in their documents."""
        if (documents := current()) is not None:
            return documents.positions(device)
        seq_len = num_tokens * self.layout.context
        return local_positions(seq_len, self.layout, self.rank, device)

    def _check_ring(self, num_tokens: int, is_causal: bool, scores: Scores) -> None:
        """The ring's blocks have no form for these."""
        seq_len = num_tokens * self.layout.context
        fix = "set layout.context_kind to ulysses"
        if num_tokens % 2 and is_causal:
            raise JobError(*check_sample(seq_len, None, None, self.layout))
        if (dropout := scores.get("dropout", 0.0)) > 0:
            raise cannot(
                f"a ring with dropout {dropout:g} of attention weights",
                f"{fix}, or the model's attention dropout (attention_dropout, attn_pdrop) to 0",
            )
        if (window := scores.get("window")) is not None and window < seq_len:
            raise cannot(f"a ring with a window of {window} of {seq_len} tokens", fix)
        if (softcap := scores.get("softcap")) is not None:
            raise cannot(f"a ring with scores capped at {softcap:g}", fix)

    def _check_heads(self, heads: int) -> None:
        if heads % self.layout.context:
            raise JobError(*check_sample(None, heads * self.layout.tensor, None, self.layout))


def cannot(what: str, fix: str) -> JobError:
    """The refusal of something that context parallelism has no form for."""
    return JobError.of(
        code="R030",
        what=f"context parallelism cannot do {what}",
        where="layout.context",
        fix=fix,
    )


ACTIVE: list[Context] = []
"""Contexts of the modules being called, innermost last. Pushed and popped around `forward`, so
that another model in the same process, or a block that is recomputed in the backward pass, gets
its own."""


def attention(
    query_BNSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    **scores: Unpack[Scores],
) -> Tensor:
    """Attention for a person's own module: torch's own, and over all ranks of a sample when its
    tokens are split.

    Args:
        query_BNSD: samples x query heads x tokens x width.
        key_BKSD: As the query; fewer heads, each shared by N / K query heads, are not repeated.
        value_BKSD: As the key.
        scores: As `Scores` has them; no dropout, window or softcap in a ring.
    """
    if ACTIVE:
        ACTIVE[-1].was_asked = True
    attend: Callable[..., Tensor] = ACTIVE[-1].attend if ACTIVE else whole_attention
    return attend(query_BNSD, key_BKSD, value_BKSD, **scores)


def positions(num_tokens: int, device: torch.device | None = None) -> Tensor:
    """Where in their samples the tokens are that a person's own module is given: 0, 1, 2, ...
    unless they are split. In packed samples `positions_BS`, from 0 in each document."""
    if ACTIVE:
        return ACTIVE[-1].positions(num_tokens, device)
    if (documents := current()) is not None:
        return documents.positions(device)
    return torch.arange(num_tokens, device=device)
