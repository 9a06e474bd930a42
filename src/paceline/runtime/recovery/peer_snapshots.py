"""Snapshots that outlive their node: a copy of each in the memory of another.

What was copied into the own node's memory is sent from there while training goes on, and received
straight into the holder's; the header is written once all of it has come, with the sender's hash.

Leaves out: who holds whose (`parallel.neighbour_of`).
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.recovery.snapshot import SnapshotError, Snapshots

_CHUNK_BYTES = 256 << 20
"""Bytes of one message. A guess: gloo's sizes are 64 bits, its buffers' are not everywhere."""


class Peers:
    """This rank's part in the sending: its own copy goes out, and those it holds come in."""

    def __init__(
        self,
        snapshots: Snapshots,
        holders: Sequence[int | None],
        group: dist.ProcessGroup,
        *,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        group: All ranks, over gloo: what is sent lies in host memory.
        settle: Raises where the generation is over: then nothing that came counts.
        """
        self._snapshots = snapshots
        self._group = group
        self._settle = settle
        self._rank = dist.get_rank(group)
        self._holder = holders[self._rank]
        self._owners = [owner for owner, holder in enumerate(holders) if holder == self._rank]
        self._is_under_way = False
        self._sent_step: int | None = None
        self._received: list[tuple[int, int, bool, Tensor | None]] = []
        self._buffers: list[Tensor] = []
        self._works: list[dist.Work] = []

    def begin(self, step: int, content: Tensor, *, certified: bool) -> list[str]:
        """Start to send a snapshot that was just taken; every rank calls it for the same step. It
        waits for the sizes alone.

        Returns:
            Why copies that come here have no room. They are received and given up.
        """
        self.finish()
        self._is_under_way = True
        facts = torch.tensor([step, content.numel(), int(certified)])
        works = self._post(facts, [torch.zeros_like(facts) for _ in self._owners])
        coming = works[1]
        _wait(works[0])
        self._sent_step = step if self._holder is not None and content.numel() else None
        failures = []
        for owner, told in zip(self._owners, coming, strict=True):
            its_step, num_bytes, is_certified = told.tolist()
            room = None
            try:
                room = self._snapshots.room(owner, num_bytes) if num_bytes else None
            except SnapshotError as error:
                failures.append(str(error))
            self._received.append((owner, its_step, bool(is_certified), room))
            self._buffers.append(
                torch.empty(num_bytes, dtype=torch.uint8) if room is None else room
            )
        self._works = self._post(content, self._buffers)[0]
        return failures

    def finish(self) -> None:
        """Wait until the last snapshot has arrived everywhere it goes. Called by every rank."""
        if not self._is_under_way:
            return
        self._is_under_way = False
        _wait(self._works)
        digest = torch.zeros(16, dtype=torch.uint8)
        if self._sent_step is not None:
            held = self._snapshots.held(self._rank)
            own = next(each for each in held if each.step == self._sent_step)
            digest = torch.tensor(list(own.digest), dtype=torch.uint8)
        works, digests = self._post(digest, [torch.zeros_like(digest) for _ in self._owners])
        _wait(works)
        self._settle()
        for (owner, step, certified, room), told in zip(self._received, digests, strict=True):
            if room is not None:
                sign = bytes(told.tolist())
                self._snapshots.seal(owner, step, room, sign, certified=certified)
        self._received, self._buffers, self._works = [], [], []

    def _post(self, mine: Tensor, theirs: list[Tensor]) -> tuple[list[dist.Work], list[Tensor]]:
        works = []
        for owner, room in zip(self._owners, theirs, strict=True):
            works += [dist.irecv(part, group=self._group, group_src=owner) for part in parts(room)]
        if self._holder is not None:
            works += [
                dist.isend(part, group=self._group, group_dst=self._holder) for part in parts(mine)
            ]
        return [work for work in works if work is not None], theirs


def parts(content: Tensor) -> tuple[Tensor, ...]:
    """A tensor as it is sent: views of it, each a message; none of an empty one."""
    return torch.split(content, _CHUNK_BYTES) if content.numel() else ()


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
