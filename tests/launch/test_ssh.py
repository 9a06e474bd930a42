import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.run.scene import JOB

from paceline.errors import JobError
from paceline.job import Job, SshSpec, parse_job
from paceline.job.hosts import find_hosts, read_hostfile
from paceline.launch.handover import with_hosts
from paceline.launch.ssh import Ssh, check
from paceline.plan import plan_job


def job_of(tmp_path: Path, nodes: int = 2, **ssh: Any) -> Job:
    spec = JOB | {"cluster": JOB["cluster"] | {"nodes": nodes, "per_node": 2}, "ssh": ssh}
    return parse_job(yaml.safe_dump(spec), source="job.yaml", folder=tmp_path)


def problems(job: Job) -> list[str]:
    return [f"{each.code}: {each.what}" for each in check(job, plan_job(job))]


TEXTS = some.text(some.characters(blacklist_categories=["Cs"], blacklist_characters="\0"))


@settings(deadline=None, max_examples=60)
@given(some.lists(TEXTS, min_size=1, max_size=4))
def test_whatever_a_path_is_called_the_host_gets_it_as_one_word(words):
    way = Ssh(SshSpec(), Path("/"))
    remote = way.command("node-a", ["printf", "%s\\0", *words])[-1]
    done = subprocess.run(["sh", "-c", remote], capture_output=True, check=True)
    assert done.stdout.decode().split("\0") == [*words, ""]


def test_s4_21_a_host_is_never_taken_for_an_option_and_nobody_is_asked():
    command = Ssh(SshSpec(port=2222, identity="key"), Path("/job")).command("node-a", ["true"])
    assert command[command.index("--") + 1 :] == ["node-a", "true"]
    assert "BatchMode=yes" in command
    assert command[command.index("-p") + 1] == "2222"
    assert command[command.index("-i") + 1] == "/job/key"


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=rm", "a b", "a;b", "$(rm)", "a\nb", "", "a'b", "`x`", "@a", "u@-x"]
)
def test_s4_21_a_host_that_is_more_than_a_name_is_refused(tmp_path, host):
    with pytest.raises(JobError, match="no host"):
        job_of(tmp_path, hosts=["node-a", host])
    with pytest.raises(JobError, match="W007"):
        with_hosts(job_of(tmp_path), f"node-a,{host}")


@pytest.mark.parametrize("host", ["::1", "[fd00::7]", "fe80::1%eth0", "root@fd00::7"])
def test_an_ipv6_address_is_refused_as_one(tmp_path, host):
    for wrong in (lambda: with_hosts(job_of(tmp_path), host), lambda: hostfile_of(host)):
        with pytest.raises(JobError, match="is an IPv6 address, which ssh and rsync"):
            wrong()


def hostfile_of(text: str) -> list[tuple[str, int | None]]:
    return read_hostfile(Path("hosts"), text)


def test_hosts_of_the_command_line_take_the_place_of_the_jobs(tmp_path):
    job = with_hosts(job_of(tmp_path, hosts=["old"]), "trainer@10.0.0.7, node-b")
    assert find_hosts(job) == [("trainer@10.0.0.7", None), ("node-b", None)]


def test_a_hostfile_of_the_command_line_is_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/hf").write_text("node-here\n")
    (tmp_path / "hf").write_text("node-beside-the-job\n")
    monkeypatch.chdir(tmp_path / "here")
    for words in ("./hf", "hf", str(tmp_path / "here/hf")):
        assert find_hosts(with_hosts(job_of(tmp_path), words)) == [("node-here", None)]


def test_a_host_named_twice_is_refused(tmp_path):
    assert problems(job_of(tmp_path, hosts=["a", "b", "a"])) == ["W007: a is named more than once"]


def test_fewer_hosts_than_nodes_are_refused(tmp_path):
    assert problems(job_of(tmp_path, hosts=["a"])) == [
        "W008: the plan has 2 nodes, the job names 1 host"
    ]


def test_hosts_beyond_the_nodes_are_spares(tmp_path):
    assert problems(job_of(tmp_path, hosts=["a", "b", "c"])) == []


def test_a_host_with_fewer_slots_than_ranks_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=1\n")
    assert problems(job_of(tmp_path, hostfile="hosts")) == [
        "W007: b has 1 slot, the plan puts 2 ranks on each node"
    ]


def test_a_hostfile_that_is_not_there_is_named(tmp_path):
    with pytest.raises(JobError, match="W007: the hostfile cannot be read"):
        find_hosts(job_of(tmp_path, hostfile="nowhere"))


def test_a_hostfile_is_read_in_the_ways_that_people_write_it():
    text = "# two racks\nnode-a slots=8\n\nnode-b:4  # the old one\ntrainer@node-c max_slots=9\n"
    assert read_hostfile(Path("hosts"), text) == [
        ("node-a", 8),
        ("node-b", 4),
        ("trainer@node-c", None),
    ]


def test_one_machine_by_two_users_or_cases_is_one(tmp_path):
    with pytest.raises(JobError, match="node-a is on line 1 already"):
        read_hostfile(Path("hosts"), "node-a\nroot@node-A\n")
    with pytest.raises(JobError, match="node-a is named more than once"):
        find_hosts(job_of(tmp_path, hosts=["node-a", "root@node-A"]))


def test_everything_wrong_in_a_hostfile_is_said_at_once_with_its_line():
    text = "a\nb slots=x\na\nc;d\ne fast\n"
    with pytest.raises(JobError) as refused:
        read_hostfile(Path("hosts"), text)
    said = {each.where: each.what for each in refused.value.problems}
    assert said["hosts:2"] == "'x' is no number of slots"
    assert said["hosts:3"] == "a is on line 1 already"
    assert said["hosts:4"].startswith("'c;d' is no host")
    assert said["hosts:5"] == "'fast' is not known: write `e slots=8`"
    assert len(said) == 4
