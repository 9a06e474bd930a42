"""The Ray files under Ray itself, and the RayJob against KubeRay's definition."""

import itertools
import json
import os
import re
import signal
import threading
import time

import pytest
from tests.engines.crds import documents, problems
from tests.engines.runs import check_losses, check_run, start, write_files
from tests.render.plans import rendered

DDP = "DistributedDataParallel"
RAY = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}
_PREFIX = re.compile(r"pid=(\d+)")


def files(*, shrink=False, **layout):
    """Six steps in float32 on two workers with a CPU each."""
    return rendered(
        "ray",
        name="tiny-ray",
        model={"decoder": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256}},
        data={"seq_len": 32},
        cluster={"accelerator": "cpu", "nodes": 1, "per_node": 2, "network": "auto"},
        train={
            "global_batch": 16,
            "steps": 6,
            "precision": "fp32",
            "schedule": "constant",
            "learning_rate": 0.003,
        },
        layout={"micro_batch": 2} | layout,
        checkpoint={"every": 3},
        recovery={"shrink": shrink},
    ).files


def run(folder, python, *command, limit_s=280.0):
    return start([str(python), *command], folder, python=python, environment=RAY, limit_s=limit_s)


def change(folder, **changes):
    settings = json.loads((folder / "train.json").read_text())
    (folder / "train.json").write_text(json.dumps(settings | changes))


@pytest.mark.engine(ran="FSDP2, 2 workers")
def test_fsdp2_under_ray_equals_a_single_device(python_with, tmp_path):
    python = python_with("ray", "torch")
    folder = write_files(files(sharding="full"), tmp_path)
    output = run(folder, python, "train.py")
    losses = check_run(output, world_size=2, wrapper="FSDPLlamaForCausalLM", sharded=True)
    check_losses(losses, folder)


@pytest.mark.engine(
    ran="DDP, 2 workers, one killed: resumes from its checkpoint to torchrun's hash"
)
def test_a_killed_worker_is_replaced_and_the_end_is_torchruns(python_with, tmp_path):
    python = python_with("ray", "torch")
    folder = write_files(files(sharding="none"), tmp_path / "ray")
    change(folder, steps=600, checkpoint_every=100)
    killed: list[int] = []
    killer = threading.Thread(target=_kill_a_worker, args=(folder / "output.txt", 150, killed))
    killer.start()
    output = run(folder, python, "train.py")
    killer.join()
    assert killed, "no worker was killed"
    check_run(output, world_size=2, wrapper=DDP, sharded=False, restarted=True)
    steps = [int(each) for each in re.findall(r'\{"step": (\d+),', output)]
    again = [step for before, step in itertools.pairwise(steps) if step <= before]
    assert len(again) == 1  # one restart
    assert again[0] % 100 == 1  # from a checkpoint
    assert again[0] > 1  # and not from the start
    calm = write_files(files(sharding="none"), tmp_path / "calm")
    change(calm, steps=600, checkpoint_every=600)
    launcher = ["torchrun", "--standalone", "--nproc-per-node=2", "train_torchrun.py"]
    assert _hash(start(launcher, calm, python=python)) == _hash(output)


SHARES = """
import json, lm, train

settings, found = lm.read_settings(), {}
samples = lm.Samples(settings)
for world in (1, 2, 3, 5, 8, 9):
    rows, calls, weights = [], set(), 0.0
    for rank in range(world):
        parts = list(train.share(samples, settings, 3, rank, world))
        calls.add(len(parts))
        weights += sum(weight for _, weight in parts) / world
        rows += [row for tokens, weight in parts if weight for row in tokens.tolist()]
    found[world] = [sorted(rows), len(calls), round(weights, 9)]
print(json.dumps(found))
"""


@pytest.mark.engine(validated="any number of elastic workers reads the same global batch")
def test_any_number_of_workers_reads_the_same_global_batch(python_with, tmp_path):
    python = python_with("ray", "torch")
    folder = write_files(files(sharding="none"), tmp_path)
    found = json.loads(run(folder, python, "-c", SHARES).strip().splitlines()[-1])
    whole, _, _ = found["1"]
    assert len(whole) == 16
    for world, (rows, kinds_of_calls, weight) in found.items():
        assert rows == whole, f"{world} workers"
        assert kinds_of_calls == 1  # every worker takes part in as many reductions
        assert weight == 1.0


def _hash(output):
    (found,) = set(re.findall(r'"sha256": "([0-9a-f]{64})"', output))
    return found


def _kill_a_worker(printed, after_step, killed):
    """SIGKILL to the worker that says the steps, once it has said one after `after_step`."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        lines = printed.read_text(errors="replace").splitlines() if printed.exists() else []
        for line in lines:
            step, worker = re.search(r'\{"step": (\d+),', line), _PREFIX.search(line)
            if step and worker and int(step[1]) > after_step:
                os.kill(int(worker[1]), signal.SIGKILL)
                killed.append(int(worker[1]))
                return
        time.sleep(0.05)


@pytest.mark.engine(ran="Tune with ASHA, 3 trials of 2 workers")
def test_a_search_finds_the_better_learning_rate(python_with, tmp_path):
    python = python_with("ray", "torch")
    folder = write_files(files(sharding="none"), tmp_path)
    change(folder, steps=20)
    output = run(folder, python, "tune_ray.py", "3", limit_s=360)
    found = json.loads(re.findall(r'^\{"trials".*\}$', output, re.M)[-1])
    assert found["trials"] == 3
    assert found["errors"] == 0
    assert 0.0003 <= found["best"]["learning_rate"] <= 0.03
    assert found["loss"] < 5.545  # ln 256: better than knowing nothing


@pytest.mark.engine(validated="KubeRay 1.7's RayJob definition, closed")
@pytest.mark.parametrize("accelerator", ["cpu", "H100-SXM", "MI300X"])
def test_the_rayjob_keeps_to_kuberays_definition(accelerator, python_with):
    python = python_with("jsonschema")
    found = rendered(
        "ray",
        cluster={"accelerator": accelerator, "nodes": 2, "per_node": 4},
        layout={"sharding": "full"},
        checkpoint={"copy_to": "s3://bucket/runs"},
        kubernetes={
            "image": "registry.internal/train:1",
            "rdma_resource": "rdma/hca",
            "network": "nets/ib0",
            "node_selector": {"node.kubernetes.io/pool": "train"},
            "tolerations": ["nvidia.com/gpu"],
            "service_account": "trainer",
            "claim": "shared",
            "secrets": {"HF_TOKEN": "hf/token"},
            "max_run": "2h",
        },
    )
    _, job = documents(found.files["rayjob.yaml"])
    assert problems(python, job) == []
    job["spec"]["rayClusterSpec"]["numWorkers"] = 2
    (said,) = problems(python, job)
    assert "numWorkers" in said


@pytest.mark.engine(validated="kubernetes-validate --strict (ConfigMap)")
def test_the_rayjobs_configmap_is_a_configmap(python_with, tmp_path):
    python = python_with("kubernetes-validate")
    program, _ = documents(files(sharding="none")["rayjob.yaml"])
    (tmp_path / "program.json").write_text(json.dumps(program))
    start(["kubernetes-validate", "--strict", "program.json"], tmp_path, python=python)
