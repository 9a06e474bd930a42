"""From what a run was started: what is kept, and what must not be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.record import starts
from paceline.record.starts import keep_start

TOKEN = "hf_" + "A1b2C3d4" * 5
"""Looks like one."""


@pytest.fixture
def scene(tmp_path, monkeypatch) -> Path:
    """A run's folder in a git work tree with one commit."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text("steps = 1\n")
    git(tmp_path / "code", "init", "-q", "-b", "main")
    commit(tmp_path / "code")
    (tmp_path / "run").mkdir()
    return tmp_path


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "one")


def kept(scene: Path) -> dict:
    """The newest start, kept now."""
    keep_start(scene / "run", scene / "code")
    return json.loads((scene / "run/starts.jsonl").read_text().splitlines()[-1])


def everything_in(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.iterdir()))


def test_s0_23_a_start_has_commit_branch_command_host_and_packages(scene, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["paceline", "run", "job.yaml", "--set", "train.steps=5"])
    start = kept(scene)
    assert start["code"]["commit"] == git(scene / "code", "rev-parse", "HEAD")
    assert (start["code"]["branch"], start["code"]["is_dirty"]) == ("main", False)
    assert start["command"] == ["paceline", "run", "job.yaml", "--set", "train.steps=5"]
    assert start["host"]
    assert start["packages"]["click"]
    assert start["packages"]["pyyaml"]


def test_changes_since_the_commit_are_kept_with_their_hash(scene):
    (scene / "code/train.py").write_text("steps = 2\n")
    code = kept(scene)["code"]
    diff = (scene / "run" / code["diff_file"]).read_text()
    assert "-steps = 1\n+steps = 2\n" in diff
    assert (code["is_dirty"], code["is_cut"], len(code["diff_sha256"])) == (True, False, 64)


def test_the_kept_difference_makes_the_code_of_the_run_from_its_commit(scene):
    code = scene / "code"
    (code / "train.py").write_text("steps = 2\n")
    (code / "new.py").write_text("new = True\n")
    name = kept(scene)["code"]["diff_file"]
    (code / "new.py").unlink()
    git(code, "checkout", "-q", ".")
    git(code, "apply", str(scene / "run" / name))
    assert (code / "train.py").read_text() == "steps = 2\n"
    assert (code / "new.py").read_text() == "new = True\n"


def test_new_files_are_named_and_those_of_runs_are_no_code(scene):
    code = scene / "code"
    (code / "notes.bin").write_bytes(b"\0\1")
    (code / "runs/old").mkdir(parents=True)
    for name in ("run.json", "job.yaml"):
        (code / "runs/old" / name).write_text("{}")
    start = kept(scene)
    assert start["code"]["new_files"] == ["notes.bin"]
    assert start["code"]["diff_file"] is None


def test_a_long_difference_is_cut_and_says_so(scene, monkeypatch):
    monkeypatch.setattr(starts, "_MOST_DIFF_BYTES", 200)
    (scene / "code/train.py").write_text("steps = 2\n" * 100)
    code = kept(scene)["code"]
    assert code["is_cut"]
    assert (scene / "run" / code["diff_file"]).stat().st_size <= 200


def test_no_value_of_the_environment_is_kept_only_its_name(scene, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("PLAIN_SETTING", "a value that nobody should see")
    start = kept(scene)
    assert {"HF_TOKEN", "PLAIN_SETTING"} <= set(start["environment"])
    text = everything_in(scene / "run")
    assert TOKEN not in text
    assert "nobody should see" not in text


@pytest.mark.parametrize(
    "line",
    [
        f'token = "{TOKEN}"',
        'db_password = "hunter2secret"',
        "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANhunter2secret\n-----END PRIVATE KEY-----",
        'os.environ["WANDB_API_KEY"] = "hunter2secret"',
        'os.environ.setdefault("WANDB_API_KEY", "hunter2secret")',
        'wandb.login(key="hunter2secret")',
        'headers = {"Authorization": "Bearer hunter2secret"}',
        'parser.add_argument("--api-key", default="hunter2secret")',
        'settings = {"token":\n    "hunter2secret"}',
        'password = (\n    "hunter2secret"\n)',
    ],
)
@pytest.mark.parametrize("name", ["train.py", "new.py"])
def test_no_secret_of_the_code_is_kept(scene, line, name):
    (scene / "code" / name).write_text(f"before = 1\n{line}\nafter = 2\n")
    kept(scene)
    text = everything_in(scene / "run")
    assert TOKEN not in text
    assert "hunter2secret" not in text
    assert "left out" in text
    assert "after = 2" in text


@pytest.mark.parametrize(
    "words",
    [
        ["--set", f"slurm.comment={TOKEN}"],
        ["--", "--api-key", "hunter2secret"],
        ["--", "--db-password=hunter2secret"],
        ["--", "https://me:hunter2secret@example.org/data"],
    ],
)
def test_no_secret_of_the_command_line_is_kept(scene, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["paceline", "run", "job.yaml", *words])
    start = kept(scene)
    text = everything_in(scene / "run")
    assert TOKEN not in text
    assert "hunter2secret" not in text
    assert any("left out" in word for word in start["command"])


def test_a_command_that_makes_a_run_and_starts_it_is_kept_once(scene):
    kept(scene)
    kept(scene)
    assert len((scene / "run/starts.jsonl").read_text().splitlines()) == 1


def test_another_command_that_resumes_it_is_kept_too(scene):
    kept(scene)
    pid = os.fork()
    if pid == 0:
        keep_start(scene / "run", scene / "code")
        os._exit(0)
    os.waitpid(pid, 0)
    assert len((scene / "run/starts.jsonl").read_text().splitlines()) == 2


def test_outside_of_a_work_tree_the_reason_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    for name in ("code", "run"):
        (tmp_path / name).mkdir()
    start = kept(tmp_path)
    assert start["code"] is None
    assert "not a git repository" in start["no_code"]


def test_without_git_the_reason_is_kept(scene, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "git cannot be started" in kept(scene)["no_code"]


def test_a_git_that_takes_too_long_leaves_the_commit(scene, monkeypatch):
    real = starts._git

    def slow(folder, *words):
        if words[0] == "diff":
            raise starts._NoAnswer("git diff took longer than 10 s")
        return real(folder, *words)

    monkeypatch.setattr(starts, "_git", slow)
    start = kept(scene)
    assert start["code"]["commit"]
    assert start["code"]["is_dirty"] is None
    assert "took longer" in start["no_code"]


def test_before_the_first_commit_all_is_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("code", "run"):
        (tmp_path / name).mkdir()
    git(tmp_path / "code", "init", "-q")
    (tmp_path / "code/train.py").write_text("steps = 1\n")
    code = kept(tmp_path)["code"]
    assert (code["commit"], code["is_dirty"], code["new_files"]) == (None, True, ["train.py"])


def test_no_program_that_the_repository_names_is_started(scene):
    mark = scene / "mark"
    (scene / "code/train.py").write_text("steps = 2\n")
    for key in ("diff.external", "core.fsmonitor", "core.pager"):
        git(scene / "code", "config", key, f"touch {mark};")
    kept(scene)
    assert not mark.exists()


def test_names_that_are_no_text_are_kept_as_far_as_they_are(scene, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["paceline", "bad\udcff"])
    (scene / "code" / "bad\udcff.py").write_text("x = 1\n")
    assert kept(scene)["command"] == ["paceline", "bad?"]
