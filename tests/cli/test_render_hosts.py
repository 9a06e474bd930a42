"""`paceline render` reads the hostfile that the job names, and refuses a wrong one."""

import json

import pytest
from click.testing import CliRunner

from paceline.cli import cli

JOB = """
name: two
model: {decoder: {layers: 2, hidden: 64, heads: 4}}
data: {corpus: python-stdlib, seq_len: 64}
cluster: {accelerator: H100-SXM, nodes: 2, per_node: 8, network: 400Gb/s}
train: {global_batch: 64, steps: 10}
layout: {sharding: zero1}
ssh: {hostfile: hosts}
"""


def test_without_for_the_files_are_those_of_the_engine_that_the_job_names(tmp_path):
    """It ended with `Missing option '--for'`."""
    (tmp_path / "job.yaml").write_text(JOB.partition("ssh:")[0])
    words = ["render", str(tmp_path / "job.yaml"), "--json"]
    done = CliRunner().invoke(cli, [*words, "--set", "engine=deepspeed"])
    assert json.loads(done.stdout)["engine"] == "deepspeed"
    ours = CliRunner().invoke(cli, words)
    assert ours.exit_code == 2
    assert "Name the engine (--for list shows them)" in ours.stderr


def rendered(tmp_path, hosts: str | bytes | None):
    (tmp_path / "job.yaml").write_text(JOB)
    if hosts is not None:
        (tmp_path / "hosts").write_bytes(hosts if isinstance(hosts, bytes) else hosts.encode())
    job = str(tmp_path / "job.yaml")
    return CliRunner().invoke(cli, ["render", job, "--for", "deepspeed", "--json"])


def test_the_hosts_of_the_file_are_the_engines(tmp_path):
    done = rendered(tmp_path, "# rack 7\nnode-a slots=8\ntrainer@node-b slots=8\n")
    assert done.exit_code == 0, done.output
    files = json.loads(done.stdout)["files"]
    assert files["hostfile"] == "node-a slots=8\ntrainer@node-b slots=8\n"


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("node-a\nroot@node-a\n", "node-a is on line 1 already"),
        ("node-a\nnode-b;id\n", "is no host"),
        ("node-a slots=0\nnode-b\n", "no number of slots"),
        ("node-a slots=4\nnode-b\n", "node-a has 4 slots, the plan puts 8 ranks on each node"),
        (b"\xff\xfe\x00", "the hostfile cannot be read"),
        (None, "the hostfile cannot be read"),
        ("node-a\n", "hosts are 1, nodes 2"),
    ],
)
def test_a_wrong_hostfile_is_refused(tmp_path, hosts, said):
    done = rendered(tmp_path, hosts)
    assert done.exit_code != 0
    assert said in str(done.exception)
