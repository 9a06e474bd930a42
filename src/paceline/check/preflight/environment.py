"""Environment variables of a node that harm the job, and settings files that do."""

from collections.abc import Iterator, Mapping

from paceline.catalog.nccl import UNWANTED, WrongValue, wrong_value
from paceline.check.preflight.need import Need
from paceline.check.preflight.rdma import rdma_ports
from paceline.check.preflight.result import Result, failed, passed, warned
from paceline.control.environment import RECOVERY, undone
from paceline.topology.node.facts import NodeFacts
from paceline.topology.node.interfaces import named_by_gloo, named_by_nccl
from paceline.units import counted

_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "HIP_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked with another one"),
}
_GIVE_WAY = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT")
"""Older names, which torch does not read where the newer one is set, as agents do."""

_OLD = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
}
"""Source: PyTorch's ProcessGroupNCCL environment variables, 2.2 to 2.9."""

_STILL_READ = ("PYTORCH_CUDA_ALLOC_CONF",)


def check_interfaces_named(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME name something usable."""
    name = "interface"
    found = [
        *_named_for_nccl(name, node, facts, need),
        *_named_for_gloo(name, node, facts, need, "GLOO_SOCKET_IFNAME"),
        *_named_for_gloo(name, node, facts, need, "TP_SOCKET_IFNAME"),
    ]
    if found:
        yield from found
        return
    up = [each.name for each in facts.interfaces if each.is_up and each.addresses]
    yield passed(name, node, f"{', '.join(up) or 'none is up'}; no setting names a wrong interface")


def _named_for_nccl(name: str, node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    value = facts.environment.get("NCCL_SOCKET_IFNAME")
    if not value:
        return
    chosen = named_by_nccl(value, facts.interfaces)
    usable = [each for each in chosen if each.is_up and each.addresses]
    said = f"NCCL_SOCKET_IFNAME={value}"
    fix = f"unset NCCL_SOCKET_IFNAME, or name one of {_offer(facts)}"
    if not chosen:
        said = f"{said} names no interface of this node"
    elif not usable:
        said = f"{said}: {', '.join(each.name for each in chosen)} is down or has no address"
    elif need.is_apart and all(each.is_loopback for each in usable):
        said = f"{said} is the loopback, which no other node reaches"
    elif need.is_apart and all(each.name.startswith(("docker", "virbr")) for each in usable):
        said = f"{said} is a bridge of this machine"
    else:
        return
    if need.backend == "nccl":
        yield failed(name, node, said, id="nccl-wrong-interface", fix=fix)
    else:
        said = f"{said}; this job's ranks talk over {need.backend}, which does not read it"
        yield warned(name, node, said, id="nccl-wrong-interface", fix=fix)


def _named_for_gloo(
    name: str, node: str, facts: NodeFacts, need: Need, variable: str
) -> Iterator[Result]:
    value = facts.environment.get(variable)
    if not value:
        return
    chosen = named_by_gloo(value, facts.interfaces)
    usable = [each for each in chosen if each.is_up and each.addresses]
    fix = f"unset {variable}, or name one of {_offer(facts)}"
    if not usable:
        what = "is down or has no address" if chosen else "is no interface of this node"
        said = f"{variable}={value} {what}"
        yield failed(name, node, said, id="gloo-ifname-missing", fix=fix)
    elif need.is_apart and all(each.is_loopback for each in usable):
        said = f"{variable}={value} is the loopback, which no other node reaches"
        yield failed(name, node, said, id="gloo-loopback-fullmesh", fix=fix)


def check_environment(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """What else is set and harms."""
    found = [
        *_values(node, facts, need),
        *_harmful(node, facts, need),
        *_recovery(node, facts, need),
        *_slow(node, facts, need),
        *_network(node, facts, need),
        *_libraries(node, facts),
        *_connections(node, facts, need),
    ]
    if found:
        yield from found
    else:
        yield passed(
            "environment",
            node,
            f"{counted(len(facts.environment), 'variable')} of NCCL, torch, CUDA set; none harmful",
        )


def _wrong_values(facts: NodeFacts) -> Mapping[str, WrongValue]:
    """Variable -> what NCCL makes of its value, on this node's devices."""
    devices = [port.device for port in rdma_ports(facts)]
    wrong = {
        name: wrong_value(name, value, devices=devices) for name, value in facts.environment.items()
    }
    return {name: each for name, each in wrong.items() if each is not None}


def _values(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """Values that NCCL refuses, or does not take as they were meant."""
    is_read = need.backend == "nccl"
    note = "" if is_read else f"; ranks talk over {need.backend} here, which does not read it"
    for each in _wrong_values(facts).values():
        say = failed if is_read and each.level == "error" else warned
        said = f"{each.what}{note}"
        yield say("environment", node, said, id=each.failure, fix=each.fix)


def _harmful(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    wrong = _wrong_values(facts)
    for variable, reason in need.harmful.items():
        value = facts.environment.get(variable)
        row = UNWANTED.get(variable)
        if value is None or variable in wrong or (row is not None and not row.harms(value)):
            continue
        if need.has_agents and variable in (*RECOVERY, *_GIVE_WAY):
            continue
        said = f"{variable}={value}: {reason}"
        id = row.failure if row is not None else "debugging-left-on"
        yield warned("environment", node, said, id=id, fix=f"unset {variable}")


def _recovery(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """What the operator has set, agents therefore leave, and recovery does not get through."""
    if not _recovers_over_nccl(need):
        return
    for variable, setting in undone(facts.environment).items():
        said = f"{variable}={facts.environment[variable]}: {setting.otherwise}"
        fix = f"unset {variable} (agents set {setting.value})"
        if setting.is_needed:
            yield failed("environment", node, said, id="recovery-undone", fix=fix)
        else:
            yield warned("environment", node, said, id="recovery-undone", fix=fix)


def _recovers_over_nccl(need: Need) -> bool:
    return need.backend == "nccl" and need.has_agents


def _slow(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    for variable, (value, what) in _SLOW.items():
        if variable in RECOVERY and _recovers_over_nccl(need):
            continue  # judged there
        if facts.environment.get(variable, "").upper() == value:
            said = f"{variable}={value}: {what}"
            fix = f"unset {variable}"
            yield warned("environment", node, said, id="debugging-left-on", fix=fix)
    for old, new in _OLD.items():
        if old in facts.environment and old not in _STILL_READ:
            said = f"{old} is not read any more"
            fix = f"unset {old}; its name is {new}"
            yield warned("environment", node, said, id="nccl-env-deprecated", fix=fix)


def _network(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    for variable in ("NCCL_GRAPH_FILE", "NCCL_TOPO_FILE"):
        places = ["the environment"] if variable in facts.environment else []
        places += [path for path, text in facts.nccl_files.items() if variable in text]
        for place in places:
            said = f"{variable} is set in {place}: it must be of exactly this machine's type"
            fix = f"take {variable} out of {place}"
            yield warned("environment", node, said, id="nccl-graph-file-env", fix=fix)
    if need.num_nodes < 2 or need.backend != "nccl":
        return
    ports = [port for port in rdma_ports(facts) if port.is_active]
    if ports and facts.environment.get("NCCL_NET", "").lower() == "socket":
        said = "NCCL_NET=Socket: TCP, though there are RDMA ports"
        fix = "unset NCCL_NET"
        yield warned("environment", node, said, id="ethernet-fallback", fix=fix)
    wanted = facts.environment.get("NCCL_IB_HCA")
    if ports and wanted and not _is_any_hca(wanted, [port.device for port in ports]):
        said = f"NCCL_IB_HCA={wanted} matches none of {', '.join(p.device for p in ports)}"
        fix = "unset NCCL_IB_HCA, or name devices of this node (ibv_devices)"
        yield failed("environment", node, said, id="ethernet-fallback", fix=fix)
    gid = facts.environment.get("NCCL_IB_GID_INDEX")
    if gid == "0" and any(port.kind == "roce" for port in ports):
        said = "NCCL_IB_GID_INDEX=0 is a RoCE v1 address, which is not routed"
        fix = "unset NCCL_IB_GID_INDEX, or take a RoCE v2 entry of show_gids (often 3)"
        yield warned("environment", node, said, id="ib-modify-qp-failed", fix=fix)


def _libraries(node: str, facts: NodeFacts) -> Iterator[Result]:
    loaded = facts.environment.get("LD_PRELOAD", "")
    if "libnccl" in loaded:
        said = f"LD_PRELOAD={loaded} replaces the NCCL that PyTorch was built with"
        yield warned("environment", node, said, id="nccl-version-mismatch", fix="unset LD_PRELOAD")
    path = facts.environment.get("LD_LIBRARY_PATH", "")
    compat = next((each for each in path.split(":") if "/cuda" in each and "/compat" in each), None)
    if compat is not None and facts.gpu.kernel_driver:
        said = f"{compat} is on LD_LIBRARY_PATH: CUDA's libraries of another driver"
        fix = "take it out, unless the driver is a data-centre one and older than this CUDA"
        yield warned("environment", node, said, id="driver-library-mismatch", fix=fix)


def _connections(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    value = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value == "1" and need.sharding in ("full", "hybrid") and need.tensor == 1:
        said = "CUDA_DEVICE_MAX_CONNECTIONS=1 is for tensor parallelism; FSDP2 overlaps nothing"
        fix = "unset CUDA_DEVICE_MAX_CONNECTIONS"
        yield warned("environment", node, said, id="cuda-device-max-connections", fix=fix)


def _is_any_hca(value: str, devices: list[str]) -> bool:
    """`mlx5` is a beginning, `=mlx5_0:1` a whole name with a port, `^mlx5_3` all but these.
    Source: NCCL user guide, NCCL_IB_HCA."""
    excludes = value.startswith("^")
    rest = value.removeprefix("^")
    exact = rest.startswith("=")
    words = [word.partition(":")[0] for word in rest.removeprefix("=").split(",") if word]
    matched = [
        device
        for device in devices
        if any(device == word if exact else device.startswith(word) for word in words)
    ]
    return len(matched) < len(devices) if excludes else bool(matched)


def _offer(facts: NodeFacts) -> str:
    names = [
        each.name
        for each in facts.interfaces
        if each.is_up and each.addresses and not each.is_loopback
    ]
    return ", ".join(names) or "those of `ip -br address`"
