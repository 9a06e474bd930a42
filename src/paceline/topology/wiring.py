"""How the accelerators of one node are joined, from the matrix that `nvidia-smi topo -m` prints.

The levels inside a node are then the machine's own: pairs of a bridge, cards without one, sockets.

Not covered: AMD, whose cards `paceline plan` takes from the catalog, and which PCIe switch two
cards share: each card is taken to have its own lanes up to the processor.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from math import isclose

from paceline.catalog import Accelerator, Catalog, Link
from paceline.catalog.link import Shape
from paceline.topology.levels import Level, level_of
from paceline.topology.read_nvidia import GpuTopology

_NVLINKS = {
    "7.0": (25e9, 6),
    "8.0": (25e9, 12),
    "8.6": (14.0625e9, 4),
    "9.0": (25e9, 18),
    "10.0": (50e9, 18),
    "10.3": (50e9, 18),
}
"""Compute capability -> rate of one NVLink in one direction, and how many a card has. Sources: the
V100, A100, H100 and B200 data sheets, the GA102 white paper."""

_USUAL_NVLINKS = (25e9, 18)
"""NVLinks of a compute capability that is not in the table: rate of each, and how many."""

_BETWEEN_SOCKETS_BYTES_PER_S = 16e9
"""Between the sockets of a node, one direction, for all its cards together: NCCL's constant for AMD
(src/graph/topo.h, AMD_BW); for Intel it has 10 (Skylake) to 40 (Emerald Rapids)."""


def levels_of_node(
    topology: GpuTopology,
    accelerator: Accelerator,
    catalog: Catalog,
    *,
    num_ranks: int,
    ranks_per_node: int,
    pcie: Link,
) -> tuple[Level, ...]:
    """The levels inside a node as its matrix shows them, innermost first.

    Ranks take the GPUs in their order, so only neighbours in it count as joined: bridges between
    0-2 and 1-3 join no block of consecutive ranks.

    Args:
        topology: The matrix, without GPUs that are hidden.
        catalog: For the rows of links.
        num_ranks: GPUs that are used, the first ones.
        ranks_per_node: Of them on each node; several nodes of one machine divide them.
        pcie: A card's own link to its host.
    """
    gpus = topology.gpus[:num_ranks]
    near = {gpu: group for group in topology.groups for gpu in group}

    def path(one: str, other: str) -> str:
        return topology.between.get((one, other), "")

    levels: list[Level] = []
    size = _block(gpus, ranks_per_node, lambda one, other: near[one] is near[other])
    if size > 1:
        inside = [gpus[start : start + size] for start in range(0, len(gpus), size)]
        link, seen = _nvlink(inside, path, accelerator, catalog)
        levels.append(replace(level_of("scale-up", size, link, "measured"), seen=seen))
    crosses = any(path(*pair) == "SYS" for pair in combinations(gpus, 2))
    socket = _block(gpus, ranks_per_node, lambda one, other: path(one, other) != "SYS")
    if crosses and size < socket < ranks_per_node and socket % size == 0:
        seen = _worst(path, gpus, socket, 1)
        levels.append(replace(level_of("socket", socket, pcie, "measured"), seen=seen))
    inner = levels[-1].size if levels else 1
    if inner < ranks_per_node:
        most = min(pcie.bytes_per_s, _BETWEEN_SOCKETS_BYTES_PER_S) if crosses else pcie.bytes_per_s
        rate = min(most, _BETWEEN_SOCKETS_BYTES_PER_S / inner) if crosses else most
        level = level_of("node", ranks_per_node, replace(pcie, bytes_per_s=rate), "measured")
        seen = _worst(path, gpus, ranks_per_node, inner)
        levels.append(replace(level, spare=most / rate, seen=seen))
    return tuple(levels)


def _block(gpus: Sequence[str], most: int, joined: Callable[[str, str], bool]) -> int:
    """Consecutive GPUs that are joined to each other in every block, as many as can be."""
    return next(
        size
        for size in range(most, 0, -1)
        if most % size == 0
        and all(
            joined(*pair)
            for start in range(0, len(gpus), size)
            for pair in combinations(gpus[start : start + size], 2)
        )
    )


_PATHS = ("", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Paths over PCIe as nvidia-smi names them, from near to far."""


def _worst(path: Callable[[str, str], str], gpus: Sequence[str], size: int, inner: int) -> str:
    """The longest path between two GPUs of one block that are in two of the blocks inside it."""
    return max(
        (
            path(gpus[one], gpus[other])
            for one, other in combinations(range(len(gpus)), 2)
            if one // size == other // size and one // inner != other // inner
        ),
        key=lambda cell: _PATHS.index(cell) if cell in _PATHS else 0,
    )


def _nvlink(
    blocks: Sequence[Sequence[str]],
    path: Callable[[str, str], str],
    accelerator: Accelerator,
    catalog: Catalog,
) -> tuple[Link, str]:
    """The NVLinks between GPUs of a block, and their cell. More than a card has to all others
    together go through a switch; else they are a link of each pair."""
    per_link, most = _NVLINKS.get(accelerator.compute_capability or "", _USUAL_NVLINKS)
    count = {
        (one, other): int(cell[2:]) if (cell := path(one, other))[2:].isdecimal() else 0
        for block in blocks
        for one in block
        for other in block
        if one != other
    }
    least = min(
        sum(count[gpu, other] for other in block if other != gpu)
        for block in blocks
        for gpu in block
    )
    pair = min(count.values())
    is_switch = least > most
    num_links = pair if is_switch else least
    peers = len(blocks[0]) - 1
    is_mesh = not is_switch and peers > 1 and pair > 0
    shape: Shape = "mesh" if is_mesh else "switch"
    wired = peers if is_mesh else 1
    seen = f"NV{pair}" if pair else "NVLink"
    rate = num_links * per_link
    own = catalog.links.get(accelerator.link or "")
    if own is not None and own.kind != "nvlink":
        own = None
    if own is not None and f"links.{own.name}" in catalog.changed:
        return own, seen
    rows = [link for link in catalog.links.values() if link.kind == "nvlink"]
    is_bridge = len(blocks[0]) == 2 and not is_switch
    row = min(
        rows,
        key=lambda link: (
            abs(link.bytes_per_s - rate),
            link is not own,
            ("bridge" in link.name) is not is_bridge,
        ),
    )
    if isclose(row.bytes_per_s, rate) and (row.shape, row.num_links) == (shape, wired):
        return row, seen
    return replace(
        row,
        bytes_per_s=rate,
        collective_share=None,
        all_reduce_share=None,
        all_to_all_share=None,
        pair_share=None,
        shape=shape,
        num_links=wired,
    ), seen
