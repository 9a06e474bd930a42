"""What `paceline detect` found, for people: one machine, or several and what differs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from paceline.report.table import format_table
from paceline.topology.detect import Detected
from paceline.topology.detect_hosts import Difference, describe_accelerators, format_rate
from paceline.topology.node.facts import Disk, FolderFacts
from paceline.topology.read_nvidia import GpuTopology
from paceline.units import counted, format_bytes


def format_hosts(
    found: Mapping[str, Detected],
    silent: Mapping[str, str],
    unlike: Sequence[Difference],
    shared: Mapping[str, bool] | None,
) -> Iterator[str]:
    """A line for each host, and what differs between them.

    Args:
        found: Host -> what it has.
        silent: Host -> why it did not answer.
        shared: Host -> whether it sees this machine's folder of runs; None where that is unknown.
    """
    rows = [("HOST", "ACCELERATORS", "DRIVER", "CORES", "MEMORY")]
    for host, each in found.items():
        memory = "unknown" if each.memory_bytes is None else format_bytes(each.memory_bytes)
        row = (host, describe_accelerators(each), each.driver or "-", f"{each.num_cores:g}", memory)
        rows.append(row)
    rows += [(host, f"no answer: {why}", "", "", "") for host, why in silent.items()]
    yield from format_table(rows).splitlines()
    yield ""
    if unlike:
        yield "What differs"
    elif len(found) > 1:
        yield f"{counted(len(found), 'host')} are alike"
    for difference in unlike:
        for value, hosts in difference.hosts.items():
            yield f"  {difference.what}: {value} on {', '.join(hosts)}"
    folder = next((each.folders[0].path for each in found.values() if each.folders), "")
    apart = [host for host, sees in (shared or {}).items() if not sees]
    if apart:
        yield f"{folder} is not this machine's on {', '.join(apart)}: runs need a shared folder"
    elif shared:
        yield f"{folder} is shared by all hosts"


def format_detected(found: Detected) -> Iterator[str]:
    """The lines for people."""
    rows = [("accelerators", text) for text in _accelerators(found)]
    if found.topology is not None and len(found.gpus) > 1:
        rows += [("joined by", text) for text in _joined(found.topology)]
    if found.driver is not None:
        cuda = f", runs CUDA up to {found.cuda}" if found.cuda else ""
        rows.append(
            ("driver", found.driver + cuda + (f", ROCm {found.rocm}" if found.rocm else ""))
        )
    if found.torch is not None:
        built = (found.torch.cuda and f"CUDA {found.torch.cuda}") or (
            found.torch.hip and f"ROCm {found.torch.hip}"
        )
        rows.append(("torch", f"{found.torch.version}, for {built or 'CPUs'}"))
    rows += [("network", text) for text in _network(found)]
    rows += [("ethernet", text) for text in _ethernet(found)]
    if found.mac is not None:
        rows += [("thunderbolt", text) for text in _thunderbolt(found)]
    cores = f"{found.num_cores:g} cores"
    if found.memory_bytes is not None:
        cores += f", {format_bytes(found.memory_bytes)} memory"
    if found.cpu is not None and found.cpu.num_sockets is not None:
        cores += f"; {found.cpu.model}, {counted(found.cpu.num_sockets, 'socket')}"
        cores += f", {counted(len(found.cpu.numa_nodes), 'NUMA node')}"
    rows.append(("cpu", cores))
    rows += [("disks", text) for text in _drives(found)]
    rows += [("folders", _folder(folder)) for folder in found.folders]
    previous = ""
    for name, text in rows:
        yield f"{'' if name == previous else name:<13} {text}"
        previous = name
    missing = [look for look in found.looks if not look.found]
    if missing:
        yield ""
        yield "Looked for and not found"
        table = format_table([("", _cut(look.what), look.why) for look in missing])
        yield from table.splitlines()


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


_WIDEST = 40
"""Characters of a command in the list of what was not found; `--json` has all of it."""


def _accelerators(found: Detected) -> Iterator[str]:
    if not found.gpus:
        yield "none"
    kinds = Counter((gpu.name, gpu.memory_bytes) for gpu in found.gpus)
    for (name, memory), count in kinds.items():
        known = found.accelerator
        told = f"{known} in the catalog" if known else "not in the catalog"
        if len(kinds) > 1 and known is None:
            told = "not all of one kind"
        known_bytes = found.gpu_memory_bytes if memory is None else memory
        size = "unknown memory" if known_bytes is None else format_bytes(known_bytes)
        note = ", not reported" if memory is None and known_bytes is not None else ""
        yield f"{count} x {name}, {size} each{note} ({told})"


def _joined(topology: GpuTopology) -> Iterator[str]:
    groups = [group for group in topology.groups if len(group) > 1]
    links = topology.num_links
    kind = "XGMI" if links is None else f"NVLink, {links} links a pair"
    for group in groups:
        yield f"{kind}: {group[0]} to {group[-1]}, {len(group)} GPUs"
    cells = Counter(
        cell
        for (one, other), cell in topology.between.items()
        if one in topology.gpus and other in topology.gpus and one < other
        if not cell.startswith(("NV", "XGMI"))
    )
    for cell, pairs in cells.items():
        yield f"{_PATHS.get(cell, cell)}: {counted(pairs, 'pair')}"
    if topology.numa_nodes:
        nodes = Counter(topology.numa_nodes.values())
        shown = ", ".join(f"{count} on node {node}" for node, count in sorted(nodes.items()))
        yield f"NUMA: {shown}"


_PATHS = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, across host bridges of a NUMA node",
    "SYS": "PCIe, across sockets",
    "PCIE": "PCIe",
}


def _network(found: Detected) -> Iterator[str]:
    kinds = Counter((port.kind, port.bytes_per_s, port.is_active) for port in found.ports)
    for (kind, rate, active), count in kinds.items():
        shown = "unknown rate" if rate is None else format_rate(rate)
        yield f"{count} x {kind} port, {shown}{'' if active else ', down'}"
    if not found.ports:
        names = ", ".join(found.rdma_devices)
        yield f"RDMA devices {names}" if names else "no RDMA NIC"
    elif found.gpus:
        direct = found.gpu_direct
        no = "no " if direct is not None and not direct.is_there else ""
        yield f"{no}GPUDirect RDMA: {direct.why if direct is not None else 'unknown'}"


def _ethernet(found: Detected) -> Iterator[str]:
    for each in found.interfaces:
        if each.driver or each.addresses:
            rate = "unknown rate" if each.bytes_per_s is None else format_rate(each.bytes_per_s)
            state = "" if each.is_up else ", down"
            addresses = ", ".join(each.addresses) or "no address"
            yield f"{each.name}: {rate}{state}, {each.driver or 'no device'}, {addresses}"


def _drives(found: Detected) -> Iterator[str]:
    for drive in found.drives:
        model = f", {drive.model}" if drive.model else ""
        yield f"{drive.name}: {drive.kind}, {format_bytes(drive.total_bytes)}{model}"
    for each in found.mounts:
        yield f"{each.path}: {each.kind} on {each.source}, {_room(each.disk)}"


def _room(disk: Disk | None) -> str:
    if disk is None:
        return "does not answer"
    return f"{format_bytes(disk.free_bytes)} free of {format_bytes(disk.total_bytes)}"


def _folder(folder: FolderFacts) -> str:
    state = "writable" if folder.why_not is None else f"not writable: {folder.why_not}"
    there = "" if folder.nearest == folder.path else f" (no folder yet; nearest: {folder.nearest})"
    return f"{folder.path}{there}: {folder.kind or 'unknown type'}, {_room(folder.disk)}, {state}"


def _thunderbolt(found: Detected) -> Iterator[str]:
    assert found.mac is not None
    for port in found.mac.ports:
        rate = port.bytes_per_s
        speed = "unknown rate" if rate is None else format_rate(rate)
        if port.peer is not None:
            what = f"{speed} to {port.peer}"
        elif port.is_connected:
            what = f"{speed} to a device"
        else:
            what = f"nothing connected, up to {speed}"
        yield f"port {port.number}: {what}"
