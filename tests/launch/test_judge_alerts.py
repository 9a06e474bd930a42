"""Rules judged on a run's files; no process is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.job.alerts import AlertSpec, AlertsSpec
from paceline.launch.judge_alerts import Alarms, Reader
from paceline.record import events as log
from paceline.record.events import event_log
from paceline.record.machines import MachineSample, machine_log
from paceline.record.metric_names import METRICS
from paceline.record.metrics import MetricsLog, StepMetrics
from paceline.record.samples import Sample
from paceline.topology.read_use import GpuSample

HIGH = AlertSpec(name="high", metric="train/loss", above=10.0)


def line(step: int, at: float, loss: float | None = 2.0, **changes: Any) -> StepMetrics:
    numbers: dict[str, Any] = dict.fromkeys(StepMetrics.__dataclass_fields__, 1.0)
    return StepMetrics(
        **numbers
        | {"step": step, "generation": 1, "at": at, "loss": loss, "applied": True}
        | {"memory_bytes": 1, "reserved_bytes": None, "samples_digest": "", "state_digest": None}
        | {"logged": {}, "accuracy": None, "mfu": None}
        | {name: None for name in ("num_steps", "not_finite") if name in numbers}
        | changes
    )


class Scene:
    """A run's folder, and somebody who writes into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events = event_log(folder / "events.jsonl")
        self.metrics = MetricsLog(folder / "metrics.jsonl")
        self.recorded: list[Any] = []

    def alarms(self, *rules: AlertSpec) -> Alarms:
        alerts = AlertsSpec(rules=list(rules), defaults=False)
        return Alarms(self.folder, "tiny", alerts, None, self.recorded.append)

    def judge(self, alarms: Alarms, now: float) -> list[Any]:
        """What one look adds to the record."""
        before = len(self.recorded)
        alarms.look(now)
        return self.recorded[before:]

    def begin(self, at: float) -> None:
        self.events.write(started(at))
        self.events.write(trains(at))


def started(at: float) -> log.RunStarted:
    return log.RunStarted(
        at=at, num_ranks=1, num_nodes=1, num_steps=9, resumed=False, layout="x", versions={}
    )


def trains(at: float, generation: int = 1) -> log.TrainingStarted:
    return log.TrainingStarted(
        at=at,
        generation=generation,
        first_step=1,
        checkpoint=None,
        pids=[1],
        backend="gloo",
        world_size=1,
    )


def ended(at: float) -> log.RunFinished:
    return log.RunFinished(
        at=at,
        outcome="finished",
        step=1,
        state_digest=None,
        held_out_loss=None,
        restarts=0,
        reason=None,
        baseline_bytes=[],
        peak_bytes=[],
    )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_step_an_event_and_a_machine_are_judged(scene: Scene):
    rules = (
        HIGH,
        AlertSpec(name="lost", event="WorkerLost"),
        AlertSpec(name="hot", metric="gpu/temperature_c", above=85.0),
    )
    alarms = scene.alarms(*rules)
    now = alarms.began + 1.0
    assert scene.judge(alarms, now) == []
    scene.metrics.write(line(3, now, 12.0))
    scene.events.write(
        log.WorkerLost(at=now, rank=2, node=0, pid=7, how="killed", detail=None, last_step=3)
    )
    machine = MachineSample(at=now, node=0, gpus=[GpuSample(gpu=1, temperature_c=90.0)])
    machine_log(scene.folder, 0).write(machine)
    fired = scene.judge(alarms, now)
    assert {(event.rule, event.of, event.step) for event in fired} >= {("high", "", 3)}
    assert {(event.rule, event.of) for event in fired} == {
        ("high", ""),
        ("lost", "rank 2"),
        ("hot", "node 0 GPU 1"),
    }
    scene.metrics.write(line(4, now, 2.0))
    assert [type(event) for event in scene.judge(alarms, now)] == [log.AlertOver]


def test_what_was_written_before_is_not_reported_by_the_next_controller(scene: Scene):
    first = scene.alarms(HIGH)
    scene.metrics.write(line(1, first.began - 2.0, 12.0))
    assert scene.judge(first, first.began) == []  # nobody has reported it: the next step does
    scene.metrics.write(line(2, first.began + 1.0, 12.0))
    (fired,) = scene.judge(first, first.began + 1.0)
    scene.events.write(fired)

    second = scene.alarms(HIGH)
    second.began = first.began + 2.0
    assert scene.judge(second, second.began) == []
    scene.metrics.write(line(3, second.began + 1.0, 12.0))
    assert scene.judge(second, second.began + 1.0) == []
    scene.metrics.write(line(4, second.began + 2.0, 2.0))
    assert [type(event) for event in scene.judge(second, second.began + 2.0)] == [log.AlertOver]


def samples(scene: Scene, reader: Reader, now: float) -> dict[str, Sample]:
    return {sample.metric: sample for sample in reader.look(now)}


def test_silence_counts_from_the_last_step_by_the_readers_own_clock(scene: Scene):
    reader = Reader(scene.folder, usd_per_h=None)
    scene.begin(100.0)
    assert "run/silence_s" not in samples(scene, reader, 500.0)  # it compiles, maybe for minutes
    scene.metrics.write(line(1, 90.0))  # rank 0's clock is behind
    assert samples(scene, reader, 600.0)["run/silence_s"].value == 0.0
    assert samples(scene, reader, 660.0)["run/silence_s"].value == 60.0
    saved = log.CheckpointSaved(
        at=661.0, step=1, checkpoint="c", num_bytes=1, stall_s=0.0, write_s=0.0
    )
    scene.events.write(saved)
    assert samples(scene, reader, 670.0)["run/silence_s"].value == 0.0
    scene.events.write(ended(680.0))
    assert "run/silence_s" not in samples(scene, reader, 900.0)


def test_a_checkpoints_age_begins_with_the_training(scene: Scene):
    reader = Reader(scene.folder, usd_per_h=None)
    scene.begin(100.0)
    assert samples(scene, reader, 150.0)["run/checkpoint_age_s"].value == 50.0
    saved = log.CheckpointSaved(
        at=160.0, step=1, checkpoint="c", num_bytes=1, stall_s=0.0, write_s=0.0
    )
    scene.events.write(saved)
    assert samples(scene, reader, 170.0)["run/checkpoint_age_s"].value == 10.0


def test_money_counts_while_the_run_has_its_machines(scene: Scene):
    reader = Reader(scene.folder, usd_per_h=36.0)
    scene.begin(0.0)
    assert samples(scene, reader, 100.0)["run/usd"].value == pytest.approx(1.0)
    scene.events.write(ended(200.0))
    assert "run/usd" not in samples(scene, reader, 900.0)
    scene.begin(1000.0)
    assert samples(scene, reader, 1100.0)["run/usd"].value == pytest.approx(3.0)
    assert samples(scene, reader, 1100.0)["run/usd_per_h"].value == 36.0


def test_a_generation_that_follows_another_is_a_restart(scene: Scene):
    reader = Reader(scene.folder, usd_per_h=None)
    scene.begin(100.0)
    assert samples(scene, reader, 101.0)["run/restarts"].value == 0
    scene.events.write(trains(102.0, generation=2))
    assert samples(scene, reader, 103.0)["run/restarts"].value == 1


def test_a_replay_finds_the_silence_between_two_steps(scene: Scene):
    scene.begin(0.0)
    for step, at in ((1, 10.0), (2, 11.0), (3, 500.0)):
        scene.metrics.write(line(step, at))
    silences = [
        sample.value
        for sample in Reader(scene.folder, usd_per_h=None).replay()
        if sample.metric == "run/silence_s"
    ]
    assert max(value or 0.0 for value in silences) == 489.0


def test_every_sample_has_a_known_name(scene: Scene):
    reader = Reader(scene.folder, usd_per_h=1.0)
    scene.begin(0.0)
    scene.events.write(log.Evaluated(at=1.0, step=1, loss=2.0, seconds=0.1))
    scene.events.write(trains(2.0, generation=2))
    scene.metrics.write(line(1, 3.0, accuracy=0.5, mfu=0.4, reserved_bytes=5))
    gpu = dict.fromkeys(GpuSample.__struct_fields__, 1)
    host = {name: 1 for name in MachineSample.__struct_fields__ if name not in ("gpus", "ranks")}
    full = MachineSample(**host, gpus=[GpuSample(**gpu)])  # type: ignore[arg-type]
    machine_log(scene.folder, 0).write(full)
    names = {sample.metric for sample in reader.look(10.0)}
    assert {name for name in names if not name.startswith("event ")} <= set(METRICS)
    assert {"eval/loss", "gpu/power_share", "host/disk_free_bytes", "run/usd"} <= names


def test_an_alert_that_has_no_sample_is_noted_at_the_end(scene: Scene):
    rule = AlertSpec(name="mine", metric="train/los", above=1.0)
    alarms = scene.alarms(rule)
    alarms.start()
    alarms.close()
    (note,) = scene.recorded
    assert note.text == "alert rule mine was never judged: train/los has no sample"


def test_a_damaged_line_is_passed_over(scene: Scene):
    alarms = scene.alarms(HIGH)
    scene.judge(alarms, alarms.began)
    with (scene.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": "x"}) + "\nnonsense\n")
    scene.metrics.write(line(3, alarms.began + 1.0, 12.0))
    (fired,) = scene.judge(alarms, alarms.began + 1.0)
    assert fired.rule == "high"
