"""What the probes of one machine come to, and the `cluster` section of a job that says so.

Leaves out: other machines. A cluster of several is this one's section with `nodes` set by hand.
"""

from collections import Counter
from dataclasses import dataclass

from paceline.catalog import Catalog, built_in_catalog
from paceline.errors import Problem
from paceline.topology.find import catalog_name, memory_of_gpus, memory_problem, unseen_gpus
from paceline.topology.machine import Machine
from paceline.topology.probe import Look, Probes
from paceline.topology.read_amd import read_rocm_json, read_rocm_table, read_rocm_topology
from paceline.topology.read_mac import Mac, read_system_profiler
from paceline.topology.read_numa import CpuLayout, read_lscpu
from paceline.topology.read_nvidia import FoundGpu, GpuTopology
from paceline.topology.read_rdma import RdmaPort, read_ibv_devices, read_rdma_port
from paceline.units import format_bytes

_NEAR = 0.03
"""Memory this near to the catalog's is the catalog's: drivers keep back a little."""

_WHERE = "paceline detect"

_WORDS = {
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "efa": "EFA",
    "omni-path": "Omni-Path",
    "unknown": "RDMA",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """This machine. Empty and None are what was not found; `looks` says why."""

    gpus: tuple[FoundGpu, ...]
    accelerator: str | None
    """Name in the catalog, of GPUs that are all of one kind; None when it is not in there."""

    gpu_memory_bytes: int | None
    """Of the smallest GPU; None where neither its tool nor the catalog says."""

    topology: GpuTopology | None
    ports: tuple[RdmaPort, ...]
    rdma_devices: tuple[str, ...]
    """As `ibv_devices` names them."""

    cpu: CpuLayout | None
    mac: Mac | None
    num_cores: float
    """Physical cores that this process may use."""

    memory_bytes: int
    """Of the machine, or the limit of the process's group."""

    problems: tuple[Problem, ...]
    looks: tuple[Look, ...]

    @property
    def network_ports(self) -> tuple[RdmaPort, ...]:
        """The active ports of the fastest kind there is: the others serve storage or people."""
        active = [port for port in self.ports if port.is_active and port.bytes_per_s]
        best = max((port.bytes_per_s or 0.0 for port in active), default=0.0)
        same = [port for port in active if port.bytes_per_s == best]
        return tuple(port for port in same if port.kind == same[0].kind)


def detect(probes: Probes, machine: Machine, catalog: Catalog | None = None) -> Detected:
    """What the probes come to.

    Args:
        probes: What the other tools printed.
        machine: Cores, memory and GPUs, as the planner counts them, `with_links`.
        catalog: For the names; the built-in one when left out.
    """
    catalog = catalog or built_in_catalog()
    mac = read_system_profiler(probes.system_profiler)
    gpus = machine.gpus
    topology = machine.topology
    if not gpus:
        gpus = read_rocm_json(probes.rocm_json) or read_rocm_table(probes.rocm_table)
        topology = read_rocm_topology(probes.rocm_topology)
    if not gpus and mac is not None and mac.memory_bytes is not None:
        gpus = (FoundGpu(name=mac.chip, memory_bytes=mac.memory_bytes),)
    kinds = Counter(gpu.name for gpu in gpus)
    accelerator = catalog_name(gpus[0].name, catalog) if len(kinds) == 1 else None
    known = catalog.accelerators[accelerator] if accelerator is not None else None
    memory = memory_of_gpus(gpus, known, machine.memory_bytes)
    problems = [_different(kinds)] if len(kinds) > 1 else []
    if not gpus and machine.why_no_gpus is not None:
        problems.append(unseen_gpus(machine.why_no_gpus, _WHERE, "set cluster.accelerator to cpu"))
    if gpus and memory is None and not problems:
        problems.append(memory_problem(gpus, "cluster.memory"))
    return Detected(
        gpus=gpus,
        accelerator=accelerator,
        gpu_memory_bytes=memory,
        topology=topology,
        ports=tuple(
            read_rdma_port(
                device=port.device,
                driver=port.driver,
                rate=port.rate,
                link_layer=port.link_layer,
                state=port.state,
            )
            for port in probes.ports
        ),
        rdma_devices=read_ibv_devices(probes.ibv_devices),
        cpu=read_lscpu(probes.lscpu),
        mac=mac,
        num_cores=machine.num_cores,
        memory_bytes=machine.memory_bytes,
        problems=tuple(problems),
        looks=(*machine.looks, *probes.looks),
    )


def _different(kinds: Counter[str]) -> Problem:
    listed = ", ".join(f"{count} {name}" for name, count in kinds.items())
    return Problem(
        code="T003",
        what=f"this machine has different GPUs: {listed}",
        where=_WHERE,
        fix="set CUDA_VISIBLE_DEVICES to the numbers of one kind",
    )


def cluster_section(found: Detected, catalog: Catalog | None = None) -> dict[str, object]:
    """The `cluster` section of a job for this one machine, only what is known.

    `memory` is given where it is not the catalog's, `network` where ports were found.
    """
    catalog = catalog or built_in_catalog()
    if not found.gpus or (found.accelerator is None and found.mac is not None):
        section: dict[str, object] = {"accelerator": "cpu", "nodes": 1}
        return section | {"memory": _size(found.memory_bytes)}
    section = {
        "accelerator": found.accelerator or "auto",
        "nodes": 1,
        "per_node": len(found.gpus),
    }
    least = found.gpu_memory_bytes
    known = catalog.accelerators[found.accelerator] if found.accelerator else None
    usual = known.memory_bytes if known is not None else None
    if least is not None and (usual is None or abs(least - usual) > _NEAR * usual):
        section["memory"] = _size(least)
    ports = found.network_ports
    if ports:
        gigabits = (ports[0].bytes_per_s or 0.0) * 8 / 1e9
        count = f"{len(ports)}x" if len(ports) > 1 else ""
        section["network"] = f"{count}{gigabits:g}Gb/s {_WORDS[ports[0].kind]}"
    return section


def _size(num_bytes: int) -> str:
    """Exact where a whole number of MiB is: `81559 MiB`, `16 GiB`."""
    if num_bytes % 2**30 == 0:
        return f"{num_bytes // 2**30} GiB"
    return f"{num_bytes // 2**20} MiB" if num_bytes >= 2**20 else format_bytes(num_bytes)
