"""How a run stands, and its end, seen from another terminal."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.record.made_runs import make_run
from tests.run.scene import Scene, wait_until

from paceline.cli.status import _lines
from paceline.launch.run_status import stand
from paceline.record.machines import MachineSample, machine_log, newest_gpus
from paceline.record.pace import cost_of, pace_s
from paceline.topology.read_use import GpuSample


def test_the_pace_is_of_the_newest_steps_without_the_recoveries():
    assert pace_s([0.0, 2.0, 4.0, 500.0, 502.0], [1, 1, 1, 2, 2]) == 2.0
    slow_at_first = [*range(0, 1000, 10), *range(1001, 1060)]
    assert pace_s(slow_at_first, [1] * len(slow_at_first)) == 1.0


def test_the_pace_is_unknown_before_there_are_two_steps():
    assert pace_s([0.0], [1]) is None
    assert pace_s([0.0, 5.0], [1, 2]) is None


def test_s0_22_the_cost_at_the_end_is_at_the_newest_pace_and_before_that_as_planned():
    cost = SimpleNamespace(per_instance_hour_usd=36.0, num_instances=2, usd=50.0)
    cost.provider, cost.instance, cost.way, cost.as_of = "a", "b", "spot", "2026-01-01"
    plan: Any = SimpleNamespace(cost=cost)
    source = "a b, spot, 2026-01-01"
    assert cost_of(plan, 100.0, left_s=200.0, is_on=True) == (2.0, 6.0, source)
    assert cost_of(plan, 100.0, left_s=None, is_on=True) == (2.0, 50.0, source)
    assert cost_of(plan, 100.0, left_s=None, is_on=False) == (2.0, None, source)
    assert cost_of(None, 100.0, left_s=None, is_on=True) == (None, None, None)


@pytest.mark.ranks
def test_s0_22_a_run_is_asked_followed_and_stopped_from_another_terminal(tmp_path):
    scene = Scene(tmp_path)
    first = scene.start("runs/mine", "--set", "train.steps=5000", "--no-report")
    metrics = scene.folder / "runs/mine/metrics.jsonl"
    try:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 2000, what="some steps")
        follows = subprocess.Popen(
            [sys.executable, "-m", "paceline", "logs", "mine", "--follow"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        standing = json.loads(scene.paceline("status", "mine", "--json").stdout)
        assert standing["run"]["state"] == "running"
        assert standing["left_s"] > 0
        assert standing["usd"] is None
        text = scene.paceline("status", "runs/mine").stdout
        assert "of 5000" in text
        stopped = scene.paceline("stop", "mine")
        assert stopped.returncode == 0, stopped.stderr
        said, _ = first.communicate(timeout=300)
        assert first.returncode == 130, said
        lines, _ = follows.communicate(timeout=300)
        assert follows.returncode == 0
        assert "rank-0: --- worker 0" in lines
    finally:
        if first.poll() is None:
            first.kill()
            first.communicate()
    record = scene.record("runs/mine")
    assert record.finished.outcome == "interrupted"
    assert record.finished.saved_step == record.finished.step
    again = scene.paceline("stop", "mine")
    assert again.returncode == 2
    assert "W016: the run is not running" in again.stderr


def test_s0_22_the_newest_use_of_each_gpu_is_found_and_shown(tmp_path):
    log = machine_log(make_run(tmp_path / "r"), 0)
    for at in range(2000):  # more than is read of the end
        use = 0.25 if at == 1999 else 0.9
        gpus = [GpuSample(gpu=0, utilization=0.75), GpuSample(gpu=1, utilization=use)]
        log.write(MachineSample(at=float(at), node=0, gpus=gpus))
    log.close()
    with (tmp_path / "r/machines/node-0.jsonl").open("a") as file:
        file.write('{"at": 2000, "node"')  # being written
    found = newest_gpus(tmp_path / "r")
    assert {name: gpu.utilization for name, gpu in found.items()} == {
        "node 0 GPU 0": 0.75,
        "node 0 GPU 1": 0.25,
    }
    told = dict(_lines(replace(stand(str(tmp_path / "r"), tmp_path), gpus=found)))
    assert told["GPUs"] == "2 GPUs used 50% of the time, node 0 GPU 1 the least: 25%"


def test_a_run_that_nobody_knows_is_named(tmp_path):
    done = Scene(tmp_path).paceline("status", "4711")
    assert done.returncode == 2
    assert "W015: '4711' is neither a run's folder nor a queue's id" in done.stderr


def test_a_name_too_long_for_a_file_is_no_run(tmp_path):
    done = Scene(tmp_path).paceline("status", "a" * 5000)
    assert done.returncode == 2
    assert done.stderr.startswith("W015")


def test_a_rank_without_a_log_is_named(tmp_path):
    scene = Scene(tmp_path)
    (tmp_path / "runs/mine/logs").mkdir(parents=True)
    for name in ("run.json", "job.yaml"):
        Path(tmp_path / "runs/mine" / name).write_text("{}")
    done = scene.paceline("logs", "mine", "--rank", "7")
    assert done.returncode == 2
    assert "W017: there is no log of rank 7" in done.stderr
