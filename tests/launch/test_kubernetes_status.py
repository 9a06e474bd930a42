"""What a cluster says of a job, in the words of `paceline status`."""

import pytest

from paceline.launch.kubernetes import read_status
from paceline.record.log_files import natural


def condition(kind, status="True", message=""):
    return {"type": kind, "status": status, "message": message, "lastTransitionTime": "x"}


@pytest.mark.parametrize(
    ("kind", "status", "state"),
    [
        ("trainjob", {}, "waiting"),
        ("trainjob", {"conditions": [condition("Suspended")]}, "waiting"),
        ("trainjob", {"conditions": [condition("Complete")]}, "finished"),
        ("trainjob", {"conditions": [condition("Failed", message="max restarts")]}, "failed"),
        ("trainjob", {"conditions": [condition("Failed", "False")]}, "waiting"),
        (
            "pytorchjob",
            {"conditions": [condition("Created"), condition("Running")]},
            "running",
        ),
        (
            "pytorchjob",
            {"conditions": [condition("Created"), condition("Running"), condition("Succeeded")]},
            "finished",
        ),
        ("rayjob", {"jobDeploymentStatus": "Initializing"}, "waiting"),
        ("rayjob", {"jobStatus": "RUNNING"}, "running"),
        ("rayjob", {"jobStatus": "SUCCEEDED"}, "finished"),
        ("rayjob", {"jobStatus": "FAILED"}, "failed"),
    ],
)
def test_the_state_is_the_last_word_of_the_conditions(kind, status, state):
    assert read_status(kind, status, []).state == state


def test_a_trainjob_whose_pods_run_is_running():
    pods = [
        {"spec": {"nodeName": "a"}, "status": {"phase": "Running"}},
        {"spec": {}, "status": {"phase": "Pending"}},
    ]
    sight = read_status("trainjob", {}, pods)
    assert (sight.state, sight.detail, list(sight.nodes)) == ("running", "1 of 2 pods run", ["a"])


def test_restarts_of_all_containers_count():
    pod = {
        "spec": {},
        "status": {"phase": "Running", "containerStatuses": [{"restartCount": 2}]},
    }
    assert read_status("pytorchjob", {}, [pod, pod]).restarts == 4


def test_a_failure_says_its_reason():
    status = {"conditions": [condition("Failed", message="node 1\n  was lost")]}
    assert read_status("trainjob", status, []).detail == "Failed (node 1 was lost)"


def test_the_tenth_pod_comes_after_the_second():
    names = [f"job-node-0-{number}-{tail}" for number, tail in ((10, "a"), (2, "z"), (0, "7x"))]
    assert sorted(names, key=natural) == [names[2], names[1], names[0]]
