"""Several hosts: what differs between them, and the `cluster` section that fits all of them."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from paceline.catalog import Catalog
from paceline.errors import Problem
from paceline.topology.detect import WHERE, Detected, cluster_section, network_words
from paceline.units import format_bytes, significant


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that not all hosts have alike."""

    what: str
    hosts: Mapping[str, tuple[str, ...]]
    """Value -> the hosts that have it, the value of most hosts first."""


def differences(found: Mapping[str, Detected]) -> list[Difference]:
    """What differs between hosts; empty where all are alike."""
    listed = []
    for what, value_of in _COMPARED.items():
        hosts: dict[str, tuple[str, ...]] = {}
        for host, each in found.items():
            value = value_of(each)
            hosts[value] = (*hosts.get(value, ()), host)
        if len(hosts) > 1:
            most_first = sorted(hosts.items(), key=lambda item: -len(item[1]))
            listed.append(Difference(what=what, hosts=dict(most_first)))
    return listed


def section_of_hosts(
    found: Mapping[str, Detected], catalog: Catalog | None = None
) -> tuple[dict[str, object] | None, list[Problem]]:
    """The `cluster` section that every host can fill: the fewest accelerators, the least memory,
    the slowest network. None, with the reason, where their accelerators are of different kinds."""
    kinds = {
        each.accelerator or describe_accelerators(each).partition(" x ")[2]
        for each in found.values()
    }
    without = [host for host, each in found.items() if not each.gpus]
    if len(kinds) > 1 or (without and len(without) < len(found)):
        by_kind: dict[str, str] = {}
        for host, each in found.items():
            by_kind.setdefault(describe_accelerators(each), host)
        listed = ", ".join(f"{host} has {kind}" for kind, host in by_kind.items())
        problem = Problem(
            code="T005",
            what=f"the hosts have different accelerators: {listed}",
            where=WHERE,
            fix="name the hosts of one kind (--hosts)",
        )
        return None, [problem]
    hosts = list(found.values())
    fewest = min(len(host.gpus) for host in hosts)
    gpu_memories = [h.gpu_memory_bytes for h in hosts if h.gpu_memory_bytes is not None]
    memories = [h.memory_bytes for h in hosts if h.memory_bytes is not None]
    slowest = min(hosts, key=_network_rate)
    least = replace(
        slowest,
        gpus=slowest.gpus[:fewest],
        gpu_memory_bytes=min(gpu_memories, default=None),
        memory_bytes=min(memories, default=None),
    )
    section = cluster_section(least, catalog) | {"nodes": len(found)}
    network = network_words(slowest)
    return section | ({} if network is None or len(found) == 1 else {"network": network}), []


def _network_rate(found: Detected) -> float:
    links = found.network_ports or found.ethernet
    return sum(link.bytes_per_s or 0.0 for link in links)


def describe_accelerators(found: Detected) -> str:
    """`8 x NVIDIA H100 80GB HBM3`."""
    kinds = Counter(gpu.name for gpu in found.gpus)
    return ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "no accelerator"


def _links(found: Detected) -> str:
    if found.topology is None:
        return "unknown"
    cells = Counter(cell for (a, b), cell in found.topology.cells.items() if a < b)
    return ", ".join(f"{count} x {cell}" for cell, count in sorted(cells.items()))


def _ports(found: Detected) -> str:
    kinds = Counter(
        (port.kind, port.bytes_per_s, "" if port.is_active else " down") for port in found.ports
    )
    return (
        ", ".join(
            f"{count} x {kind} {format_rate(rate or 0.0)}{state}"
            for (kind, rate, state), count in sorted(kinds.items(), key=str)
        )
        or "none"
    )


def _ethernet(found: Detected) -> str:
    rates = [format_rate(each.bytes_per_s or 0.0) for each in found.ethernet]
    return f"{len(rates)} x {rates[0]}" if rates else "unknown rate"


def format_rate(bytes_per_s: float) -> str:
    """A link's rate as people write it.

    >>> format_rate(12.5e9)
    '100 Gb/s'
    """
    return f"{bytes_per_s * 8 / 1e9:g} Gb/s"


def _drives(found: Detected) -> str:
    kinds = Counter((drive.kind, format_bytes(drive.total_bytes)) for drive in found.drives)
    return ", ".join(f"{n} x {kind} {size}" for (kind, size), n in sorted(kinds.items())) or "none"


def _memory(found: Detected) -> str:
    """Alike machines differ by some MiB: the firmware keeps back what it needs."""
    return (
        "unknown"
        if found.memory_bytes is None
        else f"{significant(found.memory_bytes / 2**30, 2)} GiB"
    )


def _torch(found: Detected) -> str:
    return "none" if found.torch is None else found.torch.version


_COMPARED: Mapping[str, Callable[[Detected], str]] = {
    "accelerators": describe_accelerators,
    "accelerator memory": lambda found: (
        "unknown" if found.gpu_memory_bytes is None else format_bytes(found.gpu_memory_bytes)
    ),
    "links between accelerators": _links,
    "driver": lambda found: found.driver or "unknown",
    "CUDA of the driver": lambda found: found.cuda or "unknown",
    "ROCm": lambda found: found.rocm or "unknown",
    "PyTorch": _torch,
    "system": lambda found: found.system,
    "cpu": lambda found: "unknown" if found.cpu is None else str(found.cpu.model),
    "cores": lambda found: f"{found.num_cores:g}",
    "memory": _memory,
    "RDMA ports": _ports,
    "Ethernet": _ethernet,
    "disks": _drives,
}
"""What is compared, as it is shown."""
