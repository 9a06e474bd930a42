import json
import subprocess

import pytest
from tests.render.plans import rendered

from paceline.render import RenderError

FULL = {"sharding": "full", "data": 16}
GOOD = [
    "node1:1:1 [0] NCCL INFO Using network IB",
    "node1:1:1 [0] NCCL INFO Channel 00/0 : 1[1] -> 8[0] [send] via NET/IB/0/GDRDMA",
]


def network(**changes):
    return rendered("network", **({"layout": FULL} | changes))


def checked(tmp_path, log: list[str]) -> subprocess.CompletedProcess[str]:
    script, file = tmp_path / "check-network.sh", tmp_path / "a log.txt"
    script.write_text(network().files[script.name])
    file.write_text("\n".join(log) + "\n")
    return subprocess.run(["bash", str(script), str(file)], capture_output=True, text=True)


def test_two_nodes_over_infiniband(check_golden):
    found = network()
    check_golden("network/infiniband", found)
    assert json.loads(found.files["network.json"])["choice"] == "rdma"


def test_cpus_have_no_log_of_nccl_to_check(check_golden):
    cpus = {"accelerator": "cpu", "nodes": 2, "per_node": 2, "memory": "8 GiB"}
    changes = {"cluster": cpus, "layout": {"sharding": "none"}, "train": {"precision": "fp32"}}
    found = network(**changes)
    check_golden("network/cpus", found)
    assert "check-network.sh" not in found.files


def test_s4_5_a_log_of_rdma_passes(tmp_path):
    done = checked(tmp_path, GOOD)
    assert done.returncode == 0, done.stdout
    assert "FAIL" not in done.stdout


def test_rdma_through_the_host_is_slow_and_not_wrong(tmp_path):
    done = checked(tmp_path, [line.replace("/GDRDMA", "") for line in GOOD])
    assert done.returncode == 0
    assert "nvidia_peermem" in done.stdout


def test_a_nic_that_cannot_read_the_gpu_is_said_and_may_be_for_storage(tmp_path):
    line = "NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 2 'mlx5_2'"
    done = checked(tmp_path, [*GOOD, line])
    assert done.returncode == 0
    assert "slow  1 x GPU Direct RDMA Disabled" in done.stdout


@pytest.mark.parametrize(
    "log",
    [
        [line.replace("IB", "Socket") for line in GOOD],
        [*GOOD, "node2:1:1 [0] NCCL INFO Channel 01/0 : 8[0] -> 1[1] [send] via NET/Socket/0"],
        ["nothing of NCCL"],
    ],
)
def test_s1_10_a_log_with_sockets_or_without_a_network_fails(tmp_path, log):
    done = checked(tmp_path, log)
    assert done.returncode == 1
    assert "FAIL" in done.stdout


def test_without_a_log_the_check_says_how_it_is_used(tmp_path):
    script = tmp_path / "check-network.sh"
    script.write_text(network().files[script.name])
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_s4_5_the_settings_can_be_sourced_and_only_set_or_take_away(tmp_path):
    script = tmp_path / "network.sh"
    script.write_text(network().files["network.sh"])
    said = subprocess.run(
        ["bash", "-euc", f". {script}; env"],
        env={"NCCL_NTHREADS": "4", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "NCCL_NTHREADS" not in said
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT=1" in said
    assert "NCCL_IB_HCA" not in said  # only where the owner knows better


@pytest.mark.parametrize(
    ("words", "net", "file", "checks"),
    [([], "", "all_reduce.json", 1), (["--tcp", "--x"], "Socket", "all_reduce-tcp.json", 0)],
)
def test_s4_7_the_sweep_has_a_leg_over_tcp(tmp_path, words, net, file, checks):
    for name, text in network().files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "torchrun").write_text('#!/bin/bash\necho "net=${NCCL_NET:-} $*"\n')
    (tmp_path / "check-network.sh").write_text("#!/bin/bash\necho checked\n")
    for name in ("torchrun", "check-network.sh"):
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "all-reduce.sh"), *words],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HEAD_ADDRESS": "a", "RUN_ID": "b"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"net={net} " in done.stdout
    assert f"--json {file}" in done.stdout
    assert "--tcp" not in done.stdout
    assert done.stdout.count("checked") == checks


def test_macs_are_refused():
    macs = {"accelerator": "M2-Ultra", "per_node": 1, "network": "auto"}
    with pytest.raises(RenderError, match="--for mlx"):
        network(cluster=macs, train={"precision": "fp32"}, layout={"data": 2})
