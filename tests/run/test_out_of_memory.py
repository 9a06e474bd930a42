"""A run whose rank runs out of memory: it stops and names the setting, or takes it by itself."""

import pytest
from tests.run.scene import Scene
from tests.run.test_own_code import own_scene

from paceline.record import events as log

REFIT = ("--set", "recovery.on_oom=refit")
FAULT = ("--set", "drill.faults=[oom rank=1 step=10]")


@pytest.mark.ranks
def test_s0_13_a_run_that_is_out_of_memory_takes_the_next_layout_and_ends_at_its_last_step(
    tmp_path,
):
    scene = Scene(tmp_path)
    run = scene.run("run", *REFIT, *FAULT)
    assert run.finished.outcome == "finished", run.story
    assert run.finished.step == 12
    (changed,) = run.of(log.PlanChanged)
    assert changed.settings == ["layout.micro_batch=2"]
    assert (changed.micro_batch, changed.accumulation, changed.global_batch) == (2, 2, 8)
    (back,) = run.of(log.Recovered)
    first_step = run.of(log.TrainingStarted)[-1].first_step
    assert (back.lost_rank, back.failed_after_step, back.steps_lost) == (1, 9, 10 - first_step)
    assert back.detect_s is not None
    (hit,) = run.of(log.FaultInjected)
    assert back.downtime_s == pytest.approx(back.at - hit.at, abs=0.5)
    assert run.samples == scene.run("clean").samples
    assert run.finished.exactness == "numeric"
    assert "resumes with layout.micro_batch=2" in run.output
    assert "changed     layout.micro_batch=2: rank 1 ran out of memory after step 9" in run.output
    # After the newest checkpoint: step 8's may still have been on its way to the disk.
    assert run.of(log.TrainingStarted)[-1].first_step in (5, 9)
    status = scene.paceline("status", "run").stdout
    assert "numeric" in status
    assert "changed     layout.micro_batch=2" in status
    assert "restarts    1" in status
    assert ", 1 restart, " in run.output
    told = scene.paceline("diagnose", "run").stdout
    assert "recovery.on_oom: refit resumed the run with layout.micro_batch=2" in " ".join(
        told.split()
    )
    assert "--set" not in told
    assert "lets a run change its layout" not in " ".join(told.split())


@pytest.mark.slow
@pytest.mark.ranks
def test_s0_13_run_and_diagnose_agree_on_a_cpu_out_of_memory_and_name_the_setting(tmp_path):
    scene = own_scene(tmp_path, fault="len(ids) > 2 and torch.empty(1 << 60)")
    run = scene.run("run", code=4)
    assert "rank" in run.finished.reason
    assert "out of memory: RuntimeError" in run.finished.reason
    advice = "`--set layout.micro_batch=2` with `paceline run --resume"
    assert advice in next(line for line in run.output.splitlines() if line.startswith("why"))
    done = scene.paceline("diagnose", "run")
    assert done.stdout.startswith("cause       cpu-oom"), done.stdout
    assert "--set layout.micro_batch=2" in done.stdout
    resumed = scene.resume("run", "--set", "layout.micro_batch=2")
    assert resumed.finished.step == 12


@pytest.mark.slow
@pytest.mark.ranks
def test_s0_13_a_run_that_no_layout_helps_ends_with_what_was_tried(tmp_path):
    scene = own_scene(tmp_path, fault="torch.empty(1 << 60)")
    run = scene.run("run", *REFIT, code=4)
    tried = [setting for event in run.of(log.PlanChanged) for setting in event.settings]
    assert tried[:2] == ["layout.micro_batch=2", "layout.micro_batch=1"]
    assert f"tried: {', '.join(tried)}" in run.output
