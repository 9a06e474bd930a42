"""What keeps a node's ranks from getting their GPUs, as far as it is known in milliseconds.

The kernel's files, the environment and PyTorch's own files are read; no tool and no driver is
asked, so that this comes before every run. Leaves out health, memory and links: `accelerators.py`,
which `paceline preflight` asks.
"""

from collections.abc import Iterator

from paceline.check.preflight.need import Need
from paceline.check.preflight.result import Result, failed, passed, unknown
from paceline.topology.machine import named_twice, num_visible
from paceline.topology.node.facts import NodeFacts, TorchBuild
from paceline.topology.node.read_state import read_kernel_driver
from paceline.units import counted

LEAST_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
"""CUDA's major version -> oldest Linux driver that runs its programs. Source: CUDA 13.0 release
notes, table 2, minimum driver version for CUDA minor version compatibility."""

_WHEELS = {13: "cu130", 12: "cu126", 11: "cu118"}
"""CUDA's major version -> the wheels of PyTorch that every driver for it runs. Source:
pytorch.org/get-started of 2.9 to 2.11, and its previous versions for CUDA 11 (up to 2.7)."""


def wheels_for(driver: str | None) -> str:
    """The address of PyTorch's wheels that a loaded driver runs; the newest where it is unknown,
    the oldest for a driver that runs none.

    >>> wheels_for("550.54.15")
    'https://download.pytorch.org/whl/cu126'
    """
    known = [major for major, least in LEAST_DRIVERS.items() if driver and _parts(driver) >= least]
    major = max(known, default=min(_WHEELS)) if driver else max(_WHEELS)
    return f"https://download.pytorch.org/whl/{_WHEELS[major]}"


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def check_gpus_at_once(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """Whether as many GPUs are there and visible as the job puts ranks on this node."""
    if need.backend != "nccl" or need.accelerator == "cpu":
        return
    yield from check_torch_build(node, facts, need)
    name, files = "accelerators", _gpu_files(facts)
    if not files:
        if facts.gpu.kernel_driver or facts.gpu.device_files:
            # AMD's GPUs have no numbered files, WSL2 has none at all.
            yield unknown(name, node, "the kernel does not list GPUs one by one here")
            return
        said = (
            f"no NVIDIA or AMD driver is loaded; the job puts "
            f"{counted(need.ranks_per_node, 'rank')} here"
        )
        fix = (
            "take a node that has GPUs (in a container: --gpus all), "
            "or set cluster.accelerator to cpu"
        )
        yield failed(name, node, said, id="too-few-accelerators", fix=fix)
        return
    visible = facts.gpu.visible if need.reads_visible else None
    yield _count(node, len(files), visible, facts.gpu.uuids, need)


def check_torch_build(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """Whether the installed PyTorch has NCCL, and the loaded driver runs its CUDA."""
    torch = facts.torch_build
    if torch is None or need.backend != "nccl" or torch.hip is not None:
        return
    loaded, _ = read_kernel_driver(facts.gpu.kernel_driver)
    yield _nccl(node, torch, need, loaded)
    if torch.cuda is not None and loaded is not None:
        yield _driver(node, torch.cuda, loaded)


def _count(
    node: str, num_gpus: int, visible: str | None, uuids: tuple[str, ...], need: Need
) -> Result:
    name, wanted = "accelerators", need.ranks_per_node
    there = counted(num_gpus, "GPU")
    if num_gpus < wanted:
        said = f"{there} here; the job puts {wanted} ranks here, each needs a GPU of its own"
        fix = (
            "compare nvidia-smi -L with lspci | grep -i nvidia (a GPU that fell off the bus comes "
            f"back with a reboot), or set cluster.per_node to {num_gpus}"
        )
        return failed(name, node, said, id="too-few-accelerators", fix=fix)
    twice = named_twice(visible) if visible is not None else None
    if twice is not None:
        said = (
            f"CUDA_VISIBLE_DEVICES={visible} names GPU {twice} twice, and PyTorch then sees none: "
            f"two ranks cannot share a GPU; {there} here, the job puts {wanted} ranks here"
        )
        fix = f"unset CUDA_VISIBLE_DEVICES, or name {wanted} different GPUs"
        return failed(name, node, said, id="duplicate-gpu", fix=fix)
    seen = num_visible(num_gpus, visible, uuids)
    if seen < wanted:
        said = (
            f"CUDA_VISIBLE_DEVICES={visible!r} shows {seen} of {there}; the job puts {wanted} "
            "ranks here"
        )
        fix = (
            f"unset CUDA_VISIBLE_DEVICES, or name {wanted} GPUs of this machine in it (nvidia-smi "
            f"-L), or set {f'cluster.per_node to {seen}' if seen else 'cluster.accelerator to cpu'}"
        )
        return failed(name, node, said, id="invalid-device-ordinal", fix=fix)
    return passed(name, node, f"{there}, {seen} visible")


def _nccl(node: str, torch: TorchBuild, need: Need, driver: str | None) -> Result:
    name = "nccl"
    if torch.cuda is None:
        said = (
            f"torch {torch.version} was built without CUDA and NCCL; the plan's ranks are on "
            f"{need.accelerator}"
        )
        fix = (
            f"pip install --force-reinstall torch --index-url {wheels_for(driver)}, or set "
            "cluster.accelerator to cpu"
        )
        return failed(name, node, said, id="accelerator-not-usable", fix=fix)
    if torch.nccl_wanted is not None and torch.nccl is None:
        said = f"torch {torch.version} needs {torch.nccl_wanted}, which is not installed"
        fix = f"pip install {torch.nccl_wanted}"
        return failed(name, node, said, id="accelerator-not-usable", fix=fix)
    return passed(name, node, f"torch {torch.version}, NCCL {torch.nccl or 'in torch itself'}")


def _driver(node: str, cuda: str, loaded: str) -> Result:
    name = "driver"
    least = LEAST_DRIVERS.get(int(cuda.partition(".")[0]))
    if least is None:
        return unknown(name, node, f"the oldest driver for CUDA {cuda} is not known")
    if _parts(loaded) < least:
        written = ".".join(
            str(part) if number == 0 else f"{part:02}" for number, part in enumerate(least)
        )
        said = (
            f"driver {loaded} is too old: torch is for CUDA {cuda}, which needs {written} or newer"
        )
        fix = (
            f"install driver {written} or newer, or a torch for an older CUDA (pip install "
            f"--force-reinstall torch --index-url {wheels_for(loaded)}); with NVIDIA's "
            "cuda-compat libraries: --allow driver"
        )
        return failed(name, node, said, id="accelerator-not-usable", fix=fix)
    return passed(name, node, f"driver {loaded} runs CUDA {cuda}")


def _gpu_files(facts: NodeFacts) -> list[str]:
    """/dev/nvidia0 and so on: the GPUs that the kernel, or the container, gives this process."""
    numbered = [path.removeprefix("/dev/nvidia") for path in facts.gpu.device_files]
    return [number for number in numbered if number.isdigit()]
