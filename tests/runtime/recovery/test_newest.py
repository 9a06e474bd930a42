"""From which step all go on: every order of events and kills, by a model of the protocol."""

from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paceline.runtime.recovery.newest import Copy, Reach, Route, Standing, find_reach

ALONE = [(0,), (1,)]


def of(applied: int, **others: object) -> Standing:
    return Standing(applied=applied, **others)  # type: ignore[arg-type]


def test_a_rank_that_was_interrupted_in_the_vote_rolls_forward_to_what_another_applied():
    found = find_reach([of(7, decided=7), of(6, next_step=7, decided=6)], ALONE)
    assert found == Reach(step=7, rolled=(1,))


def test_nobody_rolls_forward_when_nobody_alive_knows_the_outcome():
    kept = {1: Copy(step=6, next_step=7)}
    standings = [of(6, next_step=7, decided=6, shadows=kept), of(-1)]
    assert find_reach(standings, ALONE) == Reach(step=6, routes=(Route(1, 0, "shadow"),))


def test_a_replica_is_preferred_to_a_shadow():
    kept = {1: Copy(step=7)}
    standings = [of(7, decided=7, shadows=kept), of(-1)]
    assert find_reach(standings, [(0, 1)]).routes == (Route(1, 0, "replica"),)


def test_a_rank_lost_together_with_its_shadows_holder_is_named():
    kept = {2: Copy(step=7)}
    standings = [of(7, decided=7, shadows=kept), of(-1), of(-1), of(7, decided=7)]
    assert find_reach(standings, [(0,), (1,), (2,), (3,)]).lost == (1,)


def test_a_shadow_that_lags_and_has_no_gradients_is_no_source():
    kept = {1: Copy(step=6)}
    assert find_reach([of(7, decided=7, shadows=kept), of(-1)], ALONE).lost == (1,)


def test_what_only_a_torn_rank_knows_is_given_up_where_others_cannot_roll():
    """Optimizers that need the other ranks cannot apply a step alone."""
    standings = [of(-1, decided=7), of(6, decided=6)]
    assert find_reach(standings, [(0, 1)]) == Reach(step=6, routes=(Route(0, 1),))


@dataclass
class Slot:
    """One rank: what its present worker has, and how far it is in its step."""

    applied: int = 0
    alive: bool = True
    torn: bool = False
    sent: int = -1
    """Step whose gradients it has, and began to send and to receive."""

    voted: int = -1
    decided: int = -1
    kept: dict[int, list[int]] = field(default_factory=dict)
    """Ward -> [step of its shadow, step of the gradients that came for it]."""


class Protocol(RuleBasedStateMachine):
    """Steps, kills and recoveries in any order. Every rank's shadow is kept by one other."""

    @initialize(world=st.integers(2, 5), data=st.data())
    def begin(self, world: int, data: st.DataObject) -> None:
        shift = data.draw(st.integers(1, world - 1))
        self.world = range(world)
        self.holder = [(rank + shift) % world for rank in self.world]
        self.slots = [Slot() for _ in self.world]
        for rank in self.world:
            self.slots[self.holder[rank]].kept[rank] = [0, -1]
        self.ballots: dict[int, set[int]] = {}
        self.broken = self.joining = False
        self.ever_applied = [0 for _ in self.world]

    def living(self) -> list[int]:
        return [rank for rank in self.world if self.slots[rank].alive]

    def wards(self, rank: int) -> list[int]:
        return [ward for ward in self.world if self.holder[ward] == rank]

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
        if slot.sent < step:
            if not self.broken:
                slot.sent = step
        elif slot.voted < step:
            partners = [self.holder[rank], *self.wards(rank)]
            has_come = all(self.slots[each].sent >= step for each in partners)
            if has_come and not self.broken:
                for ward in self.wards(rank):
                    slot.kept[ward][1] = step
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
            for ward in self.wards(rank):
                assert slot.kept[ward] == [step - 1, step]
                slot.kept[ward] = [step, -1]

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
                shadows={
                    ward: Copy(step=step, next_step=gradients if gradients > step else None)
                    for ward, (step, gradients) in s.kept.items()
                },
            )
            for s in self.slots
        ]
        found = find_reach(standings, [(rank,) for rank in self.world])
        nowhere = [
            rank
            for rank in self.world
            if standings[rank].applied < 0 and rank not in standings[self.holder[rank]].shadows
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

    def actions(self, found: Reach) -> list:
        """What a recovery does, one after the other; a failure may come between any two."""
        settles = [lambda r=rank: self.settle(r, found) for rank in self.world]
        routes = [lambda r=route: self.carry(r, found.step) for route in found.routes]
        copies = [lambda r=rank: self.establish(r) for rank in self.world]
        return [*settles, *routes, *copies]

    def settle(self, rank: int, found: Reach) -> None:
        slot, step = self.slots[rank], found.step
        if rank in found.rolled:
            assert (slot.applied, slot.voted, slot.torn) == (step - 1, step, False)
            slot.applied, self.ever_applied[rank] = step, step
        is_decided = any(s.decided == step for s in self.slots)
        for ward, (its_step, gradients) in list(slot.kept.items()):
            follows = is_decided and (its_step, gradients) == (step - 1, step)
            if follows or its_step == step:
                slot.kept[ward] = [step, -1]
            else:
                del slot.kept[ward]
        if is_decided:
            slot.decided = step
        elif slot.decided > step:
            slot.decided = -1
        slot.sent = slot.voted = step

    def carry(self, route: Route, step: int) -> None:
        assert route.tier == "shadow"
        assert self.slots[route.source].kept[route.to][0] == step
        slot = self.slots[route.to]
        slot.applied, slot.torn, self.ever_applied[route.to] = step, False, step

    def establish(self, rank: int) -> None:
        step = self.slots[rank].applied
        self.slots[self.holder[rank]].kept.setdefault(rank, [step, -1])

    def all_are_at(self, step: int) -> None:
        for rank in self.world:
            slot = self.slots[rank]
            assert (slot.applied, slot.torn) == (step, False)
            assert self.slots[self.holder[rank]].kept[rank] == [step, -1]
        self.ever_applied = [step for _ in self.world]
        self.ballots = {}
        self.broken = self.joining = False

    def restart_from_checkpoint(self) -> None:
        self.slots = [Slot() for _ in self.world]
        for rank in self.world:
            self.slots[self.holder[rank]].kept[rank] = [0, -1]
        self.all_are_at(0)


Protocol.TestCase.settings = settings(
    max_examples=150, stateful_step_count=12, deadline=None, phases=[Phase.generate]
)
test_whatever_happens_all_ranks_come_to_the_newest_step_that_any_living_one_knows = (
    pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")(
        Protocol.TestCase
    )
)
