"""What `/sys/class/infiniband` and `ibv_devices` say: NICs that move data without the CPU."""

import re
from dataclasses import dataclass
from typing import Literal

from paceline.topology.node.facts import NodeFacts
from paceline.topology.node.read_state import read_kernel_driver
from paceline.topology.probe import PortText
from paceline.units import parse_bytes_per_s

RdmaKind = Literal["infiniband", "roce", "efa", "omni-path", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of one NIC."""

    device: str
    kind: RdmaKind
    bytes_per_s: float | None
    """Its rate in one direction; None where it does not say."""

    is_active: bool


def read_rdma_port(port: PortText) -> RdmaPort:
    """One port from the words that its files hold.

    >>> read_rdma_port(PortText(device="mlx5_0", driver="mlx5_core", rate="400 Gb/sec (4X NDR)",
    ...                         link_layer="InfiniBand", state="4: ACTIVE")).bytes_per_s
    50000000000.0
    """
    match = re.match(r"([\d.]+) Gb/sec", port.rate.strip())
    return RdmaPort(
        device=port.device,
        kind=_kind(port.driver.strip(), port.link_layer.strip().lower()),
        bytes_per_s=parse_bytes_per_s(f"{match[1]}Gb/s") if match else None,
        is_active="ACTIVE" in port.state,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDirect:
    """Whether NICs read and write the memory of GPUs themselves (GPUDirect RDMA)."""

    is_there: bool
    why: str


def read_gpu_direct(facts: NodeFacts) -> GpuDirect | None:
    """GPUDirect RDMA by the peer-memory module, or by dma-buf of the open kernel module; None where
    the facts do not tell: without NVIDIA GPUs, and over EFA."""
    ports = [port for port in map(read_rdma_port, facts.rdma.ports) if port.is_active]
    if not (facts.gpu.query or facts.gpu.state) or any(port.kind == "efa" for port in ports):
        return None
    if not ports:
        return GpuDirect(is_there=False, why="no active RDMA port")
    modules = sorted({"nvidia_peermem", "nv_peer_mem"} & {*facts.rdma.modules})
    if modules:
        return GpuDirect(is_there=True, why=f"module {', '.join(modules)}")
    if read_kernel_driver(facts.gpu.kernel_driver)[1]:
        return GpuDirect(is_there=True, why="the open kernel module, which has dma-buf")
    return GpuDirect(is_there=False, why="nvidia_peermem is not loaded")


def _kind(driver: str, link_layer: str) -> RdmaKind:
    if driver == "efa":
        return "efa"
    if driver == "hfi1":
        return "omni-path"
    if link_layer == "infiniband":
        return "infiniband"
    return "roce" if link_layer == "ethernet" else "unknown"


def read_ibv_devices(text: str) -> tuple[str, ...]:
    """Names in the output of `ibv_devices`; on a Mac these are Thunderbolt ports with RDMA.

    >>> read_ibv_devices("    device\\t node GUID\\n    ------\\t ---\\n    rdma_en2\\t 00ab\\n")
    ('rdma_en2',)
    """
    rows = re.findall(r"^\s+(\S+)\s+[0-9a-f]{4,}\s*$", text, re.M)
    return tuple(name for name in rows if set(name) != {"-"})
