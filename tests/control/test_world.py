"""A world that shrinks when a rank cannot be filled, and grows back; no process is started."""

from dataclasses import replace

import pytest
from tests.control.test_core import SETUP, SPARE, Scene

from paceline.control import messages as say
from paceline.control import state
from paceline.parallel.layout import Layout
from paceline.record import events as log

SPLIT = Layout(data=2, sharding="none", micro_batch=2, accumulation=1)
TWO = replace(SETUP, split=SPLIT, replace_timeout_s=5.0, tolerance=1e-6)
FOUR = replace(
    TWO,
    ranks_per_node=2,
    split=Layout(data=4, sharding="hybrid", shard=2, micro_batch=1, accumulation=1),
)


def lose_node(scene: Scene, node: int, *survivors: int) -> None:
    scene.feed(state.AgentLost(node))
    scene.parks(*survivors)


def layouts(scene: Scene) -> list[Layout | None]:
    return [order.layout for _, order in scene.told(say.Join) if isinstance(order, say.Join)]


def shrunk_scene(setup: state.Setup = TWO) -> Scene:
    """Two nodes of one rank, of which node 1 has stayed away."""
    scene = Scene(setup)
    scene.train(steps=2)
    lose_node(scene, 1, 0)
    scene.wait(6.0)
    scene.meet(source="own", first_step=3)
    scene.step(3)
    return scene


def test_a_rank_that_stays_empty_is_done_without_at_the_same_global_batch():
    scene = shrunk_scene()
    (changed,) = scene.of(log.WorldChanged)
    assert changed.num_ranks == 1
    assert "node 1 stayed away" in changed.reason
    small = layouts(scene)[-1]
    assert small is not None
    assert (small.data, small.accumulation, small.global_batch) == (1, 2, 4)
    assert scene.state.phase == "training"


def test_it_waits_for_the_node_before_it_shrinks():
    scene = Scene(TWO)
    scene.train(steps=2)
    lose_node(scene, 1, 0)
    scene.wait(4.0)
    assert not scene.of(log.WorldChanged)
    scene.feed(state.AgentJoined(1))
    scene.ready(2)
    scene.wait(6.0)
    assert not scene.of(log.WorldChanged)
    assert len(scene.ranks) == 2


def test_a_shrunk_run_says_numeric_once_and_to_the_end():
    scene = shrunk_scene()
    (exactness,) = scene.of(log.ExactnessChanged)
    assert (exactness.exactness, exactness.tolerance) == ("numeric", 1e-6)
    assert scene.state.exactness == "numeric"


def test_s1_16_a_batch_that_shrinks_with_the_ranks_makes_another_training_and_says_so():
    scene = shrunk_scene(replace(TWO, batch="shrink"))
    small = layouts(scene)[-1]
    assert small is not None
    assert (small.data, small.accumulation, small.global_batch) == (1, 1, 2)
    (exactness,) = scene.of(log.ExactnessChanged)
    assert (exactness.exactness, exactness.tolerance) == ("different", None)
    assert exactness.reason == "1 data rank had a global batch of 2 instead of 4"
    assert scene.state.exactness == "different"


def test_a_job_that_forbids_it_waits_and_fails():
    scene = Scene(replace(TWO, shrink=False))
    scene.train(steps=2)
    lose_node(scene, 1, 0)
    scene.wait(70.0)
    assert scene.state.outcome == "failed"
    assert scene.state.reason == "no agent on node 1 within 60 s"


def test_when_the_node_returns_all_leave_at_a_step_boundary_and_the_world_grows_back():
    scene = shrunk_scene()
    scene.feed(state.AgentJoined(1))
    assert scene.started[-1] == (1, 2, None)
    assert not scene.told(say.RegroupAtBoundary)
    scene.ready(2)
    ((worker, order),) = scene.told(say.RegroupAtBoundary)
    assert (worker, order.generation) == (0, 2)
    scene.step(4)
    restarts = scene.state.restarts
    scene.says(0, say.Parked(applied_step=4, planned=True))
    assert scene.ranks == [0, 2]
    assert layouts(scene)[-1] == SPLIT
    scene.meet(source="replica", first_step=5)
    scene.step(5)
    assert scene.state.phase == "training"
    assert scene.state.restarts == restarts
    assert scene.state.exactness == "numeric"
    assert [event.num_ranks for event in scene.of(log.WorldChanged)] == [1, 2]


def test_a_failure_before_the_boundary_ends_the_plan_and_all_that_live_are_used_at_once():
    scene = shrunk_scene()
    scene.feed(state.AgentJoined(1))
    scene.ready(2)
    scene.exits(0)
    assert scene.state.phase in ("forming", "joining")
    assert scene.ranks == [2]
    scene.meet(source="checkpoint", first_step=1)
    scene.step(1)
    scene.says(2, say.Parked(applied_step=1, planned=True))
    assert scene.state.generation == 3


def test_those_who_hold_a_part_take_a_rank_that_needs_it():
    scene = Scene(FOUR)
    scene.train(steps=2)
    scene.feed(state.AgentLost(0))
    scene.parks(2, 3)
    scene.wait(6.0)
    assert scene.ranks == [2, 3]
    small = layouts(scene)[-1]
    assert small is not None
    assert (small.sharding, small.num_ranks, small.global_batch) == ("full", 2, 4)


def test_another_node_with_a_free_place_takes_the_rank_before_the_world_shrinks():
    scene = Scene(replace(FOUR, num_nodes=2))
    scene.train(steps=2)
    scene.feed(state.AgentLost(0))
    scene.parks(2, 3)
    scene.wait(6.0)
    scene.meet(source="own", first_step=3)
    scene.step(3)
    scene.exits(3)
    assert scene.started[-1][0] == 1


def test_a_rank_that_did_not_shrink_still_meets_the_world_it_was_told_of():
    scene = shrunk_scene()
    scene.exits(0)
    number = scene.started[-1][1]
    assert scene.started[-1] == (0, number, 0)
    scene.ready(number)
    scene.says(number, say.Met(world_size=2, backend="gloo"))
    assert scene.state.outcome == "failed"


SPARED = replace(TWO, num_spares=1)


def leave_wanted(scene: Scene, number: int, *, with_node: bool = False) -> None:
    scene.says(number, say.LeaveWanted(with_node=with_node), generation=0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_worker_that_is_taken_away_gives_its_rank_to_a_spare_at_a_step_boundary(order):
    scene = Scene(SPARED)
    scene.train(steps=2)
    (spare,) = [number for number, worker in scene.state.workers.items() if worker.rank is None]
    leave_wanted(scene, 1)
    assert [order.save for _, order in scene.told(say.RegroupAtBoundary)] == [False, False]
    for number in order:
        scene.says(number, say.Parked(applied_step=3, planned=True))
    assert scene.state.symptom is None
    assert scene.ranks == [0, spare]
    assert say.KillWorker(worker=1) in scene.orders(say.KillWorker)
    scene.exits(1, fenced=True)
    scene.meet(source="replica", first_step=4)
    scene.step(4)
    assert scene.state.phase == "training"
    assert not scene.of(log.WorkerLost)
    assert scene.state.restarts == 0
    assert scene.state.exactness == "bitwise"


def test_a_rank_whose_part_nobody_else_holds_saves_before_it_leaves():
    full = replace(SPARED, split=replace(SPLIT, sharding="full"))
    scene = Scene(full)
    scene.train(steps=2)
    leave_wanted(scene, 1)
    assert [order.save for _, order in scene.told(say.RegroupAtBoundary)] == [True, True]


def test_without_a_spare_the_others_go_on_without_the_one_that_is_taken_away():
    scene = Scene(TWO)
    scene.train(steps=2)
    leave_wanted(scene, 1)
    for number in (0, 1):
        scene.says(number, say.Parked(applied_step=3, planned=True))
    assert scene.ranks == [0]
    assert scene.state.leaving == {1}
    scene.exits(1, fenced=True)
    scene.meet(first_step=4)
    scene.step(4)
    assert scene.state.phase == "training"
    assert scene.state.exactness == "numeric"
    assert scene.started[-1][0] != 1 or len(scene.started) == 2


def test_without_a_spare_a_node_that_stays_gives_the_rank_to_a_new_process():
    scene = Scene(replace(TWO, num_nodes=1, ranks_per_node=2))
    scene.train(steps=2)
    leave_wanted(scene, 1)
    (_, fresh, rank) = scene.started[-1]
    assert (fresh, rank) == (2, None)
    (noted,) = scene.of(log.Noted)
    assert "its rank goes to a new process on node 0 at the next step boundary" in noted.text
    for number in (0, 1):
        scene.says(number, say.Parked(applied_step=3, planned=True))
    assert scene.state.phase == "forming"
    scene.ready(fresh)
    assert scene.ranks == [0, fresh]
    scene.exits(1, fenced=True)
    scene.meet(source="replica", first_step=4)
    scene.step(4)
    assert (scene.state.phase, scene.state.exactness) == ("training", "bitwise")
    assert not scene.of(log.WorldChanged)
    assert not scene.of(log.WorkerLost)


def test_a_new_process_that_is_told_to_leave_with_its_node_is_not_replaced_there():
    scene = Scene(FOUR)
    scene.train(steps=2)
    leave_wanted(scene, 3)
    assert scene.started[-1] == (1, 4, None)
    for number in (2, 3, 4):
        leave_wanted(scene, number, with_node=True)
    assert len(scene.started) == 5
    assert scene.state.leaving == {1}
    for number in (0, 1, 2, 3):
        scene.says(number, say.Parked(applied_step=3, planned=True))
    assert scene.ranks == [0, 1]
    (changed,) = scene.of(log.WorldChanged)
    assert changed.reason == "no spare is left for ranks 2, 3, whose node is taken away"


def test_when_nobody_can_go_on_without_it_the_run_stops_at_the_boundary_and_saves():
    scene = Scene(replace(TWO, shrink=False))
    scene.train(steps=2)
    leave_wanted(scene, 1)
    assert scene.told(say.StopAtBoundary)
    assert scene.of(log.StopAsked)[0].by == "SIGTERM to rank 1"


def test_a_spare_that_is_taken_away_is_ended_and_another_one_started_elsewhere():
    scene = Scene(SPARED)
    scene.train(steps=2)
    (spare,) = [number for number, worker in scene.state.workers.items() if worker.rank is None]
    leave_wanted(scene, spare)
    assert say.KillWorker(worker=spare) in scene.orders(say.KillWorker)
    assert not scene.told(say.RegroupAtBoundary)


def test_when_everybody_is_taken_away_spare_and_all_the_run_stops_and_saves():
    scene = Scene(replace(SPARED, num_nodes=1, ranks_per_node=2))
    scene.train(steps=2)
    for number in (0, 1, 2):
        leave_wanted(scene, number, with_node=True)
    assert scene.told(say.StopAtBoundary)


def test_a_shrunk_world_names_the_drills_faults_that_have_lost_their_rank():
    scene = Scene(TWO, faults=("kill rank=1 step=8", "kill rank=0 step=9"))
    scene.train(steps=2)
    lose_node(scene, 1, 0)
    scene.wait(6.0)
    (note,) = [each.text for each in scene.of(log.Noted) if each.text.startswith("drill")]
    assert note == (
        "drill: 1 rank left, too few for `kill rank=1 step=8`: it happens only if the world grows "
        "again"
    )


def test_a_fault_of_two_ranks_hits_the_one_that_a_shrunk_world_still_has():
    scene = Scene(TWO, faults=("kill rank=0+1 step=8",))
    scene.train(steps=2)
    lose_node(scene, 1, 0)
    scene.wait(6.0)
    scene.meet(source="own", first_step=3)
    scene.says(0, say.FaultDue(fault="kill rank=0+1 step=8"))
    assert [order.worker for order in scene.orders(say.InjectFault)] == [0]


@pytest.mark.parametrize(
    ("errors_from", "promise"), [(None, "bitwise"), (1, "different"), (9, "bitwise")]
)
def test_s1_12_powersgd_promises_less_once_a_lost_process_took_the_errors_it_carried(
    errors_from, promise
):
    scene = Scene(replace(SPARE, errors_from=errors_from))
    scene.train(steps=2)
    assert scene.state.exactness == "bitwise"
    scene.exits(1)
    scene.parks(0)
    scene.meet(source="replica", first_step=3)
    assert scene.state.exactness == promise


def test_s1_16_a_run_does_not_go_on_with_fewer_ranks_than_the_state_fits_on():
    scene = Scene(replace(TWO, least_ranks=2))
    scene.train(steps=2)
    lose_node(scene, 1, 0)
    scene.wait(6.0)
    assert not scene.of(log.WorldChanged)
    scene.feed(state.AgentJoined(1))
    scene.ready(2)
    scene.wait(1.0)
    assert len(scene.ranks) == 2
