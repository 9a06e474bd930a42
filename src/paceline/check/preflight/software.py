"""Versions, code, data and settings: there on each node, and the same on all."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from paceline.check.preflight.accelerators import gpu_states
from paceline.check.preflight.need import Need
from paceline.check.preflight.result import Result, failed, passed, warned
from paceline.topology.node.facts import NodeAnswer, NodeFacts
from paceline.topology.node.probe_storage import MOST_DATA_BYTES, MOST_DATA_FILES
from paceline.topology.node.read_state import read_cuda_of_driver, read_kernel_driver
from paceline.units import counted, format_bytes

_MUST_AGREE = ("python", "torch", "paceline", "deepspeed", "transformers", "accelerate")
_AGREE_LIKE = re.compile(r"nvidia-nccl|nvidia-cuda-runtime|nvidia-cudnn|triton|flash-attn")
"""Packages of which another version speaks otherwise, or computes otherwise."""

_MUST_MATCH = re.compile(
    r"(NCCL|RCCL)_(ALGO|PROTO|BUFFSIZE|MIN_NCHANNELS|MAX_NCHANNELS|MIN_CTAS|MAX_CTAS|NTHREADS"
    r"|NET|NET_PLUGIN|IB_DISABLE|P2P_DISABLE|SHM_DISABLE|NVLS_ENABLE|COLLNET_ENABLE|CROSS_NIC)"
)
"""Variables by which ranks choose one way together. Source: NCCL user guide, env.html."""

_MAY_DIFFER = re.compile(
    r"(SOCKET_IFNAME|VISIBLE_DEVICES|_HOST|IB_HCA|RANK|DEBUG_FILE|CACHE_DIR|MASTER_)"
)


def check_versions(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """What one node has installed, and whether it goes together."""
    name = "versions"
    packages = facts.packages
    if not packages:
        return
    torch = packages.get("torch")
    if torch is None:
        fix = "pip install torch in the Python of that node, or name another (ssh.python)"
        said = f"Python {packages.get('python')} has no torch"
        yield failed(name, node, said, id="environment-differs-between-nodes", fix=fix)
        return
    nccl = next((version for key, version in packages.items() if "nvidia-nccl" in key), None)
    said = f"torch {torch}" + (f", NCCL {nccl}" if nccl else "")
    driver = {gpu.driver for gpu in gpu_states(facts) if gpu.driver}
    loaded, _ = read_kernel_driver(facts.gpu.kernel_driver)
    if loaded and driver and "NVIDIA" in facts.gpu.kernel_driver and loaded not in driver:
        fix = "drain and reboot the node: another driver is loaded than is installed"
        said = f"driver {', '.join(sorted(driver))} installed, kernel module {loaded} loaded"
        yield failed(name, node, said, id="driver-library-mismatch", fix=fix)
        return
    built, able = _cuda_of_torch(packages), read_cuda_of_driver(facts.gpu.head)
    if built and able and int(built.split(".")[0]) > int(able.split(".")[0]):
        fix = f"install the torch for CUDA {able.split('.')[0]}, or a newer driver"
        said = f"{said} is for CUDA {built}, the driver runs up to {able}"
        yield failed(name, node, said, id="accelerator-not-usable", fix=fix)
        return
    yield passed(name, node, said + (f", CUDA {built}" if built else ""))


def check_torch(answer: NodeAnswer, need: Need) -> Iterator[Result]:
    """What a process that imports PyTorch has said, where one was started."""
    name, node = "torch", answer.name
    if answer.torch is None:
        if answer.torch_why_not is not None:
            fix = "python -c 'import torch; print(torch.__version__)' on that node"
            said = answer.torch_why_not
            yield failed(name, node, said, id="accelerator-not-usable", fix=fix)
        return
    torch = answer.torch
    broken = [device for device in torch.devices if device.why_not is not None]
    if need.accelerator != "cpu" and not torch.is_available:
        said = torch.why_not or f"torch {torch.torch} sees no accelerator"
        id = "driver-library-mismatch" if "803" in said else "accelerator-not-usable"
        id = "fabric-manager-not-running" if "802" in said else id
        fix = "pip install the torch of this driver's CUDA; or repair the driver"
        yield failed(name, node, said, id=id, fix=fix)
    elif broken:
        said = f"{broken[0].name}: {broken[0].why_not}"
        kernel = "no kernel image" in said
        fix = (
            "install a torch whose torch.cuda.get_arch_list() has it"
            if kernel
            else "drain the node"
        )
        id = "no-kernel-image" if kernel else "accelerator-not-usable"
        yield failed(name, node, said, id=id, fix=fix)
    else:
        said = f"torch {torch.torch}" + (f", CUDA {torch.cuda}" if torch.cuda else "")
        yield passed(name, node, said + (f", NCCL {torch.nccl}" if torch.nccl else ""))


_OF_CONTENTS = (
    f", and contents of the first {MOST_DATA_FILES} files, {format_bytes(MOST_DATA_BYTES)} at most"
)


def check_software_alike(nodes: Mapping[str, NodeFacts], need: Need) -> Iterator[Result]:
    """Every node against what most nodes have."""
    if len(nodes) < 2:
        return
    yield from _packages(nodes)
    yield from _drivers(nodes)
    of_contents = _OF_CONTENTS if need.is_strict else ""
    yield from _hashes(
        nodes,
        name="code",
        of=lambda facts: facts.code,
        id="code-differs-between-nodes",
        fix="paceline sync JOB sends this machine's files there and says which differ",
    )
    yield from _hashes(
        nodes,
        name="data",
        of=lambda facts: facts.data,
        same="the same names and sizes as on the others" + of_contents,
        says_lost=False,  # `check_data` does, of each node by itself
        id="data-differs-between-nodes",
        fix="rsync -a --checksum the data to that node, or read them from a shared folder",
    )
    yield from _settings(nodes, need)


def check_torch_alike(answers: Sequence[NodeAnswer]) -> Iterator[Result]:
    """The NCCL and CUDA that PyTorch itself reports, wherever they were installed from."""
    loaded = {
        each.name: {"NCCL": each.torch.nccl or "none", "CUDA": each.torch.cuda or "none"}
        for each in answers
        if each.torch is not None
    }
    if len(loaded) < 2:
        return
    usual = _usual(loaded)
    for node, mine in loaded.items():
        differing = [key for key in mine if mine[key] != usual[key]]
        if differing:
            said = "; ".join(
                f"PyTorch loads {key} {mine[key]}, on most nodes {usual[key]}" for key in differing
            )
            fix = "one image or one lock file for all nodes; unset LD_PRELOAD and LD_LIBRARY_PATH"
            yield failed("torch", node, said, id="nccl-version-mismatch", fix=fix)


def check_data(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """Every pattern of the job's data has files on this node; and what `paceline data check` found
    in them."""
    missing = [pattern for pattern, digest in facts.data.items() if not digest]
    if missing:
        said = f"{missing[0]} has no file here"
        fix = "copy the data there, or mount the folder that has them"
        yield failed("data", node, said, id="data-differs-between-nodes", fix=fix)
    checked = need.data_checked
    if checked is not None and (checked.has_changed or checked.errors):
        first = f": {checked.worst}" if checked.errors else ""
        fix = "repair what paceline data check --job JOB lists, and check again"
        said = f"the data: {checked}{first}"
        yield warned("data-check", node, said, id="data-not-checked", fix=fix)
    elif checked is not None:
        yield passed("data-check", node, str(checked))


def _packages(nodes: Mapping[str, NodeFacts]) -> Iterator[Result]:
    name = "packages"
    usual = _usual({node: dict(facts.packages) for node, facts in nodes.items()})
    if not usual:
        return
    for node, facts in nodes.items():
        differing = {
            key: (facts.packages.get(key), usual.get(key))
            for key in sorted(facts.packages.keys() | usual.keys())
            if facts.packages.get(key) != usual.get(key)
        }
        grave = [key for key, versions in differing.items() if _is_grave(key, *versions)]
        shown = (grave or list(differing))[:3]
        said = "; ".join(
            f"{key} {differing[key][0] or 'missing'}, most nodes {differing[key][1] or 'without'}"
            for key in shown
        )
        more = len(differing) - len(shown)
        said += f"; {more} more" if more > 0 else ""
        fix = "pip install -r one lock file on every node, or one image for all"
        id = "environment-differs-between-nodes"
        if grave:
            yield failed(name, node, said, id=id, fix=fix)
        elif differing:
            yield warned(name, node, said, id=id, fix=fix)
        else:
            yield passed(name, node, f"{counted(len(facts.packages), 'package')}, as on the others")


def _is_grave(name: str, mine: str | None, usual: str | None) -> bool:
    """Bug fixes of one Python go together: what is pickled in one is read in the other."""
    if name == "python" and mine and usual:
        return mine.split(".")[:2] != usual.split(".")[:2]
    return name in _MUST_AGREE or _AGREE_LIKE.search(name) is not None


def _drivers(nodes: Mapping[str, NodeFacts]) -> Iterator[Result]:
    """The driver of each node's GPUs; of a Mac it comes with macOS."""
    drivers = {
        node: f"macOS {facts.mac.macos}"
        if facts.mac is not None and facts.mac.macos
        else ", ".join(sorted({f"driver {gpu.driver}" for gpu in gpu_states(facts) if gpu.driver}))
        for node, facts in nodes.items()
    }
    if not any(drivers.values()):
        return
    usual = Counter(drivers.values()).most_common(1)[0][0]
    kind = usual.partition(" ")[0]
    for node, driver in drivers.items():
        if driver != usual:
            said = f"{driver or f'{kind} unknown'}, most nodes {usual}"
            fix = (
                "softwareupdate --install --all --restart on the Macs with the older macOS"
                if kind == "macOS"
                else "install the same driver on every node, and reboot it"
            )
            yield warned("driver", node, said, id="environment-differs-between-nodes", fix=fix)
        else:
            yield passed("driver", node, f"{driver}, as on the others")


def _hashes(
    nodes: Mapping[str, NodeFacts],
    *,
    name: str,
    of: Callable[[NodeFacts], Mapping[str, str]],
    id: str,
    fix: str,
    same: str = "the same as on the others",
    says_lost: bool = True,
) -> Iterator[Result]:
    there = {
        node: {key: each for key, each in of(facts).items() if each}
        for node, facts in nodes.items()
    }
    usual = _usual(there)
    if not usual:
        return
    for node, mine in there.items():
        lost = [key for key in usual if key not in mine]
        if lost and not says_lost:
            continue
        differing = [key for key in usual if mine.get(key, usual[key]) != usual[key]]
        if lost or differing:
            parts = [(lost, "not there"), (differing, "another than on most nodes")]
            said = "; ".join(
                f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} {what}"
                for keys, what in parts
                if keys
            )
            yield failed(name, node, said, id=id, fix=fix)
        else:
            yield passed(name, node, f"{same}: {', '.join(mine)}")


def _settings(nodes: Mapping[str, NodeFacts], need: Need) -> Iterator[Result]:
    """Environment variables that differ between nodes. NCCL's matter only where the ranks talk over
    NCCL."""
    name = "settings"
    every = {
        node: {
            key: value for key, value in facts.environment.items() if not _MAY_DIFFER.search(key)
        }
        for node, facts in nodes.items()
    }
    usual = _usual(every)
    for node, mine in every.items():
        differing = [key for key in mine.keys() | usual.keys() if mine.get(key) != usual.get(key)]
        reads = need.backend == "nccl"
        grave = sorted(key for key in differing if reads and _MUST_MATCH.fullmatch(key))
        shown = (grave or sorted(differing))[:3]
        said = "; ".join(
            f"{key} is {mine.get(key, 'unset')}, on most nodes {usual.get(key, 'unset')}"
            for key in shown
        )
        fix = (
            "set the variable on every node or on none; ssh and srun take other files than a shell"
        )
        if grave:
            yield failed(name, node, said, id="nccl-size-mismatch", fix=fix)
        elif differing:
            id = "environment-differs-between-nodes"
            yield warned(name, node, said, id=id, fix=fix)
        else:
            yield passed(name, node, "the same variables as on the others")


def _usual(every: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What most nodes have; of two that differ, what the first one has."""
    found: dict[str, str] = {}
    for key in dict.fromkeys(key for mine in every.values() for key in mine):
        counts = Counter(mine.get(key) for mine in every.values())
        value = counts.most_common(1)[0][0]
        if value is not None:
            found[key] = value
    return found


def _cuda_of_torch(packages: Mapping[str, str]) -> str | None:
    """CUDA that torch was built for: `2.6.0+cu124`, or the runtime that was installed with it."""
    tagged = re.search(r"\+cu(\d{2})(\d)$", packages.get("torch", ""))
    if tagged:
        return f"{tagged[1]}.{tagged[2]}"
    runtime = next((v for key, v in packages.items() if "nvidia-cuda-runtime" in key), None)
    return ".".join(runtime.split(".")[:2]) if runtime else None
