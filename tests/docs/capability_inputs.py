"""Small real inputs for the commands of docs/capabilities.md: a folder of each kind, made once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from tests.bench.test_sweep import row as sweep_row
from tests.command import run_command
from tests.contracts.test_pytorch_trainer import MODEL
from tests.contracts.test_reading import CONTEXT
from tests.engines.test_kfp_contract import PIPELINE
from tests.engines.test_ray_contract import TRAINER
from tests.prepare.test_quality_report import VALIDATION

from paceline.record.sweep import Sweep

CPU_JOB: dict[str, Any] = {
    "name": "rows",
    "model": {"decoder": {"layers": 2, "hidden": 32, "heads": 2}},
    "data": {"path": "text", "seq_len": 32},
    "cluster": {"accelerator": "cpu", "nodes": 1, "per_node": 2},
    "train": {"global_batch": 8, "steps": 60, "learning_rate": 0.01, "precision": "fp32"},
    "checkpoint": {"every": 6},
    "evaluate": {"every": 12, "samples": 8},
}
GPU_JOB: dict[str, Any] = {
    "name": "rows-gpus",
    "model": {"preset": "llama-3-8b"},
    "data": {"corpus": "mock", "seq_len": 4096},
    "cluster": {"accelerator": "H100-SXM", "nodes": 2, "per_node": 8},
    "train": {"global_batch": 128, "steps": 1000},
}
MAC_JOB: dict[str, Any] = {
    "name": "rows-macs",
    "engine": "mlx",
    "model": {"decoder": {"layers": 4, "hidden": 256, "heads": 4}},
    "data": {"path": "text", "seq_len": 256},
    "cluster": {"accelerator": "M2-Ultra", "nodes": 2, "per_node": 1},
    "train": {"global_batch": 16, "steps": 100},
    "ssh": {"hosts": ["mac-a", "mac-b"]},
}
ONE_DEVICE_PROGRAM = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
torch.save(model.state_dict(), "model.pt")
"""
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
exec sh -c "$3"
"""
FAULTY_PROGRAM = """
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

os.environ["HF_TOKEN"] = "hf_{token}"
dist.init_process_group("nccl", world_size=16, rank=0)
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-70b-hf")
model = DistributedDataParallel(model.cuda())
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(data, batch_size=1, sampler=DistributedSampler(data))
for epoch in range(3):
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step()
"""
NCCL_LOG = """
n1:12:12 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>
n1:12:12 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
n1:12:12 [0] NCCL INFO NET/Socket : Using [0]docker0:172.17.0.1<0>
n1:12:12 [0] NCCL INFO Using network Socket
n1:12:30 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
n1:12:30 [0] NCCL INFO comm 0x55 rank 0 nranks 2 cudaDev 0 busId 1b000 commId 0x1 - Init COMPLETE
"""
ROW_SCHEMA = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def write_job(folder: Path, job: dict[str, Any], name: str = "job.yaml") -> None:
    (folder / name).write_text(yaml.safe_dump(job))
    text = folder / "text"
    text.mkdir(exist_ok=True)
    (text / "a.txt").write_text(
        "".join(f"the quick brown fox is number {i}\n" for i in range(4000))
    )


def make_cpu(folder: Path) -> None:
    """A job of two ranks."""
    write_job(folder, CPU_JOB)


def make_killed(folder: Path) -> None:
    """A run that a killed rank ended at step 50 of 60."""
    write_job(folder, CPU_JOB)
    kill = ("--set", "drill.kill=[rank=1@step=50]", "--set", "recovery.max_restarts=0")
    done = run_command("run", "job.yaml", "--out", "RUN", *kill, folder=folder)
    assert done.returncode == 4, done.stderr


def make_finished(folder: Path) -> None:
    """A finished run and a bench of its job."""
    write_job(folder, CPU_JOB)
    for words in (("run", "--out", "runs/one"), ("bench", "--ranks", "1,2", "--out", ".")):
        done = run_command(words[0], "job.yaml", *words[1:], folder=folder)
        assert done.returncode == 0, done.stderr
    (folder / "RUN").symlink_to("runs/one")


def make_out_of_memory(folder: Path) -> None:
    train = CPU_JOB["train"] | {"steps": 12}
    write_job(folder, CPU_JOB | {"train": train, "drill": {"faults": ["oom rank=1 step=10"]}})


def make_no_data(folder: Path) -> None:
    write_job(folder, CPU_JOB | {"data": {"path": "/data/elsewhere/*.txt", "seq_len": 32}})


def make_three_nodes(folder: Path) -> None:
    """A batch of nine on three nodes, one of which is lost for good."""
    changed = {
        "cluster": {"accelerator": "cpu", "nodes": 3, "per_node": 1},
        "train": CPU_JOB["train"] | {"global_batch": 9, "steps": 20},
        "recovery": {"spares": 0, "replace_timeout": 1},
        "drill": {"faults": ["node rank=1 step=6 for=600s"]},
    }
    write_job(folder, CPU_JOB | changed)


def make_gpus(folder: Path) -> None:
    write_job(folder, GPU_JOB)
    write_json(folder / "input.json", CONTEXT)
    done = run_command("plan", "job.yaml", "--json", folder=folder)
    (folder / "plan.json").write_text(done.stdout)


def make_gpu(folder: Path) -> None:
    """A model that one GPU holds, with files that the engines' own programs read."""
    cluster = {"accelerator": "H100-SXM", "nodes": 1, "per_node": 1}
    data = {"corpus": "python-stdlib", "seq_len": 128}
    model = {"decoder": {"layers": 4, "hidden": 256, "heads": 4}}
    write_job(folder, GPU_JOB | {"cluster": cluster, "model": model, "data": data})


def make_two_nodes(folder: Path) -> None:
    make_gpu(folder)
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job["cluster"] |= {"nodes": 2, "per_node": 8}
    network = {"rdma_resource": "rdma/hca", "network": "ib-network"}
    write_job(folder, job | {"kubernetes": network})


def make_hundred(folder: Path) -> None:
    """100B parameters on 64 A100."""
    cluster = {"accelerator": "A100-80", "nodes": 8, "per_node": 8}
    layout = {"sharding": "full", "recompute": "full", "offload": "cpu"}
    train = {"global_batch": 64, "steps": 100}
    changed = {"cluster": cluster, "layout": layout, "train": train, "model": {"size": "100B"}}
    write_job(folder, GPU_JOB | changed)


def make_diloco(folder: Path) -> None:
    training = CONTEXT["trainingConfig"] | {"parallelismStrategy": "diloco"}
    write_json(folder / "input.json", CONTEXT | {"trainingConfig": training})


def make_macs(folder: Path) -> None:
    write_job(folder, MAC_JOB, "mac.yaml")


def make_hosts(folder: Path) -> None:
    """Two hosts that are this machine: an ssh that goes nowhere."""
    cluster = CPU_JOB["cluster"] | {"nodes": 2, "per_node": 1}
    write_job(folder, CPU_JOB | {"cluster": cluster, "ssh": {"hosts": ["a", "b"]}})
    (folder / "train.py").write_text(ONE_DEVICE_PROGRAM)
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(SSH)
    (folder / "bin" / "ssh").chmod(0o755)


def make_refused(folder: Path) -> None:
    job = CPU_JOB | {"ssh": {"hosts": ["-oProxyCommand=touch done", "b"]}}
    write_job(folder, job | {"cluster": CPU_JOB["cluster"] | {"nodes": 2, "per_node": 1}})


def make_one_device(folder: Path) -> None:
    (folder / "train.py").write_text(ONE_DEVICE_PROGRAM)


def make_faulty(folder: Path) -> None:
    """A program, a script and a log with faults that have names."""
    token = "".join(chr(97 + i * 7 % 26) for i in range(34))
    (folder / "train.py").write_text(FAULTY_PROGRAM.format(token=token))
    (folder / "train.sh").write_text("export NCCL_NET_GDR_LEVEL=5\nexport NCCL_IB_DISABLE=1\n")
    (folder / "nccl.log").write_text(NCCL_LOG)


def make_lint(folder: Path) -> None:
    """A job that no layout fits, and a plan whose numbers were changed by hand."""
    job = GPU_JOB | {"cluster": {"accelerator": "T4", "nodes": 1, "per_node": 1}}
    write_job(folder, GPU_JOB)
    done = run_command("plan", "job.yaml", "--json", folder=folder)
    (folder / "plan.json").write_text(done.stdout)
    write_job(folder, job)


def make_data(folder: Path) -> None:
    (folder / "data").mkdir()
    texts = [f"row {i} says what {i * i} and {i**3} are" for i in range(20)]
    rows = [{"text": text} for text in [*texts, texts[0]]] + [{"words": "no text"}]
    (folder / "data/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / "row.json", ROW_SCHEMA)
    pq.write_table(pa.table({"text": texts}), folder / "rows.parquet")
    write_json(folder / "gx.json", VALIDATION)


def make_sweeps(folder: Path) -> None:
    for name, rate in (("all_reduce", 8e9), ("all_reduce-tcp", 1e9)):
        rows = tuple(replace(sweep_row(n, rate), seconds=n / rate) for n in (1024, 4096))
        made = Sweep(world_size=16, backend="nccl", device="H100", torch="2.13", rows=rows)
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(made))


def make_trainer(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL)
    for name, count in (("train", 96), ("val", 32)):
        x = np.random.default_rng(count).normal(size=(count, 4))
        np.savez(folder / f"{name}.npz", x=x, y=(x[:, 0] > 0).astype(int) + (x[:, 1] > 0))
    data = {"trainPath": "train.npz", "valPath": "val.npz", "batchSize": 16}
    training = {"epochs": 3, "learningRate": 0.05, "optimizer": "sgd"}
    asked = {"modelPath": "model.py", "dataConfig": data, "trainingConfig": training}
    write_json(folder / "input.json", asked)


def make_ray(folder: Path) -> None:
    (folder / "trainer.py").write_text(TRAINER)
    train = {"trainerPath": "trainer.py", "loopConfig": {"lr": 0.1}}
    asked = {"mode": "train", "config": {"numWorkers": 2}, "trainConfig": train}
    write_json(folder / "input.json", asked)


def make_kubeflow(folder: Path) -> None:
    (folder / "pipeline.py").write_text(PIPELINE)
    asked = {"action": "run", "pipelinePath": "pipeline.py", "dryRun": True}
    write_json(folder / "input.json", asked)


MAKERS = {
    name.removeprefix("make_"): made for name, made in globals().items() if name[:5] == "make_"
}
