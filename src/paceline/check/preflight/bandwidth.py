"""What was measured: matrix products of every device, all-reduce over all nodes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.check.preflight.need import Need
from paceline.check.preflight.result import Result, passed, warned
from paceline.topology.node.facts import NodeAnswer, SweepFacts
from paceline.units import counted, format_bytes, format_flops_per_s, significant

_SLOWER = 0.85
"""A device below this share of the median is called slow. A guess: healthy GPUs of one kind differ
by some per cent. CPUs share cores, and are not compared."""

SLOW_SHARE = 0.5
"""All-reduce below this share of the links' rate is called slow. NCCL reaches 0.8 of NVLink and 0.9
of InfiniBand at large sizes, and a quick sweep ends before. A guess."""

_ALL = "all nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRate:
    """What one node's devices multiply together."""

    node: str
    num_devices: int
    """That gave a rate."""

    flops_per_s: float
    """0 where none did."""

    share: float
    """Share of all nodes' rates, from 0 to 1."""

    why_not: str | None = None
    """Why there is no rate."""


def node_rates(answers: Sequence[NodeAnswer]) -> tuple[NodeRate, ...]:
    """Each node's measured rate and its share of all; empty where nothing was measured."""
    rates: dict[str, list[float]] = {}
    for answer in answers:
        devices = () if answer.torch is None else answer.torch.devices
        rates[answer.name] = [each.matmul_flops_per_s or 0.0 for each in devices]
    total = sum(sum(each) for each in rates.values())
    if not total:
        return ()
    return tuple(
        NodeRate(
            node=answer.name,
            num_devices=sum(rate > 0 for rate in rates[answer.name]),
            flops_per_s=sum(rates[answer.name]),
            share=sum(rates[answer.name]) / total,
            why_not=None if sum(rates[answer.name]) else _why_no_rate(answer),
        )
        for answer in answers
    )


def _why_no_rate(answer: NodeAnswer) -> str:
    if answer.torch is None:
        return answer.torch_why_not or answer.why_not or "it was not asked"
    reasons = [answer.torch.why_not, *(each.why_not for each in answer.torch.devices)]
    return next((each for each in reasons if each), "no device gave a rate")


def check_devices(answers: Sequence[NodeAnswer], need: Need) -> Iterator[Result]:
    """Matrix products: every device against the median of all."""
    rates = [
        device.matmul_flops_per_s
        for answer in answers
        if answer.torch is not None
        for device in answer.torch.devices
        if device.matmul_flops_per_s
    ]
    if not rates or need.accelerator == "cpu":
        return
    usual = median(rates)
    for answer in answers:
        if answer.torch is None:
            continue
        mine = [d.matmul_flops_per_s for d in answer.torch.devices if d.matmul_flops_per_s]
        slow = [
            f"GPU {number} {format_flops_per_s(rate)}"
            for number, rate in enumerate(mine)
            if rate < _SLOWER * usual
        ]
        name, node = "matmul", answer.name
        if slow:
            said = f"{', '.join(slow)}; the median of all is {format_flops_per_s(usual)}"
            fix = "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER; drain the node if it stays so"
            yield warned(name, node, said, id="straggler-throttle", fix=fix)
        elif mine:
            yield passed(name, node, f"{format_flops_per_s(min(mine))} on the slowest device")


def check_sweep(sweep: SweepFacts, need: Need) -> Iterator[Result]:
    """All-reduce over all ranks, against what the plan's links should give."""
    name = "all-reduce"
    if not sweep.points:
        fix = "the other checks may say why; NCCL_DEBUG=INFO paceline preflight says more"
        said = sweep.why_not or "it was not measured"
        node = sweep.node or _ALL
        yield _failed_sweep(name, node, said, fix)
        return
    best = max(sweep.points, key=lambda point: point.busbw_bytes_per_s)
    said = (
        f"{counted(sweep.world_size, 'rank')}, {sweep.backend}: bus bandwidth "
        f"{significant(best.busbw_bytes_per_s / 1e9)} GB/s, algorithm bandwidth "
        f"{significant(best.bytes / best.seconds / 1e9)} GB/s at {format_bytes(best.bytes)}, "
        f"{sweep.points[0].seconds * 1e6:.0f} us at {format_bytes(sweep.points[0].bytes)}"
    )
    expected = expected_bytes_per_s(need)
    if sweep.world_size < 2:
        yield passed(name, _ALL, "one rank sends nothing")
        return
    if expected is None:
        yield passed(name, _ALL, f"{said}; what the links should give is not known")
        return
    share = best.busbw_bytes_per_s / expected
    said = f"{said}; {share:.0%} of {significant(expected / 1e9)} GB/s ({need.rates_known})"
    if share < SLOW_SHARE and need.backend == "nccl":
        fix = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET paceline preflight: which way is taken?"
        yield warned(name, _ALL, said, id="slow-collectives", fix=fix)
    else:
        yield passed(name, _ALL, said)


def expected_bytes_per_s(need: Need) -> float | None:
    """Bus bandwidth that the slowest link on the way allows a rank.

    Between nodes a ring leaves and enters each node once, over all of its NICs: a rank sees the
    node's whole rate, but never more than its own link.
    """
    link = need.link_bytes_per_s
    if need.num_nodes == 1:
        return link
    network = need.network_bytes_per_s
    if network is None:
        return None
    return network if link is None or need.ranks_per_node == 1 else min(link, network)


def _failed_sweep(name: str, node: str, said: str, fix: str) -> Result:
    from paceline.check.preflight.result import failed

    words = said.lower()
    id = "collective-watchdog-timeout" if "longer than" in words else "nccl-system-error"
    if "shared memory" in words or "shm" in words or "no space left" in words:
        id = "shm-too-small"
    elif "too many open files" in words:
        id = "too-many-open-files"
    elif "no socket interface found" in words or "no interface" in words:
        id = "nccl-wrong-interface"
    elif "unable to find address" in words or "makedeviceforinterface" in words:
        id = "gloo-ifname-missing"
    elif "no module named" in words:
        id = "environment-differs-between-nodes"
    return failed(name, node, said, id=id, fix=fix)
