"""From which step all go on: every order of events and kills, by a model of the protocol."""

from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paceline.runtime.recovery.newest import RecoveryPlan, Route, Standing, plan_recovery

ALONE = [(0,), (1,)]


def of(applied: int, **others: object) -> Standing:
    return Standing(applied=applied, **others)  # type: ignore[arg-type]


def test_a_rank_that_was_interrupted_in_the_vote_rolls_forward_to_what_another_applied():
    found = plan_recovery([of(7, decided=7), of(6, next_step=7, decided=6)], ALONE)
    assert found == RecoveryPlan(step=7, rolled=(1,))


def test_nobody_rolls_forward_when_nobody_alive_knows_the_outcome():
    standings = [of(6, next_step=7, decided=6), of(-1)]
    assert plan_recovery(standings, [(0, 1)]) == RecoveryPlan(step=6, routes=(Route(1, 0),))


def test_a_replica_that_rolls_forward_is_a_source():
    standings = [of(6, next_step=7), of(-1), of(7, decided=7)]
    found = plan_recovery(standings, [(0, 1), (2,)])
    assert found == RecoveryPlan(step=7, rolled=(0,), routes=(Route(1, 0),))


def test_a_rank_lost_together_with_its_replicas_is_named():
    standings = [of(7, decided=7), of(-1), of(-1), of(7, decided=7)]
    assert plan_recovery(standings, [(0, 3), (1, 2)]).lost == (1, 2)


def test_what_only_a_torn_rank_knows_is_given_up_where_others_cannot_roll():
    """Optimizers that need the other ranks cannot apply a step alone."""
    standings = [of(-1, decided=7), of(6, decided=6)]
    assert plan_recovery(standings, [(0, 1)]) == RecoveryPlan(step=6, routes=(Route(0, 1),))


@dataclass
class Slot:
    """One rank: what its present worker has, and how far it is in its step."""

    applied: int = 0
    alive: bool = True
    torn: bool = False
    voted: int = -1
    decided: int = -1


class Protocol(RuleBasedStateMachine):
    """Steps, kills and recoveries in any order, of ranks each of which has some replicas."""

    @initialize(shards=st.integers(1, 3), copies=st.integers(1, 3))
    def begin(self, shards: int, copies: int) -> None:
        self.world = range(shards * copies)
        self.replicas = [tuple(range(shard, shards * copies, shards)) for shard in range(shards)]
        self.slots = [Slot() for _ in self.world]
        self.ballots: dict[int, set[int]] = {}
        self.broken = self.joining = False
        self.ever_applied = [0 for _ in self.world]

    def living(self) -> list[int]:
        return [rank for rank in self.world if self.slots[rank].alive]

    @precondition(lambda self: not self.joining)
    @rule(data=st.data(), moves=st.integers(1, 30))
    def go_on(self, data: st.DataObject, moves: int) -> None:
        for _ in range(moves):
            if not self.living():
                return
            rank = data.draw(st.sampled_from(self.living()))
            self.move(rank, breaks=data.draw(st.integers(0, 19)) == 0)

    def move(self, rank: int, *, breaks: bool) -> None:
        """The next thing that a rank does, if it need not wait."""
        slot = self.slots[rank]
        step = slot.applied + 1
        if slot.torn:
            return
        if slot.voted < step:
            if not self.broken:
                slot.voted = step
                self.ballots.setdefault(step, set()).add(rank)
        elif slot.decided < step:
            if len(self.ballots[step]) == len(self.world):
                slot.decided = step
        elif breaks:
            slot.torn = True
        else:
            slot.applied = step
            self.ever_applied[rank] = step

    @rule(data=st.data(), num=st.integers(1, 2))
    def kill(self, data: st.DataObject, num: int) -> None:
        """Others still hear of a vote that was complete, and nothing that needs the dead."""
        for _ in range(num):
            if self.living():
                self.slots[data.draw(st.sampled_from(self.living()))].alive = False
        self.broken = True

    @precondition(lambda self: self.broken or any(slot.torn for slot in self.slots))
    @rule(data=st.data())
    def recover(self, data: st.DataObject) -> None:
        if not self.living():
            self.restart_from_checkpoint()
            return
        self.joining = True
        whole = [s for s in self.slots if s.alive]
        for rank in self.world:
            if not self.slots[rank].alive:
                self.slots[rank] = Slot(applied=-1)
        standings = [
            Standing(
                applied=-1 if s.torn else s.applied,
                next_step=s.voted if not s.torn and s.voted == s.applied + 1 > 0 else None,
                decided=s.decided,
            )
            for s in self.slots
        ]
        found = plan_recovery(standings, self.replicas)
        nowhere = [
            rank
            for group in self.replicas
            if all(standings[other].applied < 0 for other in group)
            for rank in group
        ]
        if nowhere:
            assert set(found.lost) == set(nowhere)
            self.restart_from_checkpoint()
            return
        assert not found.lost
        assert found.step >= max(s.decided for s in whole)
        assert found.step >= max((s.applied for s in whole if not s.torn), default=-1)
        assert found.step >= min(self.ever_applied)  # all ranks had applied it
        actions = self.actions(found)
        cut = data.draw(st.integers(0, len(actions)))
        for action in actions[:cut]:
            action()
        if cut < len(actions):
            self.kill(data, 1)
        else:
            self.all_are_at(found.step)

    def actions(self, found: RecoveryPlan) -> list:
        """What a recovery does, one after the other; a failure may come between any two."""
        settles = [lambda r=rank: self.settle(r, found) for rank in self.world]
        routes = [lambda r=route: self.carry(r, found.step) for route in found.routes]
        return [*settles, *routes]

    def settle(self, rank: int, found: RecoveryPlan) -> None:
        slot, step = self.slots[rank], found.step
        if rank in found.rolled:
            assert (slot.applied, slot.voted, slot.torn) == (step - 1, step, False)
            slot.applied, self.ever_applied[rank] = step, step
        if any(s.decided == step for s in self.slots):
            slot.decided = step
        elif slot.decided > step:
            slot.decided = -1
        slot.voted = step

    def carry(self, route: Route, step: int) -> None:
        assert (self.slots[route.source].applied, self.slots[route.source].torn) == (step, False)
        slot = self.slots[route.to]
        slot.applied, slot.torn, self.ever_applied[route.to] = step, False, step

    def all_are_at(self, step: int) -> None:
        for rank in self.world:
            slot = self.slots[rank]
            assert (slot.applied, slot.torn) == (step, False)
        self.ever_applied = [step for _ in self.world]
        self.ballots = {}
        self.broken = self.joining = False

    def restart_from_checkpoint(self) -> None:
        self.slots = [Slot() for _ in self.world]
        self.all_are_at(0)


Protocol.TestCase.settings = settings(
    max_examples=150, stateful_step_count=12, deadline=None, phases=[Phase.generate]
)
test_whatever_happens_all_ranks_come_to_the_newest_step_that_any_living_one_knows = (
    pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")(
        Protocol.TestCase
    )
)
