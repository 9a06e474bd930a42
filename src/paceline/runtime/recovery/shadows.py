"""This rank's part in shadowing: its own gradients go to a neighbour, and its wards' come here.

In every step, before the vote: gradients are final, saved buffers settled; they are sent while the
gradients' norm is computed, and the vote is cast only once everything has come. So whoever knows a
vote's outcome knows that no shadow lacks the step's gradients (`newest.py` says what follows).

Shadows outlive generations. A rank with a new worker, or without its wards' state of the step that
all go on from, gets a full copy of each once.

Leaves out: optimizers that are not element-wise (`shadow.why_not`); options of an optimizer that a
program changes while it trains, other than learning rates.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel import neighbour_of
from paceline.plan import Plan
from paceline.runtime.checkpoint._agree import gather
from paceline.runtime.recovery.heal import receive_tensors, send_tensors
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.recovery.newest import Copy
from paceline.runtime.recovery.shadow import (
    Blueprint,
    Outgoing,
    Shadow,
    draw,
    num_bytes,
    parts_of,
    views,
    why_not,
)
from paceline.spec import Job

if TYPE_CHECKING:
    from paceline.runtime.step import Outcome

_Message = tuple[int, Tensor]
"""A rank, and what goes to it or comes from it."""


def shadow_holders(job: Job, plan: Plan) -> tuple[int | None, ...]:
    """For each rank the one that keeps its shadow; empty where the plan keeps none.

    On one machine without pretended nodes, ranks stand for nodes. Where a CPU computes the steps,
    shadows take its time: they are kept when the job asks for them by name.
    """
    asked, cluster = job.spec.recovery.state, plan.cluster
    chosen = plan.state.chosen if plan.state is not None else asked
    if chosen != "shadow" or (asked == "auto" and cluster.backend == "gloo"):
        return ()
    apart = 1 if cluster.is_local and cluster.num_nodes == 1 else cluster.ranks_per_node
    ranks = range(plan.layout.num_ranks)
    return tuple(neighbour_of(plan.layout, apart, rank) for rank in ranks)


class Shadows:
    """The shadows that this rank keeps, and the sending to the one that keeps its own."""

    def __init__(self, holders: Sequence[int | None] = ()) -> None:
        """
        Args:
            holders: For each rank the one that keeps its shadow, or None. Empty: there are none.
        """
        self._holders = holders
        self._kept: dict[int, Shadow] = {}
        self._group: dist.ProcessGroup | None = None
        self._holder: int | None = None
        self._wards: list[int] = []
        self._outgoing: Outgoing | None = None
        self._works: list[dist.Work] = []

    @property
    def is_on(self) -> bool:
        """Whether the job keeps shadows at all."""
        return any(holder is not None for holder in self._holders)

    def meet(self) -> None:
        """Be a rank of a generation. Collective; makes a process group."""
        self._outgoing, self._works = None, []
        if not self.is_on:
            return
        self._group = dist.new_group()
        rank = dist.get_rank()
        self._holder = self._holders[rank]
        self._wards = [ward for ward, holder in enumerate(self._holders) if holder == rank]
        # A worker that took another rank's place keeps nothing of the old one's.
        self._kept = {ward: kept for ward, kept in self._kept.items() if ward in self._wards}

    def standing(self) -> dict[int, Copy]:
        """What is kept, by whose it is."""
        return {ward: shadow.copy for ward, shadow in self._kept.items()}

    def drop(self) -> None:
        """Keep nothing any more: all go on from a state of somewhere else."""
        self._kept = {}

    def settle(self, step: int, outcome: "Outcome | None") -> None:
        """Bring what is kept to the step that all go on from, and drop what cannot be."""
        for ward, shadow in list(self._kept.items()):
            if outcome is not None and shadow.next_step == step:
                shadow.take(outcome)
            shadow.next_step = None
            if shadow.step != step:
                del self._kept[ward]

    def establish(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
    ) -> str | None:
        """See to it that every rank's shadow is kept, of the state that all have now. Collective.

        Returns:
            Why there can be none, the same on every rank; None when there are.
        """
        if self._group is None:
            return None
        told = gather((why_not(model, optimizer), sorted(self._kept)), self._group)
        reasons = [reason for reason, _ in told if reason is not None]
        if reasons:
            self._kept = {}
            return reasons[0]
        needs = {ward for ward, holder in enumerate(self._holders) if holder is not None}
        needs -= {ward for _, kept in told for ward in kept}
        blueprint, numbers = draw(model, optimizer)
        self._outgoing = Outgoing(model, optimizer, blueprint)
        if needs:
            self._copy(blueprint, numbers, step, needs)
        return None

    def begin(self) -> None:
        """Send this step's gradients, which are final, and saved buffers, which are settled."""
        if self._outgoing is None:
            return
        for shadow in self._kept.values():
            shadow.next_step = None
        self._outgoing.fill()
        to = [] if self._holder is None else [(self._holder, self._outgoing.flat)]
        self._works = self._post(to, [(ward, kept.room) for ward, kept in self._kept.items()])

    def finish(self, number: int) -> None:
        """Wait until they have come, and those of the wards, of a step by its number."""
        _wait(self._works)
        self._works = []
        for shadow in self._kept.values():
            shadow.next_step = number

    def take(self, outcome: "Outcome") -> None:
        """Apply a step to everything that is kept."""
        for shadow in self._kept.values():
            shadow.take(outcome)

    def give(self, ward: int, facts: Mapping[str, Any]) -> None:
        """Give a rank its state back."""
        pairs = list(self._kept[ward].tensors())
        dist.send_object_list([dict(facts), [entry for entry, _ in pairs]], dst=ward)
        send_tensors(ward, [tensor for _, tensor in pairs])

    @staticmethod
    def receive(
        source: int, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> dict[str, Any]:
        """Take this rank's state back; returns the facts that came with it."""
        received: list[Any] = [None, None]
        dist.recv_object_list(received, src=source)
        facts, entries = received
        live = LiveState(model, optimizer)
        optimizer.state.clear()
        live.make_room(entries)
        receive_tensors(source, [tensor for _, tensor in live.tensors()], device)
        return dict(facts)

    def _copy(
        self, blueprint: Blueprint, numbers: Sequence[Tensor], step: int, needs: set[int]
    ) -> None:
        """Everything of the ranks that need it goes to those who keep it."""
        to = [self._holder] if self._holder is not None and dist.get_rank() in needs else []
        wards = [ward for ward in self._wards if ward in needs]
        device = torch.device(blueprint.device)
        written = torch.frombuffer(bytearray(pickle.dumps(blueprint)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in wards]
        size = torch.tensor([written.numel()], device=device)
        self._exchange([(each, size) for each in to], list(zip(wards, sizes, strict=True)))
        texts = [torch.empty(int(each), dtype=torch.uint8, device=device) for each in sizes]
        text = written.to(device)
        self._exchange([(each, text) for each in to], list(zip(wards, texts, strict=True)))
        theirs = [pickle.loads(each.cpu().numpy().tobytes()) for each in texts]
        parts = parts_of((*blueprint.entries, *blueprint.fresh))
        flat = torch.empty(num_bytes(parts) if to else 0, dtype=torch.uint8, device=device)
        if to:
            for room, number in zip(views(flat, parts), numbers, strict=True):
                room.copy_(number)
        rooms = [
            torch.empty(
                num_bytes(parts_of((*each.entries, *each.fresh))), dtype=torch.uint8, device=device
            )
            for each in theirs
        ]
        self._exchange([(each, flat) for each in to], list(zip(wards, rooms, strict=True)))
        for ward, drawn, room in zip(wards, theirs, rooms, strict=True):
            entries = (*drawn.entries, *drawn.fresh)
            values = [
                value.cpu() if entry.on_host else value
                for entry, value in zip(entries, views(room, parts_of(entries)), strict=True)
            ]
            self._kept[ward] = Shadow(drawn, values, step)

    def _exchange(self, to: Sequence[_Message], coming: Sequence[_Message]) -> None:
        _wait(self._post(to, coming))

    def _post(self, to: Sequence[_Message], coming: Sequence[_Message]) -> list[dist.Work]:
        """Begin to send and to receive; nothing for what is empty."""
        group = self._group
        ops = [
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank)
            for rank, tensor in coming
            if tensor.numel()
        ]
        ops += [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=rank)
            for rank, tensor in to
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(ops) if ops else []


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
