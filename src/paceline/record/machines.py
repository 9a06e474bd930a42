"""What a run's machines are doing: one JSON line every few seconds and node, in `machines/`.

Each node's agent writes `machines/node-N.jsonl`; of your own script, `paceline run` does. What a
machine does not say is null. Leaves out how a machine is asked (`control/sampling.py`).
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.record.lines import JsonLines, decoded, read_tail
from paceline.topology.read_use import GpuSample


class RankSample(msgspec.Struct, frozen=True):
    """Where one rank was at that moment."""

    rank: int
    phase: str
    """Phase of its training thread, such as `forward`: a name of `control/slots.py`, in lower
    case."""

    step: int
    """In work, or last in work; 0 is none."""


class MachineSample(msgspec.Struct, frozen=True, kw_only=True):
    """One node at one moment."""

    at: float
    """Seconds since 1970 (UTC), by the node's clock."""

    node: int
    gpus: list[GpuSample] = []
    """Those that the run may use there."""

    cpu_utilization: float | None = None
    """Share of the time of all cores, 0 to 1, since the sample before."""

    memory_bytes: int | None = None
    """In use on the host: all of it less what is available."""

    memory_total_bytes: int | None = None

    disk_free_bytes: int | None = None
    """Left for this user where the run's folder is."""

    received_bytes_per_s: float | None = None
    """Over all network interfaces but the loopback, since the sample before; RDMA is not counted
    there."""

    sent_bytes_per_s: float | None = None
    ranks: list[RankSample] = []
    """Ranks of the node; empty for scripts of your own, whose phases nobody knows."""


def machines_folder(run: Path) -> Path:
    """Where the samples of a run's machines are."""
    return run / "machines"


def machine_log(run: Path, node: int) -> JsonLines[MachineSample]:
    """The writer of one node's file in a run's folder."""
    machines_folder(run).mkdir(exist_ok=True)
    return JsonLines(machines_folder(run) / f"node-{node}.jsonl")


def machine_files(run: Path) -> list[Path]:
    """The files of all nodes that have written one, by name."""
    return sorted(machines_folder(run).glob("node-*.jsonl"))


decode_machine = msgspec.json.Decoder(MachineSample).decode


def newest_gpus(run: Path) -> dict[str, GpuSample]:
    """The newest whole sample of every GPU of a run, by `node 0 GPU 1`."""
    found: dict[str, GpuSample] = {}
    for path in machine_files(run):
        *_, newest = (None, *decoded(read_tail(path), decode_machine))  # a line of 64 GPUs is 10 kB
        if newest is not None:
            found |= {f"node {newest.node} GPU {gpu.gpu}": gpu for gpu in newest.gpus}
    return found


def numbers_of_machine(sample: MachineSample) -> Iterator[tuple[str, str, float]]:
    """Name, whose it is (`node 0`, `node 0 GPU 1`), and value of everything that is known."""
    host = {
        "host/cpu_utilization": sample.cpu_utilization,
        "host/memory_bytes": sample.memory_bytes,
        "host/disk_free_bytes": sample.disk_free_bytes,
        "host/received_bytes_per_s": sample.received_bytes_per_s,
        "host/sent_bytes_per_s": sample.sent_bytes_per_s,
    }
    for name, value in host.items():
        if value is not None:
            yield name, f"node {sample.node}", value
    for gpu in sample.gpus:
        numbers = {
            "gpu/utilization": gpu.utilization,
            "gpu/memory_bytes": gpu.memory_bytes,
            "gpu/temperature_c": gpu.temperature_c,
            "gpu/power_w": gpu.power_w,
            "gpu/power_share": gpu.power_share,
            "gpu/clock_hz": gpu.clock_hz,
        }
        for name, value in numbers.items():
            if value is not None:
                yield name, f"node {sample.node} GPU {gpu.gpu}", value
