"""`paceline sync` to hosts that are folders of this machine: an ssh that goes nowhere."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.command import run_command
from tests.run.scene import JOB

from paceline.topology.node.messages import Sent, Take
from paceline.topology.node.receive import list_folder, take

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
[ "$2" = gone ] && { echo "ssh: connect to host gone: No route to host" >&2; exit 255; }
IFS= read -r line
printf '%s\\n' "$line" | sed "s#@HOST@#$2#" | sh -c "$3"
"""


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    job = tmp_path / "job"
    (job / "lib").mkdir(parents=True)
    (job / "text").mkdir()
    (job / "text" / "a.txt").write_text("some words\n" * 99)
    spec = JOB | {"cluster": JOB["cluster"] | {"nodes": 2, "per_node": 1}}
    (job / "job.yaml").write_text(yaml.safe_dump(spec | {"ssh": {"hosts": ["a", "b"]}}))
    (job / "train.py").write_text("import lib.helper\n")
    (job / "lib" / "helper.py").write_text("VALUE = 1\n")
    (job / "start.sh").write_text("#!/bin/sh\n")
    (job / "start.sh").chmod(0o755)
    return tmp_path


def sync(scene: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    path = f"{scene / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return run_command(
        *("sync", "job.yaml", "--to", str(scene / "hosts" / "@HOST@"), *words),
        folder=scene / "job",
        env=os.environ | {"PATH": path, "GIT_CEILING_DIRECTORIES": str(scene)},
    )


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.parts and path.name != ".paceline-sync"
    }


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_s4_19_every_host_gets_the_files_that_differ_and_a_dry_run_says_which(scene):
    old = scene / "hosts" / "b"
    (old / "lib").mkdir(parents=True)
    (old / "lib" / "helper.py").write_text("VALUE = 2\n")
    (old / "train.py").write_text("import lib.helper\n")
    (old / "stale.py").write_text("")
    before = files(scene / "hosts")
    dry = sync(scene, "--dry-run")
    assert dry.returncode == 1, dry.stderr
    assert f"there: {scene}/hosts/@HOST@" in dry.stdout
    assert "a: would send 4 files: job.yaml, lib/helper.py, start.sh, train.py" in dry.stdout
    assert "b: would send 3 files: job.yaml, lib/helper.py, start.sh; only there" in dry.stdout
    assert files(scene / "hosts") == before
    done = sync(scene)
    assert done.returncode == 0, done.stderr
    ours = {name: text for name, text in files(scene / "job").items() if "text" not in name}
    assert files(scene / "hosts" / "a") == ours
    assert files(old) == ours | {"stale.py": ""}
    assert os.access(old / "start.sh", os.X_OK)
    assert not os.access(old / "train.py", os.X_OK)
    again = sync(scene, "--dry-run", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["same"] is True


def test_s4_19_delete_removes_what_an_earlier_sync_sent_and_nothing_of_others(scene):
    other = scene / "hosts" / "b"
    other.mkdir(parents=True)
    (other / "etc.cfg").write_text("somebody's")
    first = sync(scene, "--delete")
    assert "b: sent 4 files" in first.stdout
    assert "only there, not from sync (never removed): 1 file: etc.cfg" in first.stdout
    (scene / "job" / "start.sh").unlink()
    assert "gone here (--delete removes it): 1 file: start.sh" in sync(scene, "--dry-run").stdout
    done = sync(scene, "--delete")
    assert done.stdout.count("removed 1 file: start.sh") == 2
    assert files(other).keys() == {"etc.cfg", "job.yaml", "train.py", "lib/helper.py"}
    assert "start.sh" not in sync(scene, "--delete").stdout


def test_s4_19_links_to_folders_are_named_and_not_sent(scene):
    (scene / "job" / "alias").symlink_to("lib")
    done = sync(scene)
    assert "not sent, links to folders: alias\n" in done.stdout
    assert not (scene / "hosts" / "a" / "alias").exists()


def test_s4_19_with_git_what_it_ignores_stays_here_and_commits_are_compared(scene):
    job = scene / "job"
    (job / ".gitignore").write_text("*.secret\n")
    (job / "key.secret").write_text("not for others")
    (job / "new.json").write_text("{}")
    (job / "runs" / "one").mkdir(parents=True)
    (job / "runs" / "one" / "run.json").write_text("{}")
    git(job, "init", "-q")
    git(job, "add", "train.py")
    git(job, "commit", "-qm", "first")
    done = sync(scene)
    assert done.returncode == 0, done.stderr
    assert "with changes that are in no commit" in done.stdout
    assert "its folder is without a commit, or has no git" in done.stdout
    there, ours = files(scene / "hosts" / "a"), files(job)
    assert there.keys() == ours.keys() - {"key.secret", "runs/one/run.json"}


@pytest.mark.parametrize("top", ["job", "."])
def test_s4_19_a_package_called_runs_is_sent_and_runs_of_jobs_are_not(scene, top):
    job = scene / "job"
    runs = {"runs/one/run.json", "exp1/runs/two/run.json", "exp1/runs/two/logs/rank-0.log"}
    for name in ("pkg/runs/new.txt", *runs):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_text("{}")
    git(scene / top, "init", "-q")
    git(job, "add", "train.py")
    git(job, "commit", "-qm", "first")
    ours = files(job).keys()
    assert list_folder(job).files.keys() == ours - runs


def test_s4_19_without_git_too_a_package_called_runs_is_sent_and_runs_of_jobs_are_not(scene):
    job = scene / "job"
    runs = {"runs/one.py", "exp1/runs/two/run.json", "exp1/runs/two/job.yaml"}
    for name in ("pkg/runs/new.py", "exp1/job.yaml", *runs):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_text("{}")
    found = list_folder(job).files.keys()
    assert {"pkg/runs/new.py", "exp1/job.yaml"} <= found
    assert not found & runs


def test_s4_19_a_host_that_is_not_reached_or_keeps_another_file_ends_it_with_1(scene):
    blocked = scene / "hosts" / "b" / "train.py"
    blocked.mkdir(parents=True)  # a folder where the file belongs
    done = sync(scene)
    assert done.returncode == 1
    assert re.search("b: FAILED:.*Is a directory", done.stdout)
    gone = sync(scene, "--hosts", "a,gone")
    assert gone.returncode == 1
    assert (
        "gone: FAILED: ssh: connect to host gone: No route to host; `ssh gone true` has to"
        in gone.stdout
    )
    assert "a: the same files as here" in gone.stdout


@pytest.mark.parametrize("folder", ["/", "/etc", "/usr/../etc"])
def test_s4_19_nothing_is_written_into_a_folder_of_the_system(folder):
    send = Take(folder=folder, names=(), files={"a.py": Sent(content=b"", is_executable=False)})
    assert "is the system's: give --to a folder of the job's own" in take(send).why_not


def test_s4_19_nothing_is_removed_from_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").touch()
    assert "home" in take(Take(folder=str(tmp_path), names=(), removed=("mine.py",))).why_not
    assert (tmp_path / "mine.py").exists()


def test_s4_19_git_without_a_commit_is_git_and_what_it_ignores_stays_here(scene):
    job = scene / "job"
    (job / "big.py").write_bytes(b"#" * (65 << 20))
    git(job, "init", "-q")
    assert "put data and checkpoints into .gitignore" in sync(scene).stderr
    (job / ".gitignore").write_text("big.py\n")
    done = sync(scene)
    assert done.returncode == 0, done.stderr
    assert "git without a commit" in done.stdout
    assert "big.py" not in files(scene / "hosts" / "a")


def test_s4_19_a_link_out_of_the_folder_is_named(scene):
    (scene / "outside.py").write_text("x = 1\n")
    (scene / "job" / "link.py").symlink_to(scene / "outside.py")
    assert f"link.py is a link to {scene / 'outside.py'}: a copy" in sync(scene).stderr


def test_s4_19_a_folder_with_data_is_refused_with_the_largest_file(scene):
    (scene / "job" / "big.yaml").write_bytes(b"#" * (65 << 20))
    done = sync(scene)
    assert done.returncode == 2
    assert re.search("W033.*big.yaml alone has 65 MiB", done.stderr)
    assert not (scene / "hosts").exists()


@pytest.mark.parametrize("name", ["/etc/evil", "../evil", "link/evil"])
def test_s4_19_nothing_is_written_outside_of_the_folder(tmp_path, name):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path)
    sent = {name: Sent(content=b"x", is_executable=False)}
    answer = take(Take(folder=str(inside), names=(), files=sent))
    assert "not inside" in (answer.why_not or "")
    assert not (tmp_path / "evil").exists()
