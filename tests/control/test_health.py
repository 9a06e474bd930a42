"""What an agent says of its GPUs, from a driver that is played."""

import asyncio
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from paceline.check.preflight.xids import _ACTS, _failure_of
from paceline.control.agent import Agent
from paceline.control.health import FATAL_XIDS, open_health, visible
from paceline.job.packages import install_line
from paceline.record.events import GpuHealth


class NVMLError(Exception):
    """What the driver cannot do."""


@dataclass
class Driver:
    """As much of `pynvml` as is used, of GPUs that the test changes."""

    gpus: list[SimpleNamespace]
    xids: list[tuple[int, int]] = field(default_factory=list)
    registered: list[str] = field(default_factory=list)

    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
    nvmlEventTypeXidCriticalError = 8

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, at):
        self.refuse(self.gpus[at])
        return self.gpus[at]

    def refuse(self, gpu):
        if gpu.is_lost:
            raise NVMLError("GPU is lost")

    def nvmlDeviceGetUUID(self, gpu):
        self.refuse(gpu)
        return gpu.uuid

    def nvmlEventSetCreate(self):
        return "set"

    def nvmlDeviceRegisterEvents(self, gpu, kinds, events):
        assert (kinds, events) == (8, "set")
        self.registered.append(gpu.uuid)

    def nvmlEventSetWait(self, events, wait_ms):
        if not self.xids:
            raise NVMLError("timeout")
        at, number = self.xids.pop(0)
        return SimpleNamespace(device=self.gpus[at], eventData=number)

    def nvmlDeviceGetTotalEccErrors(self, gpu, kind, counter):
        self.refuse(gpu)
        if gpu.ecc is None:
            raise NVMLError("not supported")
        return gpu.ecc

    def nvmlDeviceGetRemappedRows(self, gpu):
        self.refuse(gpu)
        return (0, 0, *gpu.remap)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        self.refuse(gpu)
        return gpu.reasons

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        self.refuse(gpu)
        return gpu.temperature

    def nvmlDeviceGetTemperatureThreshold(self, gpu, threshold):
        self.refuse(gpu)
        return 90


def gpu(uuid: str) -> SimpleNamespace:
    return SimpleNamespace(
        uuid=uuid, ecc=2, remap=(0, 0), reasons=0x4, temperature=60, is_lost=False
    )


def change(uuid: str, what: str, value: int, is_fatal: bool = False) -> GpuHealth:
    return GpuHealth(node=0, gpu=uuid, what=what, value=value, is_fatal=is_fatal)


@pytest.fixture
def driver(monkeypatch):
    played = Driver([gpu("GPU-a"), gpu("GPU-b")])
    monkeypatch.setitem(sys.modules, "pynvml", played)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return played


def test_what_does_not_change_is_not_said(driver):
    health = open_health(0)
    assert driver.registered == ["GPU-a", "GPU-b"]
    assert health.changes() == []
    assert health.changes() == []


def test_each_change_is_said_once_and_also_that_it_is_over(driver):
    health = open_health(0)
    health.changes()
    driver.gpus[1].reasons = 0x40 | 0x80
    driver.gpus[1].temperature = 90
    assert health.changes() == [
        change("GPU-b", "hardware thermal slowdown", 1),
        change("GPU-b", "power brake", 1),
        change("GPU-b", "too hot", 1),
    ]
    driver.gpus[1].reasons = 0x80
    assert [(each.what, each.value) for each in health.changes()] == [
        ("hardware thermal slowdown", 0)
    ]


def test_more_uncorrected_errors_and_a_failed_remap_are_fatal_and_a_pending_one_is_not(driver):
    health = open_health(0)
    health.changes()
    driver.gpus[0].ecc, driver.gpus[0].remap = 3, (1, 1)
    assert health.changes() == [
        change("GPU-a", "uncorrected ecc errors", 3, is_fatal=True),
        change("GPU-a", "row remap pending", 1),
        change("GPU-a", "row remap failed", 1, is_fatal=True),
    ]
    driver.gpus[0].ecc = 0  # a reset
    assert health.changes() == [change("GPU-a", "uncorrected ecc errors", 0)]


def test_every_xid_is_said_and_a_programs_own_is_not_fatal(driver):
    health = open_health(0)
    driver.xids = [(0, 31), (1, 79)]
    assert health.changes() == [change("GPU-a", "xid", 31), change("GPU-b", "xid", 79, True)]
    driver.gpus[1].is_lost, driver.xids = True, [(1, 79)]
    assert health.changes() == [
        change("unknown", "xid", 79, is_fatal=True),
        change("GPU-b", "lost", 1, is_fatal=True),
    ]


def test_a_gpu_about_which_the_driver_answers_nothing_any_more_is_lost(driver):
    health = open_health(0)
    health.changes()
    driver.gpus[1].is_lost = True
    assert health.changes() == [change("GPU-b", "lost", 1, is_fatal=True)]
    assert health.changes() == []
    driver.gpus[1].is_lost = False
    assert health.changes() == [change("GPU-b", "lost", 0)]


@pytest.mark.parametrize(
    ("shown", "lost"), [(None, ["0"]), ("1,0", ["0"]), ("1", []), ("GPU-b", [])]
)
def test_a_gpu_that_is_lost_at_the_start_is_reported_and_the_others_are_watched(
    driver, monkeypatch, shown, lost
):
    driver.gpus[0].is_lost = True
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    health = open_health(0)
    assert driver.registered == ["GPU-b"]
    assert health.changes() == [change(gpu, "lost", 1, is_fatal=True) for gpu in lost]
    driver.gpus[1].ecc = 3
    assert health.changes() == [change("GPU-b", "uncorrected ecc errors", 3, is_fatal=True)]


def test_what_a_gpu_does_not_count_is_not_watched(driver):
    driver.gpus[0].ecc = None
    health = open_health(0)
    health.changes()
    assert ("GPU-a", "uncorrected ecc errors") not in health.last
    assert ("GPU-b", "uncorrected ecc errors") in health.last


def test_only_the_gpus_of_this_run_are_watched(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    open_health(0)
    assert driver.registered == ["GPU-b"]
    assert visible(["GPU-a", "GPU-b"], "") == []
    assert visible(["GPU-a", "GPU-b"], "GPU-") == []  # of two, which


def test_without_nvml_nothing_is_watched_and_the_record_has_the_reason(driver, monkeypatch):
    def fail(self):
        raise NVMLError("driver not loaded")

    monkeypatch.setattr(Driver, "nvmlInit", fail)
    assert open_health(0) == "NVML: driver not loaded"
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    (note,) = notes_of_node(3)
    assert note == (
        "node 3: the health of GPUs is not watched: nvidia-ml-py is not installed "
        f"({install_line('gpu')})"
    )


def test_an_error_of_nvml_that_nobody_expected_is_in_the_record(driver, monkeypatch):
    monkeypatch.delattr(Driver, "nvmlDeviceGetTemperature")
    (note,) = notes_of_node(3)
    assert note.startswith("node 3: the health of GPUs is not watched: AttributeError: ")
    assert "nvmlDeviceGetTemperature" in note


def test_a_package_without_the_older_name_has_the_newer_one(driver, monkeypatch):
    ask = Driver.nvmlDeviceGetCurrentClocksThrottleReasons
    monkeypatch.setattr(Driver, "nvmlDeviceGetCurrentClocksEventReasons", ask, raising=False)
    monkeypatch.delattr(Driver, "nvmlDeviceGetCurrentClocksThrottleReasons")
    driver.gpus[1].reasons = 0x80
    assert open_health(0).changes() == [change("GPU-b", "power brake", 1)]


def notes_of_node(node: int) -> list[str]:
    """What an agent on a machine without NVML has for the record."""
    notes: list[str] = []
    agent = SimpleNamespace(_on_accelerator=True, _node=node, _note=notes.append)
    asyncio.run(Agent._watch_gpus(agent))
    return notes


def test_settings_that_undo_recovery_are_in_the_record_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    first, *others = notes_of_node(0)
    assert first == (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 undoes recovery over NCCL: torch's watchdog ends every "
        "survivor of a lost rank, with its state; unset TORCH_NCCL_ASYNC_ERROR_HANDLING, and "
        "agents set 0"
    )
    assert len(others) == len(notes_of_node(1)) == 1


def test_fatal_xids_are_those_for_which_the_gpu_or_the_node_is_reset_or_drained():
    spared = {"xid-63-row-remap-event"}
    ends = {"reset the GPU", "reboot the node", "drain the node"}
    named = {number: _failure_of(number, "") for number in range(200)}
    worst = {n for n, name in named.items() if name and _ACTS[name] in ends and name not in spared}
    assert worst == FATAL_XIDS
