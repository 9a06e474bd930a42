"""What the accelerators' tools and the kernel print. One slow tool does not hold the others.

A tool that hangs, as `nvidia-smi` does on a GPU that fell off the bus, is given up with a reason.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

from paceline.topology.machine import find_gpus
from paceline.topology.node import read_state
from paceline.topology.node.facts import GpuTexts
from paceline.topology.probe import (
    NVIDIA_SMI,
    NVIDIA_TOPOLOGY,
    PCI,
    Look,
    find_cards,
    nvidia_query,
    run_tool,
    text_of,
)
from paceline.topology.read_amd import TOPOLOGY

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


def probe_gpus(looks: list[Look]) -> GpuTexts:
    """Everything that is asked of accelerators; nothing is changed."""
    commands: dict[str, list[str]] = {}
    if which(NVIDIA_SMI):
        commands = {
            "state": nvidia_query(*read_state.STATE),
            "errors": nvidia_query(*read_state.ERRORS),
            "fabric": nvidia_query(*read_state.FABRIC),
            "rows": nvidia_query(*read_state.ROWS, read_state.ROWS_FAILED, of="remapped-rows"),
            "head": [NVIDIA_SMI],
            "topology": NVIDIA_TOPOLOGY,
        }
    if which("rocm-smi"):
        commands |= {
            "rocm": ["rocm-smi", *read_state.ROCM, "--json"],
            "rocm_topology": ["rocm-smi", *TOPOLOGY],
        }
    if not commands:
        looks.append(Look(what="nvidia-smi, rocm-smi", found=False, why="neither is on PATH"))
    query_looks: list[Look] = []
    with ThreadPoolExecutor(1 + len(commands)) as pool:
        query = pool.submit(find_gpus, query_looks)
        asked = {name: pool.submit(_ask, command) for name, command in commands.items()}
        texts = {name: answer.result()[0] for name, answer in asked.items()}
        looks += [look for answer in asked.values() for look in answer.result()[1]]
        lines, _, why_none = query.result()
    looks += [] if "head" not in commands and why_none is None and not lines else query_looks
    if "rocm" in commands and not texts["rocm"]:  # older releases print no JSON
        texts["rocm"] = run_tool(["rocm-smi", *read_state.ROCM], looks)
    listed = list_gpus()
    return GpuTexts(
        **texts,
        query=lines,
        why_none=why_none,
        rocm_version=text_of("/opt/rocm/.info/version"),
        kernel_driver=listed.kernel_driver,
        device_files=listed.device_files,
        on_bus=find_cards(PCI),
        uuids=listed.uuids,
        visible=listed.visible,
    )


def list_gpus() -> GpuTexts:
    """What the kernel and the environment say of accelerators; no tool is asked."""
    return GpuTexts(
        kernel_driver=next((text for path in _DRIVERS if (text := text_of(path))), ""),
        device_files=_device_files(),
        uuids=find_uuids(_NVIDIA),
        visible=visible_devices(),
    )


def find_uuids(folder: Path) -> tuple[str, ...]:
    """UUIDs of the GPUs in the driver's folder, one file a GPU; empty where one has none."""
    texts = [text_of(path) for path in sorted(folder.glob("*/information"))]
    found = [re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", text, re.M) for text in texts]
    return tuple(each[1] for each in found if each) if all(found) else ()


def visible_devices() -> str | None:
    """The variable that says which accelerators this process may use; None when none is set."""
    return next((os.environ[name] for name in _VISIBLE if name in os.environ), None)


def read_kernel_log(looks: list[Look]) -> str | None:
    """Lines of the kernel's log about hardware; None where this user may not read it.

    journalctl says nothing, and ends well, where it may not: a log without a line is none.
    """
    for command in (["dmesg", "-T"], ["journalctl", "-k", "-b", "--no-pager", "-q"]):
        text = run_tool(command, looks)
        if text.strip():
            lines = [line for line in text.splitlines() if read_state.KERNEL_LINES.search(line)]
            return "\n".join(lines[-_MOST_LINES:])
    return None


_MOST_LINES = 400
"""Lines read from the end of the kernel's log: an NVLink error prints tens of lines. A guess."""


def _ask(command: list[str]) -> tuple[str, list[Look]]:
    looks: list[Look] = []
    return run_tool(command, looks), looks


def _device_files() -> tuple[str, ...]:
    found = [
        *Path("/dev").glob("nvidia[0-9]*"),
        *Path("/dev").glob("nvidia-nvswitch[0-9]*"),
        *Path("/dev").glob("kfd"),
    ]
    return tuple(sorted(str(path) for path in found))
