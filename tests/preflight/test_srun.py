"""`paceline preflight --on srun` with a pretend Slurm of two nodes; the second has few files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command import run_command
from tests.preflight.test_here import JOB
from tests.run.scene import is_alive, wait_until

SCONTROL = '#!/bin/sh\nprintf "gpu-node07\\ngpu-node08\\n"\n'
SRUN = """#!/bin/sh
for word in "$@"; do
  case "$word" in
    --nodelist=gpu-node08) ulimit -n 64 ;;
    --nodelist=gpu-node09) echo "srun: error: Unable to contact node" >&2; exit 1 ;;
    --*) ;;
    *) break ;;
  esac
  shift
done
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "job.yaml").write_text(JOB)
    return os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


def preflight(folder: Path, environment: dict[str, str], *words: str) -> dict:
    sizes = ("--set", "cluster.nodes=2", "--set", "cluster.per_node=1")
    asked = ("preflight", "job.yaml", "--on", "srun", "--json", "--no-measure", *sizes, *words)
    done = run_command(*asked, folder=folder, env=environment, timeout=200)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_the_nodes_of_an_allocation_are_asked_by_job_steps(tmp_path, slurm):
    found = preflight(tmp_path, slurm)
    fails = [(each["node"], each["id"]) for each in found["results"] if each["status"] == "fail"]
    assert fails == [("gpu-node08", "too-many-open-files")]
    assert found["slurm"] == {"pass": "gpu-node07", "fail": "gpu-node08"}


def test_a_node_that_slurm_does_not_reach_fails_with_sruns_own_words(tmp_path, slurm):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(SCONTROL.replace("gpu-node08", "gpu-node09"))
    found = preflight(tmp_path, slurm)
    (fail,) = [each for each in found["results"] if each["status"] == "fail"]
    assert (fail["node"], fail["id"]) == ("gpu-node09", "node-unreachable")
    assert "Unable to contact node" in fail["evidence"]


def test_a_node_that_never_answers_is_given_up_in_time(tmp_path, slurm):
    srun = tmp_path / "bin" / "srun"
    srun.write_text(SRUN.replace("ulimit -n 64", "exec sleep 600"))
    found = preflight(tmp_path, slurm, "--timeout", "15")
    (fail,) = [each for each in found["results"] if each["status"] == "fail"]
    assert (fail["node"], fail["evidence"]) == ("gpu-node08", "nothing was heard for 15 s")
    assert found["pass"] == ["gpu-node07"]
    assert found["seconds"] < 60


def test_ctrl_c_ends_it_at_once_and_leaves_nothing_behind(tmp_path, slurm):
    srun, pid = tmp_path / "bin" / "srun", tmp_path / "pid"
    srun.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 600\n")
    words = ("preflight", "job.yaml", "--on", "srun", "--set", "cluster.nodes=2")
    started = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        cwd=tmp_path,
        env=slurm,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background, SIGINT is ignored, and what is started inherits it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with started:
        try:
            wait_until(
                lambda: pid.exists() and pid.read_text().strip() != "",
                what="the first job step",
                timeout_s=60,
            )
            started.send_signal(signal.SIGINT)
            _, said = started.communicate(timeout=300)
        finally:
            started.kill()
    assert started.returncode == 130
    assert "Traceback" not in said
    assert not is_alive(int(pid.read_text()))
