"""What a person sees of a place before anything is started there: a dry run, and a refusal."""

import importlib.util
import json
import os
import shlex
from pathlib import Path

import pytest
from tests.run.scene import Scene


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """With an ssh that reaches nobody, and notes that it was asked."""
    box = tmp_path / "bin"
    box.mkdir()
    (box / "ssh").write_text(f"#!/bin/sh\necho asked >> {box}/asked\necho no route >&2\nexit 255\n")
    (box / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{box}{os.pathsep}{os.environ['PATH']}")
    return Scene(tmp_path / "it's a folder")


def test_a_dry_run_over_ssh_shows_each_agents_command_and_asks_nobody(scene):
    words = ("--set", "cluster.nodes=2", "--hosts", "node-a,node-b,spare", "--out", "out")
    done = scene.paceline("run", "job.yaml", "--on", "ssh", "--dry-run", "--json", *words)
    assert done.returncode == 0, done.stderr
    starts = json.loads(done.stdout)["starts"]
    assert [each["host"] for each in starts] == ["node-a", "node-b"]
    for node, each in enumerate(starts):
        assert each["command"][0] == "ssh"
        assert (
            f"paceline.control.agent --run {shlex.quote(str(scene.folder / 'out'))} --node {node}"
            in (each["command"][-1])
        )
    assert not (scene.folder / "out").exists()
    assert not (scene.folder.parent / "bin/asked").exists()


def test_a_dry_run_here_shows_the_agents_of_this_machine(scene):
    done = scene.paceline("run", "job.yaml", "--dry-run", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "node 0: 2 ranks on this machine" in done.stdout
    assert "paceline.control.agent" in done.stdout
    assert not (scene.folder / "out").exists()


def test_a_dry_run_on_ray_needs_no_ray(scene):
    done = scene.paceline("run", "job.yaml", "--on", "ray", "--dry-run", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "--node RAY-NODE-0 --cpus=2" in done.stdout
    if importlib.util.find_spec("ray") is None:
        refused = scene.paceline("run", "job.yaml", "--on", "ray", "--out", "out")
        assert "W020" in refused.stderr
        assert "[ray]'" in refused.stderr


def test_a_dry_run_of_a_program_shows_its_command(scene):
    (scene.folder / "a.py").write_text("raise SystemExit(9)\n")
    done = scene.paceline(
        "run", "--script", "a.py", "--nproc", "2", "--dry-run", "--", "--x", "a b"
    )
    assert done.returncode == 0, done.stderr
    assert "2 process(es)" in done.stdout
    assert "a.py --x 'a b'" in done.stdout


def test_a_dry_run_of_a_programs_run_to_go_on_with_starts_nothing(scene):
    (scene.folder / "a.py").write_text(
        "from pathlib import Path\nPath('starts').open('a').write('once ')\nraise SystemExit(9)\n"
    )
    words = ("--script", "a.py", "--nproc", "1", "--set", "recovery.max_restarts=0")
    first = scene.paceline("run", *words, "--out", "out")
    assert first.returncode != 0
    before = (scene.folder / "starts").read_text()
    done = scene.paceline("run", "--resume", "out", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "1 process(es)" in done.stdout
    assert "a.py" in done.stdout
    assert (scene.folder / "starts").read_text() == before == "once "


def test_a_run_whose_hosts_are_not_reached_leaves_nothing_behind(scene):
    done = scene.paceline("run", "job.yaml", "--on", "ssh", "--hosts", "node-a", "--out", "out")
    assert done.returncode == 2
    assert "W004" in done.stderr
    assert not (scene.folder / "out").exists()


def test_a_job_in_slurms_queue_looks_at_its_own_nodes_as_it_was_told_to(scene):
    words = ("--on", "slurm", "--dry-run", "--out", "out")
    told = ("--preflight", "--allow", "clock", "--allow", "mtu")
    done = scene.paceline("run", "job.yaml", *words, *told)
    assert done.returncode == 0, done.stderr
    assert "--on srun --preflight --allow clock --allow mtu" in done.stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("job.yaml", "--on", "kubernetes"), "its machines are not there before the job is"),
        (("--script", "a.py"), "what a script or another engine needs is not known"),
    ],
)
def test_a_look_that_nobody_takes_is_not_left_out_in_silence(scene, words, why):
    done = scene.paceline("run", *words, "--allow", "clock", "--dry-run")
    assert done.returncode == 2
    assert why in " ".join(done.stderr.split())
