"""Random schedules, many in one run: the cheap way to fifty, and to a thousand."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.run.scene import Scene, wait_until

pytestmark = pytest.mark.ranks

QUIET = ("--set", "evaluate.every=10000", "--set", "checkpoint.every=10")


def soak(scene: Scene, num: int, *options: str) -> dict:
    done = scene.paceline(
        *("drill", "job.yaml", "--soak", str(num), "--json", *QUIET, *options), timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.repeat  # its faults are rows of `test_fault_matrix.py`
def test_a_soak_verifies_each_schedule_and_goes_on_where_it_stopped(tmp_path):
    scene = Scene(tmp_path)
    said = soak(scene, 4)
    assert (said["schedules"], said["passed"]) == (4, 4)
    assert said["recoveries"] > 0
    began = (tmp_path / "runs/soak.jsonl").read_text()
    again = soak(scene, 4)
    assert again["passed"] == 4
    assert (tmp_path / "runs/soak.jsonl").read_text() == began


def processes_with(mark: str) -> list[int]:
    """Those that have it in their environment; zombies have none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@pytest.mark.repeat  # a command that is killed is in `tests/run/test_controller.py`
def test_a_soak_that_is_killed_ends_its_run_and_records_no_verdict(tmp_path):
    scene = Scene(tmp_path)
    mark = f"PACELINE_TEST={tmp_path}"
    process = subprocess.Popen(
        [
            # As `paceline drill ... &` in a script does: such a process ignores Ctrl-C.
            *("sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "paceline"),
            *("drill", "job.yaml", "--soak", "5", "--model", "small", *QUIET),
        ],
        cwd=scene.folder,
        env=os.environ | {"PACELINE_TEST": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def is_soaking() -> bool:
        return any(len(path.read_bytes()) > 500 for path in tmp_path.glob("runs/soak-*/metrics*"))

    wait_until(is_soaking, what="the first steps with faults", timeout_s=200)
    assert len(processes_with(mark)) >= 5  # the command, its run, controller, agent, two ranks
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=600) == 130
    wait_until(lambda: not processes_with(mark), what="all of its processes to end")
    assert not (tmp_path / "runs/soak.jsonl").exists()


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("ranks", [2, 4])
def test_fifty_random_schedules_all_end_with_the_same_bits(tmp_path, ranks):
    said = soak(Scene(tmp_path), 50, "--set", f"cluster.per_node={ranks}")
    assert said["passed"] == 50, said["failed"]
