"""The vote on a step: one sum over all ranks, and what all of them conclude from it.

Leaves out: the all-reduce itself, and when its result may be read (`Step`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.units import numbered


class Wishes(NamedTuple):
    """What a rank was asked for, or any of them."""

    stop: bool = False
    regroup: bool = False
    save: bool = False
    """Save a checkpoint after this step; with `regroup`, before that."""


class Votes(NamedTuple):
    """What all ranks have seen of a step."""

    wishes: Wishes
    loss_sum: float
    num_targets: float

    num_right: float
    """Targets that the model has right, where the loss counts them."""

    num_judged: float
    """How many targets were judged for it."""

    norm: float
    """Norm of the gradients as they are, on this rank: finite numbers are the same on all."""

    bad_losses: list[int]
    bad_norms: list[int]
    fingerprints: list[float]
    """Sums of the numbers that ranks added for their states' comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What all ranks agreed on about a step. A rank applies the step by it, from the gradients as
    they were in the vote."""

    step: int
    stop: bool
    loss: float
    grad_norm: float
    accuracy: float | None
    """Share of the targets that the model has right; None where the loss does not count them."""

    factor: float
    """What gradients are multiplied by: the mean over all targets, the loss scale undone, and
    clipping."""

    refused: str | None

    is_overflow: bool


def ballot(
    sums_of_step: Tensor,
    norm: Tensor,
    *,
    rank: int,
    world_size: int,
    wishes: Wishes,
    fingerprint: Tensor | None = None,
) -> Tensor:
    """This rank's numbers, to be summed over all ranks; on its device, without waiting for it.

    Args:
        sums_of_step: Of the losses over this rank's targets, how many targets they are, how many
            of them the model has right, and of how many.
        fingerprint: Numbers that compare the ranks' states, where a comparison is due.
    """
    sums = torch.zeros(5 + 2 * world_size, dtype=torch.float64, device=sums_of_step.device)
    # Three counts of ranks in one number, each below the base.
    sums[0] = float(sum((world_size + 1) ** place for place, flag in enumerate(wishes) if flag))
    sums[1:5] = sums_of_step
    sums[5 + rank] = ~sums_of_step[0].isfinite()
    sums[5 + world_size + rank] = ~norm.isfinite()
    return sums if fingerprint is None else torch.cat([sums, fingerprint])


def counted(sums: list[float], *, norm: float, world_size: int) -> Votes:
    """What the sums of all ranks' ballots say.

    >>> counted([5.0, 8.0, 4.0, 3.0, 4.0, 0.0, 1.0, 0.0, 0.0], norm=0.5, world_size=2)[:-1]
    (Wishes(stop=True, regroup=True, save=False), 8.0, 4.0, 3.0, 4.0, 0.5, [1], [])
    """
    counts, loss_sum, num_targets, num_right, num_judged, *flags = sums
    base = world_size + 1
    bad = [[rank for rank in range(world_size) if flags[start + rank]] for start in (0, world_size)]
    return Votes(
        wishes=Wishes(*(counts // base**place % base > 0 for place in range(3))),
        loss_sum=loss_sum,
        num_targets=num_targets,
        num_right=num_right,
        num_judged=num_judged,
        norm=norm,
        bad_losses=bad[0],
        bad_norms=bad[1],
        fingerprints=flags[2 * world_size :],
    )


def reason_to_refuse(votes: Votes, *, world_size: int, scale: float | None) -> str | None:
    """Why all ranks leave the step out; None where they apply it.

    Args:
        scale: The loss scale, in fp16.
    """
    if votes.bad_losses:
        return f"the loss is not finite on {numbered('rank', votes.bad_losses)}"
    if votes.bad_norms:
        scaled = "" if scale is None else f" (fp16, loss scale {scale:g})"
        if len(votes.bad_norms) == world_size:
            return f"the gradient norm is {votes.norm}{scaled}"
        return f"the gradient norm is not finite on {numbered('rank', votes.bad_norms)}{scaled}"
    if not votes.num_targets:
        return "no target of the global batch counts"
    return None
