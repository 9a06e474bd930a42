"""What a machine says of itself, and the `cluster` section of a job that says so.

Not covered: several machines, see `detect_hosts.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.catalog import Catalog, accelerator_named, built_in_catalog, catalog_name
from paceline.errors import Problem
from paceline.topology.cards import (
    different_gpus,
    memory_of_gpus,
    memory_problem,
    unseen_gpus,
)
from paceline.topology.machine import read_meminfo, visible_gpus, visible_part
from paceline.topology.node.facts import (
    Drive,
    FolderFacts,
    Interface,
    Mounted,
    NodeFacts,
    TorchBuild,
)
from paceline.topology.node.read_state import read_cuda_of_driver, read_driver
from paceline.topology.probe import Look
from paceline.topology.read_amd import read_rocm_json, read_rocm_table, read_rocm_topology
from paceline.topology.read_mac import Mac, read_system_profiler
from paceline.topology.read_numa import CpuLayout, read_lscpu
from paceline.topology.read_nvidia import FoundGpu, GpuTopology, read_gpu_query, read_topology
from paceline.topology.read_rdma import (
    GpuDirect,
    RdmaPort,
    read_gpu_direct,
    read_ibv_devices,
    read_rdma_port,
)
from paceline.units import format_bytes

_NEAR = 0.03
"""Memory this near to the catalog's is the catalog's: drivers keep back a little."""

WHERE = "paceline detect"

_WORDS = {
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "efa": "EFA",
    "omni-path": "Omni-Path",
    "unknown": "RDMA",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """One machine. Empty and None are what was not found; `looks` says why."""

    host: str
    system: str
    """`Linux 5.15.0-105-generic`."""

    gpus: tuple[FoundGpu, ...]
    accelerator: str | None
    """Name in the catalog, of GPUs that are all of one kind; None when it is not in there."""

    gpu_memory_bytes: int | None
    """Memory of the smallest GPU; None where neither its tool nor the catalog says."""

    driver: str | None
    """Version of the accelerators' driver."""

    cuda: str | None
    """Newest CUDA that the driver runs."""

    rocm: str | None
    torch: TorchBuild | None
    """The installed PyTorch, which was not imported."""

    topology: GpuTopology | None
    ports: tuple[RdmaPort, ...]
    gpu_direct: GpuDirect | None
    """GPUDirect RDMA; None where nothing tells."""

    rdma_devices: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    """Network interfaces, the loopback left out."""

    cpu: CpuLayout | None
    mac: Mac | None
    num_cores: float
    """Physical cores that this process may use."""

    memory_bytes: int | None
    """Memory of the machine, or the limit of the process's group."""

    drives: tuple[Drive, ...]
    mounts: tuple[Mounted, ...]
    folders: tuple[FolderFacts, ...]
    """Those that were asked about; runs are written to the first."""

    problems: tuple[Problem, ...]
    looks: tuple[Look, ...]

    @property
    def network_ports(self) -> tuple[RdmaPort, ...]:
        """The active ports of the fastest kind there is: the others serve storage or people."""
        active = [port for port in self.ports if port.is_active and port.bytes_per_s]
        best = max((port.bytes_per_s or 0.0 for port in active), default=0.0)
        same = [port for port in active if port.bytes_per_s == best]
        return tuple(port for port in same if port.kind == same[0].kind)

    @property
    def ethernet(self) -> tuple[Interface, ...]:
        """The fastest interfaces that are up, have an address and state their rate."""
        usable = [each for each in self.interfaces if each.is_up and each.addresses]
        best = max((each.bytes_per_s or 0.0 for each in usable), default=0.0)
        return tuple(each for each in usable if best and each.bytes_per_s == best)


def detect(facts: NodeFacts, catalog: Catalog | None = None) -> Detected:
    """What a machine's facts come to.

    Args:
        facts: As `probe_node` finds them.
        catalog: For the names; the built-in one when left out.
    """
    catalog = catalog or built_in_catalog()
    texts = facts.gpu
    mac = read_system_profiler(facts.mac.profile) if facts.mac is not None else None
    gpus = read_gpu_query(texts.query)
    topology = read_topology(texts.topology)
    if not gpus:
        gpus = read_rocm_json(texts.rocm) or read_rocm_table(texts.rocm)
        topology = read_rocm_topology(texts.rocm_topology)
    gpus = visible_gpus(gpus, texts.visible)
    topology = visible_part(topology, gpus, texts.visible)
    if not gpus and mac is not None and mac.memory_bytes is not None:
        gpus = (FoundGpu(name=mac.chip, memory_bytes=mac.memory_bytes),)
    different = different_gpus(gpus, WHERE)
    accelerator = catalog_name(gpus[0].name, catalog) if gpus and different is None else None
    known = accelerator_named(accelerator or "", catalog.accelerators)
    host_bytes = _memory(facts, mac)
    memory = memory_of_gpus(gpus, known, host_bytes or 0) or None
    problems = [] if different is None else [different]
    if not gpus and texts.why_none is not None:
        problems.append(unseen_gpus(texts.why_none, WHERE, "set cluster.accelerator to cpu"))
    if gpus and memory is None and not problems:
        problems.append(memory_problem(gpus, "cluster.memory"))
    return Detected(
        host=facts.host,
        system=f"{facts.system} {facts.kernel}".strip(),
        gpus=gpus,
        accelerator=accelerator,
        gpu_memory_bytes=memory,
        driver=read_driver(texts),
        cuda=read_cuda_of_driver(texts.head),
        rocm=texts.rocm_version or None,
        torch=facts.torch_build,
        topology=topology,
        ports=tuple(map(read_rdma_port, facts.rdma.ports)),
        gpu_direct=read_gpu_direct(facts),
        rdma_devices=_rdma_devices(facts),
        interfaces=tuple(each for each in facts.interfaces if not each.is_loopback),
        cpu=read_lscpu(facts.lscpu),
        mac=mac,
        num_cores=facts.num_cores or facts.num_cpus or 1,
        memory_bytes=host_bytes,
        drives=facts.drives,
        mounts=facts.mounts,
        folders=facts.folders,
        problems=tuple(problems),
        looks=facts.looks,
    )


def _memory(facts: NodeFacts, mac: Mac | None) -> int | None:
    if not facts.meminfo:
        return None if mac is None else mac.memory_bytes
    total, _ = read_meminfo(facts.meminfo)
    return min(total, facts.memory_limit_bytes or total)


def _rdma_devices(facts: NodeFacts) -> tuple[str, ...]:
    if facts.mac is not None:
        return read_ibv_devices(facts.mac.ibv_devices)
    return tuple(dict.fromkeys(port.device for port in facts.rdma.ports))


def cluster_section(found: Detected, catalog: Catalog | None = None) -> dict[str, object]:
    """The `cluster` section of a job for this one machine, only what is known.

    `memory` is given where it is not the catalog's, `network` where ports were found.
    """
    catalog = catalog or built_in_catalog()
    if not found.gpus or (found.accelerator is None and found.mac is not None):
        section: dict[str, object] = {"accelerator": "cpu", "nodes": 1}
        told = found.memory_bytes
        return section | ({} if told is None else {"memory": _size(told)})
    section = {
        "accelerator": found.accelerator or "auto",
        "nodes": 1,
        "per_node": len(found.gpus),
    }
    if any(gpu.is_mig for gpu in found.gpus):
        section["per_node"] = 1  # a CUDA process sees one slice
    least = found.gpu_memory_bytes
    known = accelerator_named(found.accelerator or "", catalog.accelerators)
    usual = known.memory_bytes if known is not None else None
    if least is not None and (usual is None or abs(least - usual) > _NEAR * usual):
        section["memory"] = _size(least)
    network = network_words(found)
    return section | ({} if network is None else {"network": network})


def network_words(found: Detected) -> str | None:
    """A node's network, as `cluster.network` takes it; None where no rate is known."""
    links: Sequence[RdmaPort | Interface] = found.network_ports or found.ethernet
    if not links:
        return None
    gigabits = (links[0].bytes_per_s or 0.0) * 8 / 1e9
    count = f"{len(links)}x" if len(links) > 1 else ""
    kind = _WORDS[links[0].kind] if isinstance(links[0], RdmaPort) else "Ethernet"
    return f"{count}{gigabits:g}Gb/s {kind}"


def _size(num_bytes: int) -> str:
    """Exact where a whole number of MiB is: `81559 MiB`, `16 GiB`."""
    if num_bytes % 2**30 == 0:
        return f"{num_bytes // 2**30} GiB"
    return f"{num_bytes // 2**20} MiB" if num_bytes >= 2**20 else format_bytes(num_bytes)
