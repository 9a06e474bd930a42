"""The controller's mind, fed with what agents say; no process is started.

Workers are told by their numbers: in a run of two ranks and one spare, 0 and 1 have the ranks, and
2 is the spare that is started once every rank has finished a step.
"""

from dataclasses import replace

import pytest

from paceline.control import messages as say
from paceline.control import state
from paceline.control.core import decide
from paceline.errors import CrashLoop
from paceline.parallel.layout import Layout
from paceline.record import events as log

SETUP = state.Setup(
    num_nodes=2,
    ranks_per_node=1,
    num_steps=100,
    max_restarts=3,
    grace_s=10.0,
    versions={"paceline": "test"},
    resumed=False,
    layout="DDP over 2 ranks",
)
SPARE = replace(SETUP, num_nodes=1, ranks_per_node=2, num_spares=1)
FOUR = replace(SETUP, num_nodes=2, ranks_per_node=2, num_spares=1)
FAULT = "rank=1@step=3"


class Scene:
    """A controller, and a clock that moves a tenth of a second with every event."""

    def __init__(self, setup: state.Setup = SETUP, faults: tuple[str, ...] = ()) -> None:
        self.state = state.State(setup=setup, faults=faults)
        self.now = 1000.0
        self.events: list[log.AnyEvent] = []
        self.sent: list[tuple[int, say.ToAgent]] = []
        self.agents_started: list[int] = []
        self.agents_killed: list[int] = []

    def feed(self, event: state.Happening) -> None:
        self.now += 0.1
        for action in decide(self.state, event, state.Clock(self.now, self.now + 1e9)):
            match action:
                case state.Record(recorded):
                    self.events.append(recorded)
                case state.Send(node, message):
                    self.sent.append((node, message))
                case state.KillAgent(node):
                    self.agents_killed.append(node)
                case state.StartAgent(node):
                    self.agents_started.append(node)

    def wait(self, seconds: float) -> None:
        """Ticks, as the controller has them."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.4
            self.feed(state.Tick())

    def says(self, number: int, message: say.FromWorker, *, generation: int | None = None) -> None:
        if generation is None:
            worker = self.state.workers.get(number)
            generation = worker.generation if worker is not None else 0
        self.feed(say.Said(worker=number, generation=generation, message=message))

    def ready(self, *numbers: int) -> None:
        for number in numbers:
            self.feed(say.Started(worker=number, pid=100 + number))
            self.says(number, say.Ready(host="10.0.0.1", port=5000 + number))

    def exits(self, number: int, returncode: int = -9, *, fenced: bool = False) -> None:
        pid = 100 + number
        self.feed(say.Exited(worker=number, pid=pid, returncode=returncode, fenced=fenced))

    def hears(self, *numbers: int) -> None:
        """They answer that they were interrupted."""
        for number in numbers:
            self.says(number, say.Heard(generation=self.state.workers[number].generation))

    def parks(self, *numbers: int) -> None:
        """They answer, and leave their groups when they may."""
        self.hears(*numbers)
        for number in numbers:
            self.says(number, say.Parked(applied_step=1))

    def begin(self) -> None:
        self.feed(state.Begin())
        for node in range(self.state.setup.num_nodes):
            self.feed(state.AgentJoined(node))

    def meet(self, *, source: say.Source = "own", first_step: int = 1) -> None:
        """All that have a rank meet, and have their state."""
        for slot in self.state.slots:
            assert slot.worker is not None
            self.says(slot.worker, say.Met(world_size=len(self.state.slots), backend="gloo"))
        for slot in self.state.slots:
            assert slot.worker is not None
            self.says(slot.worker, restored(first_step, source))

    def step(self, number: int) -> None:
        for slot in self.state.slots:
            assert slot.worker is not None
            self.says(slot.worker, done(number))

    def train(self, steps: int = 1) -> None:
        """From nothing to a run at work, with a spare that is ready if it has one."""
        self.begin()
        self.ready(*range(self.state.setup.num_ranks))
        self.meet(source="initial")
        for number in range(1, steps + 1):
            self.step(number)
        self.ready(*(n for n, worker in self.state.workers.items() if worker.rank is None))

    @property
    def ranks(self) -> list[int | None]:
        """The worker of every rank."""
        return [slot.worker for slot in self.state.slots]

    def of(self, kind: type) -> list[log.AnyEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def orders(self, kind: type) -> list[say.ToAgent]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def told(self, kind: type) -> list[tuple[int, say.ToWorker]]:
        """What workers were told, with their numbers."""
        orders = [order for _, order in self.sent if isinstance(order, say.Tell)]
        return [(each.worker, each.message) for each in orders if isinstance(each.message, kind)]

    @property
    def started(self) -> list[tuple[int, int, int | None]]:
        """Node, number and rank of the workers that were started."""
        return [
            (node, order.worker, order.rank)
            for node, order in self.sent
            if isinstance(order, say.StartWorker)
        ]


def restored(first_step: int, source: say.Source = "own") -> say.Restored:
    checkpoint = f"step-{first_step - 1:08d}" if source == "checkpoint" else None
    return say.Restored(first_step=first_step, source=source, checkpoint=checkpoint, refused=[])


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
        "retry": True,
        "parks": True,
        "step": 2,
        "samples": [7, 8],
        "exit_code": 4,
    }
    return say.Crashed(**{**record, **changes})  # type: ignore[arg-type]


# Beginning and ending.


def test_a_run_starts_an_agent_on_every_node_and_a_worker_for_every_rank():
    scene = Scene(FOUR)
    scene.begin()
    assert scene.agents_started == [0, 1]
    assert scene.started == [(0, 0, 0), (0, 1, 1), (1, 2, 2), (1, 3, 3)]


def test_workers_join_once_all_are_ready_at_the_store_of_the_first():
    scene = Scene()
    scene.begin()
    scene.ready(1)
    assert not scene.told(say.Join)
    scene.ready(0)
    joins = scene.told(say.Join)
    assert [number for number, _ in joins] == [0, 1]
    assert [(join.rank, join.world_size, join.port) for _, join in joins] == [
        (0, 2, 5000),
        (1, 2, 5000),
    ]


def test_spares_are_started_once_every_rank_has_finished_a_step():
    scene = Scene(SPARE)
    scene.train()
    assert scene.started == [(0, 0, 0), (0, 1, 1), (0, 2, None)]


def test_a_run_is_finished_when_every_rank_left_an_equal_completion_record():
    scene = Scene()
    scene.train()
    for number in range(2):
        scene.says(number, completed())
    assert scene.state.outcome == "finished"
    (finished,) = scene.of(log.RunFinished)
    assert (finished.state_digest, finished.step, finished.peak_bytes) == ("abc", 100, [2, 2])
    assert not scene.orders(say.KillWorkers)
    assert len(scene.orders(say.Leave)) == 2


def test_an_exit_code_of_zero_without_a_completion_record_is_a_failure():
    scene = Scene()
    scene.train()
    scene.exits(0, 0)
    (lost,) = scene.of(log.WorkerLost)
    assert lost.how == "exited with 0 without a completion record"
    assert scene.state.phase == "forming"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (completed(world_size=1), r"asked for 2 ranks, the workers saw [1, 2]"),
        (completed(state_digest="other"), "the ranks ended with different parameters"),
        (completed(step=99), "the ranks ended at different steps"),
    ],
)
def test_a_run_fails_when_the_completion_records_disagree(record, reason):
    scene = Scene()
    scene.train()
    for number, said in enumerate([completed(), record]):
        scene.says(number, said)
    assert (scene.state.outcome, scene.state.reason) == ("failed", reason)


def test_a_world_of_the_wrong_size_is_refused_before_training():
    scene = Scene()
    scene.begin()
    scene.ready(0, 1)
    scene.says(0, say.Met(world_size=1, backend="gloo"))
    assert scene.state.outcome == "failed"
    assert "met a world of 1 rank, asked for 2" in str(scene.state.reason)


def test_agents_that_never_report_end_the_run():
    scene = Scene(replace(SETUP, agent_timeout_s=3.0))
    scene.feed(state.Begin())
    scene.feed(state.AgentJoined(0))
    scene.wait(4.0)
    assert scene.state.outcome == "failed"
    assert scene.state.reason == "no agent on node 1 within 3 s"


def test_a_resumed_run_counts_its_generations_on():
    scene = Scene(replace(SETUP, first_generation=4))
    scene.begin()
    scene.ready(0, 1)
    joins = [join for _, join in scene.told(say.Join)]
    assert [(join.generation, join.is_first) for join in joins] == [(4, True), (4, True)]


def test_what_a_worker_notes_is_in_the_record():
    scene = Scene()
    scene.train()
    scene.says(0, say.ForRecord(event=log.Noted(text="bf16 sends as few bytes")))
    (note,) = scene.of(log.Noted)
    assert (note.text, note.generation, note.at) == ("bf16 sends as few bytes", 1, scene.now + 1e9)


# Losing workers.


@pytest.mark.parametrize("rank", [0, 1])
def test_a_spare_takes_the_place_of_a_killed_worker_and_the_others_stay(rank):
    scene = Scene(SPARE)
    scene.train(steps=2)
    scene.exits(rank)
    assert scene.told(say.Interrupt) == [(1 - rank, say.Interrupt(generation=1))]
    assert len(scene.started) == 3
    scene.parks(1 - rank)
    assert scene.ranks[rank] == 2
    joins = scene.told(say.Join)[2:]
    assert [(number, join.rank, join.generation) for number, join in joins] == [
        (scene.ranks[each], each, 2) for each in (0, 1)
    ]
    assert {join.local_rank for _, join in joins} == {0, 1}
    assert not any(join.is_first for _, join in joins)


def test_without_a_spare_a_new_process_is_started_where_the_lost_one_was():
    scene = Scene(FOUR)
    scene.begin()
    scene.ready(0, 1, 2, 3)
    scene.meet(source="initial")
    scene.exits(3)
    assert scene.started[-1] == (1, 4, 3)
    scene.parks(0, 1, 2)
    assert scene.state.phase == "forming"
    scene.ready(4)
    assert scene.ranks == [0, 1, 2, 4]
    assert scene.state.phase == "joining"


def test_a_spare_that_is_still_starting_is_waited_for():
    scene = Scene(SPARE)
    scene.train()
    scene.exits(1)
    scene.parks(0)
    scene.meet(source="replica", first_step=2)
    scene.step(2)
    scene.exits(2)  # worker 3, its spare, has been started and is not ready
    assert [worker for _, worker, _ in scene.started] == [0, 1, 2, 3]
    scene.parks(0)
    assert scene.state.phase == "forming"
    scene.ready(3)
    assert scene.ranks == [0, 3]
    assert scene.state.phase == "joining"


def test_of_two_spares_the_one_on_the_same_node_takes_the_place():
    scene = Scene(replace(FOUR, num_spares=2))
    scene.train()
    assert scene.started[4:] == [(0, 4, None), (1, 5, None)]
    scene.exits(2)
    scene.parks(0, 1, 3)
    assert scene.ranks == [0, 1, 5, 3]


def test_a_recovery_is_reported_with_phases_that_add_up():
    scene = Scene(SPARE, faults=(FAULT,))
    scene.train(steps=2)
    scene.says(1, say.FaultDue(fault=FAULT))
    killed_at = scene.now
    scene.feed(say.FaultDone(worker=1, pid=101, fault=FAULT, monotonic_s=killed_at))
    scene.exits(1)
    scene.parks(0)
    scene.says(0, say.Met(world_size=2, backend="gloo"))
    scene.says(2, say.Met(world_size=2, backend="gloo"))
    scene.says(0, restored(2))
    scene.says(2, restored(2, "replica"))
    scene.step(2)
    (recovered,) = scene.of(log.Recovered)
    parts = [
        recovered.detect_s,
        recovered.fence_s,
        recovered.start_s,
        recovered.restore_s,
        recovered.first_step_s,
    ]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(recovered.downtime_s)
    assert recovered.downtime_s == pytest.approx(scene.now - killed_at)
    assert (recovered.failed_after_step, recovered.resumed_from_step) == (2, 1)
    assert (recovered.steps_lost, recovered.lost_rank) == (1, 1)
    assert (recovered.source, recovered.in_place) == ("replica", True)


def test_a_fault_during_a_recovery_is_not_taken_for_the_beginning_of_the_next_one():
    scene = Scene(SPARE, faults=(FAULT,))
    scene.train()
    scene.exits(1)
    scene.feed(say.FaultDone(worker=0, pid=100, fault=FAULT, monotonic_s=scene.now))
    scene.exits(0)
    scene.ready(3)
    scene.meet(source="checkpoint")
    scene.step(1)
    scene.wait(100.0)
    scene.exits(3)
    scene.parks(2)
    scene.ready(4)
    scene.meet(first_step=2)
    scene.step(2)
    assert [event.detect_s for event in scene.of(log.Recovered)] == [None, None]


def test_a_fault_fires_once_and_not_again_after_the_recovery():
    scene = Scene(SPARE, faults=(FAULT,))
    scene.train()
    scene.says(1, say.FaultDue(fault=FAULT))
    scene.says(1, say.FaultDue(fault=FAULT))
    assert scene.orders(say.InjectFault) == [say.InjectFault(worker=1, fault=FAULT)]
    scene.exits(1)
    scene.parks(0)
    assert [join.faults for _, join in scene.told(say.Join)] == [[FAULT], [FAULT], [], []]


def test_a_second_worker_lost_while_the_first_is_replaced_is_replaced_too():
    scene = Scene(FOUR)
    scene.train()
    scene.exits(1)
    scene.exits(2)
    assert scene.started[-1] == (1, 5, 2)
    scene.parks(0, 3)
    assert scene.state.phase == "forming"
    scene.ready(5)
    assert scene.ranks == [0, 4, 5, 3]
    assert scene.state.restarts == 1


def test_a_worker_lost_while_they_meet_begins_another_generation():
    scene = Scene(SPARE)
    scene.train()
    scene.exits(1)
    scene.parks(0)
    assert (scene.state.phase, scene.state.generation) == ("joining", 2)
    scene.exits(2)
    assert scene.told(say.Interrupt)[-1] == (0, say.Interrupt(generation=2))
    scene.parks(0)
    scene.ready(3)
    scene.meet(source="own", first_step=2)
    scene.step(2)
    assert (scene.state.phase, scene.state.generation) == ("training", 3)
    assert len(scene.of(log.Recovered)) == 1


def test_all_workers_lost_at_once_are_one_failure():
    scene = Scene(FOUR)
    scene.train()
    for number in range(4):
        scene.exits(number)
    assert scene.state.outcome is None
    scene.ready(*(number for number in scene.ranks if number not in (None, 4)))
    scene.meet(source="checkpoint")
    scene.step(2)
    assert (scene.state.restarts, scene.state.history.failures) == (1, 1)
    (recovered,) = scene.of(log.Recovered)
    assert not recovered.in_place


def test_a_survivor_that_does_not_park_is_killed_and_replaced():
    scene = Scene(replace(SPARE, park_timeout_s=2.0))
    scene.train()
    scene.exits(1)
    scene.hears(0)
    scene.wait(1.0)
    assert not scene.orders(say.KillWorker)
    scene.wait(2.0)
    assert scene.orders(say.KillWorker) == [say.KillWorker(worker=0)]
    lost = [(event.rank, event.how) for event in scene.of(log.WorkerLost)]
    assert lost == [
        (1, "killed by SIGKILL"),
        (0, "did not leave its generation in time"),
    ]
    scene.parks(0)  # too late
    assert scene.ranks == [3, 2]
    scene.exits(0, fenced=True)
    scene.ready(3)
    assert scene.state.phase == "joining"


def test_an_agent_that_does_not_end_a_worker_is_ended_by_force():
    scene = Scene(replace(SPARE, park_timeout_s=1.0, fence_timeout_s=3.0))
    scene.train()
    scene.exits(1)
    scene.wait(2.0)
    assert scene.orders(say.KillWorker)
    assert not scene.agents_killed
    scene.wait(3.0)
    assert scene.agents_killed == [0]


def test_a_worker_that_outlives_its_killing_ends_its_agent_even_when_training_goes_on():
    scene = Scene(replace(FOUR, fence_timeout_s=3.0))
    scene.train()
    scene.says(3, crashed(parks=False))
    scene.parks(0, 1, 2)
    assert scene.state.phase == "joining"
    scene.wait(4.0)
    assert scene.agents_killed == [1]


def test_an_exception_without_a_message_is_named_without_a_colon():
    scene = Scene(SPARE)
    scene.train()
    scene.says(1, crashed(kind="MemoryError", message=""))
    assert [each.how for each in scene.of(log.WorkerLost)] == ["out of memory: MemoryError"]


def test_a_spare_that_is_lost_is_replaced_and_training_goes_on():
    scene = Scene(SPARE)
    scene.train()
    scene.exits(2)
    assert scene.started[-1] == (0, 3, None)
    assert (scene.state.phase, scene.state.restarts) == ("training", 0)
    assert not scene.of(log.WorkerLost)


def test_spares_that_cannot_live_are_not_started_for_ever():
    scene = Scene(SPARE)
    scene.train()
    for number in range(2, 30):
        scene.exits(number, 1)
    assert len(scene.started) < 7
    assert scene.state.phase == "training"


def test_news_of_a_worker_that_is_gone_changes_nothing():
    scene = Scene(SPARE)
    scene.train()
    scene.exits(1)
    before = repr(scene.state)
    scene.exits(1)
    scene.says(1, done(50), generation=1)
    scene.says(99, done(50), generation=1)
    assert repr(scene.state) == before


def test_news_of_an_older_generation_changes_nothing():
    scene = Scene(SPARE)
    scene.train()
    scene.exits(1)
    scene.parks(0)
    before = repr(scene.state)
    for message in (done(50), crashed(), say.Parked(applied_step=1), completed()):
        scene.says(0, message, generation=1)
    assert repr(scene.state) == before


def test_a_word_that_comes_twice_is_taken_once():
    scene = Scene(SPARE)
    scene.train()
    scene.exits(1)
    scene.parks(0)
    scene.meet()
    scene.meet()
    assert len(scene.of(log.TrainingStarted)) == 2  # one in each generation
    scene.says(0, done(1))
    scene.says(0, done(1))
    assert scene.state.phase == "joining"
    scene.says(0, say.Ready(host="10.0.0.1", port=5000))
    scene.exits(2)
    scene.ready(3)
    assert scene.state.phase == "forming"  # worker 0 has not parked


# A generation is left in two moves.


def train_of_four(**changes: object) -> Scene:
    scene = Scene(replace(FOUR, num_spares=0, park_timeout_s=2.0, **changes))  # type: ignore[arg-type]
    scene.train(steps=2)
    return scene


def test_nobody_leaves_its_groups_before_the_last_rank_has_heard_of_the_end():
    scene = train_of_four()
    scene.exits(1)
    assert scene.told(say.Interrupt) == [(each, say.Interrupt(generation=1)) for each in (0, 2, 3)]
    scene.hears(0, 3)
    assert not scene.told(say.Abort)
    scene.hears(2)
    assert scene.told(say.Abort) == [(each, say.Abort(generation=1)) for each in (0, 2, 3)]


def test_a_rank_that_does_not_answer_is_ended_before_the_others_are_let_out():
    scene = train_of_four()
    scene.exits(1)
    scene.hears(0, 2)
    scene.wait(3.0)
    assert scene.orders(say.KillWorker) == [say.KillWorker(worker=3)]
    assert not scene.told(say.Abort)
    scene.exits(3)
    assert [number for number, _ in scene.told(say.Abort)] == [0, 2]
    assert scene.of(log.WorkerLost)[-1].how == "did not answer that its generation is over"  # type: ignore[attr-defined]


def test_a_rank_that_hangs_has_exited_before_the_others_are_let_out_however_long_that_takes():
    scene = train_of_four(fence_timeout_s=60.0)
    scene.says(1, crashed(parks=False))
    scene.hears(0, 2, 3)
    scene.wait(30.0)
    assert not scene.told(say.Abort)
    assert scene.orders(say.KillWorker) == [say.KillWorker(worker=1)]
    scene.exits(1)
    assert [number for number, _ in scene.told(say.Abort)] == [0, 2, 3]


def test_a_rank_that_nobody_reaches_has_come_to_the_end_of_its_lease_before_an_abort():
    scene = train_of_four()
    scene.feed(state.AgentLost(1, in_doubt_s=20.0))
    scene.hears(0, 1)
    scene.wait(19.0)
    assert not scene.told(say.Abort)
    assert not scene.orders(say.KillWorker)
    scene.wait(2.0)
    assert [number for number, _ in scene.told(say.Abort)] == [0, 1]


def test_survivors_have_as_long_to_answer_as_nobody_knows_of_a_lost_nodes_ranks():
    scene = train_of_four()
    scene.feed(state.AgentLost(1, in_doubt_s=20.0))
    scene.wait(19.0)
    assert not scene.orders(say.KillWorker)
    scene.hears(0)
    scene.wait(2.0)
    assert scene.orders(say.KillWorker) == [say.KillWorker(worker=1)]


def test_the_time_to_leave_begins_when_all_are_let_out():
    scene = train_of_four()
    scene.exits(1)
    scene.wait(1.2)
    scene.hears(0, 2, 3)
    scene.wait(1.2)
    assert not scene.orders(say.KillWorker)
    scene.wait(1.2)
    assert len(scene.orders(say.KillWorker)) == 3


def test_a_rank_that_dies_before_it_answers_is_not_waited_for():
    scene = train_of_four()
    scene.exits(1)
    scene.hears(0, 2)
    scene.exits(3)
    assert [number for number, _ in scene.told(say.Abort)] == [0, 2]


def test_a_node_that_is_lost_before_its_ranks_answer_is_not_waited_for():
    scene = train_of_four()
    scene.exits(1)
    scene.hears(0)
    scene.feed(state.AgentLost(1))
    assert [number for number, _ in scene.told(say.Abort)] == [0]


def test_a_rank_with_an_error_of_its_own_is_let_out_with_all_others():
    scene = train_of_four()
    scene.says(0, crashed())
    assert {number for number, _ in scene.told(say.Interrupt)} == {0, 1, 2, 3}
    scene.hears(1, 2, 3)
    assert not scene.told(say.Abort)
    scene.hears(0)
    assert {number for number, _ in scene.told(say.Abort)} == {0, 1, 2, 3}


def test_an_answer_of_an_older_generation_changes_nothing():
    scene = train_of_four()
    scene.exits(1)
    scene.parks(0, 2, 3)
    scene.ready(4)
    assert (scene.state.phase, scene.state.generation) == ("joining", 2)
    scene.exits(4)
    before = repr(scene.state)
    for number in (0, 2, 3):
        scene.says(number, say.Heard(generation=1))
    assert repr(scene.state) == before
    assert {order.generation for _, order in scene.told(say.Abort)} == {1}  # type: ignore[union-attr]


def test_a_controller_that_takes_over_waits_for_the_answers_that_are_missing():
    scene = train_of_four()
    scene.exits(1)
    scene.hears(0, 2)
    scene.feed(state.TookOver(5.0))
    assert not scene.told(say.Abort)
    scene.hears(3)
    assert {number for number, _ in scene.told(say.Abort)} == {0, 2, 3}


def test_a_rank_that_raises_while_all_leave_as_agreed_is_let_out_too():
    scene = train_of_four(split=Layout(data=4, sharding="none", micro_batch=1, accumulation=1))
    scene.says(3, say.LeaveWanted())
    scene.ready(4)
    scene.says(0, say.Parked(applied_step=2, planned=True))
    assert scene.state.phase == "forming"
    scene.says(1, crashed())
    scene.hears(1, 2, 3)
    assert {number for number, _ in scene.told(say.Abort)} == {1, 2, 3}


# Symptoms and causes.


def test_a_survivor_that_lost_its_peer_waits_for_the_cause_to_be_known():
    scene = Scene(SPARE)
    scene.train()
    scene.says(0, say.PeerLost(reason="Connection closed by peer"))
    assert not scene.of(log.WorkerLost)
    scene.exits(1)
    (lost,) = scene.of(log.WorkerLost)
    assert (lost.rank, lost.how) == (1, "killed by SIGKILL")
    scene.parks(0)
    assert scene.state.phase == "joining"


def test_a_lost_connection_that_nothing_explains_makes_all_meet_again():
    scene = Scene(SPARE)
    scene.train()
    scene.says(0, say.PeerLost(reason="Connection closed by peer"))
    scene.wait(3.0)
    (lost,) = scene.of(log.WorkerLost)
    assert (lost.rank, lost.how) == (0, "lost the connection to another rank")
    assert lost.detail == "Connection closed by peer"
    assert {number for number, _ in scene.told(say.Interrupt)} == {0, 1}
    scene.parks(0, 1)
    assert (scene.ranks, scene.state.phase) == ([0, 1], "joining")


def test_of_ranks_that_do_not_meet_the_newest_is_replaced_and_no_node_is_struck():
    scene = Scene(replace(SETUP, num_spares=0))
    scene.train()
    scene.says(1, say.PeerLost(reason="Connection reset by peer"))
    scene.wait(3.0)
    scene.parks(0, 1)
    assert scene.state.phase == "joining"
    scene.wait(scene.state.setup.meet_limit_s(2) + 1.0)
    assert scene.orders(say.KillWorker) == [say.KillWorker(worker=1)]
    assert [lost.cause for lost in scene.of(log.WorkerLost)] == ["network", "network"]
    assert not scene.state.history.strikes


def test_a_run_that_stops_for_a_lost_connection_shows_the_error():
    scene = Scene(replace(SPARE, max_restarts=0))
    scene.train()
    scene.says(0, say.PeerLost(reason="NCCL error in: x.cpp, unhandled system error\nlast: shm"))
    scene.wait(3.0)
    assert scene.state.outcome == "failed"
    assert str(scene.state.reason).endswith("(NCCL error in: x.cpp, unhandled system error)")


# Workers that raise.


def test_a_worker_that_raises_parks_and_is_tried_again():
    scene = Scene(SPARE)
    scene.train()
    scene.says(0, crashed())
    (lost,) = scene.of(log.WorkerLost)
    assert (lost.rank, lost.how, lost.detail) == (0, "RuntimeError: no", "line 1")
    assert not scene.orders(say.KillWorker)
    scene.parks(0, 1)
    assert (scene.ranks, scene.state.phase) == ([0, 1], "joining")


def test_a_worker_that_raises_the_same_a_second_time_is_replaced():
    scene = Scene(SPARE)
    scene.train()
    scene.says(0, crashed())
    scene.parks(0, 1)
    scene.meet(first_step=2)
    scene.says(0, crashed())
    assert scene.orders(say.KillWorker) == [say.KillWorker(worker=0)]
    scene.exits(0, fenced=True)
    scene.parks(1)
    assert (scene.ranks, scene.state.phase) == ([2, 1], "joining")


def test_a_worker_whose_process_is_broken_is_replaced_at_once():
    scene = Scene(SPARE)
    scene.train()
    scene.says(1, crashed(kind="AcceleratorError", parks=False))
    scene.parks(0)
    assert scene.ranks == [0, 2]


def test_the_place_of_a_fenced_worker_is_given_away_when_its_process_has_ended():
    scene = Scene(SPARE)
    scene.train()
    scene.says(1, crashed(kind="AcceleratorError", parks=False))
    scene.parks(0)
    scene.wait(5.0)
    assert (scene.ranks, scene.state.phase) == ([0, 2], "forming")
    scene.exits(1, fenced=True)
    assert scene.state.phase == "joining"
    assert [join.local_rank for number, join in scene.told(say.Join) if number == 2] == [1]


def test_a_worker_that_cannot_be_ended_gives_its_place_up_with_its_node():
    scene = Scene(replace(FOUR, num_spares=2, fence_timeout_s=3.0))
    scene.train()
    assert scene.started[4:] == [(0, 4, None), (1, 5, None)]
    scene.says(1, crashed(kind="AcceleratorError", parks=False))
    scene.parks(0, 2, 3)
    assert scene.state.phase == "forming"
    scene.wait(4.0)
    assert scene.agents_killed == [0]
    scene.feed(state.AgentLost(0))
    assert scene.ranks[2:] == [2, 3]
    assert not any(worker.node == 0 for worker in scene.state.workers.values())


def test_a_newcomer_on_another_node_does_not_wait_for_a_place_it_does_not_take():
    scene = Scene(FOUR)
    scene.train()
    scene.says(3, crashed(kind="AcceleratorError", parks=False))
    scene.parks(0, 1, 2)
    assert (scene.ranks, scene.state.phase) == ([0, 1, 2, 4], "joining")


def test_an_error_before_the_first_step_is_not_retried():
    scene = Scene()
    scene.begin()
    scene.ready(0, 1)
    scene.says(0, crashed(kind="ValueError", message="bad shape"))
    assert scene.state.outcome == "failed"
    assert scene.state.reason == "rank 0: ValueError: bad shape (before its first step)"
    assert scene.orders(say.KillWorkers)


def test_an_error_that_a_person_must_mend_is_not_retried_and_gives_the_exit_code():
    scene = Scene()
    scene.train()
    scene.says(0, crashed(kind="RunError", message="R022: refused", retry=False, exit_code=5))
    assert (scene.state.outcome, scene.state.exit_code) == ("failed", 5)
    assert scene.state.restarts == 0


def test_what_fails_again_and_again_ends_the_run_and_names_the_samples():
    scene = Scene()
    scene.train()
    for _ in range(2):
        scene.says(0, crashed(kind="ValueError"))
        ready_or_park(scene)
        scene.meet(first_step=2)
    scene.says(scene.ranks[0], crashed(kind="ValueError"))
    assert scene.state.outcome == "failed"
    assert scene.state.reason == (
        "rank 0: ValueError: no; step 2 raised it on two processes: a poison batch, sample ids 7, 8"
    )


def ready_or_park(scene: Scene) -> None:
    """Everybody who has a rank does what it needs to join, and who was fenced ends."""
    for number in [number for number, each in scene.state.workers.items() if each.is_fenced]:
        scene.exits(number, fenced=True)
    for number in scene.ranks:
        if number is not None and scene.state.workers[number].generation:
            scene.parks(number)
        elif number is not None:
            scene.ready(number)


def test_restarts_that_get_further_do_not_count_against_the_run():
    scene = Scene(SPARE)
    scene.train()
    for step in range(2, 9):
        scene.exits(scene.ranks[1])
        ready_or_park(scene)
        scene.meet(first_step=step)
        scene.step(step)
    assert scene.state.outcome is None
    assert scene.state.restarts == 7


def test_the_last_resort_is_that_every_process_is_new():
    scene = Scene(SPARE)
    scene.train()
    for _ in range(2):
        scene.exits(scene.ranks[1])
        ready_or_park(scene)
        scene.meet(first_step=2)
    before = set(scene.state.workers)
    scene.exits(scene.ranks[1])
    assert scene.state.phase == "clearing"
    assert scene.orders(say.KillWorkers)
    for number in before:
        scene.exits(number, fenced=True)
    assert scene.state.phase == "forming"
    assert not before & set(scene.state.workers)
    ready_or_park(scene)
    scene.meet(source="checkpoint", first_step=1)
    scene.exits(scene.ranks[1])
    assert scene.state.outcome == "failed"
    assert "3 restarts in a row made no progress, last finished step" in str(scene.state.reason)


def test_the_last_attempt_keeps_a_replica_that_lives():
    scene = Scene(
        replace(SPARE, split=Layout(data=2, sharding="none", micro_batch=1, accumulation=1))
    )
    scene.train()
    for _ in range(3):
        scene.exits(scene.ranks[1])
        assert scene.state.phase == "forming"
        ready_or_park(scene)
        scene.meet(source="replica", first_step=2)
    assert not scene.orders(say.KillWorkers)
    assert scene.ranks[0] == 0
    scene.exits(scene.ranks[1])
    assert scene.state.outcome == "failed"


def test_a_survivor_that_broke_off_inside_an_update_is_no_state_to_keep():
    scene = Scene(
        replace(SPARE, split=Layout(data=2, sharding="none", micro_batch=1, accumulation=1))
    )
    scene.train()
    scene.exits(1)
    scene.hears(0)
    scene.says(0, say.Parked(applied_step=-1))
    assert not scene.state.workers[0].holds
    scene.meet(source="checkpoint")
    assert scene.state.workers[0].holds


def test_a_run_that_fell_back_and_advances_again_is_not_given_up():
    """It was at step 50 once; each restart finishes steps, though none comes to 50 again."""
    scene = Scene(SPARE)
    scene.train(steps=50)
    for attempt in range(13):
        scene.exits(scene.ranks[1])
        for number in scene.ranks[:1]:
            assert number is not None
            scene.parks(number)
        ready_or_park(scene)
        first = 20 + attempt
        scene.meet(source="checkpoint", first_step=first)
        scene.step(first)
        scene.ready(*(n for n, worker in scene.state.workers.items() if worker.rank is None))
    assert scene.state.outcome is None
    assert scene.state.furthest_step == 50
    assert scene.state.restarts == 13


def test_a_run_that_falls_back_and_fails_at_the_same_step_each_time_is_given_up():
    scene = Scene(SPARE)
    scene.train(steps=50)
    while scene.state.outcome is None:
        scene.exits(scene.ranks[1])
        if scene.state.outcome is not None or scene.state.restarts > 9:
            break
        ready_or_park(scene)
        ready_or_park(scene)
        scene.meet(source="checkpoint", first_step=41)
        for step in range(41, 51):
            scene.step(step)
    assert scene.state.outcome == "failed"
    assert "3 restarts in a row made no progress, last finished step 50" in str(scene.state.reason)


def test_workers_that_die_before_they_are_ready_are_not_started_for_ever():
    scene = Scene()
    scene.begin()
    for number in range(20):
        scene.exits(number)
    assert scene.state.outcome == "failed"
    assert len(scene.started) < 10


# Losing nodes.


def test_spares_of_other_nodes_take_the_places_of_a_lost_node():
    scene = Scene(replace(FOUR, num_spares=4))
    scene.train()
    assert scene.started[4:] == [(0, 4, None), (1, 5, None), (0, 6, None), (1, 7, None)]
    scene.feed(state.AgentLost(1))
    (lost,) = scene.of(log.WorkerLost)
    assert (lost.rank, lost.how) == (2, "node 1 is lost")
    assert (scene.agents_killed, scene.agents_started) == ([1], [0, 1, 1])
    scene.parks(0, 1)
    assert (scene.ranks, scene.state.phase) == ([0, 1, 4, 6], "joining")


def test_without_spares_elsewhere_a_lost_node_is_waited_for():
    scene = Scene(replace(FOUR, num_spares=0))
    scene.train()
    scene.feed(state.AgentLost(1))
    scene.parks(0, 1)
    assert scene.state.phase == "forming"
    scene.feed(state.AgentJoined(1))
    assert scene.started[-2:] == [(1, 4, 2), (1, 5, 3)]
    scene.ready(4, 5)
    assert scene.state.phase == "joining"


def test_ranks_of_a_node_that_cannot_be_reached_are_not_given_away_before_it_ended_them():
    scene = Scene(replace(FOUR, num_spares=4))
    scene.train()
    scene.feed(state.AgentLost(1, in_doubt_s=5.0))
    scene.parks(0, 1)
    assert (scene.ranks, scene.state.phase) == ([0, 1, None, None], "forming")
    scene.wait(4.0)
    assert scene.state.phase == "forming"
    scene.wait(2.0)
    assert (scene.ranks, scene.state.phase) == ([0, 1, 4, 6], "joining")


def test_a_spare_is_kept_for_the_rank_of_a_lost_node_when_another_is_lost_meanwhile():
    scene = Scene(replace(SETUP, num_spares=2))
    scene.train()
    assert scene.started[2:] == [(0, 2, None), (1, 3, None)]
    scene.feed(state.AgentLost(1, in_doubt_s=20.0))
    scene.exits(0)
    assert scene.started[4:] == [(0, 4, 0)]
    scene.ready(4)
    scene.wait(21.0)
    assert (scene.ranks, scene.state.phase) == ([4, 2], "joining")


def test_a_lost_node_that_does_not_come_back_ends_the_run_that_needs_it():
    scene = Scene(replace(FOUR, num_spares=0, agent_timeout_s=5.0))
    scene.train()
    scene.feed(state.AgentLost(1))
    scene.parks(0, 1)
    scene.wait(6.0)
    assert scene.state.outcome == "failed"
    assert scene.state.reason == "no agent on node 1 within 5 s"


def test_a_lost_node_that_nobody_needs_is_started_again_and_again():
    scene = Scene(replace(FOUR, num_spares=4, agent_timeout_s=5.0))
    scene.train()
    scene.feed(state.AgentLost(1))
    scene.parks(0, 1)
    scene.meet(first_step=2)
    scene.step(2)
    scene.wait(11.0)
    assert scene.state.phase == "training"
    assert scene.agents_started == [0, 1, 1, 1, 1]


def test_a_node_lost_while_everybody_is_ended_is_not_waited_for():
    scene = Scene(SPARE)
    scene.train()
    for _ in range(2):
        scene.exits(scene.ranks[1])
        ready_or_park(scene)
        scene.meet(first_step=2)
    scene.exits(scene.ranks[1])
    assert scene.state.phase == "clearing"
    scene.feed(state.AgentLost(0))
    assert not scene.state.workers
    scene.feed(state.AgentJoined(0))
    assert [rank for _, _, rank in scene.started[-2:]] == [0, 1]


# Stopping.


def test_asked_to_stop_every_rank_is_told_and_the_run_ends_interrupted():
    scene = Scene(SPARE)
    scene.train()
    scene.feed(state.StopWanted("SIGINT"))
    assert [number for number, _ in scene.told(say.StopAtBoundary)] == [0, 1]
    for number in range(2):
        scene.says(number, completed(step=2, outcome="interrupted"))
    assert (scene.state.outcome, scene.state.exit_code) == ("interrupted", 130)
    assert scene.state.reason == "stopped by SIGINT"


def test_asked_to_stop_before_anybody_trains_the_run_is_over():
    scene = Scene()
    scene.begin()
    scene.feed(state.StopWanted("SIGTERM"))
    assert scene.state.reason == "stopped by SIGTERM before training"


def test_asked_twice_the_workers_are_ended_at_once():
    scene = Scene()
    scene.train()
    scene.feed(state.StopWanted("SIGINT"))
    scene.feed(state.StopWanted("SIGINT"))
    assert scene.orders(say.KillWorkers)
    assert scene.agents_killed == [0, 1]
    assert scene.state.outcome == "interrupted"


def test_workers_that_reach_no_boundary_within_the_grace_are_ended():
    scene = Scene()
    scene.train()
    scene.feed(state.StopWanted("SIGTERM"))
    scene.wait(8.0)
    assert scene.state.outcome is None
    scene.wait(4.0)
    assert scene.state.outcome == "interrupted"
    assert "no step boundary within the grace of 10 s" in str(scene.state.reason)
    assert scene.agents_killed == [0, 1]


def test_a_worker_lost_while_stopping_is_replaced_and_told_to_stop_too():
    scene = Scene(SPARE)
    scene.train()
    scene.feed(state.StopWanted("SIGINT"))
    scene.exits(1)
    scene.parks(0)
    scene.meet(first_step=2)
    assert [number for number, _ in scene.told(say.StopAtBoundary)] == [0, 1, 0, 2]


def test_what_a_driver_says_is_recorded_and_only_a_fatal_sign_is_a_strike():
    scene = Scene(replace(SETUP, node_strikes=1))
    scene.feed(state.Begin())

    def says(what: str, value: int, *, is_fatal: bool) -> None:
        health = log.GpuHealth(node=1, gpu="GPU-a", what=what, value=value, is_fatal=is_fatal)
        scene.feed(say.ForRecord(event=health))

    says("power brake", 1, is_fatal=False)
    assert not scene.state.history.set_aside
    says("xid", 79, is_fatal=True)
    assert scene.state.history.set_aside == {1}
    seen = [one for one in scene.events if isinstance(one, log.GpuHealth | log.NodeSetAside)]
    assert [type(one) for one in seen] == [log.GpuHealth, log.GpuHealth, log.NodeSetAside]
    assert (seen[1].what, seen[1].value, seen[2].node) == ("xid", 79, 1)


def test_a_state_that_is_found_wrong_again_and_again_ends_the_run_and_one_copied_does_not():
    scene = Scene(replace(SETUP, max_restarts=2))
    scene.train(steps=8)

    def found(goes_on_after: int) -> None:
        wrong = log.CorruptionFound(
            step=8,
            ranks=[],
            suspects=[0, 1],
            tensors=["weight"],
            verdict="undecided",
            healed="replica" if goes_on_after == 8 else "checkpoint",
            goes_on_after=goes_on_after,
        )
        scene.says(0, say.ForRecord(event=wrong))

    for _ in range(9):
        found(8)
    found(5)
    found(5)
    assert scene.state.outcome is None
    found(5)
    assert (scene.state.outcome, scene.state.exit_code) == ("failed", CrashLoop.exit_code)
    (end,) = scene.of(log.RunFinished)
    assert end.reason.startswith("the state was found wrong after step 8")


def alert(**changes: object) -> say.ForRecord:
    told = {"rule": "mine", "condition": "train/loss > 10", "metric": "train/loss", "value": 12.0}
    return say.ForRecord(event=log.AlertFired(**told | changes))  # type: ignore[arg-type]


def test_an_alert_is_recorded_and_changes_nothing_else():
    scene = Scene(SPARE)
    scene.train()
    before = len(scene.sent)
    scene.feed(alert())
    assert isinstance(scene.events[-1], log.AlertFired)
    assert scene.events[-1].generation == 1
    assert len(scene.sent) == before


def test_an_alert_that_asks_for_it_stops_the_run_once():
    scene = Scene(SPARE)
    scene.train()
    scene.feed(alert(on_alert="stop"))
    scene.feed(alert(on_alert="stop", rule="another"))
    assert [number for number, _ in scene.told(say.StopAtBoundary)] == [0, 1]
    asked = [event for event in scene.events if isinstance(event, log.StopAsked)]
    assert [event.by for event in asked] == ["alert mine"]
    for number in range(2):
        scene.says(number, completed(step=2, outcome="interrupted"))
    assert scene.state.reason == "stopped by alert mine"


def test_an_alert_that_asks_for_a_checkpoint_asks_one_rank_whose_vote_reaches_the_others():
    scene = Scene(SPARE)
    scene.train()
    scene.feed(alert(on_alert="checkpoint"))
    assert [number for number, _ in scene.told(say.SaveAtBoundary)] == [0]
    assert scene.state.phase == "training"
