"""What a kernel log says of NVIDIA GPUs: for each, one verdict, and what to do with the node.

A log reaches back to the last boot. What the GPU's own counters say now decides whether it still
matters; the log says why. Consequences of other events (43, 45, 154) are never the verdict while
anything else was logged.

Source of what to do: NVIDIA's Xid catalogue, docs.nvidia.com/deploy/xid-errors.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.catalog.failure import Effect, load_failures
from paceline.topology.node.read_state import GpuState, read_xids

Act = Literal["restart the job", "reset the GPU", "reboot the node", "drain the node", "nothing"]

_ACTS: Mapping[str, Act] = {
    "xid-13-sm-exception": "restart the job",
    "xid-31-mmu-fault": "restart the job",
    "xid-43-channel-reset": "nothing",
    "xid-44-ctxsw-fault": "restart the job",
    "xid-45-preemptive-cleanup": "nothing",
    "xid-48-double-bit-ecc": "reset the GPU",
    "xid-63-row-remap-event": "reset the GPU",
    "xid-64-row-remap-failure": "drain the node",
    "xid-74-nvlink": "drain the node",
    "xid-79-fallen-off-bus": "reboot the node",
    "xid-92-high-sbe-rate": "nothing",
    "xid-94-contained-ecc": "restart the job",
    "xid-95-uncontained-ecc": "reset the GPU",
    "xid-109-ctxsw-timeout": "reset the GPU",
    "xid-119-gsp-timeout": "reset the GPU",
    "xid-140-ecc-unrecovered": "reset the GPU",
    "xid-144-150-nvlink5": "drain the node",
    "xid-154-recovery-action": "nothing",
}
_WEIGHT: Sequence[Act] = (
    *("nothing", "restart the job", "reset the GPU", "reboot the node", "drain the node"),
)
_OF_PROGRAMS = ("xid-13-sm-exception", "xid-31-mmu-fault", "xid-44-ctxsw-fault")
"""What programs do to a healthy GPU."""

_MEMORY = (
    *("xid-48-double-bit-ecc", "xid-63-row-remap-event", "xid-94-contained-ecc"),
    *("xid-95-uncontained-ecc", "xid-140-ecc-unrecovered"),
)
_FALLEN = re.compile(r"GPU (?:at PCI:)?([0-9a-fA-F:.]+)[^\n]*has fallen off the bus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One GPU's."""

    bus: str
    id: str
    """ID of the failure in the catalog."""

    act: Act
    line: str
    """Last line of the log that reports it."""

    is_over: bool
    """Whether the GPU's counters say that it has been repaired since."""

    is_of_programs: bool


def judge_xids(log: str, gpus: Sequence[GpuState] = ()) -> list[Verdict]:
    """The worst of each GPU in a kernel log, the worst GPU first.

    Args:
        log: Lines of `dmesg` or `journalctl -k`.
        gpus: As they are now; empty where that is not known.
    """
    by_bus: dict[str, dict[str, list[str]]] = {}
    for number, bus, line in read_xids(log):
        failure = _failure_of(number, line)
        if failure is not None:
            by_bus.setdefault(bus, {}).setdefault(failure, []).append(line)
    for found in _FALLEN.finditer(log):  # newer drivers say it without a number too
        bus = _full(found[1])
        line = log[log.rfind("\n", 0, found.start()) + 1 : found.end()]
        by_bus.setdefault(bus, {}).setdefault("xid-79-fallen-off-bus", []).append(line.strip())
    now = {gpu.bus: gpu for gpu in gpus}
    verdicts = [_verdict(bus, lines, now) for bus, lines in by_bus.items()]
    return sorted(verdicts, key=lambda each: (each.is_over, -_WEIGHT.index(each.act), each.bus))


def _verdict(bus: str, lines: Mapping[str, list[str]], now: Mapping[str, GpuState]) -> Verdict:
    effects = {name: load_failures()[name].effect for name in lines}
    causes = [name for name in lines if effects[name] is not Effect.SECONDARY] or list(lines)
    worst = max(causes, key=lambda name: _WEIGHT.index(_ACTS[name]))
    return Verdict(
        bus=bus,
        id=worst,
        act=_ACTS[worst],
        line=lines[worst][-1],
        is_over=_is_over(worst, now.get(bus), is_known=bool(now)),
        is_of_programs=worst in _OF_PROGRAMS or effects[worst] is Effect.SECONDARY,
    )


def _is_over(name: str, gpu: GpuState | None, *, is_known: bool) -> bool:
    if not is_known:
        return False
    if gpu is None:  # it is not listed any more
        return False
    if name == "xid-79-fallen-off-bus":
        return True
    if name in _MEMORY:
        return gpu.num_uncorrected == 0 and not gpu.pages_pending and not gpu.rows_failed
    return False


def _failure_of(number: int, line: str) -> str | None:
    for name in _ACTS:
        first, _, last = name.removeprefix("xid-").partition("-")
        until = last.partition("-")[0]
        low = int(first)
        high = int(until) if until.isdigit() else low
        if low <= number <= high:
            return name
    return None


def _full(bus: str) -> str:
    found = re.search(r"([0-9a-f]{4}:)?([0-9a-f]{2}:[0-9a-f]{2})", bus.lower())
    return f"{(found[1] or '0000:')}{found[2]}.0" if found else bus
