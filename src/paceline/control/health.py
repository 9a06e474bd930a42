"""The health of this machine's GPUs, from NVIDIA's driver: each change is reported once.

Leaves out: what a change means for the run (`policy.py`), and machines without NVML or without
`nvidia-ml-py`, of which nothing is known.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.job.packages import install_line
from paceline.record.events import GpuHealth
from paceline.topology.node.read_state import THROTTLES

EVERY_S = 5.0
"""Between two looks. A guess: a look takes milliseconds, and a strike is for later losses."""

WAIT_MS = 100
"""For an event of the driver's, which keeps those that come between two looks."""

MOST_XIDS = 100
"""Xids read in one look. A guess: the next look reads the rest."""

FATAL_XIDS = frozenset({48, 64, 74, 79, 95, 109, 119, 140, *range(144, 151)})
"""Those after which the GPU or the node has to be reset or drained. Left out: 63, a row that was
remapped as it should be. `check/preflight/xids.py` has the source."""


@dataclass(slots=True)
class Health:
    """The GPUs that are watched, and how they were at the last look."""

    node: int
    nvml: Any
    handles: dict[str, Any]
    xids: Any
    lost: tuple[str, ...] = ()
    """GPUs that could not be opened, by number; reported at the first look."""

    last: dict[tuple[str, str], int] = field(default_factory=dict)
    """By GPU and figure; what the driver does not report is missing."""

    def changes(self) -> list[GpuHealth]:
        """What has changed since the last look; takes `WAIT_MS` and some milliseconds. Flags that
        are set at the first look are changes, counters are not."""
        found = list(self._new_xids())
        found += [self._change(gpu, "lost", 1, is_fatal=True) for gpu in self.lost]
        self.lost = ()
        for gpu, handle in self.handles.items():
            figures = _figures(self.nvml, handle)
            # The driver answers every question about a lost GPU with an error.
            had_any = any(of == gpu and what != "lost" for of, what in self.last)
            figures["lost"] = int(had_any and not figures)
            for what, value in figures.items():
                is_counter = what == "uncorrected ecc errors"
                before = self.last.get((gpu, what), value if is_counter else 0)
                self.last[gpu, what] = value
                if value != before:
                    is_fatal = value > before and what in _FATAL
                    found.append(self._change(gpu, what, value, is_fatal))
        return found

    def _change(self, gpu: str, what: str, value: int, is_fatal: bool) -> GpuHealth:
        return GpuHealth(node=self.node, gpu=gpu, what=what, value=value, is_fatal=is_fatal)

    def _new_xids(self) -> Iterator[GpuHealth]:
        try:
            for _ in range(MOST_XIDS):
                event = self.nvml.nvmlEventSetWait(self.xids, WAIT_MS)
                number = int(event.eventData)
                gpu = ask(self.nvml, self.nvml.nvmlDeviceGetUUID, event.device)
                yield self._change(_text(gpu or "unknown"), "xid", number, number in FATAL_XIDS)
        except self.nvml.NVMLError:
            return  # no more of them within the time


_FATAL = ("uncorrected ecc errors", "row remap failed", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of this machine that this process may use."""

    number: int
    """As the driver counts."""

    name: str
    """Its UUID, or its number where the driver could not open it."""

    handle: Any
    """NVML's; None where it could not be opened."""


def find_gpus() -> tuple[Any, list[Gpu]] | str:
    """NVML and the GPUs that this process may use; the reason where there is no NVML."""
    try:
        import pynvml as nvml
    except ImportError:
        return f"nvidia-ml-py is not installed ({install_line('gpu')})"
    try:
        nvml.nvmlInit()
        numbers = range(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        return f"NVML: {error}"
    handles = [ask(nvml, nvml.nvmlDeviceGetHandleByIndex, at) for at in numbers]
    uuids = [handle and ask(nvml, nvml.nvmlDeviceGetUUID, handle) for handle in handles]
    # A number is a name, too, and no UUID begins with one.
    names = [_text(uuid) if uuid else str(at) for at, uuid in enumerate(uuids)]
    chosen = visible(names, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return nvml, [
        Gpu(number=at, name=names[at], handle=handles[at] if uuids[at] else None) for at in chosen
    ]


def open_health(node: int) -> Health | str:
    """The GPUs that this process may use, to be watched; the reason where there is no NVML."""
    gpus = find_gpus()
    if isinstance(gpus, str):
        return gpus
    nvml, opened = gpus
    try:
        events = nvml.nvmlEventSetCreate()
    except nvml.NVMLError as error:
        return f"NVML: {error}"
    found = {gpu.name: gpu.handle for gpu in opened if gpu.handle is not None}
    lost = tuple(gpu.name for gpu in opened if gpu.handle is None)
    health = Health(node, nvml, found, events, lost)
    for handle in health.handles.values():
        ask(
            nvml,
            nvml.nvmlDeviceRegisterEvents,
            handle,
            nvml.nvmlEventTypeXidCriticalError,
            health.xids,
        )
    return health


def own_gpus(uuids: Sequence[str], variable: str | None) -> dict[str, str]:
    """The variable that gives workers the UUIDs of the node's GPUs as they are now, in CUDA's order
    (`runtime/own_gpu.py` compares them later); empty where they are unknown.

    >>> own_gpus(["GPU-aa", "GPU-bb"], "1,0")
    {'PACELINE_GPUS': 'GPU-bb,GPU-aa'}
    """
    seen = [uuids[at] for at in visible(uuids, variable)]
    return {"PACELINE_GPUS": ",".join(seen)} if seen else {}


def visible(uuids: Sequence[str], variable: str | None) -> list[int]:
    """Numbers of the GPUs that `CUDA_VISIBLE_DEVICES` leaves, up to the first that is none.

    Leaves out: slices of a GPU (MIG), and machines with GPUs of several kinds, where CUDA's own
    order may not be the one of the bus.

    >>> visible(["GPU-aa", "GPU-bb", "GPU-cc"], "2,GPU-a,-1,1")
    [2, 0]
    """
    if variable is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in (each.strip() for each in variable.split(",")):
        if entry.isdigit():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [at for at, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        found.extend(matches)
    return found


def _figures(nvml: Any, handle: Any) -> dict[str, int]:
    """What is watched of one GPU; what the driver or the GPU does not have is left out."""
    found: dict[str, int | None] = {
        "uncorrected ecc errors": ask(
            nvml,
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
    }
    rows = ask(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None:
        found |= {"row remap pending": int(rows[2]), "row remap failed": int(rows[3])}
    # The older of two names, which newer packages may drop: every driver knows it.
    ask_reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
    ask_reasons = ask_reasons or nvml.nvmlDeviceGetCurrentClocksEventReasons
    reasons = ask(nvml, ask_reasons, handle)
    if reasons is not None:
        found |= {word: int(bool(reasons & bit)) for bit, word in THROTTLES.items()}
    at = ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    slowdown = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    limit = ask(nvml, nvml.nvmlDeviceGetTemperatureThreshold, handle, slowdown)
    if at is not None and limit is not None:
        found["too hot"] = int(at >= limit)
    return {what: int(value) for what, value in found.items() if value is not None}


def ask(nvml: Any, call: Any, *given: Any) -> Any:
    """What the driver answers; None where it or this GPU cannot say."""
    try:
        return call(*given)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
