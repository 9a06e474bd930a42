"""What this machine and its accelerators are doing, every few seconds, beside the workers.

NVIDIA's are asked through NVML where `nvidia-ml-py` is installed, else through `nvidia-smi`, and
AMD's through `rocm-smi`. What none of them says stays unknown, and so does a machine without /proc.

Leaves out: errors of GPUs (`health.py`), and what samples mean (`alerts.py`).
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.control.health import Gpu, ask, find_gpus
from paceline.record.machines import MachineSample, RankSample, machine_log
from paceline.topology.machine import read_meminfo
from paceline.topology.probe import nvidia_query, run_tool
from paceline.topology.read_use import (
    NVIDIA_USE,
    ROCM_USE,
    GpuSample,
    read_nvidia_use,
    read_rocm_use,
)

EVERY_S = 5.0
"""Between two samples. A guess: rules wait for a minute, and a sample takes a millisecond."""

_MOST_EVERY_S = 30.0
_SLOWER = 10_000
"""A run's samples are taken `EVERY_S` apart for its first half day, and then at a ten thousandth of
its age, up to `_MOST_EVERY_S`: a month is 100,000 lines. A guess."""

_TOOL_EVERY_S = 15.0
"""Between two calls of a tool, which takes up to a second. A guess."""

_TOOL_LIMIT_S = 10.0

AskGpus = Callable[[], list[GpuSample]]


class Sampling(threading.Thread):
    """Writes this node's file in the run's folder until it is closed."""

    def __init__(
        self,
        run: Path,
        node: int,
        *,
        has_gpus: bool,
        ranks: Callable[[], list[RankSample]] = list,
    ) -> None:
        """Args:
        run: The run's folder.
        node: This one.
        has_gpus: Whether accelerators are asked for.
        ranks: Says where the node's ranks are; called in this thread.
        """
        super().__init__(name="paceline-machine", daemon=True)
        self._run_folder = run
        self._node = node
        self._has_gpus = has_gpus
        self._ranks = ranks
        self._over = threading.Event()

    def run(self) -> None:
        """Sample until closed. What fails ends the samples and nothing else."""
        began = time.monotonic()
        try:
            host = Host(self._run_folder)
            ask_gpus = find_way() if self._has_gpus else list
            log = machine_log(self._run_folder, self._node)
            while True:
                sample = host.sample(self._node, ask_gpus())
                log.write(msgspec.structs.replace(sample, ranks=self._ranks()))
                if self._over.wait(interval_s(time.monotonic() - began)):
                    break
            log.close()
        except OSError:
            return  # the folder is gone, or its disk: the run has more to say of that than we

    def close(self) -> None:
        """Take no more samples; returns at once."""
        self._over.set()


def interval_s(age_s: float) -> float:
    """Seconds to the next sample of a run that is so old.

    >>> interval_s(60.0), interval_s(86_400.0), interval_s(1e7)
    (5.0, 8.64, 30.0)
    """
    return min(_MOST_EVERY_S, max(EVERY_S, age_s / _SLOWER))


class Host:
    """The host's numbers; rates are since the last sample."""

    def __init__(self, folder: Path, proc: Path = Path("/proc")) -> None:
        self._folder = folder
        self._proc = proc
        self._before: tuple[float, int, int] | None = None
        self._times_before: tuple[int, int] | None = None

    def sample(self, node: int, gpus: list[GpuSample]) -> MachineSample:
        """The host's numbers now, with what its accelerators say."""
        received, sent = self._rates(time.monotonic())
        memory = self._memory()
        return MachineSample(
            at=time.time(),
            node=node,
            gpus=gpus,
            cpu_utilization=self._cpu(),
            memory_bytes=memory[0],
            memory_total_bytes=memory[1],
            disk_free_bytes=self._disk_free(),
            received_bytes_per_s=received,
            sent_bytes_per_s=sent,
        )

    def _rates(self, now: float) -> tuple[float | None, float | None]:
        counted = read_network(self._text("net/dev"))
        before, self._before = self._before, None
        if counted is None:
            return None, None
        received, sent = counted
        self._before = now, received, sent
        if before is None or now <= before[0] or received < before[1] or sent < before[2]:
            return None, None  # the first one, or an interface went away
        seconds = now - before[0]
        return (received - before[1]) / seconds, (sent - before[2]) / seconds

    def _memory(self) -> tuple[int | None, int | None]:
        try:
            total, available = read_meminfo(self._text("meminfo"))
        except KeyError:
            return None, None
        return total - available, total

    def _cpu(self) -> float | None:
        before, self._times_before = self._times_before, read_cpu_times(self._text("stat"))
        if before is None or self._times_before is None:
            return None
        busy, total = (now - then for now, then in zip(self._times_before, before, strict=True))
        return min(1.0, max(0.0, busy / total)) if total > 0 else None

    def _disk_free(self) -> int | None:
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def _text(self, name: str) -> str:
        try:
            return (self._proc / name).read_text()
        except OSError:
            return ""


def read_network(text: str) -> tuple[int, int] | None:
    """Bytes received and sent since the machine began, over all interfaces but the loopback; None
    where /proc/net/dev says nothing.

    >>> read_network("h\\nh\\n  lo: 9 0 0 0 0 0 0 0 9 0\\neth0: 5 0 0 0 0 0 0 0 7 0\\n")
    (5, 7)
    """
    rows = [line.partition(":") for line in text.splitlines() if ":" in line]
    cells = [values.split() for name, _, values in rows if name.strip() != "lo"]
    cells = [each for each in cells if len(each) >= 10]
    if not cells:
        return None
    return sum(int(each[0]) for each in cells), sum(int(each[8]) for each in cells)


def read_cpu_times(text: str) -> tuple[int, int] | None:
    """Busy and all time of all cores since the machine began, in ticks; None where /proc/stat says
    nothing. Waiting for disks is idle.

    >>> read_cpu_times("cpu  4 0 6 80 10 0 0 0 0 0\\ncpu0 4 0 6 80 10 0 0 0 0 0\\n")
    (10, 100)
    """
    first = text.partition("\n")[0].split()
    if len(first) < 6 or first[0] != "cpu":
        return None
    ticks = [int(word) for word in first[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def find_way() -> AskGpus:
    """How the accelerators of this machine are asked; a way that says nothing where there are
    none."""
    found = find_gpus()
    if not isinstance(found, str):
        nvml, gpus = found
        return lambda: list(_from_nvml(nvml, gpus))
    for command, read in (
        (nvidia_query(*NVIDIA_USE), read_nvidia_use),
        (["rocm-smi", *ROCM_USE], read_rocm_use),
    ):
        if shutil.which(command[0]) is not None:
            return _Tool(command, read)
    return list


def _from_nvml(nvml: Any, gpus: Iterable[Gpu]) -> Iterator[GpuSample]:
    for gpu in gpus:
        handle = gpu.handle
        if handle is None:
            continue
        rates = ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        heat = ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        power = ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        limit = ask(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        clock = ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        yield GpuSample(
            gpu=gpu.number,
            utilization=None if rates is None else rates.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            temperature_c=None if heat is None else float(heat),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            clock_hz=None if clock is None else clock * 1e6,
        )


class _Tool:
    """A program that prints the state of accelerators; what it said last holds for a while."""

    def __init__(self, command: list[str], read: Callable[[str], list[GpuSample]]) -> None:
        self._command = command
        self._read = read
        self._said: list[GpuSample] = []
        self._at: float | None = None

    def __call__(self) -> list[GpuSample]:
        now = time.monotonic()
        if self._at is None or now - self._at >= _TOOL_EVERY_S:
            self._at = now
            self._said = self._read(run_tool(self._command, [], timeout_s=_TOOL_LIMIT_S))
        return self._said
