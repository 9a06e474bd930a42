"""What one rank does in a run so that its state is right, and is not lost with its process.

Between the vote of a step and its update all ranks compare their fingerprints and copy their state
into memory, each when it is due; when the comparison finds something wrong, they repair it and
compute the step again.
"""

import os
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.control import messages as say
from paceline.parallel.replicas import neighbour_of
from paceline.record import events as log
from paceline.record.best import Best
from paceline.runtime.checkpoint._all_ranks import gather
from paceline.runtime.generation import Generation
from paceline.runtime.recovery.guard import Guard, interval
from paceline.runtime.recovery.held import StartOver
from paceline.runtime.recovery.live import LiveState
from paceline.runtime.recovery.peer_snapshots import Peers
from paceline.runtime.recovery.repair import Suspects, copy_from_replicas
from paceline.runtime.recovery.rollback import recall
from paceline.runtime.recovery.snapshot import Facts, SnapshotError, Snapshots
from paceline.runtime.recovery.verdict import Verdict, differing, held_by_all
from paceline.units import counted

_MEASURED_STEPS = 3
"""After which the interval of checks is chosen, the first ones being slower. A guess."""


class Safekeeping:
    """This rank's guard, its snapshots, and what is done when something is wrong."""

    def __init__(
        self,
        here: Generation,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        job_digest: str,
    ) -> None:
        spec, place, layout = here.job.spec.recovery, here.place, here.plan.layout
        self._here = here
        self._job_digest = job_digest
        self.state = LiveState(model, optimizer)
        """What is kept."""

        self.guard = Guard(layout, place.rank, self.state, place.device)
        """What is compared."""

        asked = spec.fingerprint_every
        self._is_auto = asked == "auto"
        self.guard.every = 1 if asked == "auto" else asked
        self._step_s: list[float] = []
        self._suspects: Suspects | None = None
        self.snapshot_every = snapshot_interval(here)
        """Steps between two snapshots; 0 is never."""

        cluster = here.plan.cluster
        # On a single machine ranks stand for nodes, as in the plan.
        is_alone = cluster.is_local and cluster.num_nodes == 1
        self._node = place.local_rank if is_alone else int(os.environ.get("PACELINE_NODE", "0"))
        self.snapshots = Snapshots(here.run.path, self._node, generation=place.generation)

        self._wants_peers = spec.snapshot_peers
        self._kept_step: int | None = None
        self._has_failed = False
        self._group: dist.ProcessGroup | None = None
        self._peers: Peers | None = None

    def open(self) -> None:
        """Make the process group that snapshots travel in, where they are kept: over gloo, as they
        lie in host memory. Collective."""
        if not self.snapshot_every:
            return
        with self._here.member.opening():
            self._group = dist.new_group(backend="gloo")
        if self._wants_peers:
            nodes = gather(self._node, self._group)
            layout = self._here.plan.layout
            holders = [neighbour_of(layout, nodes, rank) for rank in range(layout.num_ranks)]
            if None not in holders:
                self._peers = Peers(self.snapshots, holders, self._group, settle=self._here.settle)

    def recall(self, *, certified: bool = False, after: int = -1) -> int | None:
        """Go back to the newest step that every rank has in memory; None when there is none.
        Collective."""
        if not self.snapshot_every:
            return None
        found = recall(
            self.snapshots,
            self.state,
            job_digest=self._job_digest,
            certified=certified,
            after=after,
            group=self._group,
        )
        if found is None:
            return None
        step, facts = found
        here = self._here
        here.settle()
        self._kept_step = step
        here.state.last_step = here.state.told_step = step
        here.state.held_out_loss = facts.held_out_loss
        here.state.best = facts.best or Best()
        here.state.load_scaler(facts.loss_scaler)
        here.state.batches.changes = facts.batches
        return step

    def ballot(self) -> Tensor | None:
        """This rank's numbers for the vote, or None when no comparison is due."""
        step = self._state_step
        return self.guard.ballot(step) if self.guard.is_due(step) else None

    def judge(self, totals: Sequence[float]) -> Verdict | None:
        """What the vote's numbers say of the state before this step."""
        return self.guard.verdict(self._state_step, totals) if totals else None

    def before_update(self) -> None:
        """All ranks go on: copy the state into memory when that is due."""
        step = self._state_step
        self.name_suspects()
        if self._peers is not None:
            self._peers.finish()
        if not self._keeps(step) or step == self._kept_step:
            return
        self._kept_step = step
        here = self._here
        certified = self.guard.certified_step == step
        facts = Facts(
            job_digest=self._job_digest,
            held_out_loss=here.state.held_out_loss,
            loss_scaler=here.state.scaler.state_dict() if here.state.scaler is not None else None,
            best=here.state.best,
            batches=here.state.batches.changes,
        )
        failures = []
        try:
            content = self.snapshots.take(
                here.place.rank, step, self.state, facts, certified=certified
            )
        except SnapshotError as error:
            content = torch.empty(0, dtype=torch.uint8)
            failures.append(str(error))
        if self._peers is not None:
            failures += self._peers.begin(step, content, certified=certified)
        if failures and not self._has_failed:
            # The others' are of no use without it: all would go back to a checkpoint.
            self._has_failed = True
            note = log.Noted(text=f"no snapshot in memory: {failures[0]}")
            here.line.send(say.ForRecord(event=note))

    def suspect(self, step: int) -> None:
        """A step was refused: a wrong parameter may be why, so compare after it."""
        self.guard.also(step)

    def after_update(self, step: int, seconds: float) -> None:
        """The state is that of another step."""
        if self._keeps(step):
            self.guard.also(step)  # so that what is kept is certified
        self.guard.after_update(step)
        if self._is_auto and len(self._step_s) < _MEASURED_STEPS:
            self._step_s.append(seconds)
            if len(self._step_s) == _MEASURED_STEPS:
                self._choose_interval()

    def check(self) -> Verdict | None:
        """Compare now, due or not: before a checkpoint, and at the end. Collective."""
        if not self.guard.every or self.guard.certified_step == self._state_step:
            return None
        totals = self.guard.ballot(self._state_step)
        dist.all_reduce(totals)
        self._here.settle()
        return self.guard.verdict(self._state_step, totals.tolist())

    def repair(self, verdict: Verdict, go_back: Callable[[], int]) -> None:
        """Make the state right; `here.state.last_step` says of which step it is then. Collective.

        Args:
            go_back: Restores the newest checkpoint, and returns its step.

        Raises:
            StartOver: There is nothing to go back to but the seed.
        """
        step, here = self._state_step, self._here
        evidence = gather(self.guard.evidence(), None)
        moved = [changed for _, changed in evidence]
        by_name = [each for each, _ in evidence]
        tensors = differing(verdict, by_name, moved)
        shared = held_by_all(verdict, by_name, tensors)
        is_unused = self._is_unused(step, verdict, moved)
        if verdict.undecided:
            suspects = Suspects(step, verdict, shared, self.state)
            here.settle()
            self._suspects = suspects
        how: Literal["moved", "majority"] = (
            "moved" if any(moved[rank] for rank in verdict.odd) else "majority"
        )
        seen = log.CorruptionFound(
            step=step,
            ranks=list(verdict.odd),
            suspects=list(verdict.suspects),
            tensors=sorted({name for names in tensors.values() for name in names}),
            verdict="undecided" if verdict.undecided else how,
            healed="initial",
            goes_on_after=0,
        )
        healed = "replica"
        is_copied = verdict.can_copy and is_unused and shared == tensors
        # Until it is right again, what a rank replaces is the state of no step.
        here.held.is_torn |= not is_copied or here.place.rank in verdict.odd
        if is_copied:
            copy_from_replicas(self.state, verdict, tensors)
            here.settle()
            back = step
        elif (found := self.recall(certified=True)) is not None:
            healed, back = "memory", found
        else:
            try:
                healed, back = "checkpoint", go_back()
            except StartOver:
                self._tell(seen, healed="initial", goes_on_after=0)
                raise
        for slot in self.snapshots.seen() if self.snapshot_every else ():
            self.snapshots.drop(slot, after=back)
        dist.barrier()  # no rank may find what another is about to drop
        here.settle()
        here.held.is_torn = False
        self.guard.forget()
        self.guard.also(step)
        self._tell(seen, healed=healed, goes_on_after=back)

    def close(self) -> None:
        """The run is through, and what it was for is on disk: take the snapshots of this node away.
        Called by every rank."""
        if not self.snapshot_every:
            return
        if self._peers is not None:
            self._peers.finish()
        self.snapshots.remove()

    def name_suspects(self) -> None:
        """Name who was wrong, once the step at which replicas differed was computed again.
        Collective."""
        suspects, step = self._suspects, self._state_step
        if suspects is None or suspects.state_step != step or self.guard.certified_step != step:
            return
        self._suspects = None
        named = suspects.named(self.state)
        told = {name for names in suspects.tensors.values() for name in names}
        self._here.report(
            log.CorruptionFound(
                step=step,
                ranks=list(named),
                suspects=[] if named else sorted(suspects.tensors),
                tensors=sorted(told),
                verdict="replay" if named else "undecided",
                healed="recomputed",
                goes_on_after=step,
            )
        )

    def _keeps(self, step: int) -> bool:
        return self.snapshot_every > 0 and step % self.snapshot_every == 0

    @property
    def _state_step(self) -> int:
        return self._here.state.last_step

    def _is_unused(self, step: int, verdict: Verdict, moved: Sequence[Sequence[str]]) -> bool:
        """Whether no update has been made with a wrong parameter's gradients: the wrong ranks'
        changed after the last one, or all was right one update before."""
        if all(moved[rank] for rank in verdict.odd):
            return True
        return self.guard.certified_step is None or self.guard.certified_step >= step - 1

    def _tell(self, seen: log.CorruptionFound, *, healed: str, goes_on_after: int) -> None:
        told = msgspec.structs.replace(seen, healed=healed, goes_on_after=goes_on_after)
        self._here.report(told)

    def _choose_interval(self) -> None:
        """Choose the interval, the same on every rank: the dearest check against the shortest step.
        Collective."""
        cost_s = self.guard.cost_s()
        everyone = gather((cost_s, min(self._step_s)), None)
        dearest_s, shortest_s = max(cost for cost, _ in everyone), min(s for _, s in everyone)
        self.guard.every = interval(dearest_s, shortest_s)
        if self._here.place.generation == 1:
            share = dearest_s / (self.guard.every * shortest_s)
            text = (
                f"every {counted(self.guard.every, 'step')} the ranks compare parameters and "
                f"optimizer state, to find a rank that diverges (takes {share:.1%} of the time; "
                "recovery.fingerprint_every)"
            )
            self._here.report(log.Noted(text=text))


def snapshot_interval(here: Generation) -> int:
    """Steps between two snapshots: as asked, or as the plan's expectation of useful time says."""
    asked = here.job.spec.recovery.snapshot_every
    if asked != "auto":
        return asked
    plan = here.plan
    if plan.state is None or plan.state.chosen != "memory":
        return 0
    interval_s, step_s = plan.state.tier("memory").interval_s, plan.estimate.step_s
    if not interval_s or not step_s:
        return plan.checkpoint_every
    return max(1, min(plan.checkpoint_every, round(interval_s / step_s)))
