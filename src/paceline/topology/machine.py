"""This machine: cores, clock, memory and GPUs. Probing is apart from reading what probes print.

Leaves out: sockets and NUMA, AMD and Apple accelerators; see `detect.py`.
"""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from shutil import which
from typing import TypeVar

from paceline.topology.probe import (
    NVIDIA_SMI,
    NVIDIA_TOPOLOGY,
    PCI,
    Look,
    find_cards,
    nvidia_query,
    query_gpus,
    run_tool,
    text_of,
)
from paceline.topology.read_nvidia import FoundGpu, GpuTopology, read_gpu_query, read_topology

_G = TypeVar("_G")
_SMI_NOTHING = (6, 9)
"""How nvidia-smi ends where it finds no GPU, and no driver. Source: its manual, RETURN VALUE."""
_NO_LIMIT = 2**60
"""cgroup v1 writes a number about this large for "no limit"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuInfo:
    """What /proc/cpuinfo says. None where it does not."""

    num_physical_cores: int | None
    clock_hz: float | None
    flags: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this process may use of the machine it runs on."""

    num_cores: float
    """Physical cores, after the affinity mask and the cgroup's quota."""

    clock_hz: float | None
    simd_bytes: int | None
    """Width of the widest vector instructions; None when unknown."""

    has_bf16: bool
    """Whether bf16 products have instructions of their own."""

    memory_bytes: int
    """Memory of the machine, or the cgroup's limit if smaller."""

    available_bytes: int
    """What of it was free, or could be freed, when looked at."""

    gpus: tuple[FoundGpu, ...]
    why_no_gpus: str | None = None
    """What keeps GPUs from being seen that are here, or may be; None on a machine without any."""

    looks: tuple[Look, ...] = ()
    """How the GPUs were looked for."""

    topology: GpuTopology | None = None
    """How those GPUs are joined; None where `with_links` was not asked, or the driver does not
    say."""


def find_local_machine() -> Machine:
    """Look at this machine. Takes milliseconds, or as long as `nvidia-smi` where there is one."""
    cpu = read_cpuinfo(text_of("/proc/cpuinfo"))
    memory, available = _memory()
    looks: list[Look] = []
    _, gpus, why_no_gpus = find_gpus(looks)
    return Machine(
        num_cores=find_num_cores(cpu),
        clock_hz=cpu.clock_hz,
        simd_bytes=simd_bytes(cpu.flags, platform.machine()),
        has_bf16=bool(cpu.flags & {"avx512_bf16", "amx_bf16", "bf16"}),
        memory_bytes=memory,
        available_bytes=available,
        gpus=gpus,
        why_no_gpus=why_no_gpus,
        looks=tuple(looks),
    )


def with_links(machine: Machine) -> Machine:
    """The machine with how its GPUs are joined, if there are several. `nvidia-smi topo -m` takes
    up to a second."""
    if len(machine.gpus) < 2:
        return machine
    looks: list[Look] = []
    topology = read_topology(run_tool(NVIDIA_TOPOLOGY, looks))
    topology = visible_part(topology, machine.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return replace(machine, topology=topology, looks=(*machine.looks, *looks))


def visible_part(
    topology: GpuTopology | None, gpus: Sequence[FoundGpu], visible: str | None
) -> GpuTopology | None:
    """The matrix of the GPUs that CUDA_VISIBLE_DEVICES leaves; None where it has others."""
    if topology is None:
        return None
    shown = visible_gpus(topology.gpus, visible)
    return replace(topology, gpus=shown) if 1 < len(shown) == len(gpus) else None


def find_gpu_uuids() -> list[str]:
    """The UUID of each of this machine's GPUs, in the order of the bus, hidden ones included;
    empty where nvidia-smi fails. Takes as long as it does."""
    return run_tool(nvidia_query("uuid"), []).split()


def read_cpuinfo(text: str) -> CpuInfo:
    """What /proc/cpuinfo says: hardware threads of one core count once.

    >>> read_cpuinfo("physical id : 0\\ncore id : 0\\ncpu MHz : 2600.0\\n").num_physical_cores
    1
    """
    cores: set[tuple[str, str]] = set()
    clocks: list[float] = []
    flags: frozenset[str] = frozenset()
    for entry in text.split("\n\n"):
        rows = (line.partition(":") for line in entry.splitlines())
        values = {key.strip(): value.strip() for key, _, value in rows}
        if "core id" in values:
            cores.add((values.get("physical id", "0"), values["core id"]))
        if "cpu MHz" in values:
            clocks.append(float(values["cpu MHz"]) * 1e6)
        listed = values.get("flags") or values.get("Features")
        flags = flags or frozenset((listed or "").split())
    return CpuInfo(
        num_physical_cores=len(cores) or None,
        clock_hz=max(clocks) if clocks else None,
        flags=flags,
    )


def simd_bytes(flags: frozenset[str], machine: str) -> int | None:
    """Width of the widest vector instructions of a CPU; None when unknown.

    >>> simd_bytes(frozenset({"sse2", "avx2"}), "x86_64")
    32
    """
    for flag, width in (("avx512f", 64), ("avx2", 32), ("avx", 32), ("sse2", 16)):
        if flag in flags:
            return width
    return 16 if machine in ("aarch64", "arm64") else None  # NEON, which every 64-bit Arm has


def read_meminfo(text: str) -> tuple[int, int]:
    """Total and available bytes of /proc/meminfo.

    >>> read_meminfo("MemTotal: 8 kB\\nMemFree: 2 kB\\nMemAvailable: 4 kB\\n")
    (8192, 4096)
    """
    found = {
        match[1]: int(match[2]) * 1024 for match in re.finditer(r"^(\w+):\s+(\d+) kB", text, re.M)
    }
    total = found["MemTotal"]
    return total, found.get("MemAvailable", found.get("MemFree", total))


def read_cgroup_bytes(text: str) -> int | None:
    """A limit or a use in bytes; None for no limit (`max`, or v1's huge number) and no file.

    >>> read_cgroup_bytes("max\\n") is None
    True
    """
    text = text.strip()
    if not text.isdecimal() or int(text) >= _NO_LIMIT:
        return None
    return int(text)


def read_cpu_max(text: str) -> float | None:
    """CPUs that cgroup v2's `cpu.max` allows, or None for no limit.

    >>> read_cpu_max("150000 100000")
    1.5
    """
    match = re.fullmatch(r"(\d+) (\d+)", text.strip())
    return int(match[1]) / int(match[2]) if match else None


def visible_gpus(gpus: tuple[_G, ...], visible: str | None) -> tuple[_G, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; all of them when it is unset or names UUIDs.

    CUDA stops at the first number that is no GPU, and PyTorch sees none where one is named twice.

    >>> visible_gpus(("a", "b"), "1,-1,0")
    ('b',)
    """
    if visible is None:
        return gpus
    names = [part.strip() for part in visible.split(",") if part.strip()]
    if not all(name.lstrip("-").isdecimal() for name in names):
        return gpus
    if named_twice(visible) is not None:
        return ()
    chosen: list[_G] = []
    for name in names:
        if not 0 <= int(name) < len(gpus):
            break
        chosen.append(gpus[int(name)])
    return tuple(chosen)


def num_visible(num_gpus: int, visible: str | None, uuids: Sequence[str] = ()) -> int:
    """How many of a machine's GPUs PyTorch sees through CUDA_VISIBLE_DEVICES, UUIDs included.

    A UUID may be shortened. Where those of the machine are not known, each counts.

    >>> [num_visible(8, visible) for visible in ("0,1", "", "GPU-6a,GPU-6b", "0,0", None)]
    [2, 0, 2, 0, 8]
    >>> num_visible(2, "GPU-6a,GPU-7", ["GPU-6a91", "GPU-6b13"])
    1
    """
    if visible is None:
        return num_gpus
    if named_twice(visible) is not None:
        return 0
    names = [part for part in visible.split(",") if part.strip()]
    if not all(name.strip().lstrip("-").isdecimal() for name in names):
        counts_all = not uuids or any(name.strip().startswith("MIG-") for name in names)
        there = (counts_all or _is_one_of(name.strip(), uuids) for name in names)
        return min(num_gpus, len(list(takewhile(bool, there))))
    return len(visible_gpus((None,) * num_gpus, visible))


def _is_one_of(name: str, uuids: Sequence[str]) -> bool:
    return sum(uuid.startswith(name) for uuid in uuids) == 1


def named_twice(visible: str) -> str | None:
    """The first GPU that CUDA_VISIBLE_DEVICES names twice; None where each is named once.

    Source: torch.cuda._parse_visible_devices, "Repeated ordinal results in empty set".

    >>> named_twice("0,1,0")
    '0'
    """
    seen: set[str] = set()
    for name in (part.strip() for part in visible.split(",")):
        if name and name in seen:
            return name
        seen.add(name)
    return None


def find_num_cores(cpu: CpuInfo) -> float:
    """The least of physical cores, allowed CPUs and the cgroup's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    logical = allowed or os.cpu_count() or 1
    cores: float = min(cpu.num_physical_cores or logical, logical)
    quota = read_cpu_max(text_of("/sys/fs/cgroup/cpu.max")) or read_cpu_max(
        text_of("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        + " "
        + text_of("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    )
    return min(cores, quota) if quota else cores


def _memory() -> tuple[int, int]:
    text = text_of("/proc/meminfo")
    if text:
        total, available = read_meminfo(text)
    else:  # not Linux
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, use_file = memory_limit()
    if limit is not None and limit < total:
        used = read_cgroup_bytes(text_of(use_file)) or 0
        total, available = limit, min(available, max(0, limit - used))
    return total, available


def memory_limit() -> tuple[int | None, str]:
    """The limit of this process's group, of either kind of cgroup, and the file with what is used
    of it; None where there is none."""
    for limit_file, use_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit = read_cgroup_bytes(text_of(f"/sys/fs/cgroup/{limit_file}"))
        if limit is not None:
            return limit, f"/sys/fs/cgroup/{use_file}"
    return None, ""


def find_gpus(looks: list[Look]) -> tuple[str, tuple[FoundGpu, ...], str | None]:
    """The lines of NVIDIA's GPUs, those that PyTorch sees, and why there are none although there
    should be some."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):  # how one asks for CPUs
        return "", (), None
    text = query_gpus(looks)
    gpus = read_gpu_query(text)
    seen = visible_gpus(gpus, visible)
    if gpus and not seen:
        return text, (), f"CUDA_VISIBLE_DEVICES={visible!r} shows none of {len(gpus)} GPUs"
    if gpus:
        return text, seen, None
    if text:
        return "", (), f"nvidia-smi lists none that can be read: {text.splitlines()[0][:100]}"
    asked = [look for look in looks if look.what.startswith(NVIDIA_SMI)][-1]
    if which(NVIDIA_SMI) is None:
        files = sorted(Path("/dev").glob("nvidia[0-9]*"))
        why = f"{files[0]} exists, and nvidia-smi is not on PATH" if files else None
        return "", (), why
    if asked.code in _SMI_NOTHING and not find_cards(PCI):
        return "", (), None
    return "", (), f"nvidia-smi: {asked.why}"
