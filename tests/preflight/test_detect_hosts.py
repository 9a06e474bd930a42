"""`paceline detect` over ssh: hosts with other hardware, and one that does not answer."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from tests.command import run_command
from tests.engines.networks import can_make_hosts
from tests.engines.test_ssh import SSHD, Cluster
from tests.preflight.test_hosts import cluster

__all__ = ["cluster"]  # the fixture

TOPOLOGY = Path(__file__).parents[1] / "topology" / "recordings"

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not (can_make_hosts() and Path(SSHD).exists() and shutil.which("ssh-keygen")),
        reason="NOT TESTED: ssh needs root, ip netns and sshd (apt-get install openssh-server)",
    ),
]


def detect(
    cluster: Cluster, *words: str, hosts: tuple[int, ...]
) -> "subprocess.CompletedProcess[str]":
    asked = ("detect", *cluster.options(*hosts), *words)
    done = run_command(*asked, folder=cluster.folder.parent, timeout=200)
    assert "Traceback" not in done.stderr
    return done


def cards(folder: Path, query: str) -> str:
    """Shell commands that put a pretended nvidia-smi on a host's PATH alone."""
    script = folder / f"smi-{query}"
    script.write_text(f'#!/bin/sh\ncase "$*" in *query-gpu=index*) cat {TOPOLOGY / query};; esac\n')
    script.chmod(0o755)
    return (
        "mkdir -p /usr/local/bin; mount -t tmpfs tmpfs /usr/local/bin; "
        f"cp {script} /usr/local/bin/nvidia-smi;"
    )


def test_s0_2_hosts_over_ssh_are_one_cluster_and_the_silent_one_is_named(cluster: Cluster):
    for host in (0, 1):
        cluster.serve(host, cards(cluster.folder, "query-8xh100.csv"))
    names = [cluster.hosts.address(host) for host in range(3)]
    began = time.monotonic()
    done = detect(cluster, "--json", "--write", "found.yaml", hosts=(0, 1, 2))
    assert time.monotonic() - began < 60
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert list(found["hosts"]) == names[:2]
    assert list(found["silent"]) == names[2:]
    assert found["differences"] == []
    assert found["folder_is_shared"] == {names[0]: True, names[1]: True}
    section = {"accelerator": "H100-SXM", "nodes": 2, "per_node": 8}
    assert found["cluster"] == section
    assert yaml.safe_load((cluster.folder.parent / "found.yaml").read_text()) == {
        "cluster": section
    }


def test_s0_2_hosts_over_ssh_with_other_cards_are_told_apart(cluster: Cluster):
    cluster.serve(0, cards(cluster.folder, "query-8xh100.csv"))
    cluster.serve(1, cards(cluster.folder, "query-2xrtx5090.csv"))
    done = detect(cluster, hosts=(0, 1))
    assert done.returncode == 0
    one, two = (cluster.hosts.address(host) for host in (0, 1))
    assert f"accelerators: 8 x NVIDIA H100 80GB HBM3 on {one}" in done.stdout
    assert f"T005: the hosts have different accelerators: {one} has 8 x" in done.stderr
    assert f"{two} has 2 x NVIDIA GeForce RTX 5090" in done.stderr
    assert "cluster:" not in done.stdout
