"""Making a state that was found wrong right again, on all ranks together.

A wrong rank that is known gets its tensors from a replica that is right, when no update has used
them: then every number is what it would have been. Otherwise all ranks go back to the newest step
that was found right, in memory or in a checkpoint, and compute the steps since then again: a wrong
parameter has gone into everybody's gradients by then.

Of two replicas that differ nobody knows which is right before the steps are computed again: what
differed is kept meanwhile, and the rank whose numbers were clearly farther from the recomputed
ones is named then.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.checkpoint._all_ranks import gather
from paceline.runtime.recovery.heal import as_bytes, receive_tensors, send_tensors
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.recovery.verdict import Verdict, farther


@torch.no_grad()
def copy_from_replicas(
    state: LiveState,
    verdict: Verdict,
    tensors: Mapping[int, Sequence[str]],
) -> None:
    """Each wrong rank takes over its wrong tensors from the replica that is right; they have come
    once the device is settled. Collective."""
    rank = dist.get_rank()
    held = dict(state.tensors())
    for odd in verdict.odd:
        source = verdict.source_of[odd]
        wrong = [held[name] for name in tensors[odd]]
        if rank == source:
            send_tensors(odd, wrong)
        elif rank == odd:
            receive_tensors(source, wrong)


class Suspects:
    """What differed among replicas of which nobody knows who is right."""

    def __init__(
        self,
        state_step: int,
        verdict: Verdict,
        tensors: Mapping[int, Sequence[str]],
        state: LiveState,
    ) -> None:
        """Collective. What it has counts once the device is settled."""
        self.state_step = state_step
        """The step after which it differed."""

        self.tensors = {rank: tuple(tensors[rank]) for rank in verdict.suspects}

        self._groups = verdict.undecided
        held = dict(state.tensors())
        differ = gather(self._unlike_first(held), None)
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}
        """Name -> where replicas differed, and this rank's numbers."""
        for group in self._groups:
            for name in self.tensors[group[0]] if dist.get_rank() in group else ():
                places = torch.unique(torch.cat([differ[rank][name] for rank in group[1:]]))
                self._kept[name] = places, held[name].reshape(-1).to("cpu", copy=True)

    @torch.no_grad()
    def named(self, state: LiveState) -> tuple[int, ...]:
        """The ranks that were wrong, now that the same step was computed again; empty when that
        does not tell. Collective."""
        live = dict(state.tensors())
        pairs = [
            far_apart(before, live[name].reshape(-1).cpu(), places)
            for name, (places, before) in self._kept.items()
        ]
        mine = [max((pair[which] for pair in pairs), default=0.0) for which in (0, 1)]
        everyone = gather(mine, None)
        return tuple(
            rank
            for group in self._groups
            for rank in farther(
                {member: everyone[member][0] for member in group},
                noise=max(everyone[member][1] for member in group),
            )
        )

    def _unlike_first(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where this suspect's numbers differ from those of its group's first. Collective over the
        group."""
        rank = dist.get_rank()
        differ: dict[str, Tensor] = {}
        for group in self._groups:
            if rank not in group:
                continue
            mine = [held[name] for name in self.tensors[rank]]
            if rank == group[0]:
                for other in group[1:]:
                    send_tensors(other, mine)
                continue
            firsts = [torch.empty_like(tensor) for tensor in mine]
            receive_tensors(group[0], firsts)
            for name, first, own in zip(self.tensors[rank], firsts, mine, strict=True):
                differ[name] = unequal(as_bytes(first), as_bytes(own), own.element_size())
        return differ


def unequal(a: Tensor, b: Tensor, size: int) -> Tensor:
    """Numbers of which some byte differs, counted from 0, in host memory.

    Args:
        size: Of one number.
    """
    return (a != b).view(-1, size).any(1).nonzero().flatten().cpu()


def far_apart(a: Tensor, b: Tensor, places: Tensor) -> tuple[float, float]:
    """The largest difference of two flat tensors at some places, and everywhere else.

    >>> far_apart(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.5, 2.0, 3.25]), torch.tensor([0]))
    (0.5, 0.25)
    """
    difference = _difference(a, b)
    there = difference[places].max() if places.numel() else torch.zeros(())
    difference[places] = 0.0
    return float(there), float(difference.max()) if difference.numel() else 0.0


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Magnitudes of the differences; infinite where one is not finite and the other is another."""
    difference = (a.double() - b.double()).abs()
    is_same = (a == b) | (a.isnan() & b.isnan())
    return difference.masked_fill(is_same, 0.0).nan_to_num(float("inf"), float("inf"))
