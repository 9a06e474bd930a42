"""Parameters with a place on the first and on the last stage of a pipeline: tied embeddings.

From outside they are one: both places hold the same values, and one gradient, the sum of both.

Leaves out: finding them (`stages.tied_ends`) and naming them once (`pipeline.Pipeline`).
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.runtime.strategy.local import lay_out_gradient, local_of

Ends = tuple[nn.Parameter | None, nn.Parameter | None]
"""Both places of a tied parameter, None for one that is on another rank."""


@torch.no_grad()
def follow(tied: Iterable[Ends]) -> None:
    """Where both places are on this rank and no longer one object, the second takes over."""
    for first, second in tied:
        if first is not None and second is not None and first is not second:
            local_of(second).copy_(local_of(first))


@torch.no_grad()
def sum_gradients(tied: Iterable[Ends], group: dist.ProcessGroup) -> None:
    """Both places get the sum of their gradients, the same bits on both ranks.

    Of two places on this rank the first gets it, and the second's gradient is gone.
    """
    for first, second in tied:
        if first is second or not all(e is None or e.requires_grad for e in (first, second)):
            continue
        if first is not None and second is not None:
            if second.grad is not None:
                _gradient(first).add_(_gradient(second))
                second.grad = None
        elif first is not None:
            _add_from(group.size() - 1, _gradient(first), group)
        elif second is not None:
            _add_from(0, _gradient(second), group)


def _add_from(peer: int, gradient: Tensor, group: dist.ProcessGroup) -> None:
    if gradient.numel() == 0:
        return
    other = torch.empty_like(gradient)
    ops = [
        dist.P2POp(dist.isend, gradient, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    gradient.add_(other)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, which is made if there is none, laid out as the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    lay_out_gradient(parameter)
    return local_of(parameter.grad)
