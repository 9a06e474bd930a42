"""Which of Ray's nodes a job is put on, without Ray."""

from typing import Any

import pytest
import yaml
from tests.run.scene import JOB

from paceline.errors import JobError
from paceline.job import parse_job
from paceline.launch import ray
from paceline.launch.ray_step import Step, name_of
from paceline.plan import plan_job
from paceline.record.run import RunFolder


def raw(address: str, node_id: str) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "NodeID": node_id}


def test_a_node_is_called_by_its_address_unless_another_has_the_same():
    nodes = [raw("10.0.0.1", "a" * 40), raw("10.0.0.2", "b" * 40), raw("10.0.0.2", "c" * 40)]
    assert [name_of(node, nodes) for node in nodes] == ["10.0.0.1", "b" * 12, "c" * 12]


def way(**changes: Any) -> ray.Through:
    given = {"cpus": 0.0, "gpus": 8.0, "python_there": "/opt/python", "address": None}
    return ray.Through(**(given | changes))


def test_an_agent_keeps_its_nodes_gpus_and_a_visit_keeps_nothing():
    agent = way().command("10.0.0.1", way().python("paceline.control.agent", "--node", "0"))
    visit = way().command("10.0.0.1", way().python("paceline.control.host_agents"))
    assert "--gpus=8" in agent
    assert agent[agent.index("--") + 1 :][:3] == ["/opt/python", "-m", "paceline.control.agent"]
    assert "--gpus=0" in visit


def test_a_launcher_keeps_its_nodes_gpus_too():
    launcher = way().command("10.0.0.1", way().python("paceline.launch.on_node", "--node", "0"))
    assert "--gpus=8" in launcher


def test_the_cluster_is_the_one_that_the_job_names():
    assert "--address=10.0.0.5:6379" in way(address="10.0.0.5:6379").command("a", ["true"])


def job_of(tmp_path, nodes: int):
    spec = JOB | {"cluster": JOB["cluster"] | {"nodes": nodes, "per_node": 2}}
    return parse_job(yaml.safe_dump(spec), source="job.yaml", folder=tmp_path)


def test_nodes_with_too_little_room_are_not_taken(tmp_path, monkeypatch):
    job = job_of(tmp_path, nodes=2)
    there = [
        ray.Node(name=str(number), address="127.0.0.1", cpus=cpus, gpus=0.0)
        for number, cpus in enumerate((0.0, 2.0, 1.0))
    ]
    monkeypatch.setattr(ray, "find_nodes", lambda address: there)
    with pytest.raises(JobError, match=r"W008: the plan has 2 nodes of 2 CPUs, and 1 of Ray's 3"):
        ray.open_site(job, plan_job(job), RunFolder(tmp_path), lambda text: None, None)


def test_without_a_cluster_it_is_said(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(JobError, match="W030"):
        ray.find_nodes("127.0.0.1:9")


def test_a_cluster_that_never_answers_is_said(monkeypatch):
    monkeypatch.setattr(ray, "_VISIT_S", 0.2)
    monkeypatch.setattr(ray, "_step", lambda address: ["sh", "-c", "sleep 60"])
    with pytest.raises(JobError, match="W030: no Ray cluster answers: no answer within"):
        ray.find_nodes(None)


def said_by(step: Step) -> tuple[bytes, int]:
    said = b""
    while True:
        more, code = step.more()
        said += more
        if code is not None:
            return said, code


def test_a_step_gets_its_first_line_and_gives_back_all_it_says_and_its_exit_code():
    step = Step()
    script = "read -r line; echo got $line $EXTRA; echo to stderr >&2; exit 3"
    step.start(["sh", "-c", script], b"secret\n", {"EXTRA": "more"})
    assert said_by(step) == (b"got secret more\nto stderr\n", 3)


def test_the_end_of_the_input_reaches_the_command_when_it_comes_and_not_before():
    step = Step()
    step.start(["cat"], b"line\n", {})
    assert step.more() == (b"line\n", None)
    step.end_input()
    assert said_by(step) == (b"", 0)


def test_a_step_that_says_much_loses_nothing():
    step = Step()
    step.start(["seq", "200000"], b"", {})
    said, code = said_by(step)
    assert (len(said.splitlines()), code) == (200_000, 0)


def test_a_step_that_cannot_be_started_says_so():
    with pytest.raises(OSError, match="nowhere"):
        Step().start(["/nowhere"], b"", {})
