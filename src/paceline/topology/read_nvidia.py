"""What `nvidia-smi` prints: the GPUs, and how each pair of them is joined."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

QUERY = ("index", "name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
"""Fields of `nvidia-smi --query-gpu=`, with `--format=csv,noheader`."""

QUERY_MORE = (*QUERY, "compute_cap", "mig.mode.current")
"""Fields of `QUERY`, and those that drivers before 510 do not know and refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpu:
    """One accelerator as its own tool reports it."""

    name: str
    memory_bytes: int | None
    """None where the tool does not say: cards that use their host's memory, as GB10 and Jetson."""

    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    compute_capability: str | None = None
    """CUDA's compute capability: `8.9`."""

    is_mig: bool = False
    """Whether it is cut into slices (MIG): `memory_bytes` is the whole card's then, and `name` ends
    in the slices' profile where they are all of one, `MIG 1g.10gb`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTopology:
    """How the GPUs and NICs of a node are joined."""

    gpus: tuple[str, ...]
    """As the tool numbers them: `GPU0`, ..."""

    between: Mapping[tuple[str, str], str]
    """Pair -> `NV18`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`, or on AMD `XGMI` or `PCIE`."""

    numa_nodes: Mapping[str, int]
    """GPU -> NUMA node, where it says so."""

    @property
    def cells(self) -> dict[tuple[str, str], str]:
        """The pairs of GPUs alone."""
        both = set(self.gpus)
        return {pair: cell for pair, cell in sorted(self.between.items()) if both.issuperset(pair)}

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """GPUs joined by NVLink or XGMI, each with those it reaches over such links."""
        left = list(self.gpus)
        found: list[tuple[str, ...]] = []
        while left:
            group = [left.pop(0)]
            for one in group:
                near = [o for o in left if self.between.get((one, o), "").startswith(_FAST)]
                group += near
                left = [other for other in left if other not in near]
            found.append(tuple(sorted(group, key=self.gpus.index)))
        return tuple(found)

    @property
    def num_links(self) -> int | None:
        """NVLinks of the best joined pair; None without any."""
        counts = [int(cell[2:]) for cell in self.between.values() if re.fullmatch(r"NV\d+", cell)]
        return max(counts, default=None)


_FAST = ("NV", "XGMI")


def read_gpu_query(text: str) -> tuple[FoundGpu, ...]:
    """The GPUs in the output of either query above, and of `nvidia-smi -L` after it where cards are
    cut into slices. Lines that are no GPU's are left out.

    >>> read_gpu_query("0, NVIDIA L4, 23034 MiB, 4, 16\\n")[0].memory_bytes
    24152899584
    >>> read_gpu_query("0, NVIDIA L4, 23034 MiB, 4, 16, 8.9\\n")[0].compute_capability
    '8.9'
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    slices = _slices(text)
    return tuple(
        _gpu(dict(zip(QUERY_MORE, row, strict=False)), slices.get(row[0], set()))
        for row in rows
        if row[0].isdecimal() and len(row) >= len(QUERY) and not row[1].startswith("[")
    )


def _slices(text: str) -> dict[str, set[str]]:
    """Index of a GPU -> the profiles of its slices, of `nvidia-smi -L`."""
    found: dict[str, set[str]] = {}
    index = ""
    for line in text.splitlines():
        if card := re.match(r"GPU (\d+):", line):
            index = card[1]
        elif part := re.match(r"\s*MIG (\S+)\s+Device\s+\d+:", line):
            found.setdefault(index, set()).add(part[1])
    return found


def _gpu(row: Mapping[str, str], slices: set[str]) -> FoundGpu:
    """A line of the query: a cell without a value is `[N/A]`, `[Not Supported]` or such."""
    memory = re.fullmatch(r"(\d+) MiB", row["memory.total"])
    capability = row.get("compute_cap", "")
    return FoundGpu(
        name=row["name"] + (f" MIG {min(slices)}" if len(slices) == 1 else ""),
        memory_bytes=int(memory[1]) * 2**20 if memory and int(memory[1]) else None,
        pcie_generation=whole(row["pcie.link.gen.max"]),
        pcie_lanes=whole(row["pcie.link.width.max"]),
        compute_capability=capability if re.fullmatch(r"\d+\.\d+", capability) else None,
        is_mig=row.get("mig.mode.current") == "Enabled",
    )


def read_topology(text: str) -> GpuTopology | None:
    """The matrix of `nvidia-smi topo -m`, cells apart by tabs or blanks; None if there is none."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    head = next(
        (i for i, line in enumerate(lines) if re.match(r"\s*GPU\d+\b.*Affinity", line)), None
    )
    if head is None:
        return None
    columns = lines[head].partition("CPU Affinity")[0].split()
    between: dict[tuple[str, str], str] = {}
    numa: dict[str, int] = {}
    for line in lines[head + 1 :]:
        cells = line.split()
        if len(cells) <= len(columns) or cells[0] not in columns:
            continue
        between |= {
            (cells[0], column): cell
            for column, cell in zip(columns, cells[1:], strict=False)
            if column != cells[0]
        }
        rest = cells[1 + len(columns) :]
        if len(rest) > 1 and rest[1].isdecimal():
            numa[cells[0]] = int(rest[1])
    return GpuTopology(
        gpus=tuple(name for name in columns if name.startswith("GPU")),
        between=between,
        numa_nodes=numa,
    )


def read_matrices(text: str) -> dict[str, GpuTopology]:
    """Node -> its matrix: of the tool's own print, or of each node of a recorded preflight."""
    try:
        nodes = json.loads(text)["nodes"]
        texts = {node["name"]: node["facts"]["gpu"]["topology"] for node in nodes if node["facts"]}
    except (ValueError, KeyError, TypeError):
        texts = {"": text}
    found = {node: read_topology(each) for node, each in texts.items()}
    return {node: topology for node, topology in found.items() if topology is not None}


def whole(text: object) -> int | None:
    """A whole number as a tool prints it; None for anything else."""
    word = str(text).strip()
    return int(word) if word.isdecimal() else None
