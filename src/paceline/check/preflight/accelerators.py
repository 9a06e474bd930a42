"""The accelerators of a node: are all there, healthy, free, and joined as they should be."""

import re
from collections import Counter
from collections.abc import Iterator

from paceline.catalog import catalog_name
from paceline.catalog.mig import split_slice
from paceline.check.preflight.mac import check_mac
from paceline.check.preflight.need import Need
from paceline.check.preflight.result import Result, failed, passed, unknown, warned
from paceline.check.preflight.xids import judge_xids
from paceline.topology.machine import visible_gpus
from paceline.topology.node.facts import NodeFacts
from paceline.topology.node.read_state import (
    GpuState,
    read_cuda_of_driver,
    read_gpu_states,
    read_kernel_driver,
    read_rocm_states,
)
from paceline.topology.read_amd import read_rocm_topology
from paceline.topology.read_numa import read_lscpu
from paceline.topology.read_nvidia import read_topology
from paceline.units import counted, format_bytes

_USED_BY_NOBODY = 0.05
"""Share of a GPU's memory that the driver and a display take. A guess: 0.6 GiB of 80."""

_HOT_C = 87
"""Data-centre GPUs slow down a little above. Source: NVIDIA H100's data sheets, 87-95 C."""

_FASTEST_PCIE_BYTES_PER_S = 126e9
"""PCIe 6.0 x16, one direction. Source: PCI-SIG."""

_NO_PEER_TO_PEER = ("iommu=pt", "iommu=off", "amd_iommu=off", "intel_iommu=off")


def gpu_states(facts: NodeFacts) -> tuple[GpuState, ...]:
    """Every accelerator of a node, visible or not."""
    texts = facts.gpu
    return read_gpu_states(texts.state, texts.errors, texts.fabric, texts.rows) or read_rocm_states(
        texts.rocm
    )


def check_accelerators(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """What is asked of the accelerators; nothing where the job's ranks run on CPUs."""
    if need.backend == "mlx":
        yield from check_mac(node, facts, need)
        return
    gpus = gpu_states(facts)
    if need.accelerator == "cpu":
        if gpus:
            yield passed("accelerators", node, f"{len(gpus)}, none of them used: ranks are on CPUs")
        return
    broken = _broken_driver(node, facts)
    if broken is not None:
        yield broken
        return
    yield _are_there(node, gpus, facts, need)
    if not gpus:
        return
    yield _memory(node, visible_gpus(gpus, facts.gpu.visible), need)
    yield from _errors(node, gpus)
    yield from _health(node, gpus)
    yield from _fabric(node, gpus)
    yield from _kernel_log(node, facts, gpus)
    yield from _pcie(node, gpus)
    yield from _links(node, facts, need)
    yield from _peer_to_peer(node, facts, gpus)
    yield from _numa(node, facts)


def _broken_driver(node: str, facts: NodeFacts) -> Result | None:
    """A tool that is there and fails says why; another that shows accelerators is enough."""
    said = (
        []
        if gpu_states(facts)
        else [
            look.why
            for look in facts.looks
            if not look.found
            and look.what.startswith(("nvidia-smi --query-gpu=index,name", "rocm-smi"))
        ]
    )
    why = said[0] if said else ""
    name = "driver"
    if "version mismatch" in why:
        fix = "drain and reboot the node; apt-mark hold the driver's packages"
        return failed(name, node, f"nvidia-smi: {why}", id="driver-library-mismatch", fix=fix)
    if "Unknown Error" in why:
        fix = "start the container again; nvidia-ctk system create-dev-char-symlinks"
        return failed(name, node, f"nvidia-smi: {why}", id="container-lost-gpu", fix=fix)
    if why.startswith("no answer"):
        fix = "reboot the node: a GPU that does not answer holds every process that asks it"
        evidence = f"nvidia-smi: {why}"
        return failed(name, node, evidence, id="xid-79-fallen-off-bus", fix=fix)
    if why:
        fix = "see what nvidia-smi (rocm-smi) says there, and install its driver again"
        return failed(name, node, why, id="accelerator-not-usable", fix=fix)
    if facts.gpu.kernel_driver and not facts.gpu.state and facts.gpu.device_files:
        loaded, _ = read_kernel_driver(facts.gpu.kernel_driver)
        if loaded is not None:
            evidence = f"driver {loaded} is loaded, and there is no nvidia-smi on PATH"
            return unknown(name, node, evidence)
    return None


def _are_there(node: str, gpus: tuple[GpuState, ...], facts: NodeFacts, need: Need) -> Result:
    name = "accelerators"
    seen = visible_gpus(gpus, facts.gpu.visible)
    kinds = Counter(gpu.name for gpu in seen)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no accelerator"
    smaller = f"per_node to {len(seen)}" if seen else "accelerator to cpu"
    fix = (
        "compare nvidia-smi -L with lspci | grep -i nvidia; ask for all of them (--gpus-per-node, "
        f"--gpus all), or set cluster.{smaller}"
    )
    if len(seen) < need.ranks_per_node <= len(gpus):
        said = f"{len(gpus)} are there, {facts.gpu.visible!r} shows {len(seen)} of them"
        fix = "unset CUDA_VISIBLE_DEVICES, or name as many as there are ranks"
        return failed(name, node, said, id="invalid-device-ordinal", fix=fix)
    if len(seen) < need.ranks_per_node:
        said = f"{listed}; the job puts {counted(need.ranks_per_node, 'rank')} here"
        return failed(name, node, said, id="too-few-accelerators", fix=fix)
    if any(gpu.compute_mode == "Prohibited" for gpu in seen):
        fix = "nvidia-smi -c DEFAULT"
        said = "compute mode Prohibited: no process may use it"
        return failed(name, node, said, id="too-few-accelerators", fix=fix)
    card, profile = split_slice(need.accelerator)
    if any(gpu.is_mig != (profile is not None) for gpu in seen):
        fix = "nvidia-smi -mig 0, or plan for a slice: cluster.accelerator: H100-SXM 1g.10gb"
        said = f"{listed}, cut into slices (MIG)"
        if profile is not None:
            fix = f"cut it, nvidia-smi -mig 1, or set cluster.accelerator to {card}"
            said = f"{listed}, not cut into slices (MIG); the plan is for {need.accelerator}"
        return failed(name, node, said, id="too-few-accelerators", fix=fix)
    named = {catalog_name(kind) or kind for kind in kinds}
    if profile is not None and named == {card}:
        named = {need.accelerator}  # which slice a process gets is not in the list
    if named != {need.accelerator} and not (len(named) == 1 and need.accelerator in kinds):
        said = f"{listed}; the plan is for {need.accelerator}"
        fix = "take nodes of one kind, or set cluster.accelerator to what there is"
        return failed(name, node, said, id="too-few-accelerators", fix=fix)
    drivers = {gpu.driver for gpu in seen if gpu.driver}
    cuda = read_cuda_of_driver(facts.gpu.head)
    said = f"{listed}, driver {', '.join(sorted(drivers)) or 'unknown'}"
    return passed(name, node, said + (f", CUDA up to {cuda}" if cuda else ""))


def _memory(node: str, seen: tuple[GpuState, ...], need: Need) -> Result:
    name = "accelerator-memory"
    taken = [
        gpu
        for gpu in seen
        if gpu.memory_bytes and (gpu.used_bytes or 0) > _USED_BY_NOBODY * gpu.memory_bytes
    ]
    sizes = [gpu.memory_bytes for gpu in seen if gpu.memory_bytes]
    if not sizes:
        return unknown(name, node, "the tool does not say")
    least = min(sizes)
    if taken:
        said = ", ".join(f"GPU {gpu.index}: {format_bytes(gpu.used_bytes or 0)}" for gpu in taken)
        left = min((gpu.memory_bytes or 0) - (gpu.used_bytes or 0) for gpu in taken)
        fix = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv; end what is yours"
        make = failed if left < need.rank_bytes else warned
        return make(name, node, f"in use already: {said}", id="accelerator-in-use", fix=fix)
    if least < need.rank_bytes:
        said = f"{format_bytes(least)}; a rank of the plan holds {format_bytes(need.rank_bytes)}"
        fix = "plan for this accelerator: cluster.memory, or take a larger one"
        return failed(name, node, said, id="cuda-oom", fix=fix)
    said = f"{format_bytes(least)} each, free"
    return passed(name, node, said)


def _errors(node: str, gpus: tuple[GpuState, ...]) -> Iterator[Result]:
    name = "accelerator-ecc"
    failing = [gpu for gpu in gpus if gpu.rows_failed]
    wrong = [gpu for gpu in gpus if gpu.num_uncorrected]
    pending = [gpu for gpu in gpus if gpu.pages_pending]
    if failing:
        fix = "drain the node; the GPU is to be replaced (RMA)"
        said = f"{_which(failing)}: a row of memory could not be remapped"
        yield failed(name, node, said, id="xid-64-row-remap-failure", fix=fix)
    elif wrong:
        fix = f"nvidia-smi --gpu-reset -i {wrong[0].index}; drain the node if it comes back"
        total = sum(gpu.num_uncorrected or 0 for gpu in wrong)
        said = f"{_which(wrong)}: {total} uncorrectable errors"
        yield failed(name, node, said, id="gpu-ecc-uncorrectable", fix=fix)
    elif pending:
        fix = f"nvidia-smi --gpu-reset -i {pending[0].index}, when nobody uses it"
        said = f"{_which(pending)}: memory waits for a reset to be taken out of use"
        yield warned(name, node, said, id="xid-63-row-remap-event", fix=fix)
    elif all(gpu.ecc is None for gpu in gpus):
        yield unknown(name, node, "the tool does not say")
    else:
        yield passed(name, node, "no uncorrectable error")


def _health(node: str, gpus: tuple[GpuState, ...]) -> Iterator[Result]:
    name = "accelerator-clocks"
    slow = [gpu for gpu in gpus if gpu.throttles]
    hot = [gpu for gpu in gpus if (gpu.temperature_c or 0) >= _HOT_C]
    fix = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE; see to cooling and power, or take another node"
    if slow:
        reasons = ", ".join(sorted({word for gpu in slow for word in gpu.throttles}))
        yield warned(name, node, f"{_which(slow)}: {reasons}", id="straggler-throttle", fix=fix)
    elif hot:
        said = f"{_which(hot)}: {max(gpu.temperature_c or 0 for gpu in hot)} C before any work"
        yield warned(name, node, said, id="straggler-throttle", fix=fix)
    else:
        yield passed(name, node, "nothing slows them down")


def _fabric(node: str, gpus: tuple[GpuState, ...]) -> Iterator[Result]:
    joined = [gpu for gpu in gpus if gpu.fabric is not None]
    if not joined:
        return
    late = [gpu for gpu in joined if gpu.fabric != "Completed"]
    if late:
        fix = "systemctl enable --now nvidia-fabricmanager, of exactly the driver's version; reboot"
        said = f"{_which(late)}: fabric state {late[0].fabric}"
        yield failed("fabric", node, said, id="fabric-manager-not-running", fix=fix)
    else:
        yield passed("fabric", node, "NVSwitch fabric completed on all")


def _kernel_log(node: str, facts: NodeFacts, gpus: tuple[GpuState, ...]) -> Iterator[Result]:
    name = "kernel-log"
    if facts.kernel_log is None:
        yield unknown(name, node, "this user may not read dmesg or journalctl -k")
        return
    verdicts = judge_xids(facts.kernel_log, gpus)
    if not verdicts:
        yield passed(name, node, "no Xid since the last boot")
        return
    worst = verdicts[0]
    index = {gpu.bus: gpu.index for gpu in gpus}.get(worst.bus)
    who = f"GPU {index}" if index is not None else worst.bus
    more = f"; {counted(len(verdicts) - 1, 'more GPU')}" if len(verdicts) > 1 else ""
    said = f"{who}: {worst.line[-160:]}{more}"
    if worst.is_of_programs or worst.act == "nothing":
        yield passed(name, node, f"{said} (a program's doing, or a note)")
    elif worst.is_over:
        fix = f"watch it: {worst.act} if it comes back"
        yield warned(name, node, f"{said}; its counters are clean now", id=worst.id, fix=fix)
    else:
        yield failed(name, node, said, id=worst.id, fix=f"{worst.act}; paceline explain {worst.id}")


def _pcie(node: str, gpus: tuple[GpuState, ...]) -> Iterator[Result]:
    """Lanes only: an idle link runs at the lowest generation to save power."""
    name = "pcie"
    known = [gpu for gpu in gpus if gpu.lanes and gpu.lanes_max]
    narrow = [gpu for gpu in known if (gpu.lanes or 0) < (gpu.lanes_max or 0)]
    if narrow:
        said = f"{_which(narrow)}: x{narrow[0].lanes} of x{narrow[0].lanes_max} lanes"
        fix = "lspci -vv shows LnkSta of each hop: seat the card again, or take another node"
        yield warned(name, node, said, id="straggler-throttle", fix=fix)
    elif known:
        yield passed(name, node, f"x{known[0].lanes} lanes on all")
    else:
        yield unknown(name, node, "the tool does not say how many lanes")


def _links(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """NVLink or XGMI joins all accelerators alike: pairs that lack links slow everybody."""
    name = "links"
    topology = read_topology(facts.gpu.topology) or read_rocm_topology(facts.gpu.rocm_topology)
    if topology is None or len(topology.gpus) < 2:
        return
    sizes = Counter(len(group) for group in topology.groups)
    between = [
        cell
        for (one, other), cell in topology.between.items()
        if one in topology.gpus and other in topology.gpus
    ]
    kinds = Counter(cell for cell in between if cell.startswith(("NV", "XGMI")))
    if not kinds:
        said = f"no NVLink or XGMI here: {', '.join(sorted(set(between)))}"
        planned = need.link_bytes_per_s or 0.0
        if planned > _FASTEST_PCIE_BYTES_PER_S:
            said += f"; the plan counts on {planned / 1e9:.0f} GB/s between its GPUs"
            fix = "nvidia-smi nvlink --status; without bridges: nvidia-smi topo -m > topology.txt "
            fix += "there, set cluster.topology to it, and plan again"
            yield warned(name, node, said, id="xid-74-nvlink", fix=fix)
        else:
            yield passed(name, node, said)
    elif len(sizes) > 1 or len(kinds) > 1:
        usual = kinds.most_common(1)[0][0]
        lacking = sorted(
            f"{one}-{other} {cell}"
            for (one, other), cell in topology.between.items()
            if one in topology.gpus and other in topology.gpus and one < other and cell != usual
        )
        said = f"most pairs are joined by {usual}, and {', '.join(lacking[:4])}"
        fix = "nvidia-smi nvlink --status names the link that is down; reset the GPUs, or drain"
        yield warned(name, node, said, id="xid-74-nvlink", fix=fix)
    else:
        size = next(iter(sizes))
        yield passed(name, node, f"{next(iter(kinds))} between {size} of {len(topology.gpus)}")


def _peer_to_peer(node: str, facts: NodeFacts, gpus: tuple[GpuState, ...]) -> Iterator[Result]:
    if len(gpus) < 2:
        return
    name = "acs"
    if facts.acs:
        bridges = ", ".join(list(facts.acs)[:3])
        said = f"access control is on at {len(facts.acs)} PCI bridges ({bridges})"
        fix = "for each bridge: setpci -s BRIDGE ECAP_ACS+6.w=0000; or off in the BIOS"
        yield warned(name, node, said, id="acs-p2p-hang", fix=fix)
    elif facts.acs is None:
        yield unknown(name, node, "PCI bridges may be read by root only: lspci -vvv | grep ACSCtl")
    else:
        yield passed(name, node, "no PCI bridge redirects peer-to-peer traffic")
    is_amd = bool(facts.gpu.rocm)
    if is_amd and not any(word in facts.kernel_words.split() for word in _NO_PEER_TO_PEER):
        said = f"the kernel was started with {facts.kernel_words or 'no word about the IOMMU'}"
        fix = "add iommu=pt to the kernel's command line, and reboot"
        yield warned("iommu", node, said, id="rccl-iommu-pt", fix=fix)


def _numa(node: str, facts: NodeFacts) -> Iterator[Result]:
    layout = read_lscpu(facts.lscpu)
    if layout is None or len(layout.numa_nodes) < 2 or facts.num_cpus is None:
        return
    sizes = [_num_cpus(cpus) for cpus in layout.numa_nodes]
    said = f"{len(sizes)} NUMA nodes of {sizes[0]} CPUs, {facts.num_cpus} usable"
    if facts.num_cpus <= max(sizes) and len(gpu_states(facts)) > 1:
        fix = "ask for all CPUs (--exclusive, --cpus-per-task), or bind ranks to their GPU's node"
        yield warned("numa", node, said, id="numa-misbinding", fix=fix)
    else:
        yield passed("numa", node, said)


def _num_cpus(text: str) -> int:
    """Number of CPUs in a list such as `0-47,96-143`."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return sum(int(last or first) - int(first) + 1 for first, last in ranges)


def _which(gpus: list[GpuState]) -> str:
    return "GPU " + ", ".join(str(gpu.index) for gpu in gpus)
