"""`paceline detect`: driver, disks and Ethernet, several hosts beside each other, and tools that
hang or print garbage."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.topology.test_detect import h100_facts, h100_node, with_gpus

from paceline.report.detect_text import format_detected, format_hosts
from paceline.topology import probe
from paceline.topology.detect import cluster_section, detect
from paceline.topology.detect_hosts import differences, section_of_hosts
from paceline.topology.node.facts import Drive, GpuTexts, Interface, NodeFacts, Question, RdmaTexts
from paceline.topology.node.probe import probe_node
from paceline.topology.node.probe_network import find_interfaces
from paceline.topology.node.probe_storage import find_drives, find_mounts
from paceline.topology.node.read_state import read_rocm_states


def lines() -> str:
    return "\n".join(format_detected(h100_node()))


def test_s0_2_driver_cuda_disks_and_ethernet_stand_in_what_detect_found():
    found = h100_node()
    assert (found.driver, found.cuda) == ("550.54.15", "12.4")
    assert [each.name for each in found.ethernet] == ["eth0"]
    assert "driver        550.54.15, runs CUDA up to 12.4" in lines()
    assert "nvme0n1: NVMe, 3.49 TiB, MZQL2" in lines()
    assert "/local: xfs on /dev/nvme0n1p1, 2 TiB free of 3 TiB" in lines()
    assert "/home: nfs4 on files:/home, does not answer" in lines()
    assert "eth0: 100 Gb/s, mlx5_core, 10.1.0.1" in lines()


def test_a_node_without_rdma_is_planned_with_its_ethernet():
    facts = replace(h100_facts(), rdma=RdmaTexts())
    assert cluster_section(detect(facts))["network"] == "100Gb/s Ethernet"


def test_a_node_without_a_known_rate_states_no_network():
    eth = Interface(name="eth0", is_up=True, mtu=1500, addresses=("10.0.0.2",), driver="virtio_net")
    facts = replace(h100_facts(), rdma=RdmaTexts(), interfaces=(eth,))
    assert "network" not in cluster_section(detect(facts))


def interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> Interface:
    """An interface whose files in /sys are these."""
    folder = tmp_path / "net" / "eth9"
    folder.mkdir(parents=True)
    for name, text in ({"flags": "0x1003", "operstate": "up", "mtu": "1500"} | files).items():
        (folder / name).write_text(text)
    module = "paceline.topology.node.probe_network"
    monkeypatch.setattr(f"{module}.socket.if_nameindex", lambda: [(1, "eth9")])
    monkeypatch.setattr(f"{module}.Path", lambda text: tmp_path / Path(text).name)
    (found,) = find_interfaces()
    return found


@pytest.mark.parametrize(
    ("files", "rate"),
    [
        ({"speed": "25000", "uevent": "DEVTYPE=bond\nINTERFACE=eth9\n"}, 25e9 / 8),
        ({"speed": "-1", "uevent": "DEVTYPE=bond\n"}, None),
        ({"speed": "10000", "uevent": "INTERFACE=eth9\n"}, None),  # a container's end of a pair
        ({"speed": "10000", "uevent": "DEVTYPE=bridge\n"}, None),
        ({}, None),
    ],
)
def test_a_rate_is_taken_only_from_what_has_one(tmp_path, monkeypatch, files, rate):
    assert interface(tmp_path, monkeypatch, **files).bytes_per_s == rate


def test_disks_are_those_behind_a_device(tmp_path: Path):
    for name, size, spins in (("nvme0n1", 2**21, "0"), ("sda", 2**22, "1"), ("vda", 2**20, "1")):
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "queue").mkdir()
        (tmp_path / name / "size").write_text(f"{size}\n")
        (tmp_path / name / "queue" / "rotational").write_text(spins)
    (tmp_path / "nvme0n1" / "device" / "model").write_text("SAMSUNG MZQL2\n")
    (tmp_path / "loop0").mkdir()
    (tmp_path / "loop0" / "size").write_text("8")
    assert find_drives(tmp_path) == (
        Drive(name="nvme0n1", kind="NVMe", total_bytes=2**30, model="SAMSUNG MZQL2"),
        Drive(name="sda", kind="HDD", total_bytes=2**31),
        Drive(name="vda", kind="virtual", total_bytes=2**29),
    )


def test_a_file_system_whose_server_is_gone_is_waited_for_only_shortly(monkeypatch):
    module = "paceline.topology.node.probe_storage"
    mounts = [("files:/a", "/gone", "nfs4"), ("/dev/sda1", "/", "ext4"), ("proc", "/proc", "proc")]
    monkeypatch.setattr(f"{module}._mounts", lambda: iter(mounts))
    monkeypatch.setattr(f"{module}._ANSWERS_S", 0.05)
    monkeypatch.setattr(
        f"{module}.disk_of", lambda path: time.sleep(60) if str(path) == "/gone" else None
    )
    began = time.monotonic()
    assert [(each.path, each.disk) for each in find_mounts()] == [("/gone", None), ("/", None)]
    assert time.monotonic() - began < 30


# Hosts


def test_s0_2_hosts_that_are_alike_are_one_section():
    found = {"a": h100_node(), "b": h100_node()}
    assert differences(found) == []
    section, problems = section_of_hosts(found)
    assert problems == []
    assert section == cluster_section(h100_node()) | {"nodes": 2}
    assert "2 hosts are alike" in list(format_hosts(found, {}, [], None))


def test_s0_2_what_differs_between_hosts_is_named_with_the_hosts():
    other = replace(
        h100_facts(),
        gpu=replace(h100_facts().gpu, head="CUDA Version: 12.2", state="", kernel_driver=""),
        interfaces=(),
    )
    found = {"a": h100_node(), "b": detect(other), "c": h100_node()}
    unlike = {each.what: dict(each.hosts) for each in differences(found)}
    assert unlike == {
        "driver": {"550.54.15": ("a", "c"), "unknown": ("b",)},
        "CUDA of the driver": {"12.4": ("a", "c"), "12.2": ("b",)},
        "Ethernet": {"1 x 100 Gb/s": ("a", "c"), "unknown rate": ("b",)},
    }
    shown = list(
        format_hosts(found, {"d": "timed out"}, differences(found), {"a": True, "b": False})
    )
    assert "  CUDA of the driver: 12.2 on b" in shown
    assert any(line.startswith("d") and "no answer: timed out" in line for line in shown)
    assert shown[-1].endswith("on b: runs need a shared folder")


def test_the_section_of_unequal_hosts_is_the_least_that_all_have():
    fewer = replace(h100_facts(), gpu=replace(h100_facts().gpu, visible="0,1,2,3"))
    slower = replace(h100_facts(), rdma=RdmaTexts())
    section, problems = section_of_hosts({"a": detect(fewer), "b": detect(slower)})
    assert problems == []
    assert section == {
        "accelerator": "H100-SXM",
        "nodes": 2,
        "per_node": 4,
        "network": "100Gb/s Ethernet",
    }


def test_s0_2_hosts_with_other_accelerators_have_no_common_section():
    cards = with_gpus("query-2xrtx5090.csv")
    for other in (cards, NodeFacts(host="c", system="Linux")):
        section, (problem,) = section_of_hosts({"a": h100_node(), "b": detect(other)})
        assert section is None
        assert problem.code == "T005"
        assert problem.what.startswith(
            "the hosts have different accelerators: a has 8 x NVIDIA H100 80GB HBM3, b has "
        )


# Tools that do not behave


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, name: str = "nvidia-smi"):
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_tool_that_hangs_is_given_up_with_what_it_started(tmp_path, monkeypatch):
    tool(tmp_path, monkeypatch, "sleep 600 & echo $! > $0.pid; wait")
    monkeypatch.setattr(probe, "_TIMEOUT_S", 0.5)
    looks: list[probe.Look] = []
    began = time.monotonic()
    assert probe.run_tool(["nvidia-smi"], looks) == ""
    assert time.monotonic() - began < 300
    assert looks[0].why == "no answer within 0.5 s"
    pid = (tmp_path / "nvidia-smi.pid").read_text().strip()
    assert ends_within(10, Path(f"/proc/{pid}/stat"))


def ends_within(seconds: float, state: Path) -> bool:
    """Whether a killed process is gone: the kernel may need a moment to end it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if ") Z " in state.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("head -c 4096 /dev/urandom", "none that can be read"),
        ("printf '²,,\\n1²,a,b,c,d\\n'", "none that can be read"),
        (
            "echo Unable to determine the device handle; exit 15",
            "exit code 15: Unable to determine",
        ),
    ],
)
def test_a_tool_that_prints_garbage_or_fails_is_a_problem_that_is_said(
    tmp_path, monkeypatch, script, why
):
    tool(tmp_path, monkeypatch, script)
    found = detect(probe_node(Question()))
    assert found.gpus == ()
    (problem,) = found.problems
    assert problem.code == "T006"
    assert why in problem.what


@pytest.mark.parametrize("text", ['{"card0": 3, "system": "x"}', "{", "[]", '{"card0": {}}'])
def test_garbage_of_rocm_smi_is_no_error(text):
    assert all(each.driver is None for each in read_rocm_states(text))
    facts = NodeFacts(host="a", system="Linux", gpu=GpuTexts(rocm=text))
    assert detect(facts).gpus == ()
