"""Run a tool that knows this machine, and keep what it prints. Reads nothing into it.

A tool takes at most a few seconds, changes nothing, and needs no rights. What was looked for
and not found is kept with the reason, so that a person can see why something is missing.
"""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

from paceline.topology.read_nvidia import QUERY, QUERY_MORE

SYSTEM_PROFILER = ["system_profiler", "SPHardwareDataType", "SPThunderboltDataType", "-json"]
"""The command that `read_mac` reads."""

NVIDIA_SMI = "nvidia-smi"
NVIDIA_TOPOLOGY = [NVIDIA_SMI, "topo", "-m"]

_TIMEOUT_S = 20
_INFINIBAND = Path("/sys/class/infiniband")
PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One thing that was looked for."""

    what: str
    """The command or the path."""

    found: bool
    why: str
    """What it gave, or why it gave nothing."""

    code: int | None = None
    """With which a command that failed ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortText:
    """The files of one port in `/sys/class/infiniband`, word for word."""

    device: str
    """Such as `mlx5_0`."""

    driver: str
    """Name of its kernel driver, such as `mlx5_core` or `efa`; empty when unknown."""

    rate: str
    """Such as `400 Gb/sec (4X NDR)`."""

    link_layer: str
    """`InfiniBand`, `Ethernet`, or for EFA `Unknown` or `Unspecified`."""

    state: str
    """Such as `4: ACTIVE`."""


def query_gpus(looks: list[Look]) -> str:
    """The lines of NVIDIA's GPUs, for `read_gpu_query`: from `nvidia-smi`, else from NVML. Where
    cards are cut into slices (MIG), those of `nvidia-smi -L` follow."""
    for fields in (QUERY_MORE, QUERY):
        if text := run_tool(nvidia_query(*fields, form="csv,noheader"), looks):
            is_cut = any(line.endswith("Enabled") for line in text.splitlines())
            return text + (run_tool([NVIDIA_SMI, "-L"], looks) if is_cut else "")
        if looks[-1].code != _NO_SUCH_FIELD:
            break
    return _nvml(looks)


_NO_SUCH_FIELD = 2
"""How nvidia-smi ends where it does not know a field. Source: its manual, RETURN VALUE: an argument
is invalid."""


def nvidia_query(*fields: str, of: str = "gpu", form: str = "csv,noheader,nounits") -> list[str]:
    """The command that prints these fields of each of NVIDIA's GPUs."""
    return [NVIDIA_SMI, f"--query-{of}={','.join(fields)}", f"--format={form}"]


def run_tool(command: list[str], looks: list[Look], *, timeout_s: float | None = None) -> str:
    """What the command prints; empty when it cannot, with the reason in `looks`."""
    limit_s = timeout_s or _TIMEOUT_S
    shown = " ".join(command)
    tool = which(command[0])
    if tool is None:
        looks.append(Look(what=shown, found=False, why=f"there is no `{command[0]}` on PATH"))
        return ""
    try:
        process = subprocess.Popen(
            [tool, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        looks.append(Look(what=shown, found=False, why=f"cannot be started: {error.strerror}"))
        return ""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        looks.append(Look(what=shown, found=False, why=f"no answer within {limit_s} s"))
        return ""
    if process.returncode != 0:
        said = (err or out).strip().splitlines()
        why = f"exit code {process.returncode}" + (f": {said[0][:100]}" if said else "")
        looks.append(Look(what=shown, found=False, why=why, code=process.returncode))
        return ""
    looks.append(Look(what=shown, found=bool(out.strip()), why=f"{len(out.splitlines())} lines"))
    return out


def _end(process: "subprocess.Popen[str]") -> None:
    """Kill it and what it started. One that waits for a lost device does not end, and nobody waits
    for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def read_ports(looks: list[Look]) -> tuple[PortText, ...]:
    """The ports of `/sys/class/infiniband`."""
    if not _INFINIBAND.is_dir():
        why = "there is no such folder: no RDMA NIC, or its driver is not loaded"
        looks.append(Look(what=str(_INFINIBAND), found=False, why=why))
        return ()
    found = tuple(
        PortText(
            device=port.parent.parent.name,
            driver=driver_of(port.parent.parent / "device" / "driver"),
            rate=text_of(port / "rate"),
            link_layer=text_of(port / "link_layer"),
            state=text_of(port / "state"),
        )
        for port in sorted(_INFINIBAND.glob("*/ports/*"))
    )
    looks.append(Look(what=str(_INFINIBAND), found=bool(found), why=f"{len(found)} ports"))
    return found


def _nvml(looks: list[Look]) -> str:
    """Rows of `nvidia-smi`'s query, from NVML, where its Python module is installed."""
    try:
        import pynvml  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        looks.append(Look(what="NVML", found=False, why="the module pynvml is not installed"))
        return ""
    try:
        pynvml.nvmlInit()
        try:
            rows = [_nvml_row(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        looks.append(Look(what="NVML", found=False, why=str(error)))
        return ""
    looks.append(Look(what="NVML", found=bool(rows), why=f"{len(rows)} GPUs"))
    return "".join(rows)


def _nvml_row(pynvml: object, index: int) -> str:
    api: dict[str, Any] = vars(pynvml)
    handle = api["nvmlDeviceGetHandleByIndex"](index)

    def ask(name: str) -> Any:
        """None where the card, or this version of NVML, does not say."""
        try:
            return api[name](handle)
        except (KeyError, api["NVMLError"]):
            return None

    name, memory = ask("nvmlDeviceGetName"), ask("nvmlDeviceGetMemoryInfo")
    capability, mig = ask("nvmlDeviceGetCudaComputeCapability"), ask("nvmlDeviceGetMigMode")
    cells = (
        index,
        name.decode() if isinstance(name, bytes) else name,
        memory and f"{memory.total // 2**20} MiB",
        ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        ask("nvmlDeviceGetMaxPcieLinkWidth"),
        capability and f"{capability[0]}.{capability[1]}",
        mig and ("Enabled" if mig[0] else "Disabled"),
    )
    return ", ".join("[N/A]" if cell is None else str(cell) for cell in cells) + "\n"


def find_cards(devices: Path) -> tuple[str, ...]:
    """PCI addresses of NVIDIA's display and 3D controllers (class 0x0300 and 0x0302)."""
    return tuple(
        device.name
        for device in sorted(devices.glob("*"))
        if text_of(device / "vendor") == "0x10de"
        and text_of(device / "class").startswith(("0x0300", "0x0302"))
    )


def driver_of(link: Path) -> str:
    """Name of the kernel driver that a device's link leads to; empty without."""
    try:
        return link.resolve(strict=True).name
    except OSError:
        return ""


def text_of(path: str | Path) -> str:
    """A file's text without spaces around it; empty where there is no such file to read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
