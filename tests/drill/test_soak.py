"""Random schedules, many in one run: the cheap way to fifty, and to a thousand."""

import json

import pytest
from tests.run.scene import Scene

pytestmark = pytest.mark.ranks

QUIET = ("--set", "evaluate.every=10000", "--set", "checkpoint.every=10")


def soak(scene: Scene, num: int, *options: str) -> dict:
    done = scene.paceline(
        *("drill", "job.yaml", "--soak", str(num), "--json", *QUIET, *options), timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_soak_verifies_each_schedule_and_goes_on_where_it_stopped(tmp_path):
    scene = Scene(tmp_path)
    said = soak(scene, 4)
    assert (said["schedules"], said["passed"]) == (4, 4)
    assert said["recoveries"] > 0
    began = (tmp_path / "runs/soak.jsonl").read_text()
    again = soak(scene, 4)
    assert again["passed"] == 4
    assert (tmp_path / "runs/soak.jsonl").read_text() == began


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("ranks", [2, 4])
def test_fifty_random_schedules_all_end_with_the_same_bits(tmp_path, ranks):
    said = soak(Scene(tmp_path), 50, "--set", f"cluster.per_node={ranks}")
    assert said["passed"] == 50, said["failed"]
