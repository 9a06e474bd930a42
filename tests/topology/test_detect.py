"""What the probes of a machine come to, from recordings."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from paceline.job import parse_job
from paceline.report.detect_text import format_detected
from paceline.topology import Machine, find_cluster
from paceline.topology.detect import Detected, cluster_section, detect
from paceline.topology.node.facts import (
    Disk,
    Drive,
    GpuTexts,
    Interface,
    MacTexts,
    Mounted,
    NodeFacts,
    Question,
    RdmaTexts,
)
from paceline.topology.node.probe import probe_node
from paceline.topology.probe import Look, PortText, query_gpus
from paceline.topology.read_nvidia import read_gpu_query

RECORDINGS = Path(__file__).parent / "recordings"
PREFLIGHT = Path(__file__).parents[1] / "preflight" / "recordings"
GIB = 2**30
HERE = Machine(
    num_cores=96,
    clock_hz=2e9,
    simd_bytes=64,
    has_bf16=True,
    memory_bytes=2048 * GIB,
    available_bytes=2000 * GIB,
    gpus=(),
)
LINUX = NodeFacts(
    host="node01",
    system="Linux",
    num_cores=96,
    meminfo=f"MemTotal: {2048 * 2**20} kB\nMemAvailable: {2000 * 2**20} kB\n",
)


def recording(name: str) -> str:
    return (RECORDINGS / name).read_text()


def with_gpus(query: str, visible: str | None = None, **texts: str) -> NodeFacts:
    return replace(LINUX, gpu=GpuTexts(query=recording(query), visible=visible, **texts))


def mac(profile: str) -> NodeFacts:
    return NodeFacts(host="studio", system="Darwin", mac=MacTexts(profile=profile))


def ports(count: int, *, rate: int = 400, layer: str = "InfiniBand", driver: str = "mlx5_core"):
    return tuple(
        PortText(
            device=f"mlx5_{index}",
            driver=driver,
            rate=f"{rate} Gb/sec (4X NDR)",
            link_layer=layer,
            state="4: ACTIVE",
        )
        for index in range(count)
    )


def h100_facts() -> NodeFacts:
    return replace(
        with_gpus(
            "query-8xh100.csv",
            topology=recording("topo-8xh100.txt"),
            state=(PREFLIGHT / "state-8xh100.csv").read_text(),
            head=(PREFLIGHT / "nvidia-smi-head.txt").read_text(),
        ),
        lscpu=recording("lscpu-2-sockets.txt"),
        rdma=RdmaTexts(ports=(*ports(8), *ports(2, rate=100, layer="Ethernet"))),
        interfaces=(
            Interface(name="lo", is_up=True, mtu=65536, addresses=("127.0.0.1",)),
            Interface(
                name="eth0",
                is_up=True,
                mtu=9000,
                addresses=("10.1.0.1",),
                bytes_per_s=12.5e9,
                driver="mlx5_core",
            ),
        ),
        drives=(Drive(name="nvme0n1", kind="NVMe", total_bytes=3_840_755_982_336, model="MZQL2"),),
        mounts=(
            Mounted(
                path="/local",
                kind="xfs",
                source="/dev/nvme0n1p1",
                disk=Disk(total_bytes=3 * 2**40, free_bytes=2 * 2**40),
            ),
            Mounted(path="/home", kind="nfs4", source="files:/home", disk=None),
        ),
    )


def h100_node() -> Detected:
    return detect(h100_facts())


def test_an_h100_node_is_a_section_with_its_compute_ports():
    found = h100_node()
    assert cluster_section(found) == {
        "accelerator": "H100-SXM",
        "nodes": 1,
        "per_node": 8,
        "network": "8x400Gb/s InfiniBand",
    }
    shown = "\n".join(format_detected(found))
    assert "8 x NVIDIA H100 80GB HBM3, 79.6 GiB each (H100-SXM in the catalog)" in shown
    assert "NVLink, 18 links a pair: GPU0 to GPU7, 8 GPUs" in shown
    assert "2 x roce port, 100 Gb/s" in shown


def test_the_section_is_read_back_to_the_same_cluster():
    text = yaml.safe_dump(
        {
            "model": {"preset": "tiny"},
            "data": {"path": "x"},
            "train": {"global_batch": 8, "steps": 1},
            "cluster": cluster_section(h100_node()),
        }
    )
    job = parse_job(text, source="job.yaml", folder=Path("/nowhere"))
    cluster = find_cluster(job.spec.cluster, job, HERE)
    assert cluster.name == "1 node x 8 H100-SXM"
    assert cluster.network_bytes_per_s == 400e9


def test_s4_4_efa_is_told_from_infiniband():
    rdma = RdmaTexts(ports=ports(32, rate=100, layer="Unknown", driver="efa"))
    found = detect(replace(with_gpus("query-8xh100.csv"), rdma=rdma))
    assert cluster_section(found)["network"] == "32x100Gb/s EFA"


KERNEL = "NVRM version: NVIDIA UNIX {}Kernel Module for x86_64  550.54.15  Release Build"


@pytest.mark.parametrize(
    ("modules", "kernel", "driver", "is_there", "words"),
    [
        (("nvidia_peermem",), "", "mlx5_core", True, " GPUDirect RDMA: module nvidia_peermem"),
        ((), "Open ", "mlx5_core", True, " GPUDirect RDMA: the open kernel module, which has dma"),
        (("ib_uverbs",), "", "mlx5_core", False, "no GPUDirect RDMA: nvidia_peermem is not loaded"),
        (("nvidia_peermem",), "", "efa", None, " GPUDirect RDMA: unknown"),
    ],
)
def test_s4_4_detect_says_whether_nics_reach_the_gpus_memory(
    modules, kernel, driver, is_there, words
):
    facts = with_gpus("query-8xh100.csv", kernel_driver=KERNEL.format(kernel))
    found = detect(replace(facts, rdma=RdmaTexts(ports=ports(8, driver=driver), modules=modules)))
    assert (found.gpu_direct and found.gpu_direct.is_there) is is_there
    assert words in "\n".join(format_detected(found))
    assert detect(facts).gpu_direct.why == "no active RDMA port"
    assert detect(LINUX).gpu_direct is None


def test_amd_gpus_are_found_where_there_are_no_nvidia_ones():
    texts = GpuTexts(
        rocm=recording("rocm-8xmi300x.json"), rocm_topology=recording("rocm-topo-8xmi300x.txt")
    )
    found = detect(replace(LINUX, gpu=texts))
    assert found.accelerator == "MI300X"
    assert cluster_section(found) == {"accelerator": "MI300X", "nodes": 1, "per_node": 8}
    assert "XGMI: GPU0 to GPU7, 8 GPUs" in "\n".join(format_detected(found))


def test_a_mac_with_a_chip_of_the_catalog_is_that_accelerator():
    found = detect(mac(recording("mac-studio-m3-ultra.json")))
    assert cluster_section(found) == {"accelerator": "M3-Ultra", "nodes": 1, "per_node": 1}
    assert "port 2: 80 Gb/s to MacBook Pro" in "\n".join(format_detected(found))


def test_a_mac_with_less_memory_than_the_largest_says_so():
    text = recording("mac-studio-m3-ultra.json").replace("512 GB", "96 GB")
    section = cluster_section(detect(mac(text)))
    assert section["memory"] == "96 GiB"


def test_a_mac_that_the_catalog_lacks_is_a_cpu():
    assert cluster_section(detect(mac(recording("macbook-m2.json"))))["accelerator"] == "cpu"


def test_different_gpus_are_a_problem_that_is_said():
    found = detect(with_gpus("query-mixed.csv"))
    (problem,) = found.problems
    assert problem.code == "T003"
    assert "1 NVIDIA GeForce RTX 3090, 1 NVIDIA GeForce RTX 4090" in problem.what


def test_the_gpus_that_cuda_may_see_are_the_ones_that_count():
    found = detect(with_gpus("query-mixed.csv", visible="1"))
    assert found.problems == ()
    assert cluster_section(found) == {"accelerator": "RTX-4090", "nodes": 1, "per_node": 1}


def test_a_gpu_that_the_catalog_lacks_keeps_its_name_and_memory():
    found = detect(replace(LINUX, gpu=GpuTexts(rocm=recording("rocm-rx7900xt.json"))))
    assert found.accelerator is None
    assert cluster_section(found)["memory"] == "20464 MiB"


def test_s4_4_a_machine_with_nothing_says_what_was_looked_for_and_why_it_is_missing():
    looks = (Look(what="rocm-smi", found=False, why="there is no `rocm-smi` on PATH"),)
    found = detect(replace(LINUX, looks=looks))
    shown = list(format_detected(found))
    assert shown[0].endswith("none")
    assert "  rocm-smi  there is no `rocm-smi` on PATH" in shown
    assert cluster_section(found)["accelerator"] == "cpu"


def fake(folder: Path, name: str, script: str) -> None:
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_a_tool_that_prints_is_kept_and_one_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake(
        tmp_path,
        "nvidia-smi",
        f'case "$1" in topo) /bin/cat {RECORDINGS}/topo-8xh100.txt;; '
        f"*) /bin/cat {RECORDINGS}/query-8xh100.csv;; esac",
    )
    fake(tmp_path, "rocm-smi", "echo no driver >&2; exit 2")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    facts = probe_node(Question())
    assert detect(facts).accelerator == "H100-SXM"
    assert detect(facts).topology is not None
    (why,) = {look.why for look in facts.looks if look.what.endswith("--json")}
    assert why == "exit code 2: no driver"
    assert any(look.what == "lscpu" and not look.found for look in facts.looks)


@pytest.mark.parametrize(
    ("line", "section"),
    [
        (
            "0, NVIDIA GB10, [N/A], 1, 1, 12.1, [N/A]",
            {"accelerator": "GB10", "memory": "2048 GiB"},  # LINUX's, which it shares
        ),
        (
            "0, Orin (nvgpu), [N/A], [N/A], [N/A], 8.7",
            {"accelerator": "auto", "memory": "2048 GiB"},
        ),
        ("0, NVIDIA L4, [Not Supported], 4, 16", {"accelerator": "L4"}),
        ("0, GRID V100-8Q, [N/A], 3, 16", {"accelerator": "auto"}),
    ],
)
def test_a_card_whose_memory_nvidia_smi_does_not_say_is_seen(line: str, section: dict[str, str]):
    found = detect(replace(LINUX, gpu=GpuTexts(query=line)))
    assert cluster_section(found) == section | {"nodes": 1, "per_node": 1}
    is_known = found.gpu_memory_bytes is not None
    assert [problem.code for problem in found.problems] == ([] if is_known else ["T007"])
    if not is_known:
        assert "set cluster.memory" in found.problems[0].fix
    said = "2 TiB each, not reported" if "memory" in section else ""
    said = said or ("22.5 GiB each, not reported" if is_known else "unknown memory each")
    assert said in "\n".join(format_detected(found))


def test_gpus_that_cannot_be_seen_are_a_problem_and_not_a_machine_without_any():
    texts = GpuTexts(why_none="nvidia-smi: exit code 15: GPU is lost")
    (problem,) = detect(replace(LINUX, gpu=texts)).problems
    assert problem.code == "T006"
    assert "GPU is lost" in problem.what


def test_a_card_without_a_memory_of_its_own_is_seen_through_nvml(monkeypatch: pytest.MonkeyPatch):
    class NVMLError(Exception):
        pass

    def refuse(handle: int) -> None:
        raise NVMLError("Not Supported")

    fake_nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA GB10",
        nvmlDeviceGetMemoryInfo=refuse,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda handle: 5,
        nvmlDeviceGetMaxPcieLinkWidth=refuse,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (12, 1),
        nvmlDeviceGetMigMode=refuse,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    monkeypatch.setenv("PATH", "")
    (gpu,) = read_gpu_query(query_gpus([]))
    assert (gpu.name, gpu.memory_bytes, gpu.compute_capability) == ("NVIDIA GB10", None, "12.1")
    assert (gpu.pcie_generation, gpu.pcie_lanes, gpu.is_mig) == (5, None, False)
