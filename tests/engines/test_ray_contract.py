"""The Ray trainer's contract, done by Ray: the command reads JSON, trains, and answers JSON."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from paceline.contracts.skills import find_skill
from paceline.contracts.skills.messages.read import read_request

SOURCE = Path(__file__).parents[2] / "src"
TRAINER = """
import tempfile

import ray.train
import ray.train.torch
import torch


def train_loop(config):
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    rank = ray.train.get_context().get_world_rank()
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(rank))
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for step in range(config.get("steps", 20)):
        loss = torch.nn.functional.mse_loss(model(x), y)
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        world = torch.distributed.get_world_size()
        if step % 5 == 4:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.state_dict(), f"{folder}/model.pt")
                ray.train.report(
                    {"loss": float(loss), "world": world},
                    checkpoint=ray.train.Checkpoint.from_directory(folder),
                )
"""


def contract(python, request, folder, limit_s=280):
    (folder / "trainer.py").write_text(TRAINER)
    environment = os.environ | {
        "PYTHONPATH": str(SOURCE),
        "RAY_AUTH_MODE": "disabled",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    environment.pop("RAY_ADDRESS", None)
    return subprocess.run(
        [python, "-m", "paceline", "contract", "ray-distributed-trainer"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=limit_s,
        check=False,
    )


def answered(done):
    """Standard output is one JSON answer that keeps to its schema, and nothing else."""
    answer = json.loads(done.stdout)
    read_request(find_skill("ray-distributed-trainer").answer, done.stdout, source="the answer")
    return answer


@pytest.mark.engine("ray", ran="the contract: DDP on 2 workers, checkpoint reported")
def test_train_trains_on_the_workers_asked_for(python_with, tmp_path):
    python = python_with("ray", "torch")
    request = {
        "mode": "train",
        "config": {"numWorkers": 2},
        "trainConfig": {"trainerPath": "trainer.py", "loopConfig": {"lr": 0.1}},
    }
    done = contract(python, request, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = answered(done)
    assert answer["status"] == "success"
    assert answer["results"]["metrics"]["world"] == 2
    assert answer["results"]["metrics"]["loss"] < 1.0  # from 5
    assert (Path(answer["checkpointPath"]) / "model.pt").is_file()
    assert answer["clusterStatus"]["numNodes"] == 1
    shares = (os.cpu_count() or 1) < 2
    assert ("share the" in answer.get("message", "")) is shares


@pytest.mark.engine("ray", ran="the contract: reports without a checkpoint, on 2 workers")
def test_s2_9_metrics_come_from_the_last_report_with_or_without_a_checkpoint(python_with, tmp_path):
    python = python_with("ray", "torch")
    (tmp_path / "plain.py").write_text(
        "import ray.train\n\n\ndef train_loop(config):\n"
        "    for step in range(3):\n"
        "        rank = ray.train.get_context().get_world_rank()\n"
        "        ray.train.report({'loss': 3.0 - step, 'rank': rank})\n"
    )
    request = {
        "mode": "train",
        "config": {"numWorkers": 2},
        "trainConfig": {"trainerPath": "plain.py", "loopConfig": {}},
    }
    done = contract(python, request, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = answered(done)
    assert answer["results"]["metrics"] == {"loss": 1.0, "rank": 0}
    assert "checkpointPath" not in answer


@pytest.mark.engine("ray", ran="the contract: a search of 3 trials, one of which fails")
def test_tune_finds_the_best_and_says_what_failed(python_with, tmp_path):
    python = python_with("ray", "torch")
    request = {
        "mode": "tune",
        "config": {"numWorkers": 1, "maxFailures": 0},
        "trainConfig": {"trainerPath": "trainer.py", "loopConfig": {"steps": 200}},
        "tuneConfig": {
            # The last one fails before its first report: after one, ASHA may stop it instead.
            "searchSpace": {"lr": {"type": "grid", "values": [1e-4, 0.1, 1e30]}},
            "scheduler": "asha",
            "numSamples": 1,
            "metric": "loss",
            "mode": "min",
        },
    }
    done = contract(python, request, tmp_path, limit_s=400)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = answered(done)
    assert answer["status"] == "partial"
    assert answer["results"]["bestConfig"] == {"lr": 0.1}
    assert (answer["results"]["numTrials"], answer["results"]["completedTrials"]) == (3, 2)
    assert "1 of 3 trials failed" in answer["message"]
    assert (Path(answer["checkpointPath"]) / "model.pt").is_file()


@pytest.mark.engine("ray", ran="the contract: a program that fails, no cluster, too few GPUs")
def test_what_cannot_be_done_is_an_error_with_its_reason(python_with, tmp_path):
    python = python_with("ray", "torch")
    done = contract(python, {"mode": "cluster", "config": {}}, tmp_path)
    assert done.returncode == 4
    assert answered(done)["status"] == "error"
    assert "ray start --head" in answered(done)["message"]
    train = {"trainerPath": "trainer.py", "loopConfig": {"lr": 1e9, "steps": 200}}
    failing = {"mode": "train", "config": {"maxFailures": 0}, "trainConfig": train}
    done = contract(python, failing, tmp_path)
    assert done.returncode == 4
    assert "the loss is not finite" in answered(done)["message"]
    gpus = {"mode": "train", "config": {"useGpu": True, "numWorkers": 8}, "trainConfig": train}
    done = contract(python, gpus, tmp_path)
    assert "8 workers need 8 GPUs" in answered(done)["message"]
