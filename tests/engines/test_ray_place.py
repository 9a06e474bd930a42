"""`paceline run --on ray`: the same controller and agents, on nodes of a real Ray cluster."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from paceline.record.events import Recovered, RunFinished, read_events
from paceline.record.placement import read_placement

SOURCE = Path(__file__).parents[2] / "src"
HERE = Path(__file__).parent
JOB = {
    "name": "on-ray",
    "model": {"decoder": {"layers": 2, "hidden": 64, "heads": 4}},
    "data": {"path": "text/*.txt", "seq_len": 32},
    "cluster": {"accelerator": "cpu", "nodes": 2, "per_node": 1},
    "train": {"global_batch": 8, "steps": 30, "precision": "fp32"},
    "layout": {"sharding": "none"},
    "checkpoint": {"every": 10},
    "recovery": {"spares": 0},
}
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def ray_cluster(python_with):
    """The address of a cluster of two nodes with a CPU each, and the Python that has Ray."""
    python = python_with("ray", "torch")
    process = subprocess.Popen(
        [python, HERE / "ray_cluster.py", "2", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | RAY,
    )
    assert process.stdout is not None
    line = next((each for each in process.stdout if each.startswith("address ")), "")
    yield python, line.removeprefix("address ").strip()
    process.communicate("", timeout=60)


def paceline(python, folder, *words, address=None):
    environment = {key: each for key, each in os.environ.items() if key != "RAY_ADDRESS"} | RAY
    environment |= {"PYTHONPATH": str(SOURCE)} | ({"RAY_ADDRESS": address} if address else {})
    return subprocess.run(
        [python, "-m", "paceline", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=250,
        check=False,
    )


def end_of(folder):
    (end,) = [
        each for each in read_events(folder / "events.jsonl") if isinstance(each, RunFinished)
    ]
    return end


@pytest.fixture
def job(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(8):
        line = f"line {number} of a text that is the same on every machine\n"
        (tmp_path / f"text/{number}.txt").write_text(line * 200)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    return tmp_path


@pytest.mark.engine("ray", ran="run --on ray: agents on 2 nodes, a rank killed, same bits as here")
def test_a_job_on_ray_recovers_and_ends_as_on_this_machine(ray_cluster, job):
    python, address = ray_cluster
    kill = ("--set", "drill.kill=[rank=1@step=15]")
    on_ray = paceline(
        python, job, "run", "job.yaml", "--on", "ray", "--out", "there", *kill, address=address
    )
    assert on_ray.returncode == 0, on_ray.stderr[-4000:]
    placement = read_placement(job / "there")
    assert placement is not None
    assert placement.place == "ray"
    assert len(set(placement.hosts.values())) == 2  # an agent on each node
    here = paceline(python, job, "run", "job.yaml", "--out", "here")
    assert here.returncode == 0, here.stderr[-4000:]
    assert end_of(job / "there").state_digest == end_of(job / "here").state_digest
    (recovered,) = [
        each for each in read_events(job / "there/events.jsonl") if isinstance(each, Recovered)
    ]
    assert recovered.source == "replica"  # in place: the other rank had never stopped
    assert end_of(job / "there").exactness == "bitwise"
    assert not _agents(job / "there")


def _agents(run):
    """Processes that are left of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(run) in words and "paceline.control.agent" in words:
            found.append(path.parent.name)
    return found


@pytest.mark.engine("ray", ran="run --on ray: too few nodes are refused")
def test_a_cluster_that_is_too_small_is_refused(ray_cluster, job):
    python, address = ray_cluster
    large = ("--set", "cluster.nodes=3", "--set", "train.global_batch=6")
    done = paceline(python, job, "run", "job.yaml", "--on", "ray", *large, address=address)
    assert done.returncode == 2
    assert "W008" in done.stderr
    assert "2 of Ray's 2 nodes" in done.stderr
    assert "Traceback" not in done.stderr
