"""`paceline preflight --on ssh` with a real sshd on each of several hosts, some of them broken.

The hosts are network namespaces of this machine, see `tests/engines/networks.py`.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command import run_command
from tests.engines.networks import Hosts, can_make_hosts
from tests.engines.test_ssh import SSHD, Cluster
from tests.preflight.test_here import JOB

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not (can_make_hosts() and Path(SSHD).exists() and shutil.which("ssh-keygen")),
        reason="NOT TESTED: ssh needs root, ip netns and sshd (apt-get install openssh-server)",
    ),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "job.yaml").write_text(JOB)
    made = Cluster(Hosts(4, subnet="10.213.93"), tmp_path / "ssh")
    try:
        made.up()
        yield made
    finally:
        made.hosts.down()


def preflight(cluster: Cluster, *words: str, hosts: tuple[int, ...]) -> dict:
    """Its JSON."""
    folder = cluster.folder.parent
    sizes = ("--set", f"cluster.nodes={len(hosts)}", "--set", "cluster.per_node=1")
    asked = ("preflight", "job.yaml", "--json", *sizes, *cluster.options(*hosts), *words)
    done = run_command(*asked, folder=folder, timeout=280)
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["fit"] else 1), done.stderr
    return found


def failing(found: dict) -> dict[str, list[str]]:
    """Node -> ids of what fails there."""
    fails: dict[str, list[str]] = {}
    for each in found["results"]:
        if each["status"] == "fail":
            fails.setdefault(each["node"], []).append(each["id"])
    return fails


def test_each_broken_host_is_named_with_what_is_broken_and_the_good_one_is_listed(cluster):
    cluster.serve(0)
    cluster.serve(1, "mount -t tmpfs -o size=64m tmpfs /dev/shm;")
    cluster.serve(2, "ulimit -n 64;")
    address = cluster.hosts.address
    file = cluster.folder / "good.txt"
    words = ("--no-measure", "--timeout", "30", "--nodes-file", str(file))
    found = preflight(cluster, *words, hosts=(0, 1, 2, 3))  # nobody answers on host 3
    assert failing(found) == {
        address(1): ["shm-too-small"],
        address(2): ["too-many-open-files"],
        address(3): ["node-unreachable"],
    }
    assert found["pass"] == [address(0)]
    assert found["slurm"]["fail"] == ",".join(address(host) for host in (1, 2, 3))
    assert file.read_text() == f"{address(0)}\n"


def test_a_host_whose_logins_name_a_wrong_interface_is_found(cluster):
    cluster.serve(0)
    cluster.serve(1, variables="NCCL_SOCKET_IFNAME=ib7 GLOO_SOCKET_IFNAME=ib7")
    found = preflight(cluster, "--no-measure", hosts=(0, 1))
    wrong = {
        each["id"]: (each["node"], each["status"])
        for each in found["results"]
        if each["name"] == "interface" and each["status"] != "pass"
    }
    host = cluster.hosts.address(1)
    assert wrong == {  # without accelerators the ranks talk over gloo, which reads only its own
        "nccl-wrong-interface": (host, "warning"),
        "gloo-ifname-missing": (host, "fail"),
    }
    assert set(failing(found)) == {host}


def test_a_run_on_hosts_is_refused_with_the_host_that_is_not_fit(cluster):
    cluster.serve(0)
    cluster.serve(1, variables="GLOO_SOCKET_IFNAME=ib7")
    folder = cluster.folder.parent
    sizes = ("--set", "cluster.nodes=2", "--set", "cluster.per_node=1")
    asked = ("run", "job.yaml", *sizes, *cluster.options(0, 1))
    done = run_command(*asked, folder=folder, timeout=200)
    assert done.returncode == 2
    assert "W032: interface [gloo-ifname-missing]" in done.stderr
    assert f"where: {cluster.hosts.address(1)}" in done.stderr
    assert list(folder.glob("runs/*")) == []


def test_hosts_that_do_not_reach_each_other_are_named_though_each_is_reached(cluster):
    cluster.serve(0)
    cluster.serve(1, f"ip route add blackhole {cluster.hosts.address(0)};")
    found = preflight(cluster, "--no-measure", hosts=(0, 1))
    assert failing(found)[cluster.hosts.address(1)] == ["nccl-connect-refused"]


def test_a_folder_that_each_host_has_for_itself_is_no_place_for_a_run(cluster):
    runs = cluster.folder.parent / "runs"
    runs.mkdir()
    cluster.serve(0)
    cluster.serve(1, f"mount -t tmpfs tmpfs {runs};")
    found = preflight(cluster, "--no-measure", hosts=(0, 1))
    assert failing(found) == {cluster.hosts.address(1): ["folder-not-shared"]}


@pytest.mark.repeat  # on one host it is in `test_here.py`
def test_all_reduce_goes_over_the_hosts(cluster):
    cluster.serve(0)
    cluster.serve(1)
    found = preflight(cluster, hosts=(0, 1))
    (swept,) = [each for each in found["results"] if each["name"] == "all-reduce"]
    assert swept["status"] == "pass"
    assert "2 ranks, gloo" in swept["evidence"]
    assert failing(found) == {}
