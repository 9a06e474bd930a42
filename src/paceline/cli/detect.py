"""`paceline detect`: what this machine has."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import PathName, force_option, json_option
from paceline.cli.output_file import write_new
from paceline.report.table import format_table

if TYPE_CHECKING:
    from paceline.topology.detect import Detected
    from paceline.topology.read_nvidia import GpuTopology


@click.command()
@click.option(
    "--write",
    "write",
    metavar="FILE",
    type=PathName(path_type=Path),
    help="Write the `cluster:` section of a job file that says the same.",
)
@force_option
@click.option(
    "--file",
    "file",
    type=PathName(path_type=Path),
    help="Your own catalog file, for the names of accelerators.",
)
@json_option
def command(write: Path | None, force: bool, file: Path | None, as_json: bool) -> None:
    """Look at this machine: accelerators, how they are joined, RDMA ports, sockets, memory.

    Asks nvidia-smi or NVML, rocm-smi, /sys/class/infiniband, ibv_devices and lscpu, and on a Mac
    system_profiler. Nothing is changed and no other machine is asked. What was looked for and not
    found is listed with the reason.

    \b
    Examples:
      paceline detect
      paceline detect --json
      paceline detect --write cluster.yaml
    """
    from paceline.catalog import load_catalog
    from paceline.topology.detect import cluster_section, detect
    from paceline.topology.machine import find_local_machine, with_links
    from paceline.topology.probe import probe_machine

    catalog = load_catalog(file)
    found = detect(probe_machine(), with_links(find_local_machine()), catalog)
    section = cluster_section(found, catalog)
    if write is not None:
        write_new(write, _yaml(found, section), force=force)
        click.echo(f"wrote {write}; set nodes, and put it into the job file", err=True)
    if as_json:
        click.echo(json.dumps(_data(found, section), indent=2))
        return
    for line in format_detected(found):
        click.echo(line)
    if write is None:
        click.echo("")
        click.echo(_yaml(found, section), nl=False)
    for problem in found.problems:
        click.echo(str(problem), err=True)


def _data(found: "Detected", section: dict[str, object]) -> dict[str, Any]:
    data = asdict(found)
    topology = found.topology
    if topology is not None:
        data["topology"] = asdict(topology) | {
            "between": {f"{one} {other}": cell for (one, other), cell in topology.between.items()},
            "groups": topology.groups,
        }
    return data | {"cluster": section}


def _yaml(found: "Detected", section: dict[str, object]) -> str:
    import yaml

    lines = ["# Found by `paceline detect`. One machine; set nodes to how many there are.\n"]
    if found.problems:
        lines += [f"# {problem.what}: {problem.fix}.\n" for problem in found.problems]
    elif found.gpus and found.accelerator is None and found.mac is None:
        names = ", ".join(sorted({gpu.name for gpu in found.gpus}))
        lines.append(f"# Not in the catalog: {names}. `paceline catalog --write FILE` adds it.\n")
    if found.mac is not None and found.accelerator is not None:
        lines.append("# Paceline plans for this chip; training on it is for MLX, not for run.\n")
    text: str = yaml.safe_dump({"cluster": section}, sort_keys=False)
    return "".join(lines) + text


def format_detected(found: "Detected") -> Iterator[str]:
    """The lines for people."""
    from paceline.units import format_bytes

    rows = [("accelerators", text) for text in _accelerators(found)]
    if found.topology is not None and len(found.gpus) > 1:
        rows += [("joined by", text) for text in _joined(found.topology)]
    rows += [("network", text) for text in _network(found)]
    if found.mac is not None:
        rows += [("thunderbolt", text) for text in _thunderbolt(found)]
    cores = f"{found.num_cores:g} cores, {format_bytes(found.memory_bytes)} memory"
    if found.cpu is not None and found.cpu.num_sockets is not None:
        numa = len(found.cpu.numa_nodes)
        cores += f"; {found.cpu.model}, {found.cpu.num_sockets} socket(s), {numa} NUMA node(s)"
    rows.append(("cpu", cores))
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


def _accelerators(found: "Detected") -> Iterator[str]:
    from paceline.units import format_bytes

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


def _joined(topology: "GpuTopology") -> Iterator[str]:
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
        yield f"{_PATHS.get(cell, cell)}: {pairs} pair(s)"
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


def _network(found: "Detected") -> Iterator[str]:
    kinds = Counter((port.kind, port.bytes_per_s, port.is_active) for port in found.ports)
    for (kind, rate, active), count in kinds.items():
        shown = "unknown rate" if rate is None else f"{rate * 8 / 1e9:g} Gb/s"
        yield f"{count} x {kind} port, {shown}{'' if active else ', down'}"
    if not found.ports:
        names = ", ".join(found.rdma_devices)
        yield f"RDMA devices {names}" if names else "no RDMA NIC"


def _thunderbolt(found: "Detected") -> Iterator[str]:
    assert found.mac is not None
    for port in found.mac.ports:
        rate = port.bytes_per_s
        speed = "unknown rate" if rate is None else f"{rate * 8 / 1e9:g} Gb/s"
        if port.peer is not None:
            what = f"{speed} to {port.peer}"
        elif port.is_connected:
            what = f"{speed} to a device"
        else:
            what = f"nothing connected, up to {speed}"
        yield f"port {port.number}: {what}"
