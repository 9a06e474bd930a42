"""The controller's mind, fed with what agents say; no process is started."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control import messages as say
from paceline.control import state
from paceline.control.core import decide
from paceline.record import events as log

SETUP = state.Setup(
    num_nodes=2,
    ranks_per_node=1,
    num_steps=100,
    max_restarts=2,
    grace_s=10.0,
    versions={"paceline": "test"},
    resumed=False,
    layout="DDP over 2 ranks",
)


class Scene:
    """A controller, and a clock that moves a second with every event."""

    def __init__(self, setup: state.Setup = SETUP, faults: tuple[str, ...] = ()) -> None:
        self.state = state.State(setup=setup, faults=faults)
        self.now = 1000.0
        self.events: list[log.AnyEvent] = []
        self.sent: list[tuple[int, say.ToAgent]] = []
        self.agents_started: list[int] = []
        self.killed_agents: list[state.KillAgent] = []

    def feed(self, event: state.Happening) -> None:
        self.now += 1.0
        self.state, actions = decide(self.state, event, state.Clock(self.now, self.now + 1e9))
        for action in actions:
            match action:
                case state.Record(recorded):
                    self.events.append(recorded)
                case state.Send(node, message):
                    self.sent.append((node, message))
                case state.KillAgent():
                    self.killed_agents.append(action)
                case state.StartAgent(node):
                    self.agents_started.append(node)

    def says(self, rank: int, message: say.FromWorker) -> None:
        self.feed(say.Said(generation=self.state.generation, rank=rank, message=message))

    def exits(self, rank: int, returncode: int, *, fenced: bool = False) -> None:
        generation = self.state.generation
        self.feed(
            say.Exited(
                generation=generation, rank=rank, pid=1, returncode=returncode, fenced=fenced
            )
        )

    def bring_up(self, first_step: int = 1) -> None:
        if self.state.generation == 0:
            self.feed(state.Begin())
        for node in range(self.state.setup.num_nodes):
            if node not in self.state.agents:
                self.feed(state.AgentJoined(node))
        for rank in range(2):
            self.feed(say.Started(generation=self.state.generation, rank=rank, pid=10 + rank))
        self.says(0, say.StoreListening(host="127.0.0.1", port=4711))
        for rank in range(2):
            self.says(rank, say.Met(world_size=2, backend="gloo"))
        for rank in range(2):
            self.says(rank, restored(first_step))

    def step(self, number: int) -> None:
        for rank in range(2):
            self.says(rank, done(number))

    def of(self, kind: type) -> list[log.AnyEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def orders(self, kind: type) -> list[say.ToAgent]:
        return [message for _, message in self.sent if isinstance(message, kind)]


def restored(first_step: int) -> say.Restored:
    checkpoint = f"step-{first_step - 1:08d}" if first_step > 1 else None
    return say.Restored(first_step=first_step, checkpoint=checkpoint, refused=[])


def done(step: int) -> say.StepDone:
    return say.StepDone(step=step, loss=1.0, tokens_per_s=1.0, unit="tokens")


def completed(step: int = 100, **changes: object) -> say.Completed:
    record = {
        "outcome": "finished",
        "step": step,
        "saved_step": step,
        "world_size": 2,
        "state_digest": "abc",
        "held_out_loss": 1.0,
        "baseline_bytes": 1,
        "peak_bytes": 2,
    }
    return say.Completed(**{**record, **changes})  # type: ignore[arg-type]


def crashed(**changes: object) -> say.Crashed:
    record = {
        "kind": "RuntimeError",
        "message": "no",
        "where": "line 1",
        "peer_lost": False,
        "retry": True,
        "exit_code": 4,
    }
    return say.Crashed(**{**record, **changes})  # type: ignore[arg-type]


def test_a_run_starts_an_agent_on_every_node_and_a_worker_for_every_rank():
    scene = Scene()
    scene.bring_up()
    assert scene.agents_started == [0, 1]
    started = [order.rank for order in scene.orders(say.StartWorker)]
    assert started == [0, 1]
    assert all(
        order.message == say.Rendezvous(host="127.0.0.1", port=4711)
        for order in scene.orders(say.Tell)
    )


def test_a_run_is_finished_when_every_rank_left_an_equal_completion_record():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    for rank in range(2):
        scene.says(rank, completed())
        scene.exits(rank, 0)
    assert scene.state.outcome == "finished"
    (finished,) = scene.of(log.RunFinished)
    assert finished.state_digest == "abc"
    assert scene.orders(say.Leave)


def test_an_abort_at_exit_after_the_completion_record_is_no_failure():
    scene = Scene()
    scene.bring_up()
    for rank in range(2):
        scene.says(rank, completed())
        scene.exits(rank, -6)
    assert scene.state.outcome == "finished"


def test_an_exit_code_of_zero_without_a_completion_record_is_a_failure():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    scene.exits(0, 0)
    assert scene.state.phase == "fencing"
    (lost,) = scene.of(log.WorkerLost)
    assert lost.how == "exited with 0 without a completion record"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (completed(world_size=1), r"asked for 2 ranks, the workers saw \[1, 2\]"),
        (completed(state_digest="other"), "different parameters"),
        (completed(step=99), "different steps"),
    ],
)
def test_a_run_fails_when_the_completion_records_disagree(record, reason):
    scene = Scene()
    scene.bring_up()
    for rank, said in enumerate([completed(), record]):
        scene.says(rank, said)
        scene.exits(rank, 0)
    assert scene.state.outcome == "failed"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(scene.state.reason)


def test_a_world_of_the_wrong_size_is_refused_before_training():
    scene = Scene()
    scene.bring_up()
    scene = Scene()
    scene.feed(state.Begin())
    scene.feed(state.AgentJoined(0))
    scene.feed(state.AgentJoined(1))
    scene.says(0, say.Met(world_size=1, backend="gloo"))
    for rank in range(2):
        scene.exits(rank, -9, fenced=True)
    assert scene.state.outcome == "failed"
    assert "met a world of 1 ranks, asked for 2" in str(scene.state.reason)


def test_a_killed_worker_ends_its_generation_and_the_next_one_starts_after_the_fence():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    scene.step(2)
    scene.exits(1, -9)
    assert [order.generation for order in scene.orders(say.KillWorkers)] == [1, 1]
    assert scene.state.generation == 1  # rank 0 lives: no worker of the next generation yet
    scene.exits(0, -9, fenced=True)
    assert scene.state.generation == 2
    assert [order.generation for order in scene.orders(say.StartWorker)] == [1, 1, 2, 2]


def test_a_recovery_is_reported_with_phases_that_add_up():
    scene = Scene(faults=("rank=1@step=3",))
    scene.bring_up()
    for number in (1, 2):
        scene.step(number)
    scene.says(1, say.FaultDue(fault="rank=1@step=3"))
    killed_at = scene.now
    scene.feed(
        say.FaultDone(generation=1, rank=1, pid=11, fault="rank=1@step=3", monotonic_s=killed_at)
    )
    scene.exits(1, -9)
    scene.exits(0, -9, fenced=True)
    scene.bring_up(first_step=2)
    scene.step(2)
    (recovered,) = scene.of(log.Recovered)
    parts = [
        recovered.detect_s,
        recovered.fence_s,
        recovered.start_s,
        recovered.restore_s,
        recovered.first_step_s,
    ]
    assert sum(parts) == pytest.approx(recovered.downtime_s)
    assert recovered.downtime_s == pytest.approx(scene.now - killed_at)
    assert (recovered.failed_after_step, recovered.resumed_from_step) == (2, 1)
    assert recovered.steps_lost == 1
    assert recovered.lost_rank == 1


def test_a_fault_fires_once_and_not_again_after_the_recovery():
    fault = "rank=1@step=3"
    scene = Scene(faults=(fault,))
    scene.bring_up()
    scene.step(1)
    scene.says(1, say.FaultDue(fault=fault))
    scene.says(1, say.FaultDue(fault=fault))
    assert len(scene.orders(say.InjectFault)) == 1
    scene.exits(1, -9)
    scene.exits(0, -9, fenced=True)
    assert [order.faults for order in scene.orders(say.StartWorker)] == [[fault], [fault], [], []]


def test_the_worker_that_a_signal_ended_is_blamed_and_not_the_one_that_lost_its_peer():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    scene.says(0, crashed(message="Connection closed by peer", peer_lost=True))
    scene.exits(1, -9)
    scene.exits(0, 1)
    scene.bring_up(first_step=1)
    scene.step(1)
    (recovered,) = scene.of(log.Recovered)
    assert recovered.lost_rank == 1


def test_an_error_before_the_first_step_is_not_retried():
    scene = Scene()
    scene.bring_up()
    scene.says(0, crashed(kind="ValueError", message="bad shape"))
    scene.exits(0, 1)
    scene.exits(1, -9, fenced=True)
    assert scene.state.outcome == "failed"
    assert scene.state.reason == "rank 0: ValueError: bad shape (before its first step)"


def test_an_error_that_a_person_must_mend_is_not_retried():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    scene.says(0, crashed(kind="RunError", message="R022: refused", retry=False))
    scene.exits(0, 1)
    scene.exits(1, -9, fenced=True)
    assert scene.state.outcome == "failed"
    assert scene.state.restarts == 0


def test_restarts_that_get_no_further_end_the_run():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    for attempt in range(3):
        if attempt:
            scene.bring_up(first_step=1)
            scene.step(1)
        scene.exits(1, -9)
        scene.exits(0, -9, fenced=True)
    assert scene.state.outcome == "failed"
    assert "2 restart(s) got no further than step 1" in str(scene.state.reason)


def test_restarts_that_get_further_do_not_count_against_the_run():
    scene = Scene()
    for step in range(1, 8):
        scene.bring_up(first_step=step)
        scene.step(step)
        scene.exits(1, -9)
        scene.exits(0, -9, fenced=True)
    assert scene.state.outcome is None
    assert scene.state.restarts == 7


def test_news_of_an_older_generation_changes_nothing():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    scene.exits(1, -9)
    scene.exits(0, -9, fenced=True)
    before = scene.state
    scene.feed(say.Exited(generation=1, rank=0, pid=1, returncode=-9, fenced=False))
    scene.feed(say.Said(generation=1, rank=0, message=done(50)))
    assert scene.state == before


def test_a_lost_node_is_started_again_with_all_ranks():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    scene.feed(state.AgentLost(1))
    (lost,) = scene.of(log.WorkerLost)
    assert lost.how == "node 1 is lost"
    scene.exits(0, -9, fenced=True)
    assert scene.agents_started == [0, 1, 1]
    assert scene.state.phase == "gathering"
    scene.bring_up(first_step=1)
    assert scene.state.phase == "starting"


def test_asked_to_stop_every_worker_is_told_and_the_run_ends_interrupted():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    scene.feed(state.StopWanted("SIGINT"))
    told = [
        order.rank
        for order in scene.orders(say.Tell)
        if isinstance(order.message, say.StopAtBoundary)
    ]
    assert told == [0, 1]
    for rank in range(2):
        scene.says(rank, completed(step=2, outcome="interrupted"))
        scene.exits(rank, 0)
    assert scene.state.outcome == "interrupted"


def test_asked_twice_the_workers_are_killed_at_once():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    scene.feed(state.StopWanted("SIGINT"))
    scene.feed(state.StopWanted("SIGINT"))
    assert scene.orders(say.KillWorkers)
    for rank in range(2):
        scene.exits(rank, -9, fenced=True)
    assert scene.state.outcome == "interrupted"


def test_workers_that_reach_no_boundary_within_the_grace_are_killed():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    scene.feed(state.StopWanted("SIGTERM"))
    for _ in range(8):
        scene.feed(state.Tick())
    assert not scene.orders(say.KillWorkers)
    for _ in range(4):
        scene.feed(state.Tick())
    assert scene.orders(say.KillWorkers)


def test_a_worker_lost_while_stopping_ends_the_run_without_a_restart():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    scene.feed(state.StopWanted("SIGINT"))
    scene.exits(1, -9)
    scene.exits(0, -9, fenced=True)
    assert scene.state.outcome == "interrupted"
    assert len(scene.orders(say.StartWorker)) == 2


def test_agents_that_never_report_end_the_run():
    scene = Scene(replace(SETUP, agent_timeout_s=3.0))
    scene.feed(state.Begin())
    scene.feed(state.AgentJoined(0))
    for _ in range(4):
        scene.feed(state.Tick())
    assert scene.state.outcome == "failed"
    assert scene.state.reason == "no agent on node(s) [1] within 3 s"


HAPPENINGS = st.one_of(
    st.builds(state.AgentJoined, st.integers(0, 1)),
    st.builds(state.AgentLost, st.integers(0, 1)),
    st.just(state.Tick()),
    st.builds(state.StopWanted, st.just("SIGINT")),
    st.builds(
        say.Exited,
        generation=st.integers(0, 4),
        rank=st.integers(0, 1),
        pid=st.just(1),
        returncode=st.sampled_from([0, 1, -9, -6]),
        fenced=st.booleans(),
    ),
    st.builds(
        say.Said,
        generation=st.integers(0, 4),
        rank=st.integers(0, 1),
        message=st.sampled_from(
            [
                say.StoreListening(host="h", port=1),
                say.Met(world_size=2, backend="gloo"),
                restored(1),
                restored(5),
                done(1),
                done(7),
                completed(),
                completed(outcome="interrupted", step=7),
                crashed(),
                crashed(peer_lost=True),
                crashed(retry=False),
                say.FaultDue(fault="rank=1@step=3"),
            ]
        ),
    ),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(HAPPENINGS, max_size=60))
def test_whatever_happens_the_laws_of_the_controller_hold(happenings):
    scene = Scene(faults=("rank=1@step=3",))
    scene.feed(state.Begin())
    for event in happenings:
        before = scene.state
        num_started = len(scene.orders(say.StartWorker))
        scene.feed(event)
        after = scene.state
        assert after.generation >= before.generation
        assert after.furthest_step >= before.furthest_step
        if len(scene.orders(say.StartWorker)) > num_started:
            # Never two generations at once: all of the old one are gone before the next starts.
            assert not any(rank.alive for rank in before.ranks) or before.phase == "fencing"
        if before.phase == "over":
            assert after == before
        if after.phase == "over":
            assert after.outcome is not None
            assert sum(isinstance(event, log.RunFinished) for event in scene.events) == 1
        if after.outcome == "finished":
            assert all(rank.completed for rank in after.ranks)


def test_a_survivor_that_lost_its_peer_waits_for_the_cause_to_be_known():
    scene = Scene()
    scene.bring_up()
    scene.step(1)
    scene.says(0, crashed(message="Connection closed by peer", peer_lost=True))
    assert not scene.of(log.WorkerLost)
    scene.exits(1, -9)
    (lost,) = scene.of(log.WorkerLost)
    assert (lost.rank, lost.how) == (1, "killed by SIGKILL")


def test_a_lost_connection_that_nothing_explains_is_a_failure_of_its_own():
    scene = Scene(replace(SETUP, cause_timeout_s=2.0))
    scene.bring_up()
    scene.step(1)
    scene.says(0, crashed(message="Connection closed by peer", peer_lost=True))
    for _ in range(3):
        scene.feed(state.Tick())
    (lost,) = scene.of(log.WorkerLost)
    assert (lost.rank, lost.how) == (0, "lost the connection to another rank")


def test_an_agent_that_does_not_end_its_workers_is_ended_by_force():
    scene = Scene(replace(SETUP, fence_timeout_s=3.0))
    scene.bring_up()
    scene.step(1)
    scene.exits(1, -9)
    for _ in range(4):
        scene.feed(state.Tick())
    assert state.KillAgent(0) in scene.killed_agents


def test_what_a_worker_notes_is_in_the_record():
    scene = Scene()
    scene.bring_up()
    scene.says(0, say.NoteMade(text="bf16 sends as few bytes"))
    (note,) = scene.of(log.Noted)
    assert isinstance(note, log.Noted)
    assert (note.text, note.generation) == ("bf16 sends as few bytes", 1)


def test_a_resumed_run_counts_its_generations_on():
    scene = Scene(replace(SETUP, first_generation=4))
    scene.bring_up()
    assert [order.generation for order in scene.orders(say.StartWorker)] == [4, 4]


def test_what_survivors_say_while_they_are_fenced_does_not_hold_up_the_fence():
    scene = Scene(replace(SETUP, fence_timeout_s=3.0))
    scene.bring_up()
    scene.step(1)
    scene.exits(1, -9)
    scene.says(0, crashed(message="Connection closed by peer", peer_lost=True))
    for _ in range(8):
        scene.feed(state.Tick())
    assert state.KillAgent(0) in scene.killed_agents
