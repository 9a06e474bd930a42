"""`paceline run --on slurm` on a real Slurm of three nodes, one of which is lost in mid-run.

Runs are handed over by `sbatch`, and everything is read from the run's folder and from Slurm, as a
person would.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.networks import Hosts, can_make_hosts
from tests.engines.runs import check_losses, check_run, write_files
from tests.engines.slurm_cluster import SlurmCluster, versions, what_is_missing
from tests.engines.tiny import tiny
from tests.run.scene import Record, Scene, is_alive, wait_until

from paceline.record import events as log

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not can_make_hosts() or what_is_missing() is not None,
        reason=f"NOT TESTED: Slurm needs root, ip netns and {what_is_missing() or 'Slurm'} "
        "(apt-get install slurm-wlm munge)",
    ),
]
SETTINGS = (
    *("--set", "cluster.nodes=2", "--set", "cluster.per_node=1", "--set", "train.steps=120"),
    *("--set", "checkpoint.every=20", "--set", "evaluate.every=60", "--set", "recovery.spares=1"),
    *("--set", "recovery.lease=6", "--set", "recovery.grace=2", "--set", "recovery.heartbeat=1"),
    *("--set", "recovery.replace_timeout=60"),
)
LIMIT_S = 170
GOING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
VERSIONS = versions()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("slurm") / "a folder with spaces")


@pytest.fixture(scope="module")
def clean(scene: Scene) -> Record:
    """The same layout on this machine, undisturbed."""
    return scene.run("clean", *SETTINGS)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    made = SlurmCluster(Hosts(3, subnet="10.213.79"), tmp_path / "slurm")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    try:
        made.up()
        yield made
    finally:
        made.down()


def submit(scene: Scene, out: str, *words: str) -> str:
    done = scene.paceline("run", "job.yaml", "--on", "slurm", "--json", "--out", out, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    job_id: str = json.loads(done.stdout)["job_id"]
    return job_id


def status(scene: Scene, out: str) -> dict[str, object]:
    done = scene.paceline("status", out, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def after_step(scene: Scene, out: str, step: int) -> Record:
    record = scene.record(out)

    def reached() -> bool:
        path = scene.folder / out / "metrics.jsonl"
        lines = record.metrics if path.exists() else []
        return bool(lines) and lines[-1].step >= step

    try:
        wait_until(reached, what=f"step {step}")
    except AssertionError as late:
        raise AssertionError(f"{late}{scene.logs(out)}") from None
    return record


def end_of(scene: Scene, slurm: SlurmCluster, job_id: str, out: str) -> str:
    """How Slurm says that the job ended."""
    state = last_state(slurm, job_id)
    assert state not in GOING, f"job {job_id} is still {state}: {scene.logs(out)}"
    return state


def last_state(slurm: SlurmCluster, job_id: str) -> str:
    """Of a job that has ended, or has not in LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while (state := state_of(slurm, job_id)) in GOING and time.monotonic() < deadline:
        time.sleep(0.5)
    return state


def state_of(slurm: SlurmCluster, job_id: str) -> str:
    said = slurm.say("scontrol", "--oneliner", "show", "job", job_id)
    return said.partition("JobState=")[2].split()[0]


@pytest.mark.engine(
    "slurm",
    versions=VERSIONS,
    ran="sbatch on 3 nodes, one lost in mid-run, the spare node takes its place: same bits",
)
def test_a_lost_node_is_replaced_by_a_spare_node_with_the_same_bits(scene, clean, slurm):
    job_id = submit(scene, "spare", *SETTINGS, "--set", "slurm.spare_nodes=1")
    record = after_step(scene, "spare", 25)
    assert status(scene, "spare")["queue"]["nodes"] == ["node0", "node1", "node2"]
    slurm.lose(1)
    assert end_of(scene, slurm, job_id, "spare") == "COMPLETED", scene.logs("spare")
    assert record.finished.outcome == "finished"
    assert record.finished.exactness == "bitwise"
    assert record.digest == clean.digest
    assert record.samples == clean.samples
    assert record.of(log.WorkerLost)[0].node == 1
    assert status(scene, "spare")["hosts"] == {"0": "node0", "1": "node2"}
    assert not any(is_alive(each.pid) for each in record.of(log.WorkerStarted))


@pytest.mark.engine(
    "slurm", versions=VERSIONS, ran="the node with the controller lost: requeued, same bits"
)
def test_the_loss_of_the_first_node_puts_the_job_back_and_it_goes_on(scene, clean, slurm):
    job_id = submit(scene, "first", *SETTINGS)
    record = after_step(scene, "first", 45)
    slurm.lose(0)
    assert end_of(scene, slurm, job_id, "first") == "COMPLETED", scene.logs("first")
    assert record.digest == clean.digest
    assert record.finished.exactness == "bitwise"
    first, second = record.of(log.RunStarted)
    assert not first.resumed
    assert second.resumed
    assert status(scene, "first")["queue"]["restarts"] == 1


@pytest.mark.engine(
    "slurm", versions=VERSIONS, ran="no spare: a lost node shrinks the run, which says `numeric`"
)
def test_without_a_spare_node_the_run_shrinks_and_says_so(scene, clean, slurm):
    settings = ("--set", "recovery.replace_timeout=5", "--set", "recovery.spares=0")
    job_id = submit(scene, "shrink", *SETTINGS, *settings)
    record = after_step(scene, "shrink", 25)
    slurm.lose(1)
    assert end_of(scene, slurm, job_id, "shrink") == "COMPLETED", scene.logs("shrink")
    assert record.finished.outcome == "finished"
    assert record.finished.exactness == "numeric"
    assert record.samples == clean.samples
    assert record.metrics[-1].loss == pytest.approx(clean.metrics[-1].loss, rel=1e-3)


@pytest.mark.engine(
    "slurm",
    versions=VERSIONS,
    ran="out of time: saved, requeued by itself, same bits",
)
def test_a_job_out_of_time_saves_goes_back_into_the_queue_and_ends_the_same(scene, clean, slurm):
    job_id = submit(scene, "time", *SETTINGS)
    record = after_step(scene, "time", 25)
    slurm.say("scancel", "--batch", "--signal=USR1", job_id)
    assert end_of(scene, slurm, job_id, "time") == "COMPLETED", scene.logs("time")
    assert record.digest == clean.digest
    starts = record.of(log.RunStarted)
    assert [each.resumed for each in starts] == [False, True]
    assert record.of(log.RunFinished)[0].outcome == "interrupted"


@pytest.mark.engine(
    "slurm", versions=VERSIONS, ran="`paceline stop`: saved at a step boundary and not requeued"
)
def test_a_stopped_job_saves_and_stays_away(scene, slurm):
    job_id = submit(scene, "stopped", *SETTINGS, "--set", "train.steps=5000")
    record = after_step(scene, "stopped", 10)
    done = scene.paceline("stop", "stopped")
    assert done.returncode == 0, done.stderr
    assert end_of(scene, slurm, job_id, "stopped") == "FAILED"
    assert record.finished.outcome == "interrupted"
    assert record.finished.saved_step == record.finished.step


def test_a_partition_that_is_not_there_is_refused_by_slurm_and_nothing_is_left(scene, slurm):
    words = ("--set", "slurm.partition=nowhere")
    done = scene.paceline("run", "job.yaml", "--on", "slurm", "--out", "refused", *words)
    assert done.returncode == 2
    assert "W010: Slurm does not take the job" in done.stderr
    assert "partition" in done.stderr
    assert not (scene.folder / "refused").exists()
    assert "JobId" not in slurm.say("scontrol", "show", "job")


@pytest.mark.engine(
    "slurm", versions=VERSIONS, ran="job.sbatch as rendered: torchrun on 2 nodes, DDP"
)
def test_the_rendered_script_trains_on_two_nodes(python_with, slurm, tmp_path, monkeypatch):
    python = python_with("torch")
    found = tiny("slurm", 1, nodes=2, accelerator="cpu", sharding="none")
    folder = write_files(found.files, tmp_path / "a folder")
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.chdir(folder)
    job_id = slurm.say("sbatch", "--parsable", "job.sbatch").strip()
    state = last_state(slurm, job_id)
    output = (folder / f"slurm-{job_id}.out").read_text()
    assert state == "COMPLETED", output
    losses = check_run(output, world_size=2, wrapper="DistributedDataParallel", sharded=False)
    check_losses(losses, folder)


PROGRAM = """\
import os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
kept = pathlib.Path("step.txt")
first = int(kept.read_text()) if kept.exists() else 0
for step in range(first, 60):
    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    assert total.item() == 3
    time.sleep(0.15)
    if dist.get_rank() == 0:
        kept.write_text(str(step + 1))
if dist.get_rank() == 0:
    print("through, from", first, "on", dist.get_world_size(), "ranks", flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.engine(
    "slurm", versions=VERSIONS, ran="a foreign torchrun script, a node lost: requeued, through"
)
def test_a_program_that_is_not_ours_goes_back_into_the_queue_when_a_node_is_lost(scene, slurm):
    (scene.folder / "foreign.py").write_text(PROGRAM)
    done = scene.paceline(
        *("run", "--script", "foreign.py", "--on", "slurm", "--out", "foreign", "--json"),
        *("--set", "nodes=2", "--set", "environment.GLOO_SOCKET_IFNAME=eth0"),
    )
    assert done.returncode == 0, done.stderr
    job_id = json.loads(done.stdout)["job_id"]
    kept = scene.folder / "step.txt"
    wait_until(lambda: kept.exists() and int(kept.read_text() or 0) > 5, what="the program")
    slurm.lose(1)
    assert end_of(scene, slurm, job_id, "foreign") == "COMPLETED", scene.logs("foreign")
    said = scene.logs("foreign")
    assert "through, from" in said
    assert "through, from 0 " not in said
    assert status(scene, "foreign")["queue"]["restarts"] >= 1
