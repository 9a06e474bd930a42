"""Events in words, the state of ranks, and what the curves show besides numbers."""

import typing

import msgspec
from tests.report import made

from paceline.record import events as log
from paceline.record.machines import RankSample
from paceline.report.alert_text import summarise_alerts
from paceline.report.event_text import describe
from paceline.report.happenings import alerts, happenings, marks, ranks_of


def stuck(at: float, rank: int) -> log.WorkerStuck:
    return log.WorkerStuck(
        at=made.T0 + at,
        generation=1,
        rank=rank,
        node=0,
        pid=9,
        kind="looping",
        phase="forward",
        step=7,
        waited_s=31.0,
        limit_s=30.0,
        stacks="Thread 1\n  train.py line 5",
    )


def slow(at: float, rank: int) -> log.StragglerNamed:
    return log.StragglerNamed(
        at=made.T0 + at,
        generation=1,
        rank=rank,
        node=0,
        factor=1.5,
        step=7,
        num_steps=20,
        evicted=False,
    )


def test_ranks_are_what_the_newest_events_say_of_them():
    history = [made.started(), made.training(1, 1), slow(2, 1), stuck(3, 0)]
    ranks = ranks_of(history, is_running=True)
    assert (ranks["num"], ranks["per_node"], ranks["usual"]) == (2, 2, "training")
    assert [(odd["rank"], odd["state"], odd["phase"]) for odd in ranks["odd"]] == [
        (0, "stuck", "forward"),
        (1, "slow", ""),
    ]
    lost = ranks_of([*history, made.lost(4, 6, rank=0)], is_running=True)
    assert lost["usual"] == "recovering"
    assert lost["odd"][0]["state"] == "lost"
    back = ranks_of([*history, made.lost(4, 6), made.training(5, 7)], is_running=True)
    assert (back["usual"], back["odd"]) == ("training", [])


def test_the_phase_of_a_healthy_rank_is_the_one_its_agent_saw():
    seen = [RankSample(rank, "backward", 7) for rank in (0, 1, 5)]
    history = [made.started(), made.training(1, 1), slow(2, 1)]
    ranks = ranks_of(history, is_running=True, seen=seen)
    assert ranks["phases"] == {"backward": [0]}  # rank 1 is slow, and there is no rank 5 any more
    assert ranks_of(history, is_running=False, seen=seen)["phases"] == {}


def test_ranks_of_a_script_train_when_steps_come_after_their_start():
    def started(at: float, generation: int) -> log.WorkerStarted:
        return log.WorkerStarted(at=made.T0 + at, generation=generation, node=0, rank=1, pid=9)

    history = [made.started(), started(1, 1)]
    assert ranks_of(history, is_running=True)["usual"] == "starting"
    assert ranks_of(history, is_running=True, stepped_at=made.T0 + 2)["usual"] == "training"
    again = [*history, made.lost(3, 6, rank=1), started(4, 2)]
    ranks = ranks_of(again, is_running=True, stepped_at=made.T0 + 2)
    assert (ranks["usual"], ranks["odd"]) == ("recovering", [])
    assert ranks_of(again, is_running=True, stepped_at=made.T0 + 5)["usual"] == "training"


def test_alerts_hold_until_they_are_over():
    def fired(rule: str) -> log.AlertFired:
        condition = "train/loss > 1"
        return log.AlertFired(
            at=made.T0, generation=1, rule=rule, condition=condition, metric="train/loss", value=2.0
        )

    over = log.AlertOver(
        at=made.T0 + 1, generation=1, rule="low", metric="train/loss", value=0.5, of=""
    )
    found = alerts([fired("high"), fired("low"), over])
    assert [(alert["rule"], alert["is_on"]) for alert in found] == [("high", True), ("low", False)]
    assert found[0]["text"] == "high: train/loss is 2 (train/loss > 1)"


def test_ranks_of_a_run_that_nobody_holds_are_not_known():
    assert ranks_of([made.started(), made.training(1, 1)], is_running=False)["usual"] == "unknown"
    assert ranks_of([], is_running=False)["num"] == 0


def test_recovery_is_marked_with_its_phases_one_after_the_other():
    found = marks([made.lost(10, 114), made.recovered(14.3, 114, 100)])
    (recovery,) = found["recoveries"]
    ends = [phase["at"] + phase["seconds"] for phase in recovery["phases"]]
    begins = [phase["at"] for phase in recovery["phases"]]
    assert all(abs(end - begin) < 1e-6 for end, begin in zip(ends, begins[1:], strict=False))
    assert abs(ends[-1] - (made.T0 + 14.3)) < 1e-6
    assert found["failures"][0]["step"] == 114
    assert found["repeated"] == [{"from": 100, "to": 114}]


def test_every_kind_of_event_has_words():
    for kind in typing.get_args(log.AnyEvent):
        fields = {
            field.name: {"str": "x", "float": 1.5, "list": [], "dict": {}}.get(
                getattr(field.type, "__name__", ""), 1
            )
            for field in msgspec.structs.fields(kind)
            if field.required
        }
        (said,) = happenings([kind(**fields)])
        assert said.name == kind.__name__
        assert said.level in ("bad", "good", "plain")


def test_long_texts_are_cut_and_only_the_newest_events_are_listed():
    noted = log.Noted(at=made.T0, generation=1, text="x" * 100_000)
    said = happenings([noted] * 1000)
    assert len(said) == 300
    assert len(said[0].text) == 4000


def test_stacks_of_a_stuck_rank_are_there_when_asked_for():
    (said,) = happenings([stuck(1, 0)])
    assert said.text == "rank 0 is stuck (looping): in forward of step 7 for 31 s"
    assert said.more.startswith("Thread 1")


def test_s1_19_a_corrupted_rank_is_shown_with_its_tensor_and_what_it_was_repaired_from():
    found = log.CorruptionFound(
        at=0.0,
        generation=1,
        step=12,
        ranks=[1],
        suspects=[],
        tensors=["model/embedding.weight", "model/head.weight"],
        verdict="majority",
        healed="replica",
        goes_on_after=12,
    )
    assert describe(found) == (
        "after step 12 model/embedding.weight and 1 more are wrong on rank 1 (most replicas "
        "differ from it); repaired from a replica"
    )
    unknown = msgspec.structs.replace(found, ranks=[], suspects=[0, 1], tensors=["a"])
    unsure = "and which is right is not known"
    assert describe(unknown) == (
        f"after step 12 a differs on ranks 0, 1, {unsure}; repaired from a replica"
    )
    again = msgspec.structs.replace(unknown, suspects=[], healed="recomputed")
    assert describe(again) == f"after step 12 a differs between ranks, {unsure}; computed again"


def test_s0_22_the_alerts_of_a_run_count_no_restarts_a_second_time():
    def fired(rule: str) -> log.AlertFired:
        condition = f"run/{rule} > 0"
        return log.AlertFired(rule=rule, condition=condition, metric=f"run/{rule}", value=2.0)

    events = [fired("restarted"), fired("slow"), fired("slow")]
    assert summarise_alerts(events)[-1] == "fired: restarted, slow 2 times"
