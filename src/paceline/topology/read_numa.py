"""What `lscpu` says: sockets, cores and NUMA nodes."""

import re
from dataclasses import dataclass

from paceline.topology.read_nvidia import whole


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLayout:
    """Sockets and NUMA nodes of a machine. None where it does not say."""

    model: str | None
    num_sockets: int | None
    num_cores: int | None
    """Physical cores of all sockets."""

    numa_nodes: tuple[str, ...]
    """The CPUs of each NUMA node, such as `0-47,96-143`."""


def read_lscpu(text: str) -> CpuLayout | None:
    """The layout in the output of `lscpu` in English; None when it is none.

    >>> read_lscpu("Socket(s): 2\\nCore(s) per socket: 48\\n").num_cores
    96
    """
    rows = (line.partition(":") for line in text.splitlines())
    values = {key.strip(): value.strip() for key, found, value in rows if found}
    sockets, cores = whole(values.get("Socket(s)")), whole(values.get("Core(s) per socket"))
    if sockets is None and "Model name" not in values:
        return None
    nodes = [
        (int(match[1]), value)
        for key, value in values.items()
        if (match := re.fullmatch(r"NUMA node(\d+) CPU\(s\)", key))
    ]
    return CpuLayout(
        model=values.get("Model name"),
        num_sockets=sockets,
        num_cores=sockets * cores if sockets is not None and cores is not None else None,
        numa_nodes=tuple(value for _, value in sorted(nodes)),
    )
