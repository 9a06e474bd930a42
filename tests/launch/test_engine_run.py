"""Another engine's plan at a place: what would be started there, and what is missing before."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.command import run_command
from tests.run.scene import Scene

from paceline.record import events as log
from paceline.record.placement import read_placement

JOB: dict[str, Any] = {
    "name": "big",
    "model": {"preset": "llama-3-8b", "tokenizer": "/shared/llama-3"},
    "data": {"path": "/shared/corpus_text_document", "seq_len": 8192},
    "cluster": {"accelerator": "H100-SXM", "nodes": 2, "per_node": 8, "network": "400Gb/s"},
    "train": {"global_batch": 64, "steps": 100},
    "engine": "megatron",
    "engine_path": "/shared/Megatron-LM",
}


def run(folder: Path, *words: str, **changes: Any) -> "subprocess.CompletedProcess[str]":
    spec = {key: value for key, value in (JOB | changes).items() if value is not None}
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    return run_command("run", "job.yaml", "--out", "out", *words, folder=folder)


def shown(folder: Path, *words: str, **changes: Any) -> dict[str, Any]:
    done = run(folder, *words, "--dry-run", "--json", **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / "out").exists()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_megatron_on_slurm_is_its_files_and_a_job_that_watches_them(tmp_path):
    found = shown(tmp_path, "--on", "slurm", "--set", "slurm.partition=gpu")
    batch, out = found["files"]["place/job.sbatch"], tmp_path.resolve() / "out"
    assert "#SBATCH --nodes=2\n" in batch
    assert "#SBATCH --gpus-per-node=8\n" in batch
    assert "#SBATCH --partition=gpu\n" in batch
    assert f"-m paceline run --resume {out} --on srun" in batch
    assert found["command"][0] == "sbatch"
    launch = found["files"]["engine/launch.sh"]
    assert "--data-path /shared/corpus_text_document" in launch
    assert "--max-restarts=0 " in launch  # the controller starts it again
    assert "MEGATRON_PATH=/shared/Megatron-LM" in launch
    assert "--tokenizer-model /shared/llama-3" in found["files"]["engine/arguments.txt"].replace(
        "\n", " "
    )


def test_nothing_is_made_up_unless_the_job_asks(tmp_path):
    real = shown(tmp_path, "--on", "slurm")["files"]["engine/launch.sh"]
    assert 'if [ -n "${MOCK_DATA:-}" ]; then data=(--mock-data); fi' in real
    assert real.count("--mock-data") == 1
    mock = shown(tmp_path, "--on", "slurm", data={"corpus": "mock", "seq_len": 8192})
    assert "\ndata=(--mock-data)\n" in mock["files"]["engine/launch.sh"]


def test_megatron_over_ssh_is_started_once_on_each_host_by_one_command(tmp_path):
    hosts = ("--hosts", "node-a,trainer@node-b,spare")
    starts = shown(tmp_path, "--on", "ssh", *hosts)["starts"]
    assert [each["host"] for each in starts] == ["node-a", "trainer@node-b"]
    for node, each in enumerate(starts):
        assert each["command"][0] == "ssh"
        assert f"--node {node} --nodes 2" in each["command"][-1]
        assert each["command"][-1].endswith("-- bash launch.sh")


def test_a_dry_run_shows_every_file_that_a_person_can_read_and_names_the_plan(tmp_path):
    done = run(tmp_path, "--on", "slurm", "--dry-run")
    assert (
        "engine/plan.json <==\nthe plan, as `paceline plan JOB --json` prints it\n" in done.stdout
    )
    assert '"rejected"' not in done.stdout
    assert len(done.stdout.splitlines()) < 250


def test_what_the_controller_does_is_not_left_out(tmp_path):
    asked: dict[str, Any] = {
        "metrics": {"tensorboard": True},
        "alerts": {"rules": [{"name": "big", "metric": "train/loss", "above": 9}]},
        "recovery": {"max_restarts": 5, "grace": "90s"},
    }
    done = run(tmp_path, "--on", "slurm", "--dry-run", **asked)
    assert done.returncode == 0, done.stderr
    for section in asked:
        assert section not in done.stderr


def test_a_look_at_the_machines_that_nobody_takes_is_refused(tmp_path):
    done = run(tmp_path, "--on", "slurm", "--dry-run", "--preflight")
    assert done.returncode == 2
    assert "--preflight and --allow are for Paceline's own runtime" in done.stderr


def test_an_engine_is_no_array_of_jobs(tmp_path):
    done = run(tmp_path, "--on", "slurm", "--dry-run", slurm={"array": "0-3"})
    assert done.returncode == 2
    assert "W014: an array starts several jobs, and this run is one" in done.stderr


def test_a_launch_script_is_valid_and_names_what_a_node_lacks(tmp_path):
    shared = tmp_path / "shared"
    given = {
        "engine_path": str(shared / "Megatron-LM"),
        "model": {"preset": "llama-3-8b", "tokenizer": str(shared / "llama-3")},
        "data": {"path": str(shared / "my corpus"), "seq_len": 8192},
    }
    text = shown(tmp_path, "--on", "slurm", **given)["files"]["engine/launch.sh"]
    here = tmp_path / "here"
    here.mkdir()
    (here / "launch.sh").write_text(text)
    (here / "arguments.txt").write_text("--bf16\n")
    (here / "torchrun").write_text('#!/bin/sh\necho "trains $*"\n')
    (here / "torchrun").chmod(0o755)
    path = f"{here}{os.pathsep}{os.environ['PATH']}"
    meeting = {"HEAD_ADDRESS": "10.0.0.1", "RUN_ID": "a", "PATH": path}

    def start(**more: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "launch.sh"],
            cwd=here,
            env=os.environ | meeting | more,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    for lacking, kind in (("Megatron-LM/pretrain_gpt.py", "file"), ("llama-3", "folder")):
        code, said = start()
        assert code == 2
        assert said.endswith(f" has no {shared / lacking}\n")
        (shared / lacking).parent.mkdir(parents=True, exist_ok=True)
        (shared / lacking).write_text("") if kind == "file" else (shared / lacking).mkdir()
    code, said = start()
    assert (code, said.endswith(f" has no {shared}/my corpus.idx\n")) == (2, True)
    assert start(MOCK_DATA="1")[0] == 0
    (shared / "my corpus.idx").write_text("")
    code, said = start()
    assert code == 0
    assert f"--data-path {shared}/my corpus --split 99,1,0" in said


def test_megatron_on_ray_needs_no_ray_to_be_shown(tmp_path):
    starts = shown(tmp_path, "--on", "ray")["starts"]
    assert [each["host"] for each in starts] == ["RAY-NODE-0", "RAY-NODE-1"]
    assert all("paceline.launch.ray_step" in each["command"] for each in starts)
    assert all("--gpus=8" in each["command"] for each in starts)


@pytest.mark.parametrize("api", ["trainjob", "pytorchjob"])
def test_megatron_on_kubernetes_is_started_by_every_pod(tmp_path, api):
    places = {"image": "registry/megatron:1", "claim": "shared", "api": api}
    found = shown(tmp_path, "--on", "kubernetes", kubernetes=places)
    objects = list(yaml.safe_load_all(found["files"]["objects.yaml"]))
    program = objects[0]["data"]
    assert {"launch.sh", "arguments.txt", "start.sh"} == set(program)
    assert 'HEAD_ADDRESS="${PET_MASTER_ADDR:-127.0.0.1}"' in program["start.sh"]
    assert "ln -sfn /workspace/out/checkpoints /tmp/engine/checkpoints" in program["start.sh"]
    assert "export RUN_ID=out\n" in program["start.sh"]  # another run has checkpoints of its own
    assert "['bash', '/job/start.sh']" in str(objects[-1])
    assert "status.podIP" in str(objects)


def test_paths_that_no_pod_has_are_named(tmp_path):
    places = {"image": "registry/megatron:1", "claim": "shared"}
    done = run(tmp_path, "--on", "kubernetes", "--dry-run", kubernetes=places)
    assert (
        "left out: /shared/Megatron-LM, /shared/corpus_text_document, /shared/llama-3 in the pods"
        in done.stdout
    )
    inside = {
        "engine_path": "/workspace/Megatron-LM",
        "model": {"preset": "llama-3-8b", "tokenizer": "/workspace/llama-3"},
        "data": {"path": "/workspace/corpus_text_document", "seq_len": 8192},
    }
    done = run(tmp_path, "--on", "kubernetes", "--dry-run", kubernetes=places, **inside)
    assert done.returncode == 0
    assert "in the pods" not in done.stdout


def test_a_rayjob_starts_no_other_engine(tmp_path):
    places = {"image": "registry/megatron:1", "api": "rayjob"}
    done = run(tmp_path, "--on", "kubernetes", "--dry-run", kubernetes=places)
    assert done.returncode == 2
    assert "R015: a RayJob starts Ray Train's own program, not the engine megatron" in done.stderr


@pytest.mark.parametrize("engine", ["torchtitan", "deepspeed", "accelerate", "megatron-bridge"])
@pytest.mark.parametrize("place", ["slurm", "ssh", "ray", "kubernetes"])
def test_every_engine_is_started_at_every_place(tmp_path, engine, place):
    layouts = {
        "accelerate": {"sharding": "none", "recompute": "none"},
        "deepspeed": {"sharding": "full", "tensor": 1, "pipeline": 1, "context": 1},
    }
    spec: dict[str, Any] = {
        "engine": engine,
        "engine_path": None,
        "layout": layouts.get(engine, {}),
        "kubernetes": {"image": "registry/train:1", "claim": "shared"},
        "ssh": {"hosts": ["node-a", "node-b"]},
    }
    if engine in ("deepspeed", "accelerate"):  # their example program reads bytes
        spec["model"] = {"preset": "llama-3-8b"}
    if engine == "accelerate":
        spec["model"] = {"decoder": {"layers": 4, "hidden": 256, "heads": 8}}
    found = shown(tmp_path, "--on", place, **spec)
    files = str(found["files"])
    assert "launch.sh" in files


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine_path": None}, "H025: megatron needs a checkout of Megatron-LM"),
        ({"data": {"seq_len": 8192}}, "H025: megatron needs data"),
        ({"data": {"corpus": "python-stdlib", "seq_len": 8192}}, "H025: megatron needs data"),
        (
            {"engine": "torchtitan", "engine_path": None, "model": {"preset": "llama-3-8b"}},
            "H025: torchtitan needs a tokenizer",
        ),
        (
            {"engine": "maxtext", "engine_path": None},
            "R015: Paceline estimates maxtext and does not",
        ),
        ({"slurm": {"spare_nodes": 1}}, "R015: slurm.spare_nodes 1"),
        ({"engine_path": "/a b/Megatron-LM"}, "H003: engine_path '/a b/Megatron-LM' has a space"),
    ],
)
def test_what_an_engine_lacks_is_said_before_anything_is_submitted(tmp_path, changes, said):
    done = run(tmp_path, "--on", "slurm", **changes)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_place_without_launchers_is_refused_by_name(tmp_path):
    done = run(tmp_path, "--on", "sky", "--dry-run")
    assert "R015: the engine megatron is not started at sky" in done.stderr


def test_a_cluster_that_is_elsewhere_is_not_started_here(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert "H024: this is one machine, and the plan is for" in done.stderr


def test_what_only_megatron_reads_is_refused_by_our_own_runtime(tmp_path):
    mock = {"corpus": "mock", "seq_len": 8192}
    small = {"preset": "llama-3-8b"}
    words = ("--on", "slurm", "--dry-run")
    done = run(tmp_path, *words, engine="paceline", data=mock, model=small)
    assert (
        "J007: Paceline's own runtime cannot generate mock samples (data.corpus mock)"
        in done.stderr
    )
    assert "J007: engine_path is read for the engine megatron alone" in done.stderr


@pytest.mark.ranks
def test_a_launcher_that_ends_well_and_trained_nothing_is_a_failed_run(tmp_path, hosts):
    scene = Scene(tmp_path / "a folder")
    (scene.folder / "launch.sh").write_text("echo all is well\n")
    spec = {"command": ["bash", "launch.sh"], "starts": "nodes", "nodes": 2, "steps": 10}
    (scene.folder / "program.yaml").write_text(yaml.safe_dump(spec))
    words = ("program.yaml", "--on", "ssh", "--hosts", "node-a,node-b", "--out", "out")
    done = scene.paceline("run", *words, "--no-report")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "every node exited with 0 after step 0 of 10" in done.stdout + done.stderr
    assert scene.record("out").finished.outcome == "failed"


SSH = """#!/bin/sh
# Hosts that are this machine: their names are in the log, and ssh -G answers for an alias.
if [ "$1" = -G ]; then echo "hostname 127.0.0.1"; exit 0; fi
while [ "$1" != -- ]; do shift; done
echo "$2" >> {box}/asked
exec sh -c "$3"
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    box = tmp_path / "bin"
    box.mkdir()
    (box / "ssh").write_text(SSH.format(box=box))
    (box / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{box}{os.pathsep}{os.environ['PATH']}")
    return box


LAUNCHER = """
echo "node $NODE_RANK meets $HEAD_ADDRESS:$HEAD_PORT as $RUN_ID"
for step in 1 2 3; do echo "step $step loss $step.5"; done
touch met-$NODE_RANK
while [ ! -e met-0 ]; do sleep 0.05; done  # or node 0 is ended before it has said where it meets
if [ "$NODE_RANK" = 1 ] && [ ! -e failed ]; then touch failed; exit 7; fi
"""


@pytest.mark.ranks
def test_a_launcher_on_two_hosts_is_watched_and_started_again_on_both(tmp_path, hosts):
    scene = Scene(tmp_path / "a folder")
    (scene.folder / "launch.sh").write_text(LAUNCHER)
    spec = {
        "command": ["bash", "launch.sh"],
        "starts": "nodes",
        "nodes": 2,
        "ssh": {"hosts": ["node-a", "node-b"]},
        "recovery": {"backoff": 0.01},
    }
    (scene.folder / "program.yaml").write_text(yaml.safe_dump(spec))
    words = ("program.yaml", "--on", "ssh", "--out", "out", "--no-report")
    done = scene.paceline("run", *words)
    assert done.returncode == 0, done.stdout + done.stderr + scene.logs("out")
    record = scene.record("out")
    (lost,) = record.of(log.WorkerLost)
    assert (lost.rank, lost.how) == (1, "exited with 7")
    assert record.finished.outcome == "finished"
    first, second = (
        (scene.folder / "out/logs" / f"rank-{node}.log").read_text() for node in range(2)
    )
    for attempt in (1, 2):
        (met,) = [
            line.partition(" meets ")[2]
            for line in first.splitlines()
            if f"as out-{attempt}" in line
        ]
        assert f"node 1 meets {met}" in second
        assert met.startswith("127.0.0.1:")
    placement = read_placement(scene.folder / "out")
    assert placement is not None
    assert (placement.place, placement.hosts) == ("ssh", {0: "node-a", 1: "node-b"})


def test_a_launchers_dry_run_shows_its_command_on_each_host(tmp_path, hosts):
    scene = Scene(tmp_path / "a folder")
    spec = {"command": ["bash", "launch.sh"], "starts": "nodes", "nodes": 2}
    (scene.folder / "program.yaml").write_text(yaml.safe_dump(spec))
    words = ("program.yaml", "--on", "ssh", "--hosts", "node-a,node-b", "--dry-run", "--json")
    done = scene.paceline("run", *words)
    assert done.returncode == 0, done.stderr
    assert [each["host"] for each in json.loads(done.stdout)["starts"]] == ["node-a", "node-b"]
    assert not (hosts / "asked").exists()
    few = scene.paceline("run", "program.yaml", "--on", "ssh", "--hosts", "node-a")
    assert "W008: the run has 2 nodes, the job names 1 host" in few.stderr


PRINTS = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", int(total), flush=True)
os._exit(0)  # gloo's threads may abort at the interpreter's end
"""


@pytest.mark.ranks
def test_a_script_under_torchrun_meets_over_two_hosts_with_one_command(tmp_path, hosts):
    scene = Scene(tmp_path / "a folder")
    (scene.folder / "train.py").write_text(PRINTS)
    cluster = ("--set", "cluster.nodes=2", "--set", "cluster.per_node=1")
    words = ("--script", "train.py", "--with", "torchrun", "job.yaml", *cluster)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = run_command(
        *("run", *words, "--on", "ssh", "--hosts", "node-a,node-b", "--out", "out", "--no-report"),
        folder=scene.folder,
        env=os.environ | {"PATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr + scene.logs("out")
    printed = scene.logs("out")
    assert "rank 0 of 2 sum 2" in printed
    assert "rank 1 of 2 sum 2" in printed
