"""Reading what a machine's own files and tools say, from recorded texts."""

import os
from pathlib import Path

import pytest

import paceline
from paceline.catalog import catalog_name
from paceline.topology import machine as machine_module
from paceline.topology.machine import (
    Machine,
    find_gpu_uuids,
    find_local_machine,
    read_cgroup_bytes,
    read_cpu_max,
    read_cpuinfo,
    read_meminfo,
    visible_gpus,
)

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_meminfo_gives_total_and_available_bytes():
    total, available = read_meminfo(recorded("meminfo.txt"))
    assert total == 24_684_084 * 1024
    assert 0 < available < total


def test_an_old_kernel_without_available_memory_gives_the_free():
    assert read_meminfo("MemTotal: 10 kB\nMemFree: 4 kB\n") == (10_240, 4_096)


def test_cpuinfo_counts_cores_and_reads_clock_and_flags():
    cpu = read_cpuinfo(recorded("cpuinfo-amd-2-cores.txt"))
    assert cpu.num_physical_cores == 2
    assert cpu.clock_hz == pytest.approx(2.6e9, rel=0.01)
    assert {"avx512f", "avx512_bf16"} <= cpu.flags


def test_hardware_threads_of_one_core_count_once():
    cpu = read_cpuinfo(recorded("cpuinfo-threads.txt"))
    assert cpu.num_physical_cores == 2
    assert cpu.clock_hz == 2.1e9


def test_a_cpuinfo_that_says_nothing_leaves_everything_unknown():
    cpu = read_cpuinfo("processor : 0\nBogoMIPS : 50.00\n\nprocessor : 1\n")
    assert cpu.num_physical_cores is None
    assert cpu.clock_hz is None


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max\n", None), ("9223372036854771712\n", None), ("", None), ("4294967296\n", 2**32)],
)
def test_a_cgroup_limit_may_be_none_in_both_versions(text: str, limit: int | None):
    assert read_cgroup_bytes(text) == limit


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("max 100000", None), ("150000 100000", 1.5), ("-1 100000", None), (" ", None)],
)
def test_a_cpu_quota_may_be_none_in_both_versions(text: str, cpus: float | None):
    assert read_cpu_max(text) == cpus


def test_hidden_gpus_are_not_counted():
    gpus = tuple(range(8))
    assert len(visible_gpus(gpus, "0,1")) == 2
    assert len(visible_gpus(gpus, "")) == 0
    assert len(visible_gpus(gpus, None)) == 8


@pytest.mark.parametrize(
    ("smi_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX-PRO-6000-MaxQ"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("AMD Instinct MI210", "MI210"),
        ("AMD Instinct MI350X", "MI350X"),
        ("NVIDIA A100-PCIE-40GB", "A100-40-PCIe"),
        ("Tesla V100-PCIE-16GB", "V100-16-PCIe"),
        ("Tesla V100-PCIE-32GB", "V100-32-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce GTX 970", None),
    ],
)
def test_a_device_name_is_found_in_the_catalog(smi_name: str, name: str | None):
    assert catalog_name(smi_name) == name


def test_this_machine_has_cores_and_memory():
    machine = find_local_machine()
    assert machine.num_cores > 0
    assert 0 < machine.available_bytes <= machine.memory_bytes


LOST = "Unable to determine the device handle for GPU0000:04:00.0: GPU is lost."


def smi(monkeypatch, tmp_path, text: str, ends: int, visible: str | None = None) -> Machine:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{text}'\nexit {ends}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return find_local_machine()


def test_a_lost_gpu_is_the_reason_that_none_is_seen(monkeypatch, tmp_path):
    machine = smi(monkeypatch, tmp_path, LOST, 15)
    assert (machine.gpus, machine.why_no_gpus) == ((), f"nvidia-smi: exit code 15: {LOST}")


@pytest.mark.parametrize("visible", ["7", "0,0"])
def test_a_variable_that_hides_every_gpu_is_the_reason(monkeypatch, tmp_path, visible):
    machine = smi(monkeypatch, tmp_path, "0, NVIDIA L4, 23034 MiB, 4, 16", 0, visible)
    assert machine.why_no_gpus == f"CUDA_VISIBLE_DEVICES='{visible}' shows none of 1 GPUs"


@pytest.mark.parametrize("visible", ["", "-1"])
def test_an_empty_variable_asks_for_cpus(monkeypatch, tmp_path, visible):
    machine = smi(monkeypatch, tmp_path, LOST, 15, visible)
    assert (machine.gpus, machine.why_no_gpus) == ((), None)


@pytest.mark.parametrize("is_there", [False, True])
def test_the_tools_alone_are_no_gpu(monkeypatch, tmp_path, is_there):
    monkeypatch.setattr(machine_module, "find_cards", lambda _: ("0000:1b:00.0",) * is_there)
    machine = smi(monkeypatch, tmp_path, "No devices were found", 6)
    assert (machine.why_no_gpus is not None) == is_there


def test_lines_that_are_no_gpu_are_the_reason_that_none_is_seen(monkeypatch, tmp_path):
    line = "0, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]"
    machine = smi(monkeypatch, tmp_path, line, 0)
    assert machine.why_no_gpus == f"nvidia-smi lists none that can be read: {line}"


def test_a_driver_that_does_not_know_a_field_is_asked_without_it(monkeypatch, tmp_path):
    script = 'case "$1" in *compute_cap*) exit 2;; *) echo "0, Tesla V100, 16160 MiB, 3, 16";; esac'
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = find_local_machine().gpus
    assert (gpu.name, gpu.compute_capability) == ("Tesla V100", None)


def test_gpus_that_are_seen_need_no_reason(monkeypatch, tmp_path):
    machine = smi(monkeypatch, tmp_path, "0, NVIDIA L4, 23034 MiB, 4, 16", 0, "0")
    assert (len(machine.gpus), machine.why_no_gpus) == (1, None)


def test_the_uuids_of_gpus_are_known_unless_one_is_lost(monkeypatch, tmp_path):
    smi(monkeypatch, tmp_path, "GPU-6a91\nGPU-6b13", 0)
    assert find_gpu_uuids() == ["GPU-6a91", "GPU-6b13"]
    smi(monkeypatch, tmp_path, LOST, 15)
    assert find_gpu_uuids() == []


def test_one_module_starts_nvidia_smi():
    source = Path(paceline.__file__).parent
    of_people = source / "render" / "scripts"  # they run where Paceline is not installed
    texts = {path: path.read_text("utf-8") for path in source.rglob("*.py")}
    naming = {
        str(path.relative_to(source))
        for path, text in texts.items()
        if '"nvidia-smi"' in text and of_people not in path.parents
    }
    assert naming == {"topology/probe.py"}
