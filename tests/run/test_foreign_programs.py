"""Scripts that know nothing of us: started, watched and started again, as whole processes."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import yaml
from tests.run.scene import Record, Scene, is_alive, wait_until

from paceline.record import events as log
from paceline.record.script_profile import read_profile

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
    new = pathlib.Path(f"new-{rank}")  # killed while it writes, it leaves the old one whole
    new.write_text(str(step))
    new.replace(saved)
    print(f"step {step}/6 loss={1 / step}", flush=True)
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
    assert "0.1667" in listed.stdout
    assert "all processes exited with 0" in record.output
    page = scene.paceline("report", "run")
    assert page.returncode == 0
    assert "rank 1 is process" in (record.folder / "report.html").read_text()


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


SKIPS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    print(f"step {step}", flush=True)
    if (dist.get_rank(), step) == (1, 2) and {fault}:
        continue
    dist.all_reduce(torch.ones(1))
dist.barrier()
"""


ENDS_LATE = """
import os, time
if os.environ["RANK"] == "0" and (trains := os.fork()):
    os.waitpid(trains, 0)
    time.sleep(5)
    raise SystemExit(1)
"""
"""Rank 0 is seen to end when the other has had the time to print its own error."""


def test_s3_4_a_rank_that_skips_a_collective_is_named_with_the_collective_of_each(tmp_path):
    scene = script(tmp_path, ENDS_LATE + SKIPS, fault="True")
    record = run(scene, "--set", "recovery.max_restarts=0", code=4)
    told = " ".join(record.output.split())
    assert "cause gloo-size-mismatch" in told
    assert "collectives rank 0 in all_reduce" in told
    assert "train.py:17 in <module>; rank 1 in backward," in told


@pytest.mark.skipif(
    not (Path(sys.executable).with_name("py-spy").is_file() or shutil.which("py-spy")),
    reason="py-spy is not installed",
)
def test_s3_4_ranks_that_hang_in_unlike_collectives_are_named_with_them(tmp_path):
    fewer = SKIPS.replace("range(4)", "range(4 - dist.get_rank())")
    scene = script(tmp_path, fewer, fault="False")
    options = ("--set", "recovery.max_restarts=0", "--set", "recovery.silence=40s")
    record = run(scene, *options, code=4)
    told = " ".join(record.output.split())
    assert "cause rank-divergent-decision" in told
    assert "stands in backward, train.py:7 in <module>; rank 1 in barrier" in told
    assert "train.py:12 in <module>" in told


def test_a_program_that_always_fails_stops_after_the_restarts_allowed(tmp_path):
    scene = script(tmp_path, fault="step > 1 and sys.exit(5)")
    options = ("--set", "recovery.max_restarts=1", "--set", "recovery.backoff=0.1s")
    record = run(scene, *options, code=7)
    assert "1 restart in a row did not last" in record.output
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


FAILS = """
import os, sys, time
print("rank", os.environ["RANK"], "begins", flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("no such column: text")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("text", "words", "shown"),
    [
        ("x = = 3\n", "SyntaxError: invalid syntax", "train.py"),
        (FAILS, "ValueError: no such column: text", "in <module>"),
    ],
    ids=["syntax", "rank-1"],
)
def test_an_error_before_the_first_step_is_shown_and_started_once(tmp_path, text, words, shown):
    record = run(script(tmp_path, text), "--no-report", code=4)
    assert len(record.of(log.WorkerStarted)) == 2
    assert "not started again" in record.output
    assert words in record.output
    assert shown in record.output
    assert "\ncause " in record.output  # what diagnose says
    assert "paceline diagnose" in record.output


def test_output_steps_and_losses_are_seen(tmp_path):
    record = run(script(tmp_path), "--no-report")
    assert "step 3/6 loss=0.333" in record.output
    assert "rank 1 of 2" not in record.output  # in its log
    assert [(line.step, line.num_steps) for line in record.metrics] == [(n, 6) for n in range(1, 7)]
    assert record.finished.step == 6
    scene = Scene(tmp_path)
    assert "6 of 6, loss 0.1667" in scene.paceline("status", "run").stdout


def test_all_ranks_are_shown_each_behind_its_number(tmp_path):
    record = run(script(tmp_path), "--no-report", "--ranks", "all")
    assert "rank 0: step 3/6" in record.output
    assert "rank 1: step 3/6" in record.output
    with_none = run(script(tmp_path / "none"), "--no-report", "--ranks", "none")
    assert "step 3/6" not in with_none.output


LOGS = """
import paceline
for step in range(1, 4):
    print(f"step {step} loss=9.0", flush=True)
    paceline.log({"reward/mean": 0.5}, loss=1 / step, step=step, steps=3)
paceline.log(eval_loss=0.25)
paceline.log(checkpoint="saved/last.pt")
"""


def test_what_a_script_logs_counts_before_what_it_prints(tmp_path):
    record = run(script(tmp_path, LOGS), "--no-report")
    assert [line.loss for line in record.metrics] == [1.0, 0.5, 1 / 3]
    assert [line.logged for line in record.metrics] == [{"reward/mean": 0.5}] * 3
    assert record.metrics[-1].num_steps == 3
    (evaluated,) = record.of(log.Evaluated)
    (saved,) = record.of(log.CheckpointSaved)
    assert (evaluated.step, evaluated.loss) == (3, 0.25)
    assert (saved.step, saved.checkpoint) == (3, "saved/last.pt")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--script", "train.py", "--ranks", "2"), "ranks from 0 to 0"),
        (("--script", "train.py", "--ranks", "some"), "--ranks takes all, none"),
        (("--script", "train.py", "--silence", "soon"), "not a duration"),
        (("job.yaml", "--ranks", "all"), "--ranks goes with --script"),
        (("job.yaml", "--silence", "10m"), "--silence goes with --script"),
    ],
)
def test_a_wrong_option_of_scripts_is_refused_before_anything_starts(tmp_path, options, said):
    scene = script(tmp_path)
    done = scene.paceline("run", *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "runs").exists()


STEPS = """
import sys, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("as", __name__, sys.argv, flush=True)
"""


def test_s0_10_a_script_is_profiled_by_phase_without_a_change(tmp_path):
    record = run(script(tmp_path, STEPS), "--profile", "--no-report", "--", "9", nproc=1)
    assert "as __main__ ['train.py', '9']" in record.output
    profile = read_profile(record.folder)
    assert profile is not None
    assert (profile.steps, profile.after) == (5, 3)
    phases = {part.name: part.seconds for part in profile.phases}
    for name in ("forward", "backward", "optimizer"):
        assert phases[name] > 0
    assert sum(phases.values()) == pytest.approx(profile.step_s)
    assert "5 steps of rank 0, after 3" in record.output
    assert profile.peak_bytes is not None
    assert "MiB at the peak" in record.output


SLOW_DATA = """
import time, torch
from torch.utils.data import DataLoader
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 99
    def __getitem__(self, i): time.sleep(0.2); return torch.ones(4)
model = torch.compile(torch.nn.Linear(4, 1), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch, _ in zip(DataLoader(Slow(), batch_size=2), range(9)):
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.repeat  # profiled as the script above
def test_s0_10_a_compiled_scripts_slow_data_is_named_as_its_limit(tmp_path):
    record = run(script(tmp_path, SLOW_DATA), "--profile", "--no-report", nproc=1)
    assert "data limits the step: " in record.output
    assert "1. data, up to " in record.output
    profile = read_profile(record.folder)
    assert profile is not None
    assert {part.name: part.seconds > 0 for part in profile.phases}["forward"]


def test_too_few_steps_are_no_profile(tmp_path):
    record = run(script(tmp_path, STEPS), "--profile", "--no-report", "--", "2", nproc=1)
    assert "not measured: only 2 optimizer steps" in record.output
