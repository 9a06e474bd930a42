"""Laws of the controller's core under random faults, delays, doubles and lost connections, on a
virtual clock."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some
from tests.control.virtual_agents import Fault, World

from paceline.control import messages as say
from paceline.control import state as st
from paceline.control.core import decide
from paceline.record import events as log

SETUP = st.Setup(
    num_nodes=2,
    ranks_per_node=2,
    num_steps=20,
    max_restarts=3,
    grace_s=10.0,
    versions={},
    resumed=False,
    layout="DDP over 4 ranks",
)
KINDS = ("kill", "hang", "crash", "node", "spare", "partition", "controller")
FAULTS = some.lists(
    some.builds(
        Fault,
        at_s=some.floats(0.0, 25.0),
        kind=some.sampled_from(KINDS),
        target=some.integers(0, 5),
    ),
    max_size=6,
)
CALM = settings(max_examples=60, deadline=None)


def played(faults: list[Fault], seed: int = 0, spares: int = 1, **how: object) -> World:
    world = World(replace(SETUP, num_spares=spares), faults, seed=seed, **how)  # type: ignore[arg-type]
    world.on_feed = check_now
    world.play()
    return world


def check_now(world: World) -> None:
    """What holds after every event."""
    state = world.state
    assert state.empty == {r for r, slot in enumerate(state.slots) if slot.worker is None}
    assert state.unranked == {n for n, each in state.workers.items() if each.rank is None}
    holders = [slot.worker for slot in state.slots if slot.worker is not None]
    assert len(holders) == len(set(holders)), "a worker has two slots"
    for rank, slot in enumerate(state.slots):
        if slot.worker is not None:
            assert state.workers[slot.worker].rank == rank
    if state.phase == "over":
        assert state.outcome is not None
        assert state.outcome == "finished" or state.reason


def check_whole(world: World) -> None:
    """What holds of a whole run."""
    assert world.state.phase == "over", f"it never ended: {world.state.phase} at {world.now:.0f} s"
    assert sum(isinstance(event, log.RunFinished) for event in world.events) == 1
    places = [(generation, rank) for generation, rank, _ in world.joins]
    assert len(places) == len(set(places)), "two workers were sent to one slot of a generation"
    for generation in {generation for generation, _ in places}:
        workers = [worker for g, _, worker in world.joins if g == generation]
        assert len(workers) == len(set(workers)) == world.setup.num_ranks
    assert [g for g, _, _ in world.joins] == sorted(g for g, _, _ in world.joins)
    started = [event for event in world.events if isinstance(event, log.TrainingStarted)]
    for before, after in pairwise(started):
        assert after.generation > before.generation


@CALM
@given(FAULTS, some.integers(0, 2**16), some.integers(0, 2))
@example([Fault(3.0, "kill", 0), Fault(3.0, "kill", 1)], 0, 1)
@example([Fault(3.0, "node", 0), Fault(3.05, "node", 1)], 0, 0)
@example([Fault(0.2, "node", 0)], 0, 0)
@example([Fault(4.9, "kill", 0)], 0, 0)
def test_whatever_fails_the_run_ends_and_no_slot_has_two_workers(faults, seed, spares):
    check_whole(played(faults, seed, spares))


@CALM
@given(FAULTS, some.integers(0, 2**16), some.integers(0, 2))
def test_messages_that_come_twice_later_do_no_harm(faults, seed, spares):
    check_whole(played(faults, seed, spares, doubles=0.3))


@CALM
@given(FAULTS, some.integers(0, 2))
def test_a_run_with_every_message_doubled_at_once_goes_as_the_one_without(faults, spares):
    once, twice = (played(faults, 0, spares, is_slow=False, at_once=each) for each in (False, True))
    for world in (once, twice):
        check_whole(world)

    def told(world: World) -> list[object]:
        kinds = (log.TrainingStarted, log.Recovered, log.RunFinished)
        return [event for event in world.events if isinstance(event, kinds)]

    assert once.joins == twice.joins
    assert told(once) == told(twice)


@CALM
@given(FAULTS, some.integers(0, 2**16))
def test_a_run_without_an_exception_of_its_own_never_goes_back_while_a_copy_lives(faults, seed):
    world = World(replace(SETUP, num_spares=1), faults, seed=seed)
    furthest = 0

    def never_back(world: World) -> None:
        nonlocal furthest
        assert world.state.furthest_step >= furthest
        furthest = world.state.furthest_step

    world.on_feed = never_back
    world.play()
    for event in world.events:
        if isinstance(event, log.Recovered) and event.source in ("own", "replica"):
            assert event.steps_lost == 0


@CALM
@given(FAULTS, some.integers(0, 2**16))
def test_few_enough_kills_are_survived(faults, seed):
    """Kills and lost nodes are nobody's own fault: a run ends by them only in a crash loop."""
    mild = [fault for fault in faults if fault.kind in ("kill", "node", "spare")][:3]
    spread = [replace(fault, at_s=12.0 * n + fault.at_s / 10) for n, fault in enumerate(mild, 1)]
    world = World(replace(SETUP, num_spares=1, num_steps=400), spread, seed=seed)
    world.play()
    assert world.state.outcome == "finished", world.state.reason
    assert world.state.furthest_step == 400


@CALM
@given(FAULTS, some.integers(0, 2**16), some.data())
def test_news_of_older_generations_and_of_ended_workers_changes_nothing(faults, seed, data):
    world = World(replace(SETUP, num_spares=1), faults, seed=seed)
    late = some.sampled_from(
        [
            say.Met(world_size=4, backend="gloo"),
            say.StepDone(step=7, loss=1.0, tokens_per_s=1.0, unit="tokens"),
            say.Parked(applied_step=3),
            say.Restored(first_step=3, source="own", checkpoint=None, refused=[]),
        ]
    )
    is_feeding = False

    def tell_old_news(world: World) -> None:
        nonlocal is_feeding
        if is_feeding or world.num_fed % 17 or world.state.phase == "over":
            return
        is_feeding = True
        known = sorted(world.state.workers)
        gone = [number for number in world.processes if number not in known]
        before = _snapshot(world.state)
        if known:
            number = data.draw(some.sampled_from(known))
            older = world.state.workers[number].generation - 1
            if older > 0:
                _feed_quietly(world, number, older, data.draw(late))
        for number in gone[:1]:
            _feed_quietly(world, number, world.state.generation, data.draw(late))
        assert _snapshot(world.state) == before
        is_feeding = False

    world.on_feed = tell_old_news
    world.play()
    assert world.state.phase == "over"


def _feed_quietly(world: World, number: int, generation: int, message: say.FromWorker) -> None:
    said = say.Said(worker=number, generation=generation, message=message)
    assert decide(world.state, said, st.Clock(world.now, world.now)) == []


def _snapshot(state: st.State) -> str:
    return repr(state)


@CALM
@given(FAULTS, some.integers(0, 2**16), some.integers(0, 2))
def test_what_happened_played_again_gives_the_same_mind(faults, seed, spares):
    """What a journal is good for."""
    world = played(faults, seed, spares)
    again = st.State(setup=world.setup)
    for event, clock in world.history:
        decide(again, event, clock)
    assert repr(again) == repr(world.state)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_worker_that_stops_between_being_ready_and_joining_is_fenced(rank):
    """It waits for orders, as it may for ever, and the others wait for it."""
    for tenth in range(12):
        hang = Fault(0.5 + 0.1 * tenth, "hang", rank)
        world = World(SETUP, [hang], seed=16)
        world.play()
        assert world.state.outcome == "finished", f"{hang}: {world.state.phase}"


@pytest.mark.parametrize("spares", [0, 1])
def test_an_undisturbed_run_starts_every_rank_once_and_finishes(spares):
    world = played([], spares=spares)
    assert world.state.outcome == "finished"
    assert [(g, rank) for g, rank, _ in world.joins] == [(1, rank) for rank in range(4)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_of_every_kind_is_survived_with_no_step_lost(kind):
    world = played([Fault(6.0, kind, 1)], spares=1)
    assert world.state.outcome == "finished", world.state.reason
    lost = [event.steps_lost for event in world.events if isinstance(event, log.Recovered)]
    assert lost in ([], [0])


def test_asked_to_stop_in_the_middle_of_a_recovery_the_run_still_ends():
    world = World(replace(SETUP, num_spares=1), [Fault(6.0, "kill", 0)])
    world.later(6.1, lambda: world.feed(st.StopWanted("SIGTERM")))
    world.play()
    assert world.state.phase == "over"
    assert world.state.outcome == "interrupted"
