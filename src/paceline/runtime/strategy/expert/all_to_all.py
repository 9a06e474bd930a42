"""Tokens to the ranks that hold their experts, and what the experts make of them back.

Nothing is dropped and no rank waits for an agreed capacity: ranks first tell each other how many
rows they send to each expert, which costs one read from the device, then send exactly those.

In a dry run (`FakeTensorMode`) no number can be read. There every rank is taken to send the same
number of rows to every other: what a perfectly balanced router does, and the mean of any other.

Letters in tensor names:
    T  tokens of this rank           R  ranks that share the experts
    K  experts that a token goes to  L  experts of one rank
    P  T x K pairs to send           H  width of the residual stream
    Q  pairs received                C  L + 1
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime._torch_private import FakeTensor

RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""tokens_QH, expert_Q1, weight_Q1 -> outputs_QH, of the experts of this rank, counted from 0."""


def run_spread_experts(
    run_local: RunExperts,
    tokens_TH: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    num_local: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """`mixed_TH`: each token's experts, wherever they are, times their weights, summed.

    Collective over the group, as is its backward pass. The largest tensors are P x H and Q x H.

    Args:
        run_local: Runs this rank's experts. Called once, with one row at least.
        tokens_TH: This rank's tokens. Ranks may have different numbers of them.
        expert_TK: For each token the ids of its experts, counted over all ranks.
        weight_TK: The router's weights. Applied here, on the sender, so that its gradient is too.
        group: Ranks in the order of their experts.
    """
    num_chosen = expert_TK.shape[-1]
    expert_P = expert_TK.reshape(-1)
    order_P = torch.argsort(expert_P, stable=True)
    sent_RC, received_RC = _exchange_counts(expert_P, num_local, group)
    send, receive = _rows_per_rank(sent_RC, received_RC, expert_P.numel())
    rows_QH = _exchange(tokens_TH[order_P // num_chosen], send, receive, group)
    outputs_QH = _run_on_rows(run_local, rows_QH, _local_ids(received_RC[:, :-1], sum(receive)))
    outputs_PH = _exchange(outputs_QH, receive, send, group)
    pairs_PH = torch.empty_like(outputs_PH).index_copy(0, order_P, outputs_PH)
    pairs_TKH = pairs_PH.view(*expert_TK.shape, -1)
    return (pairs_TKH * weight_TK.unsqueeze(-1)).sum(dim=1).to(tokens_TH.dtype)


def _exchange_counts(
    expert_P: Tensor, num_local: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Rows that this rank sends to each expert, and those it is sent, by rank and its experts; in
    the last column how many in all, and one."""
    num_ranks = dist.get_world_size(group)
    sent_E = expert_P.new_zeros(num_ranks * num_local)
    sent_E.scatter_add_(0, expert_P, torch.ones_like(expert_P))
    sent_RL = sent_E.view(num_ranks, num_local)
    sent_RC = torch.cat([sent_RL, sent_RL.sum(dim=1, keepdim=True) + 1], dim=1)
    received_RC = torch.empty_like(sent_RC)
    dist.all_to_all_single(received_RC, sent_RC, group=group)
    return sent_RC, received_RC


def _rows_per_rank(
    sent_RC: Tensor, received_RC: Tensor, num_pairs: int
) -> tuple[list[int], list[int]]:
    """Rows sent to and received from each rank, as numbers of the host.

    Raises:
        DistBackendError: The counts never came: a collective of NCCL that was aborted returns with
            whatever its buffer held, and kernels that index by it would end the process.
    """
    num_ranks = sent_RC.shape[0]
    if isinstance(sent_RC, FakeTensor):
        each, left = divmod(num_pairs, num_ranks)
        even = [each + (rank < left) for rank in range(num_ranks)]
        return even, even
    sent, received = torch.stack([sent_RC, received_RC]).tolist()
    if not all(min(counts) >= 0 and sum(counts) + 1 == whole for *counts, whole in received):
        raise dist.DistBackendError("the counts of experts' rows did not arrive")
    return [whole - 1 for *_, whole in sent], [whole - 1 for *_, whole in received]


def _local_ids(received_RL: Tensor, num_rows: int) -> Tensor:
    """`expert_Q1`: the expert of each row received. Rows lie by sender, then by expert."""
    num_ranks, num_local = received_RL.shape
    expert_E = torch.arange(num_local, device=received_RL.device).repeat(num_ranks)
    expert_Q = expert_E.repeat_interleave(received_RL.flatten(), output_size=num_rows)
    return expert_Q.unsqueeze(-1)


def _run_on_rows(run_local: RunExperts, rows_QH: Tensor, expert_Q1: Tensor) -> Tensor:
    """What this rank's experts make of the rows.

    Without any row they still run, on a row of ones that is then left out: so their gradients are
    zeros, not missing, and the backward pass meets both exchanges on this rank as on the others.
    """
    num_rows = rows_QH.shape[0]
    if num_rows == 0:
        rows_QH = torch.cat([rows_QH, rows_QH.new_ones(1, rows_QH.shape[1])])
        expert_Q1 = expert_Q1.new_zeros(1, 1)
    weight_Q1 = rows_QH.new_ones(rows_QH.shape[0], 1)
    return run_local(rows_QH, expert_Q1, weight_Q1)[:num_rows]


def _exchange(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    received: Tensor = _Exchange.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """Backward, gradients go the way the rows came."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.way_back = (receive, send, group)
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], *ctx.way_back), None, None, None


def _all_to_all(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received
