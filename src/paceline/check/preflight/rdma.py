"""NICs that move data without the CPU: are they up, and may the job use them."""

from collections.abc import Iterator, Mapping

from paceline.check.preflight.need import Need
from paceline.check.preflight.result import Result, failed, passed, warned
from paceline.topology.node.facts import NodeFacts
from paceline.topology.read_rdma import RdmaPort, read_gpu_direct, read_rdma_port
from paceline.units import counted

_NEAR = 0.95
"""Least share of the rate that the plan takes; rates are round numbers on both sides. A guess."""


def rdma_ports(facts: NodeFacts) -> tuple[RdmaPort, ...]:
    """Every port of a node."""
    return tuple(map(read_rdma_port, facts.rdma.ports))


def check_rdma(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """One node's ports, and what is needed beside them."""
    if need.num_nodes < 2 or need.backend != "nccl":
        return
    name = "rdma"
    ports = rdma_ports(facts)
    active = [port for port in ports if port.is_active]
    if not active:
        if not need.wants_rdma:
            yield passed(name, node, "no active port; the plan is for TCP")
            return
        down = f"{counted(len(ports), 'port')}, none ACTIVE" if ports else "no RDMA port at all"
        fix = (
            "ibstat names the port's state: cable, switch, subnet manager; in containers mount "
            "/dev/infiniband and ask for the NICs (rdma/...)"
        )
        said = f"{down}; the plan counts on RDMA"
        yield failed(name, node, said, id="ethernet-fallback", fix=fix)
        return
    yield from _usable(node, facts, active)
    yield from _rates(node, active, need)
    yield from _direct(node, facts)


def _usable(node: str, facts: NodeFacts, active: list[RdmaPort]) -> Iterator[Result]:
    name = "rdma"
    rates = sorted({_rate(port) for port in active})
    kinds = ", ".join(sorted({port.kind for port in active}))
    said = f"{counted(len(active), f'active {kinds} port')}, {', '.join(rates)} each"
    libraries = facts.rdma.libraries
    if not facts.rdma.device_files:
        fix = (
            "docker run --device=/dev/infiniband --cap-add=IPC_LOCK; in Kubernetes ask for rdma/..."
        )
        said = f"{said}, and there is no /dev/infiniband/uverbs*"
        yield failed(name, node, said, id="ethernet-fallback", fix=fix)
    elif "libibverbs" in libraries and libraries["libibverbs"] is None:
        fix = "apt-get install libibverbs1 rdma-core in the image"
        said = f"{said}, and libibverbs is not installed: NCCL falls back to TCP"
        yield failed(name, node, said, id="ethernet-fallback", fix=fix)
    elif _is_efa(active) and libraries.get("libnccl-net", "") is None:
        fix = "install aws-ofi-nccl (the EFA installer's), and put its lib on LD_LIBRARY_PATH"
        said = f"{said}, and NCCL's plugin for EFA (libnccl-net) is not found"
        yield failed(name, node, said, id="ethernet-fallback", fix=fix)
    elif len({port.kind for port in active}) > 1:
        fix = "NCCL_IB_HCA=^NAME leaves out those that are for storage"
        said = f"{said}: of different kinds"
        yield warned(name, node, said, id="ib-modify-qp-failed", fix=fix)
    else:
        yield passed(name, node, said)


def _rates(node: str, active: list[RdmaPort], need: Need) -> Iterator[Result]:
    """All ports together against what the plan takes for a node."""
    total = sum(port.bytes_per_s or 0.0 for port in active)
    expected = need.network_bytes_per_s
    if not total or expected is None or not need.wants_rdma:
        return
    said = f"{len(active)} ports, {total * 8 / 1e9:g} Gb/s in all"
    if total < _NEAR * expected:
        said = f"{said}; the plan takes {expected * 8 / 1e9:g} Gb/s for a node"
        ports = f"{len(active)}x{_rate(active[0]).replace(' ', '')}"
        fix = f"set cluster.network to {ports}, and plan again"
        yield warned("rdma-rate", node, said, id="slow-collectives", fix=fix)
    else:
        yield passed("rdma-rate", node, said)


def _direct(node: str, facts: NodeFacts) -> Iterator[Result]:
    name, found = "gpu-direct", read_gpu_direct(facts)
    if found is not None and found.is_there:
        yield passed(name, node, found.why)
    elif found is not None:
        fix = (
            "modprobe nvidia_peermem; echo nvidia_peermem > /etc/modules-load.d/nvidia-peermem.conf"
        )
        said = f"{found.why}: every byte goes through the host's memory"
        yield warned(name, node, said, id="gdr-peermem-missing", fix=fix)


def check_rdma_alike(nodes: Mapping[str, NodeFacts], need: Need) -> Iterator[Result]:
    """Check that every node has as many active ports of the same rate as the others."""
    if len(nodes) < 2 or need.backend != "nccl":
        return
    active = {
        node: [port for port in rdma_ports(facts) if port.is_active]
        for node, facts in nodes.items()
    }
    most = max((len(ports) for ports in active.values()), default=0)
    if most == 0:
        return
    best = max(port.bytes_per_s or 0.0 for ports in active.values() for port in ports)
    for node, ports in active.items():
        name = "rdma-alike"
        slow = [port for port in ports if (port.bytes_per_s or 0.0) < best]
        if len(ports) < most:
            said = f"{counted(len(ports), 'active port')}, another node has {most}"
            down = [port.device for port in rdma_ports(nodes[node]) if not port.is_active]
            said += f"; down: {', '.join(down)}" if down else ""
            fix = "ibstat; see to the cable or the switch port, or drain the node"
            yield failed(name, node, said, id="nccl-mixed-nic-counts", fix=fix)
        elif slow and len(slow) < len(ports):
            said = f"{', '.join(port.device for port in slow)} at {_rate(slow[0])}, others faster"
            fix = (
                "mlxlink -d DEVICE, ibdiagnet: the link was negotiated down; no harm if for storage"
            )
            yield warned(name, node, said, id="straggler-throttle", fix=fix)
        elif slow:
            said = f"{_rate(slow[0])}, another node has {best * 8 / 1e9:g} Gb/s"
            fix = "mlxlink -d DEVICE, ibdiagnet: the link was negotiated down; or drain the node"
            yield warned(name, node, said, id="straggler-throttle", fix=fix)
        else:
            yield passed(name, node, f"{counted(len(ports), 'active port')}, as on the others")


def _is_efa(ports: list[RdmaPort]) -> bool:
    return any(port.kind == "efa" for port in ports)


def _rate(port: RdmaPort) -> str:
    if port.bytes_per_s is None:
        return "unknown rate"
    return f"{port.bytes_per_s * 8 / 1e9:g} Gb/s"
