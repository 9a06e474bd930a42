"""Going back to a step that every rank finds in some node's memory, on its own or on a peer's."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from paceline.runtime.checkpoint._all_ranks import attempt, gather
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.recovery.peer_snapshots import parts
from paceline.runtime.recovery.snapshot import Facts, SnapshotError, Snapshots

Seen = dict[int, list[tuple[int, bool]]]
"""What one rank finds on its node: slot -> steps, and whether each is certified."""


def sources(seen: Sequence[Seen], *, certified: bool) -> dict[int, list[int]]:
    """Steps that every slot has a snapshot of, newest first, and the rank that reads each slot's.

    Args:
        certified: Take only those on which all replicas agreed.

    >>> sources([{0: [(8, True), (4, True)], 1: [(8, True)]}, {1: [(4, True)]}], certified=True)
    {8: [0, 0], 4: [0, 1]}
    """
    num = len(seen)
    where: dict[int, dict[int, int]] = {}
    for slot in range(num):
        # Its own node first: nothing has to be sent.
        for rank in (slot, *range(num)):
            for step, is_certified in seen[rank].get(slot, []):
                if is_certified or not certified:
                    where.setdefault(step, {}).setdefault(slot, rank)
    whole = sorted((step for step, ranks in where.items() if len(ranks) == num), reverse=True)
    return {step: [where[step][slot] for slot in range(num)] for step in whole}


def recall(
    snapshots: Snapshots,
    state: LiveState,
    *,
    job_digest: str,
    certified: bool = False,
    after: int = -1,
    group: dist.ProcessGroup | None = None,
) -> tuple[int, Facts] | None:
    """Bring every rank back to the newest step that all have in memory. Collective.

    A snapshot that is damaged, or of another job, is passed over by all ranks together.

    Args:
        after: Take only later ones.
        group: All ranks, over gloo or with a CPU transport.

    Returns:
        The step and what belongs to it, or None when there is no such step. Parts of the state may
        be overwritten then, if there were some.
    """
    rank = dist.get_rank(group)
    seen, reason = attempt(snapshots.seen, group)
    if reason is not None:
        return None
    for step, readers in sources(gather(seen or {}, group), certified=certified).items():
        if step <= after:
            break
        _, reason = attempt(partial(_check, snapshots, rank, step, readers, job_digest), group)
        if reason is not None:
            continue
        _exchange(snapshots, rank, step, readers, group)
        facts, reason = attempt(partial(snapshots.load_into, rank, step, state), group)
        if reason is None and facts is not None:
            return step, facts
    return None


def _check(
    snapshots: Snapshots, rank: int, step: int, readers: Sequence[int], job_digest: str
) -> None:
    """Whether all that this rank reads, for itself or for others, is what was written."""
    for slot, reader in enumerate(readers):
        if reader == rank:
            found = snapshots.facts(slot, step).job_digest
            if found != job_digest:
                raise SnapshotError(f"step {step} in memory is of another job: {found}")


def _exchange(
    snapshots: Snapshots,
    rank: int,
    step: int,
    readers: Sequence[int],
    group: dist.ProcessGroup | None,
) -> None:
    for slot, reader in enumerate(readers):
        if slot == reader or rank not in (slot, reader):
            continue
        facts = torch.zeros(3, dtype=torch.int64)
        digest = torch.zeros(16, dtype=torch.uint8)
        if rank == reader:
            held = next(each for each in snapshots.held(slot) if each.step == step)
            content = snapshots.content(slot, step)
            facts[:] = torch.tensor([held.num_bytes, int(held.certified), step])
            digest[:] = torch.tensor(list(held.digest), dtype=torch.uint8)
            for sent in (facts, digest, *parts(content)):
                dist.send(sent, group=group, group_dst=slot)
            continue
        for received in (facts, digest):
            dist.recv(received, group=group, group_src=reader)
        try:
            room = snapshots.room(slot, int(facts[0]))
        except SnapshotError:  # the sender is on its way: it comes all the same, and is given up
            room = None
        content = torch.empty(int(facts[0]), dtype=torch.uint8) if room is None else room
        for part in parts(content):
            dist.recv(part, group=group, group_src=reader)
        if room is not None:
            snapshots.seal(slot, step, room, bytes(digest.tolist()), certified=bool(facts[1]))
