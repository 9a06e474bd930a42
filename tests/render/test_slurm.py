import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from tests.render.plans import planned, rendered

from paceline.errors import JobError
from paceline.job import make_script
from paceline.render import RenderError
from paceline.render.slurm import agents_script, program_script
from paceline.render.slurm_directives import to_slurm_time


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]


def script_of(command: list[str], *overrides: str, **values: object) -> str:
    job = make_script({"name": "mine", "command": command, **values}, Path("/work dir"), overrides)
    return program_script(job, folder=str(job.folder), python="/usr/bin/python3")


def test_s1_1_two_nodes_meet_at_the_first_of_the_job(check_golden):
    found = rendered("slurm", layout={"sharding": "full"})
    assert "localhost" not in found.files["job.sbatch"]
    assert found.gaps == ()
    check_golden("slurm/two-nodes", found)


def test_what_the_job_asks_of_slurm_is_in_the_directives(check_golden):
    found = rendered(
        "slurm",
        slurm={
            "partition": "gpu",
            "account": "team/a",
            "time": "26h",
            "gpu_type": "h100",
            "exclusive": True,
            "options": ["--reservation=mine"],
            "setup": ["module load cuda/13"],
        },
    )
    lines = options(found.files["job.sbatch"])
    assert "--gpus-per-node=h100:8" in lines
    assert "--time=1-02:00:00" in lines
    assert "--reservation=mine" in lines
    check_golden("slurm/all-options", found)


def test_directives_come_before_any_command():
    text = rendered("slurm").files["job.sbatch"]
    assert text.startswith("#!/usr/bin/env bash\n#SBATCH ")
    assert text.rindex("#SBATCH") < text.index("set -euo pipefail")


def test_a_run_of_ours_outlives_its_nodes_and_holds_the_spares():
    plan, job = planned(
        cluster={"accelerator": "cpu", "nodes": 2, "per_node": 2},
        train={"precision": "fp32"},
        slurm={"spare_nodes": 1},
    )
    text = agents_script(plan, job, run="/runs/it's mine", python="/opt/my python")
    assert {"--no-kill", "--nodes=3"} <= set(options(text))
    assert not any("gpus" in option for option in options(text))
    assert "'/opt/my python' -m paceline run --resume '/runs/it'\"'\"'s mine' --on srun &" in text


def test_slurm_tells_of_the_end_before_the_grace_begins():
    plan, job = planned(recovery={"grace": "2m"})
    text = agents_script(plan, job, run="/runs/a", python="python")
    assert "--signal=B:USR1@150" in options(text)


def test_a_program_of_several_nodes_is_started_by_torchrun_on_each():
    text = script_of(["python", "train.py", "--name", "a b; rm -rf /"], nodes=2, processes=4)
    assert "python -m torch.distributed.run" in text
    assert "--nnodes=2" in text
    assert "--nproc-per-node=4" in text
    assert "train.py --name 'a b; rm -rf /'" in text
    assert "cd '/work dir'" in text


def test_a_program_of_accelerate_knows_its_machine_on_that_machine_only():
    text = script_of(["accelerate", "launch", "train.py"], nodes=2, processes=4)
    assert "--num_machines 2 --num_processes 8" in text
    assert 'exec accelerate launch --machine_rank="$SLURM_NODEID" "$@"' in text


def test_an_array_is_only_asked_for_where_the_job_does():
    assert "--array=0-9%2" in options(script_of(["python", "a.py"], "slurm.array=0-9%2"))
    assert not any("array" in option for option in options(script_of(["python", "a.py"])))


def test_a_program_that_shall_not_come_back_is_not_requeued():
    text = script_of(["python", "a.py"], "slurm.requeue=false")
    assert "--no-requeue" in options(text)
    assert "scontrol requeue" not in text


def test_ranks_have_all_cores_of_their_nodes_unless_the_job_says_how_many():
    lines = options(rendered("slurm").files["job.sbatch"])
    assert "--exclusive" in lines
    assert not any("cpus" in line for line in lines)
    lines = options(rendered("slurm", slurm={"cpus": 96}).files["job.sbatch"])
    assert "--cpus-per-task=96" in lines
    assert "--exclusive" not in lines
    lines = options(rendered("slurm", slurm={"exclusive": False}).files["job.sbatch"])
    assert "--cpus-per-task=8" in lines
    lines = options(script_of(["python", "a.py"], "slurm.array=0-9", processes=4))
    assert "--cpus-per-task=4" in lines
    assert "--exclusive" not in lines


def test_srun_asks_for_the_jobs_cores_itself():
    found = rendered("slurm", slurm={"cpus": 96}).files["job.sbatch"]
    assert '${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}' in found
    assert "srun --ntasks-per-node=1 --cpu-bind=none" in found


def test_a_plan_is_no_array():
    with pytest.raises(RenderError, match=r"H002.*slurm\.array 0-3"):
        rendered("slurm", slurm={"array": "0-3"})


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("--nodes=9", "cluster.nodes"),
        ("--ntasks-per-node=8", "cluster.per_node"),
        ("--gpus-per-node=1", "slurm.gpus_per_node"),
        ("--cpus-per-task=2", "slurm.cpus"),
        ("--array=0-3", "slurm.array"),
        ("--arr=0-3", "slurm.array"),
        ("--chdir=/", "--out"),
        ("--signal=USR1", "recovery.grace"),
        ("--requeue", "slurm.requeue"),
        ("--time=1", "slurm.time"),
        ("--wrap=x", "own affair"),
    ],
)
def test_an_option_that_the_plan_sets_is_refused_with_its_field(option, field):
    with pytest.raises(JobError, match=r"slurm\.options") as error:
        script_of(["python", "a.py"], f"slurm.options=[{option}]")
    assert field in str(error.value)


@pytest.mark.parametrize(
    "option",
    [
        "--exclude=node3",
        "--dependency=afterok:5",
        "--mem-bind=local",
        "--time-min=1",
        "--nodelist=node[1-2]",
        "--mail-type=END",
    ],
)
def test_other_options_are_passed_on(option):
    assert option in options(script_of(["python", "a.py"], f'slurm.options=["{option}"]'))


def test_a_time_in_which_nothing_can_be_done_is_refused():
    with pytest.raises(JobError, match="W018") as error:
        rendered("slurm", slurm={"time": "1m"})
    assert "4m or more" in str(error.value)
    assert "--time=0-00:04:00" in options(
        rendered("slurm", slurm={"time": "4m"}).files["job.sbatch"]
    )
    with pytest.raises(JobError, match="W018"):
        script_of(["python", "a.py"], "slurm.time=1m")


@pytest.mark.parametrize(
    "bad",
    [
        "slurm.partition=a b",
        "slurm.partition=$(rm)",
        "slurm.account=--x",
        "slurm.options=[--wrap=a b]",
        "slurm.options=[x]",
        "slurm.array=0-9;rm",
        'slurm.setup=["a\\nb"]',
    ],
)
def test_what_slurm_could_misread_is_refused(bad):
    with pytest.raises(JobError, match="slurm"):
        script_of(["python", "a.py"], bad)


def test_an_environment_with_a_line_break_is_refused():
    with pytest.raises(JobError, match="H003"):
        script_of(["python", "a.py"], environment={"A": "1\n2"})


@pytest.mark.parametrize(
    ("seconds", "text"), [(30, "0-00:01:00"), (3600, "0-01:00:00"), (86_400, "1-00:00:00")]
)
def test_times_are_rounded_up_to_what_slurm_counts(seconds, text):
    assert to_slurm_time(seconds) == text


def test_spare_nodes_are_a_gap_where_torchrun_has_none():
    found = rendered("slurm", slurm={"spare_nodes": 2})
    assert [gap.what for gap in found.gaps] == ["2 spare nodes"]


SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="NOT TESTED: there is no bash")
class TestBatchScript:
    """The shell part, run for real; `srun` and `scontrol` are stood in for."""

    def run(
        self, tmp_path: Path, program: str, sent: str | None, **environment: str
    ) -> tuple[int, str]:
        fakes = {"srun": SRUN, "scontrol": '#!/bin/bash\necho "scontrol $*"\n'}
        for name, text in (fakes | {"python": f"#!/bin/bash\n{program}\n"}).items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        job = make_script({"name": "mine", "command": ["python", "a.py"]}, tmp_path, ())
        (tmp_path / "job").write_text(program_script(job, folder=str(tmp_path), python="python"))
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        with subprocess.Popen(
            ["bash", "job"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,  # else what comes right after the first line is in a buffer, and lost
            env={"PATH": path, "SLURM_JOB_ID": "7", **environment},
            start_new_session=True,
        ) as started:
            assert started.stdout is not None
            assert started.stdout.read(3) == b"up\n"
            if sent is not None:
                subprocess.run(["kill", f"-{sent}", str(started.pid)], check=True)
            try:
                said = started.communicate(timeout=300)[0].decode()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
            return started.returncode, said

    SAVES = 'trap "echo saved; exit 130" TERM\necho up\nwhile true; do sleep 0.05; done'

    def test_out_of_time_it_saves_and_goes_back_into_the_queue(self, tmp_path):
        code, said = self.run(tmp_path, self.SAVES, "USR1")
        assert "saved" in said
        assert "scontrol requeue 7" in said
        assert code == 0

    def test_a_signal_that_comes_before_the_programs_number_is_known_is_passed_on(self, tmp_path):
        hook = tmp_path / "hook"
        hook.write_text(
            """trap 'case "$BASH_COMMAND" in *pid=?!*) sleep 0.5; kill -USR1 $$ ;; esac' DEBUG\n"""
        )
        code, said = self.run(tmp_path, self.SAVES, None, BASH_ENV=str(hook))
        assert "saved" in said
        assert "scontrol requeue 7" in said
        assert code == 0

    def test_out_of_time_too_often_it_stays_away(self, tmp_path):
        code, said = self.run(tmp_path, self.SAVES, "USR1", SLURM_RESTART_COUNT="100")
        assert "requeue" not in said
        assert "100 times before" in said
        assert code == 130

    def test_stopped_it_saves_and_stays_away(self, tmp_path):
        code, said = self.run(tmp_path, self.SAVES, "USR2")
        assert "saved" in said
        assert "requeue" not in said
        assert code == 130

    def test_a_failure_comes_back_by_itself(self, tmp_path):
        code, said = self.run(tmp_path, "echo up; exit 3", None)
        assert "ended with 3: back into the queue" in said
        assert code == 0

    def test_a_success_ends_the_job(self, tmp_path):
        assert self.run(tmp_path, "echo up", None) == (0, "")
