"""What the tools say of the state of accelerators: errors, heat, links, and the kernel's log.

Field names: `nvidia-smi --help-query-gpu` and `--help-query-remapped-rows`; driver 535 and newer
call `clocks_throttle_reasons` `clocks_event_reasons` and still take the old name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.topology.node.facts import GpuTexts
from paceline.topology.read_nvidia import whole

STATE = (
    *("index", "name", "pci.bus_id", "driver_version", "memory.total", "memory.used"),
    *("pcie.link.width.current", "pcie.link.width.max", "pcie.link.gen.max"),
    *("temperature.gpu", "mig.mode.current", "compute_mode"),
)
ERRORS = (
    *("index", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total"),
    *("retired_pages.pending", "clocks_throttle_reasons.active"),
)
FABRIC = ("index", "fabric.state", "fabric.status")
ROWS = ("gpu_bus_id", "remapped_rows.uncorrectable", "remapped_rows.pending")
ROWS_FAILED = "remapped_rows.failure"
ROCM = ("--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--showbus")

KERNEL_LINES = re.compile(
    r"NVRM|\bXid\b|nvidia-|nvswitch|SXid|amdgpu|EDAC|Machine [Cc]heck|\bMCE\b|[Hh]ardware [Ee]rror"
    r"|mlx5|AER:|Out of memory|oom-kill|I/O error|EXT4-fs error|nfs: server"
)
"""Lines of the kernel's log that are kept: hardware, and what ends processes."""

THROTTLES = {
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "software thermal slowdown",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "power brake",
}
"""Bits that say that something is wrong; idle, application clocks and the power cap are none.
Source: NVIDIA's nvml.h, nvmlClocksEventReason*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One accelerator. None is what its tool does not say."""

    index: int
    name: str
    bus: str = ""
    """PCI address, lower case, domain of four digits: `0000:1b:00.0`."""

    driver: str | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    lanes: int | None = None
    lanes_max: int | None = None
    temperature_c: int | None = None
    is_mig: bool = False
    compute_mode: str = ""
    ecc: str | None = None
    """`Enabled`, `Disabled`."""

    num_uncorrected: int | None = None
    """Uncorrectable ECC errors since the driver was loaded."""

    pages_pending: bool = False
    """Memory waits for a reset to be taken out of use."""

    rows_failed: bool = False
    throttles: tuple[str, ...] = ()
    fabric: str | None = None
    """`Completed`, `In Progress`; None where there is none."""


def read_gpu_states(
    state: str, errors: str = "", fabric: str = "", rows: str = ""
) -> tuple[GpuState, ...]:
    """The GPUs, from the texts of `nvidia-smi` with the fields above.

    >>> read_gpu_states("0, NVIDIA L4, 00000000:31:00.0, 550.54, 23034, 1, 16, 16, 4, 30, "
    ...                 "[N/A], Default")[0].bus
    '0000:31:00.0'
    """
    by_index = {row["index"]: row for row in _rows(errors, ERRORS)}
    fabrics = {row["index"]: row for row in _rows(fabric, FABRIC)}
    remapped = {_bus(row["gpu_bus_id"]): row for row in _rows(rows, (*ROWS, ROWS_FAILED))}
    return tuple(
        _gpu_state(row, by_index.get(row["index"], {}), fabrics.get(row["index"], {}), remapped)
        for row in _rows(state, STATE)
        if row["index"].isdecimal()
    )


def read_rocm_states(text: str) -> tuple[GpuState, ...]:
    """AMD's accelerators, from `rocm-smi` with `ROCM` and `--json`."""
    try:
        found: dict[str, Any] = json.loads(text[text.index("{") :])
    except ValueError:
        return ()
    cards = {key: each for key, each in found.items() if isinstance(each, dict)}
    driver = cards.get("system", {}).get("Driver version")
    numbered = sorted((int(key[4:]), key) for key in cards if re.fullmatch(r"card\d+", key))
    return tuple(
        GpuState(
            index=number,
            name=str(cards[key].get("Card Series") or cards[key].get("Card series") or "AMD GPU"),
            bus=_bus(str(cards[key].get("PCI Bus", ""))),
            driver=driver,
            memory_bytes=whole(cards[key].get("VRAM Total Memory (B)")),
            used_bytes=whole(cards[key].get("VRAM Total Used Memory (B)")),
        )
        for number, key in numbered
    )


def read_cuda_of_driver(head: str) -> str | None:
    """Newest CUDA that the driver runs, from the table of `nvidia-smi`.

    >>> read_cuda_of_driver("| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   "
    ...                     "CUDA Version: 12.4  |")
    '12.4'
    """
    found = re.search(r"CUDA Version:\s*([\d.]+)", head)
    return found[1] if found else None


def read_kernel_driver(text: str) -> tuple[str | None, bool]:
    """Version of NVIDIA's loaded kernel module, and whether it is the open one.

    >>> read_kernel_driver("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  "
    ...                    "Release Build")
    ('550.54.15', True)
    """
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return (found[1] if found else None), "Open Kernel Module" in text


def read_driver(texts: GpuTexts) -> str | None:
    """Version of the accelerators' driver, as their tool reports it, or else the kernel."""
    states = read_gpu_states(texts.state) or read_rocm_states(texts.rocm)
    told = sorted({state.driver for state in states if state.driver})
    return ", ".join(told) or read_kernel_driver(texts.kernel_driver)[0]


def read_xids(log: str) -> Iterator[tuple[int, str, str]]:
    """Each Xid of a kernel log: its number, the GPU's bus address, and the line."""
    for line in log.splitlines():
        found = re.search(r"Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)", line)
        if found:
            yield int(found[2]), _bus(found[1]), line.strip()


def acs_control(config: bytes) -> int | None:
    """ACS control register of a PCI bridge, from its configuration space; None if it has none.

    Source: PCI Express Base Specification, extended capability 0x000D; lspci prints it as ACSCtl.

    >>> acs_control(bytes(64)) is None
    True
    """
    offset = 0x100
    for _ in range(64):  # a chain that bites its tail
        if offset < 0x100 or offset + 8 > len(config):
            return None
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == 0x000D:
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset = header >> 20
    return None


def _gpu_state(
    row: Mapping[str, str],
    errors: Mapping[str, str],
    fabric: Mapping[str, str],
    remapped: Mapping[str, Mapping[str, str]],
) -> GpuState:
    bus = _bus(row["pci.bus_id"])
    rows = remapped.get(bus, {})
    mask = number_of_hex(errors.get("clocks_throttle_reasons.active", ""))
    return GpuState(
        index=int(row["index"]),
        name=row["name"],
        bus=bus,
        driver=row["driver_version"],
        memory_bytes=_mib(row["memory.total"]),
        used_bytes=_mib(row["memory.used"]),
        lanes=whole(row["pcie.link.width.current"]),
        lanes_max=whole(row["pcie.link.width.max"]),
        temperature_c=whole(row["temperature.gpu"]),
        is_mig=row["mig.mode.current"] == "Enabled",
        compute_mode=row["compute_mode"],
        ecc=_word(errors.get("ecc.mode.current", "")),
        num_uncorrected=whole(errors.get("ecc.errors.uncorrected.volatile.total", "")),
        pages_pending=_is_yes(errors.get("retired_pages.pending", ""))
        or _is_yes(rows.get("remapped_rows.pending", "")),
        rows_failed=_is_yes(rows.get(ROWS_FAILED, "")),
        throttles=tuple(word for bit, word in THROTTLES.items() if mask & bit),
        fabric=_word(fabric.get("fabric.state", "")),
    )


def _rows(text: str, fields: tuple[str, ...]) -> Iterator[dict[str, str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(fields):
            yield dict(zip(fields, cells, strict=True))


def _bus(text: str) -> str:
    """`00000000:1B:00.0` of nvidia-smi, `0000:1b:00` of the kernel: one form for both."""
    found = re.fullmatch(
        r"(?:0*([0-9a-f]{4}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.\d)?", text.strip().lower()
    )
    return f"{found[1] or '0000'}:{found[2]}:{found[3]}.0" if found else text.strip().lower()


def _mib(text: str) -> int | None:
    found = re.match(r"(\d+)", text)
    return int(found[1]) * 2**20 if found else None


def _word(text: str) -> str | None:
    bare = text.strip("[] ")
    return None if bare.lower() in ("", "n/a", "not supported", "not available") else bare


def _is_yes(text: str) -> bool:
    return text.strip().lower() in ("yes", "1", "true")


def number_of_hex(text: str) -> int:
    """A hexadecimal number; 0 where the text is none."""
    try:
        return int(text, 16)
    except ValueError:
        return 0
