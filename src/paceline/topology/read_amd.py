"""What `rocm-smi` prints: the GPUs, and how each pair of them is joined."""

import json
import re
from typing import Any

from paceline.topology.read_nvidia import FoundGpu, GpuTopology

ARGUMENTS = ("--showproductname", "--showmeminfo", "vram")
TOPOLOGY = ("--showtopotype", "--showtoponuma")
_NAMES = ("Card Series", "Card series", "Product Name", "Device Name", "Card Model")
"""The key of the name changed between releases; the model number is the last resort."""

_BYTES = "VRAM Total Memory (B)"


def read_rocm_json(text: str) -> tuple[FoundGpu, ...]:
    """The GPUs in the output of `rocm-smi ARGUMENTS --json`, in the order of their numbers.

    >>> read_rocm_json('{"card0": {"VRAM Total Memory (B)": "8", "Card Series": "MI300X"}}')[0].name
    'MI300X'
    """
    try:
        cards: Any = json.loads(text[text.index("{") :])  # warnings may come before it
    except ValueError:
        return ()
    return tuple(
        gpu
        for _, values in sorted(
            ((int(key[4:]), values) for key, values in cards.items() if re.match(r"card\d+$", key)),
            key=lambda card: card[0],
        )
        if (gpu := _gpu(values)) is not None
    )


def read_rocm_table(text: str) -> tuple[FoundGpu, ...]:
    """Read GPUs from the table for people, which older releases print without `--json`."""
    cards: dict[int, dict[str, str]] = {}
    for row in re.finditer(r"^GPU\[(\d+)\]\s*: ([^:]+):\s*(.+?)\s*$", text, re.M):
        cards.setdefault(int(row[1]), {})[row[2].strip()] = row[3]
    return tuple(gpu for _, card in sorted(cards.items()) if (gpu := _gpu(card)) is not None)


def read_rocm_topology(text: str) -> GpuTopology | None:
    """`Link Type between two GPUs` of `rocm-smi TOPOLOGY`; None where there is none."""
    _, found, rest = text.partition("Link Type between two GPUs")
    if not found:
        return None
    rows: dict[str, list[str]] = {}
    for line in rest.partition("\n===")[0].splitlines():
        cells = line.split()
        if len(cells) > 1 and re.fullmatch(r"GPU\d+", cells[0]) and not cells[1].startswith("GPU"):
            rows[cells[0]] = cells[1:]
    numa = {
        f"GPU{row[1]}": int(row[2])
        for row in re.finditer(r"^GPU\[(\d+)\].*Numa Node: (\d+)", text, re.M)
    }
    return GpuTopology(
        gpus=tuple(rows),
        between={
            (one, other): cell
            for one, cells in rows.items()
            for other, cell in zip(rows, cells, strict=False)
            if one != other
        },
        numa_nodes=numa,
    )


def _gpu(card: Any) -> FoundGpu | None:
    if not isinstance(card, dict) or not str(card.get(_BYTES, "")).isdecimal():
        return None
    name = next((str(card[key]).strip() for key in _NAMES if card.get(key)), "AMD GPU")
    return FoundGpu(name=name, memory_bytes=int(card[_BYTES]))
