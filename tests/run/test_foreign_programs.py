"""Scripts that know nothing of us: started, watched and started again, as whole processes."""

import os
import signal
from pathlib import Path

import pytest
import yaml
from tests.run.scene import Record, Scene, is_alive, wait_until

from paceline.record import events as log

pytestmark = pytest.mark.ranks

COUNT = """
import os, pathlib, sys, time
rank, restart = int(os.environ["RANK"]), int(os.environ["PACELINE_RESTART"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "port", os.environ["MASTER_PORT"], flush=True)
saved = pathlib.Path(f"saved-{rank}")
done = int(saved.read_text()) if saved.exists() else 0
for step in range(done + 1, 7):
    time.sleep(0.02)
    {fault}
    saved.write_text(str(step))
print("done", rank, sys.argv[1:], flush=True)
"""

DDP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt")
    model.module.load_state_dict(state["model"])
    first = state["step"]
print("from step", first, flush=True)
for step in range(first + 1, 9):
    if (rank, step) == (1, 5) and os.environ["PACELINE_RESTART"] == "0":
        os.kill(os.getpid(), 9)
    points = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 2 + rank))
    loss = (model(points) - points.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        torch.save({"step": step, "model": model.module.state_dict()}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
    dist.barrier()
print("weight", model.module.weight.tolist(), flush=True)
dist.destroy_process_group()
"""


def script(folder: Path, text: str = COUNT, *, fault: str = "pass") -> Scene:
    scene = Scene(folder)
    (folder / "train.py").write_text(text.replace("{fault}", fault))
    return scene


def run(scene: Scene, *more: str, code: int = 0, nproc: int = 2) -> Record:
    options = ("--script", "train.py", "--nproc", str(nproc), "--out", "run")
    done = scene.paceline("run", *options, *more)
    assert done.returncode == code, done.stdout + done.stderr + scene.logs("run")
    assert "Traceback" not in done.stderr
    return scene.record("run", done.stdout + done.stderr)


def test_a_script_runs_on_every_rank_with_its_arguments_and_shows_in_runs_and_report(tmp_path):
    scene = script(tmp_path)
    record = run(scene, "--", "--lr", "0.1")
    logs = [(record.folder / f"logs/rank-{rank}.log").read_text() for rank in range(2)]
    assert all("['--lr', '0.1']" in text and "of 2" in text for text in logs)
    assert record.finished.outcome == "finished"
    listed = scene.paceline("runs", "--runs", ".")
    assert "finished" in listed.stdout
    assert "unknown" in listed.stdout
    assert "every process exited with 0" in record.output
    page = scene.paceline("report", "run")
    assert page.returncode == 0
    assert "rank 1 started" in (record.folder / "report.html").read_text()


def test_a_rank_that_fails_ends_all_and_all_go_on_from_their_own_checkpoint(tmp_path):
    fault = "if (rank, step, restart) == (1, 4, 0): sys.exit(3)"
    record = run(script(tmp_path, fault=fault))
    (lost,) = record.of(log.WorkerLost)
    assert (lost.rank, lost.how) == (1, "exited with 3")
    assert record.finished.restarts == 1
    text = (record.folder / "logs/rank-0.log").read_text()
    ports = {line.split()[-1] for line in text.splitlines() if line.startswith("rank 0")}
    assert len(ports) == 2


@pytest.mark.slow  # the quick one counts instead, above
def test_a_real_ddp_script_that_is_killed_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    killed = run(script(tmp_path / "killed", DDP))
    whole = DDP.replace('os.environ["PACELINE_RESTART"] == "0"', "False")
    clean = run(script(tmp_path / "clean", whole))
    (lost,) = killed.of(log.WorkerLost)
    assert (lost.rank, lost.how) == (1, "killed by SIGKILL")
    assert killed.finished.restarts == 1

    def weight(record: Record) -> str:
        lines = (record.folder / "logs/rank-0.log").read_text().splitlines()
        return [line for line in lines if line.startswith("weight")][-1]

    assert weight(killed) == weight(clean)


def test_a_silent_program_is_shown_where_it_stands_and_started_again(tmp_path):
    fault = "(rank, step, restart) == (1, 3, 0) and time.sleep(600)"
    record = run(script(tmp_path, fault=fault), "--set", "recovery.silence=8s")
    stuck = record.of(log.WorkerStuck)
    assert stuck
    assert all(event.kind == "silent" for event in stuck)
    assert record.of(log.WorkerLost)[0].cause == "hang"
    assert record.finished.restarts == 1


def test_a_program_that_always_fails_stops_after_the_restarts_allowed(tmp_path):
    scene = script(tmp_path, fault="sys.exit(5)")
    options = ("--set", "recovery.max_restarts=1", "--set", "recovery.backoff=0.1s")
    record = run(scene, *options, code=7)
    assert "1 restart(s) in a row did not last" in record.output
    assert len(record.of(log.WorkerLost)) == 2


def test_a_job_file_with_a_command_is_run_and_resumed_after_ctrl_c(tmp_path):
    scene = script(tmp_path, fault="time.sleep(0.5)")
    job = {"name": "own", "command": ["python", "train.py"], "processes": 2}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    process = scene.start("run")
    record = scene.record("run")
    wait_until(lambda: (tmp_path / "saved-0").exists(), what="the first step")
    pids = [event.pid for event in record.of(log.WorkerStarted)]
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert not any(map(is_alive, pids))
    resumed = scene.resume("run")
    assert resumed.finished.outcome == "finished"
    assert resumed.of(log.RunStarted)[-1].resumed


def test_killed_with_its_supervisor_nothing_is_left(tmp_path):
    scene = script(tmp_path, fault="time.sleep(60)")
    job = {"command": ["python", "train.py"], "processes": 2}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    process = scene.start("run")
    record = scene.record("run")
    wait_until(lambda: len(record.of(log.WorkerStarted)) == 2, what="two processes")
    pids = [event.pid for event in record.of(log.WorkerStarted)]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    wait_until(lambda: not any(map(is_alive, pids)), what="the ranks to end")


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ({"command": []}, "J006"),
        ({"command": ["no-such-program"]}, "R050"),
        ({"command": ["python", "gone.py"]}, "R050"),
        ({"command": ["python", "train.py"], "processes": 0}, "J006"),
        ({"command": ["python", "train.py"], "train": {"steps": 3}}, "J004"),
        ({"command": ["python", "train.py"], "recovery": {"silence": "soon"}}, "J006"),
        ({"command": "python train.py"}, "J006"),
    ],
)
def test_a_wrong_command_job_is_refused_with_a_fix_before_anything_starts(tmp_path, job, code):
    scene = script(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = scene.paceline("run", "job.yaml", "--out", "run")
    assert done.returncode == 2
    assert code in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_other_commands_say_that_a_command_job_is_not_theirs(tmp_path):
    scene = script(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"command": ["python", "train.py"]}))
    done = scene.paceline("plan", "job.yaml")
    assert done.returncode == 2
    assert "J012" in done.stderr
