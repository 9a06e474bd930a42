"""Is this machine fit to train on, whatever the job? Preflight's checks, and what only here is
asked: the Python, packages against requirements, least sizes, which NCCL and kernels torch has.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.catalog import catalog_name
from paceline.check.preflight.accelerators import gpu_states
from paceline.check.preflight.gpu_start import wheels_for
from paceline.check.preflight.need import Need
from paceline.check.preflight.network import check_own_name
from paceline.check.preflight.packages import Lack, check_requirements
from paceline.check.preflight.preflight import judge
from paceline.check.preflight.rdma import check_rdma
from paceline.check.preflight.result import Result, Status, failed, passed, unknown, warned
from paceline.record.requirements import Requirements
from paceline.render.environment import removals_anywhere
from paceline.topology.machine import read_meminfo, visible_gpus
from paceline.topology.node.facts import Gathered, NodeFacts, TorchFacts
from paceline.topology.node.read_state import read_kernel_driver
from paceline.units import format_bytes

DEFAULT_PORT = 29500
"""Where torchrun and DeepSpeed's launcher meet when nobody names a port. Source: PyTorch 2.9,
torch/distributed/run.py; DeepSpeed 0.16, constants.py, TORCH_DISTRIBUTED_DEFAULT_PORT."""

_LITTLE_DISK = 10 * 10**9
"""Below it is worth a word: torch with its CUDA libraries takes 5 to 7 GB. A guess."""

_OTHERS = ("tensorflow", "jax", "mlx")
_OF_A_JOB = (
    *("answers", "checkpoint-folder", "checkpoint-room", "checkpoint-ephemeral", "folder", "ports"),
)
_FIRST = ("python", "torch", "nccl", "driver", "architectures", "accelerators", "vram", "packages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the reader says that the machine must have. None is not asked."""

    vram_bytes: int | None = None
    ram_bytes: int | None = None
    disk_bytes: int | None = None
    named_ports: tuple[int, ...] = ()
    """Ports that must be free; one that was only looked at is a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The Python that is looked at."""

    version: str
    executable: str
    prefix: str
    active: str | None = None
    """The environment that the shell has activated; None where it has none."""


def check_machine(
    gathered: Gathered,
    asked: Asked,
    python: Interpreter,
    requirements: Requirements,
    lacks: Sequence[Lack],
) -> list[Result]:
    """Every check of one machine: what fails first, then warnings, then the rest in order."""
    (answer,) = gathered.nodes
    node, facts = answer.name, answer.facts
    assert facts is not None, "this machine answers"
    need = need_of_machine(facts)
    pip = f"{python.executable} -m pip install"
    results = [
        *_python(node, python, requirements),
        *_torch(node, facts, answer.torch, need, pip),
        *_seen(node, facts, need, judge(gathered, need).results),
        *_least(node, facts, asked),
        *_disks(node, facts, asked),
        *_own_name(node, facts, need),
        *(check_rdma(node, facts, replace(need, num_nodes=2)) if facts.rdma.ports else ()),
        *_ports(node, facts, asked),
        *check_requirements(node, requirements, lacks, pip),
    ]
    order = (Status.FAIL, Status.WARNING, Status.PASS, Status.UNKNOWN)
    return sorted(
        results,
        key=lambda each: (
            order.index(each.status),
            _FIRST.index(each.name) if each.name in _FIRST else len(_FIRST),
        ),
    )


def need_of_machine(facts: NodeFacts) -> Need:
    """One rank on each accelerator that this process sees; one on the CPUs where there is none."""
    seen = visible_gpus(gpu_states(facts), facts.gpu.visible)
    kind = Counter(gpu.name for gpu in seen).most_common(1)[0][0] if seen else "cpu"
    has_driver = read_kernel_driver(facts.gpu.kernel_driver)[0] is not None
    wants_cpus = (facts.gpu.visible or "0").strip() == "-1" or facts.gpu.visible == ""
    on_gpus = bool(seen or has_driver) and not wants_cpus
    return Need(
        num_nodes=1,
        ranks_per_node=len(seen) or 1,
        backend="nccl" if on_gpus else "gloo",
        accelerator=(catalog_name(kind) or kind) if seen or not on_gpus else "GPU",
        has_agents=False,
        harmful={each.name: each.reason for each in removals_anywhere()},
    )


def torch_to_install(
    results: Sequence[Result], facts: NodeFacts, lacks: Sequence[Lack]
) -> list[str]:
    """Words for pip that give a torch which this machine's driver runs; none where it has one, and
    where the requirements bring it."""
    loaded, _ = read_kernel_driver(facts.gpu.kernel_driver)
    index = ["--index-url", wheels_for(loaded)] if loaded else []
    if facts.torch_build is None:
        asked = any(lack.wanted.requirement.name == "torch" for lack in lacks)
        fails = any(each.name == "torch" and each.status is Status.FAIL for each in results)
        return ["torch", *index] if fails and not asked else []
    wrong = any(
        each.status is Status.FAIL and (each.name == "nccl" or "torch is for CUDA" in each.evidence)
        for each in results
    )
    return ["--force-reinstall", "torch", *index] if wrong and index else []


def _python(node: str, python: Interpreter, requirements: Requirements) -> Iterator[Result]:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    name, said = "python", f"Python {python.version}, {python.executable}"
    if requirements.python is not None:
        try:
            fits = SpecifierSet(requirements.python).contains(python.version, prereleases=True)
        except InvalidSpecifier:
            wrong = f"pyproject.toml: requires-python {requirements.python!r} cannot be read"
            yield unknown(name, node, wrong)
            fits = True
        if not fits:
            fix = f"make an environment with Python {requirements.python}: uv venv --python VERSION"
            said = f"{said}; pyproject.toml asks for {requirements.python}"
            yield failed(name, node, said, id="requirements-not-met", fix=fix)
            return
    if python.active is not None and python.active != python.prefix:
        fix = f"{python.active}/bin/python -m pip install paceline, and run paceline from there"
        said = f"{said}; the active environment is {python.active}, which is not looked at"
        yield warned(name, node, said, id="other-python-than-active", fix=fix)
    else:
        yield passed(name, node, said)


def _torch(
    node: str, facts: NodeFacts, torch: TorchFacts | None, need: Need, pip: str
) -> Iterator[Result]:
    """Whether torch is there, and has code for these cards and the NCCL it was built with."""
    build = facts.torch_build
    if build is None:
        others = [f"{name} {facts.packages[name]}" for name in _OTHERS if name in facts.packages]
        if others:
            yield passed("torch", node, f"not installed; {', '.join(others)} is")
            return
        loaded, _ = read_kernel_driver(facts.gpu.kernel_driver)
        fix = f"{pip} torch" + (f" --index-url {wheels_for(loaded)}" if loaded else "")
        yield failed("torch", node, "not installed", id="requirements-not-met", fix=fix)
        return
    if torch is None:
        return
    wanted = (build.nccl_wanted or "").partition("==")[2]
    if torch.nccl and wanted and torch.nccl != ".".join(wanted.split(".")[:3]):
        said = f"torch loads NCCL {torch.nccl}, and was built with {wanted}"
        fix = f"unset LD_PRELOAD and LD_LIBRARY_PATH, or {pip} '{build.nccl_wanted}'"
        yield warned("nccl", node, said, id="nccl-version-mismatch", fix=fix)
    cards = [device.capability for device in torch.devices if device.capability]
    if cards and torch.architectures and build.hip is None:
        yield _architectures(node, torch, cards)


def _architectures(node: str, torch: TorchFacts, cards: Sequence[str]) -> Result:
    name, has = "architectures", " ".join(torch.architectures)
    lost = sorted({card for card in cards if not runs_on(card, torch.architectures)})
    if lost:
        said = f"torch {torch.torch} has {has}, and no code for {', '.join(lost)}"
        fix = "install a torch whose torch.cuda.get_arch_list() has it: a newer one for new cards"
        return failed(name, node, said, id="no-kernel-image", fix=fix)
    return passed(name, node, f"torch has code for {', '.join(sorted(set(cards)))}: {has}")


def runs_on(card: str, architectures: Sequence[str]) -> bool:
    """Whether a build has code for a card: machine code (`sm_`) of its major version that is not
    newer, or `compute_` code, which the driver compiles for newer cards. One that ends in a letter
    is for that card alone.

    Source: CUDA C++ Programming Guide, binary and PTX compatibility.

    >>> runs_on("sm_86", ["sm_80", "sm_90"]), runs_on("sm_120", ["sm_80", "sm_90"])
    (True, False)
    >>> runs_on("sm_120", ["sm_90", "compute_90"]), runs_on("sm_100", ["sm_90a"])
    (True, False)
    """
    number = int(card.removeprefix("sm_"))
    for each in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", each)
        if found is None:
            continue
        has, is_alike = int(found[2]), int(found[2]) // 10 == number // 10
        if has == number or (not found[3] and has <= number and (found[1] != "sm" or is_alike)):
            return True
    return False


def _seen(node: str, facts: NodeFacts, need: Need, judged: Sequence[Result]) -> Iterator[Result]:
    """Preflight's results; what it says of kinds and numbers of GPUs, which a job asks for and a
    machine alone does not, in other words."""
    states = gpu_states(facts)
    kinds = sorted({gpu.name for gpu in visible_gpus(states, facts.gpu.visible)})
    own: Result | None = None
    name = "accelerators"
    if facts.gpu.on_bus and not facts.gpu.kernel_driver and not facts.gpu.device_files:
        said = f"an NVIDIA card is at {', '.join(facts.gpu.on_bus)}, and no driver is loaded"
        fix = "install NVIDIA's driver; in a container: docker run --gpus all"
        own = failed("driver", node, said, id="accelerator-not-usable", fix=fix)
    elif not states and need.accelerator == "cpu":
        own = passed(name, node, "none here: training runs on the CPUs")
    elif not states and all(each.name != "driver" or each.status is Status.PASS for each in judged):
        fix = "nvidia-smi -L must list every GPU; in a container: docker run --gpus all"
        said = "NVIDIA's driver is loaded and shows no GPU"
        own = failed(name, node, said, id="accelerator-not-usable", fix=fix)
    elif len(kinds) > 1:
        said = f"different kinds: {', '.join(kinds)}; the slowest sets the pace"
        fix = "set CUDA_VISIBLE_DEVICES to the numbers of one kind"
        own = warned(name, node, said, id="too-few-accelerators", fix=fix)
    dropped = {*_OF_A_JOB, *([name] if own is not None else [])}
    if "torch" not in facts.packages:
        dropped.add("versions")  # said by `torch`
    yield from (each for each in judged if each.name not in dropped)
    if own is not None:
        yield own


def _own_name(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    for each in check_own_name(node, facts, need):
        wrong = each.status is not Status.PASS
        said = (
            f"{each.evidence}, an address that other machines cannot reach"
            if wrong
            else each.evidence
        )
        yield replace(each, evidence=said)


def _least(node: str, facts: NodeFacts, asked: Asked) -> Iterator[Result]:
    """The sizes that were asked for."""
    if asked.vram_bytes is not None:
        seen = visible_gpus(gpu_states(facts), facts.gpu.visible)
        sizes = [gpu.memory_bytes for gpu in seen if gpu.memory_bytes is not None]
        said = f"{format_bytes(min(sizes))} on the smallest" if sizes else "no accelerator"
        fix = "take a larger card, or plan for what is there: paceline plan shows what fits"
        yield _compared(
            "vram", node, said, min(sizes, default=0), asked.vram_bytes, "cuda-oom", fix
        )
    if asked.ram_bytes is not None and not facts.meminfo:
        yield unknown("ram", node, "there is no /proc/meminfo, so --min-ram was not checked")
    elif asked.ram_bytes is not None:
        total = read_meminfo(facts.meminfo)[0]
        total = min(total, facts.memory_limit_bytes or total)
        fix = "take a machine with more memory, or raise the container's limit (docker run -m)"
        said = f"{format_bytes(total)} of memory"
        yield _compared("ram", node, said, total, asked.ram_bytes, "host-oom-sigkill", fix)


def _compared(name: str, node: str, said: str, have: int, least: int, id: str, fix: str) -> Result:
    said = f"{said}; {format_bytes(least)} {'is' if have >= least else 'was'} asked for"
    return passed(name, node, said) if have >= least else failed(name, node, said, id=id, fix=fix)


def _disks(node: str, facts: NodeFacts, asked: Asked) -> Iterator[Result]:
    """Room in the folder of the runs, in the caches and in the temporary folder."""
    name, id = "disk", "disk-full-checkpoint"
    seen: set[tuple[str | None, int, int]] = set()
    for number, folder in enumerate(facts.folders):
        where = f"{folder.nearest} on {folder.kind or 'a file system of unknown type'}"
        if folder.why_not is not None:
            fix = f"name another with --folder, or let this user write to {folder.nearest}"
            said = f"{where}: {folder.why_not}"
            make = failed if number == 0 else warned
            yield make(name, node, said, id="checkpoint-folder-unusable", fix=fix)
            continue
        if folder.disk is None:
            yield unknown(name, node, f"{where}: its room cannot be asked")
            continue
        size = folder.disk.total_bytes, folder.disk.free_bytes
        same = folder.kind, size[0], round(100 * size[1] / max(1, size[0]))
        if same in seen:  # one file system, whose room changes meanwhile
            continue
        seen.add(same)
        said = f"{where}: {format_bytes(size[1])} of {format_bytes(size[0])} free"
        fix = f"du -xsh {folder.nearest}/* shows what fills it; or name another with --folder"
        if number == 0 and asked.disk_bytes is not None:
            yield _compared(name, node, said, size[1], asked.disk_bytes, id, fix)
        elif size[1] < _LITTLE_DISK:
            yield warned(name, node, said, id=id, fix=fix)
        else:
            yield passed(name, node, said)


def _ports(node: str, facts: NodeFacts, asked: Asked) -> Iterator[Result]:
    for port, why in facts.ports.items():
        if not why:
            yield passed("ports", node, f"port {port} is free")
            continue
        fix = (
            f"ss -ltnp 'sport = :{port}' names who has it; or take another: torchrun "
            "--master-port, MASTER_PORT, cluster.rendezvous_port"
        )
        make = failed if port in asked.named_ports else warned
        yield make("ports", node, f"port {port}: {why}", id="port-in-use", fix=fix)
