"""`paceline preflight` and the look before `paceline run`, here, with one thing broken."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command import run_command

JOB = """\
name: small
model: {decoder: {layers: 2, hidden: 64, heads: 4}}
data: {corpus: python-stdlib, seq_len: 32}
train: {global_batch: 8, steps: 4}
cluster: {accelerator: cpu, nodes: 1, per_node: 2}
"""


def can_mount() -> bool:
    """Whether this machine lets us mount something that only our children see."""
    if not shutil.which("unshare"):
        return False
    words = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="NOT TESTED: mounting needs root")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def paceline(
    *words: str, before: str = "", **options: object
) -> "subprocess.CompletedProcess[str]":
    """The command, maybe after mounts that only it sees, or with limits."""
    if not before and "preexec_fn" not in options:
        folder, env = options.get("cwd", Path.cwd()), options.get("env")
        return run_command(*words, folder=folder, env=env, timeout=200)
    command = [sys.executable, "-m", "paceline", *words]
    if before:
        command = ["unshare", "--mount", "sh", "-c", f'{before} exec "$0" "$@"', *command]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, **options
    )


def failing(done: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    """Check -> id of the failure that it found."""
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    return {each["name"]: each["id"] for each in found["results"] if each["status"] == "fail"}


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


@needs_mounts
def test_64_mb_of_shared_memory_are_found_in_time(job):
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm;"
    done = paceline("preflight", str(job), "--json", before=mount, cwd=job.parent)
    assert done.returncode == 1
    assert failing(done) == {"shared-memory": "shm-too-small"}


def test_a_limit_of_64_files_is_found_in_time(job):
    done = paceline("preflight", str(job), "--json", preexec_fn=few_files, cwd=job.parent)
    assert done.returncode == 1
    assert failing(done) == {"open-files": "too-many-open-files"}


@pytest.mark.parametrize(
    ("variable", "id", "status"),
    [
        # The job's ranks are on CPUs and talk over gloo, which does not read NCCL's variable.
        ("NCCL_SOCKET_IFNAME", "nccl-wrong-interface", "warning"),
        ("GLOO_SOCKET_IFNAME", "gloo-ifname-missing", "fail"),
    ],
)
def test_a_variable_that_names_no_interface_is_found_in_time(job, variable, id, status):
    environment = os.environ | {variable: "ens-of-another-machine"}
    words = ("--json", "--no-measure")
    done = paceline("preflight", str(job), *words, env=environment, cwd=job.parent)
    assert done.returncode == (1 if status == "fail" else 0)
    found = json.loads(done.stdout)
    (named,) = [each for each in found["results"] if each["name"] == "interface"]
    assert (named["id"], named["status"]) == (id, status)
    assert (found["slurm"]["pass"] == "") == (status == "fail")


@pytest.mark.parametrize(
    "variable",
    [
        pytest.param("NCCL_SOCKET_IFNAME", marks=pytest.mark.slow),  # a whole run
        "GLOO_SOCKET_IFNAME",
        None,
    ],
)
def test_a_run_and_a_quick_look_judge_alike(job, tmp_path, variable):
    broken: dict[str, object] = {"cwd": tmp_path}
    if variable is None:
        broken["preexec_fn"] = few_files
    else:
        broken["env"] = os.environ | {variable: "ens-of-another-machine"}
    quick = failing(paceline("preflight", str(job), "--quick", "--json", **broken))
    done = paceline("run", str(job), "--no-report", "--set", "train.steps=1", **broken)
    refused = {line for line in quick if f"W032: {line} [{quick[line]}]" in done.stderr}
    assert refused == set(quick)
    assert ("W032" in done.stderr) == (done.returncode == 2) == bool(quick)
    assert bool(quick) == (variable != "NCCL_SOCKET_IFNAME")
    for name in quick:
        assert f"--allow {name}" in done.stderr


def test_a_queue_outside_of_an_allocation_says_how_its_nodes_can_be_looked_at(job):
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    words = ("--on", "slurm", "--set", "cluster.nodes=2")
    done = paceline("preflight", str(job), *words, env=environment)
    assert done.returncode == 2
    assert "W031" in done.stderr
    assert "salloc --no-kill --nodes=2" in done.stderr
    assert "--on srun" in done.stderr


@needs_mounts
@pytest.mark.parametrize(
    ("options", "name", "id"),
    [
        ("ro", "checkpoint-folder", "checkpoint-folder-unusable"),
        ("size=1m", "checkpoint-room", "disk-full-checkpoint"),
    ],
)
def test_a_folder_for_the_run_that_will_not_do(job, tmp_path, options, name, id):
    runs = tmp_path / "runs"
    runs.mkdir()
    mount = f"mount -t tmpfs -o {options} tmpfs {runs};"
    words = ("preflight", str(job), "--runs", str(runs), "--json")
    assert failing(paceline(*words, before=mount)) == {name: id}


def test_a_port_that_somebody_has_is_said(job):
    import socket

    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        asked = f"cluster.rendezvous_port={port}"
        done = paceline("preflight", str(job), "--quick", "--json", "--set", asked, cwd=job.parent)
    assert failing(done) == {"ports": "port-in-use"}


def test_nothing_is_left_in_the_folder_of_the_runs(job, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    paceline("preflight", str(job), "--runs", str(runs), "--no-measure")
    assert list(runs.iterdir()) == []


def test_what_was_recorded_is_judged_without_a_look(job, tmp_path):
    found = tmp_path / "found.json"
    done = paceline("preflight", str(job), "--quick", "--record", str(found), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(found.read_text())
    told["nodes"][0]["facts"]["limits"]["nofile"] = [64, 64]
    found.write_text(json.dumps(told))
    done = paceline("preflight", str(job), "--from", str(found), "--json")
    assert failing(done) == {"open-files": "too-many-open-files"}
    again = paceline("preflight", str(job), "--from", str(found), "--from", str(found))
    assert again.returncode == 2
    assert "it was given before: its nodes count once" in again.stderr


def test_a_file_that_is_no_recording_is_refused_with_its_name(job, tmp_path):
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    done = paceline("preflight", str(job), "--from", str(wrong), "--from", str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr.count("T021") == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--allow", "shared-memry"), "Did you mean shared-memory?"),
        (("--on", "kubernetes"), "W031"),
        (("--on", "slrm"), "did you mean `slurm`"),
        (("--hosts", "a,b"), "--hosts goes with --on ssh"),
        (("--timeout", "nan"), "nan"),
    ],
)
def test_a_wrong_option_ends_before_anything_is_looked_at(job, words, said):
    done = paceline("preflight", str(job), *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_is_not_started_where_a_quick_look_says_that_it_would_end(job, tmp_path):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "ens-of-another-machine"}
    done = paceline("run", str(job), env=environment, cwd=tmp_path)
    assert done.returncode == 2
    assert "W032: interface [gloo-ifname-missing]" in done.stderr
    assert "--allow interface" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.ranks
def test_a_run_keeps_what_was_allowed_and_says_nothing_of_what_is_well(job, tmp_path):
    out = tmp_path / "out"
    done = paceline("run", str(job), "--out", str(out), "--allow", "interface", "--no-report")
    assert done.returncode == 0, done.stderr
    kept = json.loads((out / "preflight.json").read_text())
    assert kept["fit"]
    assert kept["allowed"] == ["interface"]
    assert "preflight" not in done.stdout + done.stderr


@pytest.mark.slow  # the quick one is over hosts, in `tests/preflight/test_hosts.py`
@pytest.mark.ranks
def test_all_reduce_over_the_ranks_of_the_job_is_measured(job, tmp_path):
    done = paceline("preflight", str(job), "--json", cwd=tmp_path)
    found = {each["name"]: each for each in json.loads(done.stdout)["results"]}
    assert done.returncode == 0, done.stdout
    assert found["torch"]["status"] == "pass"
    assert "2 ranks, gloo: bus bandwidth" in found["all-reduce"]["evidence"]
