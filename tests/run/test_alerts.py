"""Alerts of real runs: one that saves and one that stops, and what the run shows of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.run.scene import Scene

from paceline.record import events as log
from paceline.record.machines import decode_machine, machine_files

SECRET = "T0PSECRET"


def rule(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "metric": "train/loss", "above": 0.0} | changes


@pytest.mark.ranks
def test_s0_21_an_alert_saves_another_stops_and_no_address_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPS_URL", f"http://127.0.0.1:1/{SECRET}")
    scene = Scene(tmp_path)
    scene.job["train"]["steps"] = 100_000
    scene.job["checkpoint"]["every"] = 100_000
    scene.job["alerts"] = {
        "rules": [
            rule("saves", on_alert="checkpoint", to=["ops"]),
            # The checkpoint that the first one asked for is the event of the second.
            {"name": "stops", "event": "CheckpointSaved", "on_alert": "stop"},
        ],
        "targets": {"ops": {"webhook": "env:OPS_URL"}},
    }
    scene.write_job()
    run = scene.run("run", code=130)

    fired = {event.rule: event for event in run.of(log.AlertFired)}
    assert {"saves", "stops"} <= set(fired)
    first, *_ = run.of(log.CheckpointSaved)
    assert first.step < run.finished.step < 100_000
    assert run.finished.outcome == "interrupted"
    assert [event.by for event in run.of(log.StopAsked)] == ["alert stops"]
    (unsent,) = run.of(log.AlertNotSent)
    assert (unsent.rule, unsent.target) == ("saves", "ops")
    assert "ALERT (warning) stops: event CheckpointSaved" in run.output
    assert "alerts      fired: " in run.output

    (machine,) = machine_files(run.folder)
    sample = decode_machine(machine.read_bytes().splitlines()[0])
    assert (sample.node, sample.gpus) == (0, [])

    status = json.loads(scene.paceline("status", "run", "--json").stdout)
    assert status["num_fired"]["stops"] == 1
    assert [event["rule"] for event in status["alerts"]] == ["saves"]
    judged = json.loads(scene.paceline("alerts", "run", "--json").stdout)
    counts = {row["rule"]: len(row["fired"]) for row in judged}
    assert (counts["saves"], counts["stops"]) == (1, 1)

    kept = [path for path in run.folder.rglob("*") if path.is_file()]
    assert run.folder / "job.yaml" in kept
    assert [path for path in kept if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in run.output


@pytest.mark.ranks
def test_an_alert_ends_your_own_script_by_sigterm(tmp_path: Path):
    scene = Scene(tmp_path)
    (tmp_path / "train.py").write_text(
        "import time, paceline\n"
        "paceline.log(step=1, loss=2.0)\n"
        "paceline.log(step=2, loss=float('nan'))\n"
        "time.sleep(900)\n"
    )
    (tmp_path / "alerts.yaml").write_text(
        "rules: [{name: mine, metric: train/loss, not_finite: true, on_alert: stop}]\n"
    )
    arguments = ("--script", "train.py", "--nproc", "2", "--alerts", "alerts.yaml", "--out", "run")
    done = scene.paceline("run", *arguments, "--no-report")
    assert done.returncode == 130, done.stdout + done.stderr
    run = scene.record("run")
    assert [event.by for event in run.of(log.StopAsked)] == ["alert mine"]
    assert "ALERT (warning) mine: train/loss is not finite at step 2" in done.stdout
    assert machine_files(run.folder)
    resumed = scene.paceline("run", "--resume", "run", "--alerts", "alerts.yaml")
    assert (resumed.returncode, "R051" in resumed.stderr) == (2, True)
