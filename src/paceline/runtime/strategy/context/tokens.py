"""Which tokens of each sample a context rank has, and whether a sample can be split so."""

import torch
from torch import Tensor

from paceline.errors import JobError
from paceline.parallel.layout import Layout
from paceline.parallel.layout_laws import check_sample


def local_spans(seq_len: int, layout: Layout, context_rank: int) -> tuple[range, ...]:
    """The positions, in a sample of `seq_len` tokens, of the tokens that a context rank has.

    A ring splits samples into two chunks for each of its W ranks, and rank r has the chunks r and
    2W-1-r: of causal attention, every rank then has the same share. Ulysses' ranks have one run of
    tokens each.

    Raises:
        JobError: L009, the ranks do not divide the sample.

    >>> ring = Layout(data=1, sharding="none", micro_batch=1, accumulation=1, context=2)
    >>> local_spans(16, ring, 0)
    (range(0, 4), range(12, 16))
    """
    JobError.raise_for([*check_sample(seq_len, None, None, layout)])
    if layout.context_kind == "ulysses" or layout.context == 1:
        each = seq_len // layout.context
        return (range(context_rank * each, (context_rank + 1) * each),)
    each = seq_len // (2 * layout.context)
    chunks = (context_rank, 2 * layout.context - 1 - context_rank)
    return tuple(range(chunk * each, (chunk + 1) * each) for chunk in chunks)


def local_positions(
    seq_len: int, layout: Layout, context_rank: int, device: torch.device | str | None = None
) -> Tensor:
    """`local_spans` as a tensor of int64, in the order in which the rank has its tokens."""
    spans = local_spans(seq_len, layout, context_rank)
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def local_tokens(tokens_BS: Tensor, layout: Layout, context_rank: int) -> Tensor:
    """A context rank's part of whole samples: of the inputs, and likewise of the targets.

    Targets are shifted against the inputs before they are split, not after: the token after a
    chunk is on another rank.
    """
    if layout.context == 1:
        return tokens_BS
    spans = local_spans(tokens_BS.shape[1], layout, context_rank)
    return torch.cat([tokens_BS[:, span.start : span.stop] for span in spans], dim=1)
