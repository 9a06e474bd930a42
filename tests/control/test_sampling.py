"""What an agent says of its machine, from a /proc and a driver that are played."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.control.test_health import Driver

from paceline.control import sampling
from paceline.control.sampling import Host, Sampling, find_way
from paceline.record.machines import (
    RankSample,
    decode_machine,
    machine_files,
    numbers_of_machine,
)
from paceline.topology.read_use import GpuSample, read_nvidia_use, read_rocm_use


def write_proc(proc: Path, *, received: int, busy: int, idle: int) -> None:
    (proc / "net").mkdir(parents=True, exist_ok=True)
    (proc / "net/dev").write_text(
        "Inter-|   Receive\n face |bytes\n"
        "    lo: 99999 1 0 0 0 0 0 0 99999 1 0 0 0 0 0 0\n"
        f"  eth0: {received} 1 0 0 0 0 0 0 {2 * received} 1 0 0 0 0 0 0\n"
    )
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable: 40 kB\n")
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 0 0 1 0 0 0 0\n")


def test_rates_are_since_the_sample_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr(sampling.time, "monotonic", lambda: next(clock))
    host = Host(tmp_path, tmp_path / "proc")
    write_proc(tmp_path / "proc", received=1000, busy=100, idle=100)
    first = host.sample(3, [])
    assert (first.node, first.received_bytes_per_s, first.cpu_utilization) == (3, None, None)
    assert (first.memory_bytes, first.memory_total_bytes) == (60 * 1024, 100 * 1024)
    assert first.disk_free_bytes is not None
    write_proc(tmp_path / "proc", received=5000, busy=130, idle=110)
    second = host.sample(3, [])
    assert (second.received_bytes_per_s, second.sent_bytes_per_s) == (2000.0, 4000.0)
    assert second.cpu_utilization == 0.75
    write_proc(tmp_path / "proc", received=10, busy=130, idle=110)  # an interface went away
    third = host.sample(3, [])
    assert (third.received_bytes_per_s, third.cpu_utilization) == (None, None)


def test_what_a_machine_does_not_say_stays_unknown(tmp_path: Path):
    sample = Host(tmp_path / "gone", tmp_path / "no-proc").sample(0, [GpuSample(gpu=0)])
    assert list(numbers_of_machine(sample)) == []


def test_s4_18_nvidia_smis_table_is_read_and_what_it_does_not_have_is_unknown():
    text = "0, 97, 61034, 71, 412.50, 700.00, 1755\n1, [N/A], [N/A], 40, [Not Supported], 700, x\n"
    first, second = read_nvidia_use(text)
    assert first == GpuSample(
        gpu=0,
        utilization=0.97,
        memory_bytes=61034 * 2**20,
        temperature_c=71.0,
        power_w=412.5,
        power_limit_w=700.0,
        clock_hz=1.755e9,
    )
    assert second == GpuSample(gpu=1, temperature_c=40.0, power_limit_w=700.0)
    assert second.power_share is None
    assert read_nvidia_use("No devices were found\n") == []


def test_rocm_smis_json_is_read():
    card = {
        "GPU use (%)": "55",
        "VRAM Total Used Memory (B)": "1024",
        "Temperature (Sensor edge) (C)": "40.0",
        "Temperature (Sensor junction) (C)": "61.0",
        "Average Graphics Package Power (W)": "300.0",
        "Max Graphics Package Power (W)": "750.0",
        "sclk clock speed:": "(2100Mhz)",
    }
    text = "WARNING: something\n" + json.dumps({"card1": {}, "card0": card, "system": {}})
    first, second = read_rocm_use(text)
    assert first == GpuSample(
        gpu=0,
        utilization=0.55,
        memory_bytes=1024,
        temperature_c=61.0,
        power_w=300.0,
        power_limit_w=750.0,
        clock_hz=2.1e9,
    )
    assert second == GpuSample(gpu=1)
    assert read_rocm_use("ERROR") == []


class Busy(Driver):
    """GPUs at work."""

    NVML_CLOCK_SM = 1

    def nvmlDeviceGetUtilizationRates(self, gpu: Any) -> Any:
        self.refuse(gpu)
        if gpu.is_sliced:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetMemoryInfo(self, gpu: Any) -> Any:
        return SimpleNamespace(used=7)

    def nvmlDeviceGetPowerUsage(self, gpu: Any) -> int:
        return 350_000

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: Any) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, gpu: Any, kind: int) -> int:
        return 1000

    def nvmlDeviceGetTemperature(self, gpu: Any, kind: int) -> int:
        return 60


def gpu(uuid: str, *, is_sliced: bool = False, is_lost: bool = False) -> SimpleNamespace:
    return SimpleNamespace(uuid=uuid, is_sliced=is_sliced, is_lost=is_lost)


def test_nvml_is_asked_for_the_gpus_that_the_run_may_use(monkeypatch: pytest.MonkeyPatch):
    gpus = [gpu("GPU-a"), gpu("GPU-b"), gpu("GPU-c", is_sliced=True), gpu("GPU-d", is_lost=True)]
    monkeypatch.setitem(sys.modules, "pynvml", Busy(gpus))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    sliced, whole = find_way()()
    assert whole == GpuSample(
        gpu=1,
        utilization=0.5,
        memory_bytes=7,
        temperature_c=60.0,
        power_w=350.0,
        power_limit_w=700.0,
        clock_hz=1e9,
    )
    assert (sliced.gpu, sliced.utilization) == (2, None)


def test_s4_18_samples_are_lines_of_the_nodes_file(tmp_path: Path):
    ranks = [RankSample(3, "forward", 7)]
    thread = Sampling(tmp_path, 5, has_gpus=False, ranks=lambda: ranks)
    thread.close()  # after the first one
    thread.start()
    thread.join(60)
    (path,) = machine_files(tmp_path)
    assert path.name == "node-5.jsonl"
    (line,) = path.read_bytes().splitlines()
    assert (decode_machine(line).node, decode_machine(line).ranks) == (5, ranks)
