"""Slurm's answers as they were recorded (22.05.8), and a pretend Slurm on PATH."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.run.scene import Scene

from paceline.launch.slurm import read_accounts, read_jobs
from paceline.launch.srun import Srun
from paceline.record.placement import read_placement

RUNNING = (
    "JobId=5 JobName=it UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901757 Nice=0 "
    "Account=(null) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 "
    "Restarts=1 BatchFlag=2 Reboot=0 ExitCode=0:0 RunTime=00:00:13 TimeLimit=1-02:00:00 "
    "TimeMin=N/A SubmitTime=2026-11-21T10:00:00 EligibleTime=2026-11-21T10:00:10 "
    "StartTime=2026-11-21T10:00:11 EndTime=2026-11-22T12:00:11 Deadline=N/A NodeList=node[0,2] "
    "BatchHost=node0 NumNodes=2 NumCPUs=4 NumTasks=2 WorkDir=/runs/a JobState=FAKE"
)
PENDING = RUNNING.replace("JobState=RUNNING Reason=None", "JobState=PENDING Reason=Resources")
ENDED = RUNNING.replace("JobState=RUNNING", "JobState=NODE_FAIL")


def expand(listed: str) -> Sequence[str]:
    return {"node[0,2]": ["node0", "node2"]}[listed]


def local(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def test_a_running_job_says_where_since_when_and_for_how_long():
    sight = read_jobs(RUNNING, expand=expand)
    assert (sight.state, sight.detail) == ("running", "RUNNING")
    assert sight.nodes == ["node0", "node2"]
    assert sight.started_at == local("2026-11-21T10:00:11")
    assert sight.ended_at is None
    assert sight.restarts == 1
    assert sight.limit_s == 26 * 3600


def test_a_waiting_job_says_what_for():
    sight = read_jobs(PENDING, expand=expand)
    assert (sight.state, sight.detail) == ("waiting", "PENDING (Resources)")
    assert sight.started_at is None


def test_a_job_whose_node_failed_has_failed():
    sight = read_jobs(ENDED, expand=expand)
    assert sight.state == "failed"
    assert sight.ended_at == local("2026-11-22T12:00:11")


def test_an_array_is_one_run_that_goes_on_while_one_of_its_jobs_does():
    sight = read_jobs("\n".join([ENDED, RUNNING, PENDING, PENDING]), expand=expand)
    assert sight.state == "running"
    assert sight.detail == "1 NODE_FAIL, 1 RUNNING, 2 PENDING"


def test_accounting_says_how_a_forgotten_job_ended():
    text = "CANCELLED by 0|node[0,2]|2026-11-21T10:00:11|2026-11-21T10:05:00\n"
    sight = read_accounts(text, expand=expand)
    assert sight.state == "cancelled"
    assert sight.ended_at == local("2026-11-21T10:05:00")


PRETEND = """#!{python}
import json, pathlib, sys
name, box = pathlib.Path(sys.argv[0]).name, pathlib.Path({box!r})
with (box / "asked.jsonl").open("a") as file:
    file.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
answer = json.loads((box / "answers.json").read_text()).get(name, {{}})
sys.stdout.write(answer.get("out", ""))
sys.stderr.write(answer.get("err", ""))
sys.exit(answer.get("code", 0))
"""


class Slurm:
    """Commands that keep what they were given, and say what they were told to say."""

    def __init__(self, box: Path) -> None:
        self.box = box
        box.mkdir()
        for name in ("sbatch", "scontrol", "scancel"):
            (box / name).write_text(PRETEND.format(python=sys.executable, box=str(box)))
            (box / name).chmod(0o755)
        self.answer()

    def answer(self, **answers: dict[str, object]) -> None:
        (self.box / "answers.json").write_text(json.dumps(answers))

    @property
    def asked(self) -> list[list[str]]:
        path = self.box / "asked.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{made.box}{os.pathsep}{os.environ['PATH']}")
    return made


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "it's a folder")


def run(scene: Scene, *words: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    done = scene.paceline(*words)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_a_job_is_submitted_as_the_dry_run_shows_it(scene, slurm):
    slurm.answer(sbatch={"out": "4711;cluster\n"})
    words = ("run", "job.yaml", "--on", "slurm", "--out", "out")
    shown = json.loads(run(scene, *words, "--dry-run", "--json").stdout)
    assert slurm.asked == []
    assert not (scene.folder / "out").exists()
    run(scene, *words)
    assert slurm.asked == [shown["command"]]
    handed_over = (scene.folder / "out/place/job.sbatch").read_text()
    assert shown["files"] == {"job.sbatch": handed_over}
    placement = read_placement(scene.folder / "out")
    assert placement is not None
    assert (placement.place, placement.job_id) == ("slurm", "4711")


@pytest.mark.parametrize("place", [("slurm",), ("ssh", "--hosts", "node-a")])
def test_s2_12_a_dry_run_only_notes_that_the_data_are_not_on_this_machine(scene, place):
    words = ("run", "job.yaml", "--on", *place, "--set", "data={path: /far/*.txt, seq_len: 32}")
    done = run(scene, *words, "--dry-run")
    assert done.stderr.startswith("note: D001")
    assert "node-a" in done.stdout or "#SBATCH" in done.stdout
    assert "D001" in run(scene, *words, code=2).stderr.splitlines()[0]


def test_a_job_that_slurm_refuses_leaves_nothing_behind(scene, slurm):
    slurm.answer(sbatch={"code": 1, "err": "sbatch: error: invalid partition specified: x\n"})
    done = run(scene, "run", "job.yaml", "--on", "slurm", "--out", "out", code=2)
    assert "W010" in done.stderr
    assert "invalid partition specified: x" in done.stderr
    assert not (scene.folder / "out").exists()


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller",
        "sbatch: fatal: Could not establish a configuration source",
    ],
)
def test_a_slurm_that_is_down_is_said_to_be(scene, slurm, said):
    slurm.answer(sbatch={"code": 1, "err": f"{said}\n"})
    done = run(scene, "run", "job.yaml", "--on", "slurm", "--out", "out", code=4)
    assert "W011" in done.stderr
    assert "scontrol ping" in done.stderr
    assert "sinfo" not in done.stderr
    assert not (scene.folder / "out").exists()


def test_a_run_in_the_queue_is_not_submitted_again(scene, slurm):
    slurm.answer(sbatch={"out": "5\n"}, scontrol={"out": PENDING})
    run(scene, "run", "job.yaml", "--on", "slurm", "--out", "out")
    done = run(scene, "run", "--resume", "out", code=2)
    assert "W013" in done.stderr
    assert [words[0] for words in slurm.asked].count("sbatch") == 1


def test_a_run_that_left_the_queue_goes_back_where_it_was(scene, slurm):
    slurm.answer(sbatch={"out": "5\n"}, scontrol={"out": ENDED})
    run(scene, "run", "job.yaml", "--on", "slurm", "--out", "out")
    run(scene, "run", "--resume", "out")
    assert [words[0] for words in slurm.asked].count("sbatch") == 2


def test_status_says_what_the_queue_says(scene, slurm):
    slurm.answer(sbatch={"out": "5\n"}, scontrol={"out": PENDING})
    run(scene, "run", "job.yaml", "--on", "slurm", "--out", "runs/out")
    by_id = json.loads(run(scene, "status", "5", "--json").stdout)
    assert by_id["queue"]["detail"] == "PENDING (Resources)"
    assert by_id["job_id"] == "5"
    assert by_id["run"]["state"] == "waiting"
    assert "PENDING (Resources)" in run(scene, "status", "runs/out").stdout


def test_status_of_a_slurm_that_is_down_says_so_and_what_the_folder_knows(scene, slurm):
    slurm.answer(
        sbatch={"out": "5\n"},
        scontrol={"code": 1, "err": "slurm_load_jobs error: Unable to contact slurm controller\n"},
    )
    run(scene, "run", "job.yaml", "--on", "slurm", "--out", "out")
    said = run(scene, "status", "out").stdout
    assert "W011: Slurm cannot be asked: slurm_load_jobs error: Unable to contact" in said
    assert "0 of 12" in said


def test_a_running_job_is_asked_to_save_and_a_waiting_one_leaves_the_queue(scene, slurm):
    slurm.answer(sbatch={"out": "5\n"}, scontrol={"out": RUNNING})
    run(scene, "run", "job.yaml", "--on", "slurm", "--out", "out")
    run(scene, "stop", "out")
    assert slurm.asked[-1] == ["scancel", "--batch", "--signal=USR2", "5"]
    slurm.answer(scontrol={"out": PENDING})
    run(scene, "stop", "out")
    assert slurm.asked[-1] == ["scancel", "5"]


def test_an_agent_gets_the_cores_that_its_job_asked_for(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "12")
    assert "--cpus-per-task=12" in Srun("python").command("node0", ["true"])
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    assert not any("cpus" in word for word in Srun("python").command("node0", ["true"]))


def test_a_job_that_slurm_has_forgotten_is_said_to_be(scene, slurm):
    slurm.answer(
        sbatch={"out": "5\n"},
        scontrol={"code": 1, "err": "slurm_load_jobs error: Invalid job id specified\n"},
    )
    run(scene, "run", "job.yaml", "--on", "slurm", "--out", "out")
    done = run(scene, "stop", "out", code=4)
    assert "W012" in done.stderr


def test_without_slurm_nothing_is_made(scene, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    done = run(scene, "run", "job.yaml", "--on", "slurm", "--out", "out", code=2)
    assert "W009: sbatch is not installed" in done.stderr
    assert not (scene.folder / "out").exists()


def test_an_array_of_one_of_our_runs_is_refused(scene):
    done = run(
        scene, "run", "job.yaml", "--on", "slurm", "--dry-run", "--set", "slurm.array=0-3", code=2
    )
    assert "W014" in done.stderr


def test_a_program_is_submitted_with_its_arguments_as_they_are(scene, slurm):
    slurm.answer(sbatch={"out": "6\n"})
    (scene.folder / "train.py").write_text("print(1)\n")
    run(
        scene,
        "run",
        "--script",
        "train.py",
        "--on",
        "slurm",
        "--out",
        "out",
        "--",
        "--name",
        "a b;c",
    )
    text = (scene.folder / "out/place/job.sbatch").read_text()
    assert "train.py --name 'a b;c'" in text
