"""SkyPilot reads the tasks, offline: nothing is rented."""

import pytest
import yaml
from tests.engines.read_offline import read_offline
from tests.engines.runs import start, write_files
from tests.render.test_clouds import cloud_files

SKY = """
import json, sys, yaml, sky
config = yaml.safe_load(open("task.yaml"))
secrets = [(name, "x") for name in config.get("secrets") or {}]
task = sky.Task.from_yaml_config(config, secrets_overrides=secrets)
found = []
for each in task.resources:
    stop = each.autostop_config
    found.append({
        "cloud": str(each.cloud).lower(),
        "accelerators": each.accelerators,
        "spot": each.use_spot,
        "idle_minutes": stop.idle_minutes if stop else None,
        "down": stop.down if stop else None,
        "most": each.max_hourly_cost,
        "recovery": each.job_recovery,
    })
print(json.dumps({"nodes": task.num_nodes, "mounts": sorted(task.file_mounts or {}) +
      sorted(task.storage_mounts or {}), "resources": found}))
"""


@pytest.mark.engine(validated="sky.Task.from_yaml, on demand and spot, offline")
def test_skypilot_reads_every_task(python_with, tmp_path):
    own = python_with("skypilot")
    plain = write_files(cloud_files("sky", nodes=2).files, tmp_path / "plain")
    found = read_offline(own, plain, SKY)
    assert found["nodes"] == 2
    assert len(found["resources"]) > 3
    for each in found["resources"]:
        assert list(each["accelerators"].values()) == [8]
        assert (each["idle_minutes"], each["down"], each["spot"]) == (10, True, False)
    spot = cloud_files("sky", plan={"spot": True, "budget": 50}, cloud={"secrets": ["HF_TOKEN"]})
    found = read_offline(own, write_files(spot.files, tmp_path / "spot"), SKY)
    assert all(each["spot"] for each in found["resources"])
    assert all(each["most"] > 0 for each in found["resources"])
    assert found["resources"][0]["recovery"]["strategy"] == "EAGER_NEXT_REGION"
    assert found["mounts"] == ["/bucket"]


@pytest.mark.engine(validated="a slip in a task is found by SkyPilot")
def test_skypilot_refuses_a_slip(python_with, tmp_path):
    own = python_with("skypilot")
    folder = write_files(cloud_files("sky").files, tmp_path)
    task = yaml.safe_load((folder / "task.yaml").read_text())
    task["resources"]["autostopp"] = task["resources"].pop("autostop")
    (folder / "task.yaml").write_text(yaml.safe_dump(task))
    output = start([str(own), "-c", SKY], folder, python=own, fails=True)
    assert "autostopp" in output
