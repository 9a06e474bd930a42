"""A launcher on its node: what it is told of the others, and that it ends with its input."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.run.scene import wait_until

from paceline.launch.on_node import marked, variables

LAUNCHER = """
trap 'echo saved > ended; exit 0' TERM
setsid sleep 600 &
echo $NODE_RANK $HEAD_ADDRESS $HEAD_PORT > met
touch ready
while :; do sleep 0.05; done
"""


def test_a_node_meets_the_others_at_the_first_ones_address():
    first = variables(node=0, num_nodes=2, head="127.0.0.1", port=20001, attempt=3, run="/runs/a")
    second = variables(node=1, num_nodes=2, head="127.0.0.1", port=20001, attempt=3, run="/runs/a")
    met = ("HEAD_ADDRESS", "HEAD_PORT", "RUN_ID")
    assert [first[name] for name in met] == ["127.0.0.1", "20001", "a-3"]
    assert [second[name] for name in met] == ["127.0.0.1", "20001", "a-3"]
    assert (first["NODE_RANK"], second["NODE_RANK"]) == ("0", "1")
    assert (first["PET_RDZV_CONF"], second["PET_RDZV_CONF"]) == ("is_host=true", "is_host=false")
    assert second["PET_LOCAL_ADDR"] == "127.0.0.1"


def test_a_launcher_beside_this_python_is_found_where_ssh_gives_a_short_path(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    given = variables(node=0, num_nodes=1, head="127.0.0.1", port=1, attempt=1, run="/runs/a")
    beside = str(Path(sys.executable).parent)
    assert given["PATH"] == f"/usr/bin:/bin:{beside}"  # after what the node itself has


def test_one_node_meets_nobody():
    given = variables(node=0, num_nodes=1, head="127.0.0.1", port=1, attempt=1, run="/runs/a")
    assert not [name for name in given if name.startswith(("HEAD", "PET"))]


def start(folder: Path, *more: str) -> "subprocess.Popen[bytes]":
    (folder / "launch.sh").write_text(LAUNCHER)
    words = ("--run", str(folder), "--folder", str(folder), "--node", "1", "--nodes", "2", *more)
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.launch.on_node", *words, "--", "bash", "launch.sh"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def wait_for(path: Path) -> None:
    wait_until(path.exists, what=f"{path} is there")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="NOT TESTED: needs /proc")
def test_a_launcher_ends_with_its_input_and_nothing_that_it_started_stays(tmp_path):
    process = start(tmp_path, "--port", "20001")
    wait_for(tmp_path / "ready")
    assert len(marked(f"{tmp_path}:1")) >= 2
    assert (tmp_path / "met").read_text() == "1 127.0.0.1 20001\n"
    process.communicate(timeout=300)  # closes its input first
    assert process.returncode == 0
    assert (tmp_path / "ended").read_text() == "saved\n"
    assert marked(f"{tmp_path}:1") == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="NOT TESTED: needs /proc")
def test_what_a_killed_attempt_left_is_ended_before_the_next_one(tmp_path):
    first = start(tmp_path)
    wait_for(tmp_path / "ready")
    first.kill()
    first.communicate(timeout=300)
    left = marked(f"{tmp_path}:1")
    assert left
    (tmp_path / "ready").unlink()
    second = start(tmp_path)
    wait_for(tmp_path / "ready")
    assert not [pid for pid in left if os.path.exists(f"/proc/{pid}/exe")]
    second.communicate(timeout=300)
    assert second.returncode == 0
