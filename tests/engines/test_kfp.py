"""The pipeline, compiled by kfp and run here: its training step starts two ranks."""

import json
import re

import pytest
import yaml
from tests.engines.runs import check_losses, check_run, start, write_files
from tests.engines.tiny import tiny

DDP = "DistributedDataParallel"


@pytest.mark.engine(ran="prepare, train (DDP, 2 ranks), evaluate, export")
def test_the_pipeline_trains_evaluates_and_exports(python_with, tmp_path):
    python = python_with("kfp", "torch")
    folder = write_files(tiny("kfp", 2, sharding="none").files, tmp_path)
    output = start([str(python), "pipeline.py", "local"], folder, python=python)
    losses = check_run(output, world_size=2, wrapper=DDP, sharded=False)
    check_losses(losses, folder)
    (hash_of_ranks,) = set(re.findall(r'"sha256": "([0-9a-f]{64})"', output))
    (found,) = (folder / "outputs").rglob("model.json")
    exported = json.loads(found.read_text())
    assert exported["sha256"] == hash_of_ranks
    assert exported["held_out_loss"] < losses[0]
    assert found.with_name("model.pt").stat().st_size > 100_000


@pytest.mark.engine(validated="kfp's compiler")
def test_the_pipeline_compiles_to_four_steps_in_order(python_with, tmp_path):
    python = python_with("kfp")
    folder = write_files(tiny("kfp", 2, sharding="full").files, tmp_path)
    start([str(python), "pipeline.py", "compile"], folder, python=python)
    pipeline, *_ = yaml.safe_load_all((folder / "pipeline.yaml").read_text())
    tasks = pipeline["root"]["dag"]["tasks"]
    after = {name: set(task.get("dependentTasks", [])) for name, task in tasks.items()}
    assert after == {
        "prepare": set(),
        "train": {"prepare"},
        "evaluate": {"prepare", "train"},
        "export": {"prepare", "train", "evaluate"},
    }
    executors = pipeline["deploymentSpec"]["executors"]
    asked = executors["exec-train"]["container"]["resources"]["accelerator"]
    assert (asked["resourceType"], asked["resourceCount"]) == ("nvidia.com/gpu", "2")


@pytest.mark.engine(ran="a training step that fails, fails the pipeline")
def test_a_training_step_that_fails_fails_the_pipeline(python_with, tmp_path):
    python = python_with("kfp", "torch")
    folder = write_files(tiny("kfp", 2, sharding="none").files, tmp_path)
    program = (folder / "train.py").read_text()
    (folder / "train.py").write_text(program + "\nraise SystemExit(3)\n")
    output = start([str(python), "pipeline.py", "local"], folder, python=python, fails=True)
    assert "train" in output
    assert not list((folder / "outputs").rglob("model.json"))
