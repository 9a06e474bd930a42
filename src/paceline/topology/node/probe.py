"""Look at this machine as a node of a job: one function that gathers what the other probes find."""

import contextlib
import importlib.metadata
import os
import platform
import socket
import sys
import time
from pathlib import Path

import paceline
from paceline.topology.machine import find_num_cores, memory_limit, read_cpuinfo
from paceline.topology.node import read_state
from paceline.topology.node.facts import MacTexts, NodeFacts, Question
from paceline.topology.node.probe_gpu import list_gpus, probe_gpus, read_kernel_log
from paceline.topology.node.probe_network import (
    find_interfaces,
    own_addresses,
    probe_rdma,
    try_ports,
)
from paceline.topology.node.probe_storage import (
    disk_of,
    find_drives,
    find_mounts,
    hash_code,
    hash_data,
    kind_of,
    look_at_folder,
    stale_locks,
)
from paceline.topology.node.probe_torch import probe_torch_build
from paceline.topology.probe import PCI, SYSTEM_PROFILER, Look, run_tool, text_of

_LIBRARIES = (
    *("NCCL_", "RCCL_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "GLOO_", "TP_SOCKET", "UCX_"),
    *("FI_", "CUDA_", "HIP_", "HSA_", "ROCR_", "OMP_", "MKL_NUM", "KMP_", "MASTER_", "TRITON_"),
    *("MLX_", "NVIDIA_VISIBLE", "TOKENIZERS_PARALLELISM"),
)
_NAMES = (*("RANK", "LOCAL_RANK", "WORLD_SIZE", "LD_PRELOAD", "LD_LIBRARY_PATH", "PACELINE_HOST"),)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_LIMITS = {"nofile": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK", "nproc": "RLIMIT_NPROC"}
_TIMEX_BYTES = 512
"""More than a `struct timex` has on any machine."""

_TIME_ERROR = 5
"""What adjtimex(2) returns while the clock is not synchronised."""

_MAIN_PACKAGES = (*("torch", "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),)
"""Packages that must have one version on all nodes: others talk or compute differently."""

_IOMMU = ("iommu", "amd_iommu", "intel_iommu", "pci", "pcie_acs_override")


def probe_node(question: Question) -> NodeFacts:
    """This machine. Takes below half a second when it is asked to be quick, else some seconds."""
    began = time.monotonic()
    looks: list[Look] = []
    quick = question.is_quick
    is_linux = sys.platform == "linux"
    return NodeFacts(
        host=socket.gethostname(),
        system=platform.system(),
        kernel=platform.release(),
        boot_id=text_of("/proc/sys/kernel/random/boot_id"),
        packages=_main_packages() if quick else _packages(),
        torch_build=probe_torch_build(),
        gpu=list_gpus() if quick else probe_gpus(looks),
        mac=probe_mac(looks) if sys.platform == "darwin" and not quick else None,
        kernel_log=None if quick else read_kernel_log(looks),
        meminfo=text_of("/proc/meminfo"),
        memory_limit_bytes=memory_limit()[0],
        memory_errors=_memory_errors(),
        shm=disk_of(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None,
        limits=find_limits(),
        folders=tuple(
            look_at_folder(path, question.note if number == 0 else None)
            for number, path in enumerate(question.folders)
        ),
        home_kind=None if quick else _home_kind(),
        stale_locks=() if quick else stale_locks(),
        data=hash_data(question.data, reads=not quick),
        code=hash_code(question.code, own=not quick),
        interfaces=find_interfaces(),
        own_addresses=None if quick else own_addresses(),
        ports=try_ports(question.ports),
        rdma=probe_rdma(looks, is_quick=quick),
        acs=_acs() if is_linux and not quick else None,
        kernel_words=_kernel_words(),
        num_cores=find_num_cores(read_cpuinfo(text_of("/proc/cpuinfo"))),
        drives=() if quick else find_drives(),
        mounts=() if quick else find_mounts(),
        num_cpus=len(os.sched_getaffinity(0)) if is_linux else os.cpu_count(),
        lscpu="" if quick or not is_linux else run_tool(["lscpu"], looks),
        environment=find_environment(),
        nccl_files=_nccl_files(),
        looks=tuple(looks),
        keeps_time=_keeps_time() if is_linux else None,
        seconds=time.monotonic() - began,
        unix_s=time.time(),
    )


def probe_mac(looks: list[Look]) -> MacTexts:
    """What this Mac's tools print."""
    limit = run_tool(["sysctl", "-n", "iogpu.wired_limit_mb"], looks).strip()
    return MacTexts(
        profile=run_tool(SYSTEM_PROFILER, looks),
        macos=platform.mac_ver()[0],
        ibv_devices=run_tool(["ibv_devices"], looks),
        wired_limit_bytes=int(limit) * 2**20 if limit.isdecimal() and int(limit) else None,
    )


def find_limits() -> dict[str, tuple[int | None, int | None]]:
    """Soft and hard limits of this process, which its children inherit; None is unlimited."""
    import resource

    names = _LIMITS | {"stack": "RLIMIT_STACK"}
    found: dict[str, tuple[int | None, int | None]] = {}
    for name, constant in names.items():
        number = getattr(resource, constant, None)
        if number is not None:
            soft, hard = (
                None if value == resource.RLIM_INFINITY else value
                for value in resource.getrlimit(number)
            )
            found[name] = (soft, hard)
    return found


def find_environment() -> dict[str, str]:
    """Variables of the libraries that train; none that is named like a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_LIBRARIES) or name in _NAMES)
        and not any(word in name for word in _SECRET)
    }


def _main_packages() -> dict[str, str]:
    """Looked up one by one: to read what all are takes a tenth of a second."""
    found = _ourselves()
    for name in _MAIN_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _ourselves() -> dict[str, str]:
    return {"python": platform.python_version(), "paceline": paceline.__version__}


def _packages() -> dict[str, str]:
    found = _ourselves()
    for each in importlib.metadata.distributions():
        name = each.metadata["Name"]
        if name:  # a broken installation has none
            found.setdefault(name.lower().replace("_", "-"), each.version)
    return dict(sorted(found.items()))


def _keeps_time() -> bool | None:
    import ctypes

    asked = ctypes.create_string_buffer(_TIMEX_BYTES)  # mode 0: nothing is set
    try:
        state = ctypes.CDLL(None).adjtimex(asked)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _memory_errors() -> dict[str, int]:
    found: dict[str, int] = {}
    for kind in ("ue", "ce"):
        counts = [
            text_of(path) for path in Path("/sys/devices/system/edac/mc").glob(f"mc*/{kind}_count")
        ]
        if counts:
            found[kind] = sum(int(count) for count in counts if count.isdecimal())
    return found


def _acs() -> dict[str, int] | None:
    """Bridges with access control on; None where the configuration space may not be read."""
    found: dict[str, int] = {}
    is_readable = False
    for device in sorted(PCI.glob("*")):
        if not text_of(device / "class").startswith("0x0604"):  # a PCI-to-PCI bridge
            continue
        try:
            config = (device / "config").read_bytes()
        except OSError:
            continue
        if len(config) <= 256:  # without rights only 64 bytes are there; without PCIe 256
            continue
        is_readable = True
        control = read_state.acs_control(config)
        if control:
            found[device.name] = control
    return found if is_readable else None


def _kernel_words() -> str:
    words = text_of("/proc/cmdline").split()
    return " ".join(word for word in words if word.partition("=")[0] in _IOMMU)


def _home_kind() -> str | None:
    with contextlib.suppress(RuntimeError):  # there is no home folder
        return kind_of(Path.home())
    return None


def _nccl_files() -> dict[str, str]:
    paths = ["/etc/nccl.conf", os.path.expanduser("~/.nccl.conf")]
    return {path: text for path in paths if (text := text_of(path))}
