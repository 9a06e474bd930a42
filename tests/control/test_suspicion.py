"""What the controller does about ranks that stand still or are slow, and about silent nodes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.test_core import SPARE, Scene, crashed, done

from paceline.control import messages as say
from paceline.control.heartbeats import BEAT_EVERY_S, TIMES_ALIVE, Beats
from paceline.control.slots import Phase
from paceline.record import events as log


def stuck(worker: int, generation: int = 1, **changes: object) -> say.Stuck:
    return say.Stuck(seen=seen(worker, generation, **changes))


def seen(worker: int, generation: int = 1, **changes: object) -> say.Seen:
    told = {
        "kind": "waiting",
        "is_certain": False,
        "phase": Phase.BACKWARD,
        "step": 3,
        "micro_batch": 0,
        "waited_s": 11.0,
        "limit_s": 10.0,
        "is_late": True,
        "in_collective": True,
        "stacks": "File somewhere",
    }
    return say.Seen(worker=worker, generation=generation, **{**told, **changes})  # type: ignore[arg-type]


def at_work() -> Scene:
    scene = Scene(SPARE)
    scene.train(steps=2)
    return scene


def killed(scene: Scene) -> list[int]:
    return [order.worker for order in scene.orders(say.KillWorker)]  # type: ignore[attr-defined]


def test_when_a_rank_is_late_every_agent_is_asked_to_look_once():
    scene = at_work()
    scene.feed(stuck(0))
    scene.feed(stuck(1))
    assert len(scene.orders(say.Look)) == 1
    assert not killed(scene)


def test_the_rank_the_others_wait_for_is_fenced_and_replaced_as_any_lost_one():
    scene = at_work()
    scene.feed(stuck(0))
    scene.feed(seen(0))
    assert not killed(scene)
    scene.feed(seen(1, phase=Phase.FORWARD, kind="looping", in_collective=False))
    assert killed(scene) == [1]
    (event,) = scene.of(log.WorkerStuck)
    assert (event.rank, event.kind, event.phase, event.stacks) == (
        1,
        "looping",
        "forward",
        "File somewhere",
    )
    names = [type(each).__name__ for each in scene.events]
    assert names.index("WorkerStuck") + 1 == names.index("WorkerLost")
    (lost,) = scene.of(log.WorkerLost)
    assert lost.how == "looping, in forward for 11.0 s where it may take 10.0 s"
    scene.exits(1, fenced=True)
    scene.parks(0)
    assert scene.ranks == [0, 2]


def test_a_victim_is_not_fenced_while_the_rank_it_waits_for_saves():
    scene = at_work()
    scene.feed(stuck(0))
    scene.feed(seen(0))
    scene.feed(seen(1, step=2, phase=Phase.SAVE, is_late=False))
    assert not killed(scene)
    assert scene.state.inquiry is None
    scene.wait(2.0)
    scene.feed(stuck(0))
    assert len(scene.orders(say.Look)) == 2


def test_a_stopped_rank_is_fenced_though_another_agent_does_not_answer():
    scene = at_work()
    scene.feed(stuck(1))
    scene.feed(seen(1, kind="stopped", is_certain=True))
    assert not killed(scene)
    scene.wait(1.5)
    assert killed(scene) == [1]


def test_without_an_answer_of_all_nobody_is_blamed_for_being_slow():
    scene = at_work()
    scene.feed(stuck(0))
    scene.feed(seen(0))
    scene.wait(3.0)
    assert not killed(scene)


def test_ranks_that_wait_for_each_other_all_meet_again_and_none_is_ended():
    scene = at_work()
    scene.feed(stuck(0))
    scene.feed(seen(0))
    scene.feed(seen(1))
    assert not killed(scene)
    assert {number for number, _ in scene.told(say.Interrupt)} == {0, 1}
    scene.parks(0, 1)
    assert scene.state.phase == "joining"
    assert scene.ranks == [0, 1]


@pytest.mark.parametrize("generation", [0, 2])
def test_what_is_said_of_another_generation_changes_nothing(generation: int):
    scene = at_work()
    scene.feed(stuck(1, generation=generation))
    scene.feed(seen(1, generation=generation))
    assert not scene.orders(say.Look)
    assert not killed(scene)


def test_a_fenced_worker_that_comes_back_is_heard_no_more():
    scene = at_work()
    scene.feed(stuck(1))
    scene.feed(seen(0))
    scene.feed(seen(1, kind="stopped", is_certain=True))
    before = len(scene.events)
    scene.says(1, done(3))  # SIGCONT came before the SIGKILL
    scene.feed(stuck(1))
    scene.says(1, say.Parked(applied_step=3))
    assert len(scene.events) == before
    assert scene.state.slots[1].last_step != 3
    assert scene.ranks[1] != 1


def test_a_spare_that_gets_stuck_while_it_starts_is_ended_quietly():
    scene = Scene(SPARE)
    scene.begin()
    scene.ready(0, 1)
    scene.meet(source="initial")
    scene.step(1)
    scene.feed(stuck(2, generation=0, phase=Phase.IMPORTING))
    assert killed(scene) == [2]
    assert not scene.of(log.WorkerLost)


def test_a_new_process_that_is_stuck_before_it_is_ready_is_replaced():
    scene = Scene(SPARE)
    scene.begin()
    scene.ready(0)
    scene.feed(stuck(1, generation=0, phase=Phase.IMPORTING))
    assert killed(scene) == [1]
    assert scene.ranks[1] not in (None, 1)


# Memory.


def test_a_kill_by_the_kernel_for_want_of_memory_is_called_that():
    scene = at_work()
    scene.feed(say.Exited(worker=1, pid=101, returncode=-9, fenced=False, out_of_memory=True))
    (lost,) = scene.of(log.WorkerLost)
    assert lost.how == "out of memory: killed by SIGKILL"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("MemoryError", ""),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_an_error_of_memory_is_called_that(kind: str, message: str):
    scene = at_work()
    scene.says(1, crashed(kind=kind, message=message, parks=False))
    (lost,) = scene.of(log.WorkerLost)
    assert lost.how.startswith("out of memory: ")


def test_a_kill_by_anybody_else_is_not():
    scene = at_work()
    scene.exits(1)
    assert scene.of(log.WorkerLost)[0].how == "killed by SIGKILL"


# Speeds.


def own(step: int, own_s: float) -> say.StepDone:
    return say.StepDone(step=step, loss=1.0, tokens_per_s=1.0, unit="tokens", own_s=own_s)


def slow_run(*, evict: bool = False, num_spares: int = 1, factor: float = 1.5) -> Scene:
    setup = replace(SPARE, peers=((0, 1),), evict_stragglers=evict, num_spares=num_spares)
    scene = Scene(replace(setup, num_steps=10_000))
    scene.train(steps=1)
    for step in range(2, 40):
        if scene.state.phase != "training":
            break
        for rank, number in enumerate(scene.ranks):
            assert number is not None
            scene.says(number, own(step, factor if rank == 1 else 1.0))
    return scene


def test_a_slow_rank_is_named_once_and_left_where_it_is():
    scene = slow_run()
    (named,) = scene.of(log.StragglerNamed)
    assert (named.rank, round(named.factor, 2), named.evicted) == (1, 1.5, False)
    assert named.step <= 20
    assert not scene.of(log.WorkerLost)


def test_a_slow_rank_is_replaced_when_the_job_asks_for_it_and_it_pays():
    scene = slow_run(evict=True)
    (named,) = scene.of(log.StragglerNamed)
    assert named.evicted
    assert killed(scene) == [1]


def test_a_slow_rank_is_not_replaced_without_a_spare():
    scene = slow_run(evict=True, num_spares=0)
    assert not scene.of(log.StragglerNamed)[0].evicted
    assert not scene.of(log.WorkerLost)


def test_equal_ranks_are_not_named():
    assert not slow_run(factor=1.0).of(log.StragglerNamed)


# Silence.


def silence(beats: Beats, *, start_s: float, seconds: float) -> list[tuple[float, list[int]]]:
    """When which nodes are given up, checked as often as the controller does."""
    found = []
    for number in range(1, round(seconds / BEAT_EVERY_S) + 1):
        now = start_s + number * BEAT_EVERY_S
        if lost := beats.check(now).lost:
            found.append((now, [node for node, _ in lost]))
    return found


def test_a_node_is_given_up_after_the_limit_and_never_after_one_missed_beat():
    beats = Beats(heartbeat_s=2.0)
    for node in (0, 1):
        beats.joined(node, 100.0)
    for number in range(1, 50):
        now = 100.0 + number * BEAT_EVERY_S
        beats.heard(0, now)
        assert beats.check(now).lost == ([] if number != 10 else [(1, pytest.approx(2.0))])


def test_a_silent_node_that_answers_when_asked_has_more_time_but_not_for_ever():
    beats = Beats(heartbeat_s=2.0)
    beats.joined(0, 0.0)
    given_up = None
    for number in range(1, 100):
        now = number * BEAT_EVERY_S
        checked = beats.check(now)
        for node in checked.ask:
            beats.answered(node, now + 0.01)
        if checked.lost:
            given_up = now
            break
    assert given_up == pytest.approx(2.0 * TIMES_ALIVE, abs=BEAT_EVERY_S)


def test_a_silent_node_whose_ranks_go_on_is_not_given_up_at_the_limit():
    beats = Beats(heartbeat_s=2.0)
    beats.joined(0, 0.0)
    beats.step_finished()
    beats.step_finished()
    assert not silence(beats, start_s=0.0, seconds=4.0)


def test_one_step_that_was_on_its_way_speaks_for_nobody():
    beats = Beats(heartbeat_s=2.0)
    beats.joined(0, 0.0)
    beats.step_finished()
    assert silence(beats, start_s=0.0, seconds=4.0)


def test_a_controller_that_was_stopped_itself_blames_nobody():
    beats = Beats(heartbeat_s=2.0)
    for node in range(8):
        beats.joined(node, 0.0)
    assert not silence(beats, start_s=0.0, seconds=0.6)
    assert beats.check(60.0).lost == []
    assert beats.check(60.2).lost == []


@settings(max_examples=50)
@given(st.lists(st.floats(0.0, 1.9), min_size=1, max_size=60))
def test_beats_that_come_within_the_limit_never_give_anybody_up(gaps: list[float]):
    beats = Beats(heartbeat_s=2.0)
    beats.joined(0, 0.0)
    now, due = 0.0, 0.0
    for gap in gaps:
        due += gap
        while now + BEAT_EVERY_S < due:
            now += BEAT_EVERY_S
            assert beats.check(now).lost == []
        beats.heard(0, due)
