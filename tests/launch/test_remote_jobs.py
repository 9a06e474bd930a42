"""Jobs without a run's folder here: pretend tools on PATH say what they were asked."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli import logs, status, stop
from paceline.errors import JobError, RunError
from paceline.launch.places import find_place
from paceline.launch.remote_jobs import (
    FarRun,
    PlaceJob,
    command_there,
    find_elsewhere,
    log_command,
    stand_elsewhere,
    stop_elsewhere,
)
from paceline.launch.run_status import stand
from paceline.launch.run_status import stop as stop_run
from paceline.record.placement import Placement, write_placement
from paceline.render import ENGINES

TOOL = """#!{python}
import sys
print("{name}", *sys.argv[1:])
{more}
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Only the tools that a test asks for are on PATH."""
    box = tmp_path / "bin"
    box.mkdir()
    monkeypatch.setenv("PATH", str(box))

    def make(name: str, more: str = "") -> None:
        path = box / name
        path.write_text(TOOL.format(python=sys.executable, name=name, more=more))
        path.chmod(0o755)

    return make


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("slurm:4711", PlaceJob(place="slurm", job_id="4711")),
        ("sky:pl-x:3", PlaceJob(place="sky", job_id="pl-x:3")),
        ("node-a:/data/runs/x", FarRun(host="node-a", folder="/data/runs/x")),
        ("runs/mine", None),
        ("4711", None),
        ("pl-x:3", None),  # SkyPilot's id of a run that is in the folder of runs
    ],
)
def test_a_job_is_named_by_its_place_and_a_far_run_by_its_host(named, expected):
    assert find_elsewhere(named) == expected


@pytest.mark.parametrize(
    "named", ["slurm:47;11", "kubernetes:my-job", "kubernetes:a.pod.b", "sky:x", "ray:--help"]
)
def test_an_id_that_a_place_would_not_give_is_refused(named):
    with pytest.raises(JobError, match="W015"):
        find_elsewhere(named)


def test_a_host_that_ssh_could_take_for_an_option_is_refused():
    with pytest.raises(JobError, match="W007"):
        find_elsewhere("-oProxyCommand=x:/runs/mine")


@pytest.mark.parametrize(
    ("placement", "command"),
    [
        (Placement(place="slurm", job_id="4711"), "scancel 4711"),
        (
            Placement(place="kubernetes", job_id="ns.trainjob.x"),
            "kubectl delete trainjob x --namespace ns",
        ),
        (Placement(place="sky", job_id="pl-x:3"), "sky down --yes pl-x"),
        (Placement(place="sky", job_id="jobs:3"), "sky jobs cancel --yes 3"),
        (Placement(place="ssh"), None),
        (Placement(place="kubernetes", job_id="damaged"), None),
    ],
)
def test_the_command_that_ends_a_job_is_known_for_every_queue(placement, command):
    assert command_there(placement, "stop") == command


def test_every_place_that_can_be_asked_is_one_that_render_knows():
    from paceline.launch.remote_jobs import _TOOLS

    assert set(_TOOLS) - {"sky-jobs"} <= set(ENGINES)


def test_a_tool_that_is_missing_is_named_with_the_command(tools):
    with pytest.raises(RunError) as refused:
        stop_elsewhere(PlaceJob(place="slurm", job_id="4711"))
    (problem,) = refused.value.problems
    assert (problem.code, problem.what) == ("W009", "scancel is not installed")
    assert problem.fix.endswith("or, where that works: scancel 4711")


def test_a_run_of_a_queue_that_is_not_reached_names_the_command(tools, tmp_path):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    for name in ("run.json", "job.yaml"):
        (run / name).write_text("{}")
    write_placement(run, Placement(place="slurm", job_id="4711"))
    with pytest.raises(RunError) as refused:
        stop_run("mine", tmp_path / "runs")
    assert "scancel 4711" in refused.value.problems[0].fix
    silent = stand("mine", tmp_path / "runs").queue_silent
    assert silent is not None
    assert "scontrol show job 4711" in silent


def test_s0_22_a_place_is_asked_by_its_own_tool(tools):
    tools("ray")
    job = PlaceJob(place="ray", job_id="raysubmit_1")
    assert stand_elsewhere(job)["text"] == "ray job status raysubmit_1\n"
    assert log_command(job, None, follow=True, tail=20)[1:] == [
        *("job", "logs", "raysubmit_1", "--follow"),
    ]
    assert stop_elsewhere(job) == "job raysubmit_1 at ray was asked to end"


def test_a_tool_that_refuses_is_quoted(tools):
    tools("modal", more="print('no such app', file=sys.stderr); sys.exit(2)")
    with pytest.raises(RunError, match="W011: modal failed: no such app"):
        stop_elsewhere(PlaceJob(place="modal", job_id="ap-1"))


def test_the_log_of_a_slurm_job_is_the_file_that_slurm_names(tools, tmp_path):
    log = tmp_path / "slurm-4711.out"
    log.write_text("one\ntwo\n")
    tools("scontrol", more=f"print('   StdOut={log}')")
    job = PlaceJob(place="slurm", job_id="4711")
    assert log_command(job, None, follow=False, tail=5) == ["tail", "-n", "5", str(log)]
    log.unlink()
    with pytest.raises(JobError, match="W017: the log of job 4711 is not on this machine"):
        log_command(job, None, follow=False, tail=5)


def test_a_place_without_a_log_command_says_so(tools):
    with pytest.raises(JobError, match="W017: runpod has no command"):
        log_command(PlaceJob(place="runpod", job_id="x"), None, follow=False, tail=5)


@pytest.mark.parametrize(
    ("module", "words", "there"),
    [
        (status, ["--json"], "paceline status /runs/mine --json"),
        (stop, [], "paceline stop /runs/mine"),
        (logs, ["--rank", "3"], "paceline logs /runs/mine --rank 3 --tail=20"),
    ],
)
def test_a_run_on_another_machine_is_asked_over_ssh(tools, capfd, module, words, there):
    tools("ssh", more="sys.exit(7)")
    done = CliRunner().invoke(
        module.command, ["me@node-a:/runs/mine", *words], standalone_mode=False
    )
    assert done.return_value == 7
    said = capfd.readouterr().out
    assert said.startswith("ssh -o BatchMode=yes")
    assert said.strip().endswith(f"-- me@node-a {there}")


def test_a_job_of_a_queue_is_shown_and_as_json(tools):
    line = "JobId=4711 JobState=PENDING Reason=Resources NodeList=(null) TimeLimit=01:00:00"
    tools("scontrol", more=f"print({line!r})")
    shown = CliRunner().invoke(status.command, ["slurm:4711"], standalone_mode=False)
    assert "queue       waiting: PENDING (Resources)" in shown.output
    told = CliRunner().invoke(status.command, ["slurm:4711", "--json"], standalone_mode=False)
    assert json.loads(told.output)["queue"]["state"] == "waiting"


def test_a_file_of_that_name_is_no_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("slurm:4711").touch()
    assert find_elsewhere("slurm:4711") is None


@pytest.mark.parametrize("job", ["sky:c:1", "sky:jobs:1"])
def test_a_place_without_its_tool_names_the_command(tools, job):
    found = find_elsewhere(job)
    assert isinstance(found, PlaceJob)
    with pytest.raises(RunError, match=r"sky is not installed[\s\S]*sky (jobs )?logs"):
        log_command(found, None, follow=False, tail=10)


def test_kubernetes_without_its_package_names_the_command(tools, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    found = find_elsewhere("kubernetes:default.trainjob.mine")
    assert isinstance(found, PlaceJob)
    with pytest.raises(RunError, match="kubectl get trainjob mine"):
        stand_elsewhere(found)


def test_a_machine_that_ssh_does_not_reach_is_an_error_of_ours(tools):
    tools("ssh", "sys.exit(255)")
    with pytest.raises(RunError, match="W011: ssh failed"):
        FarRun(host="node-a", folder="/data/x").do("status", "--json")


def test_a_slurm_log_without_slurm_names_the_command(tools):
    with pytest.raises(RunError, match="scontrol show job 123"):
        log_command(PlaceJob(place="slurm", job_id="123"), None, follow=False, tail=10)


@pytest.mark.parametrize("name", ["modal", "runpod", "lambda", "vertex"])
def test_s0_22_a_cloud_that_is_no_place_names_the_command_that_writes_its_files(name):
    with pytest.raises(JobError, match=f"paceline render JOB --for {name} --out FOLDER"):
        find_place(name)
    with pytest.raises(JobError, match="did you mean `slurm`"):
        find_place("sluurm")
