"""A Mac as a node of a job of MLX: its chip, what Metal lets the GPU have, RDMA, and MLX itself."""

from collections.abc import Iterator

from paceline.catalog import catalog_name
from paceline.check.preflight.need import Need
from paceline.check.preflight.result import Result, failed, passed, unknown
from paceline.topology.node.facts import MacTexts, NodeFacts
from paceline.topology.read_mac import Mac, read_system_profiler
from paceline.topology.read_rdma import read_ibv_devices
from paceline.units import format_bytes

RDMA_SINCE = (26, 2)
"""macOS with RDMA over Thunderbolt 5. Source: Apple's technical note TN3205."""

_METAL_SHARE = 0.75
"""Share of the memory that Metal lets the GPU have by itself (the catalog's note on Macs'
memory)."""


def check_mac(node: str, facts: NodeFacts, need: Need) -> Iterator[Result]:
    """What a job of MLX needs of a Mac. A quick look asks no tool and is not judged."""
    texts = facts.mac
    mac = read_system_profiler(texts.profile) if texts is not None else None
    if texts is None or mac is None:
        yield unknown("accelerators", node, "system_profiler was not asked, or named no chip")
        return
    yield _chip(node, mac, need)
    yield _memory(node, mac, texts, need)
    yield from _rdma(node, texts, need)
    yield _mlx(node, facts)


def _chip(node: str, mac: Mac, need: Need) -> Result:
    found = catalog_name(mac.chip) or mac.chip
    if found == need.accelerator:
        return passed("accelerators", node, mac.chip)
    said = f"{mac.chip}; the plan is for {need.accelerator}"
    fix = f"set cluster.accelerator to {found} and plan again, or take the Mac out of ssh.hosts"
    return failed("accelerators", node, said, id="too-few-accelerators", fix=fix)


def _memory(node: str, mac: Mac, texts: MacTexts, need: Need) -> Result:
    name = "accelerator-memory"
    if mac.memory_bytes is None:
        return unknown(name, node, "system_profiler does not name the Mac's memory")
    most = texts.wired_limit_bytes or int(_METAL_SHARE * mac.memory_bytes)
    said = f"Metal gives {format_bytes(most)} of {format_bytes(mac.memory_bytes)}"
    if need.rank_bytes <= most:
        return passed(name, node, said)
    said = f"{said}; the plan holds {format_bytes(need.rank_bytes)}"
    fix = (
        f"sudo sysctl iogpu.wired_limit_mb={-(-need.rank_bytes // 2**20)}"
        if need.rank_bytes < mac.memory_bytes
        else "set cluster.memory to this Mac's and plan again, or take it out of ssh.hosts"
    )
    return failed(name, node, said, id="host-oom-sigkill", fix=fix)


def _rdma(node: str, texts: MacTexts, need: Need) -> Iterator[Result]:
    if not need.wants_rdma:
        return
    devices = [each for each in read_ibv_devices(texts.ibv_devices) if each.startswith("rdma_")]
    words = texts.macos.split(".")[:2]
    version = tuple(int(word) for word in words if word.isdigit())
    said = f"macOS {texts.macos}, RDMA devices: {', '.join(devices) or 'none'}"
    if version < RDMA_SINCE:
        fix = "update to macOS 26.2 or newer: softwareupdate --install --all --restart"
    elif not devices:
        fix = "run `rdma_ctl enable` in macOS Recovery, and see `ibv_devices`"
    else:
        yield passed("rdma", node, said)
        return
    yield failed("rdma", node, f"{said}; the plan counts on RDMA", id="ethernet-fallback", fix=fix)


def _mlx(node: str, facts: NodeFacts) -> Result:
    version = facts.packages.get("mlx")
    if version is not None:
        return passed("packages", node, f"mlx {version}")
    said, fix = "MLX is not installed for this Python", "python3 -m pip install mlx"
    return failed("packages", node, said, id="environment-differs-between-nodes", fix=fix)
