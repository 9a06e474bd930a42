import pytest
import torch

from paceline.runtime.devices import DEVICES, current_device, device_of, is_accelerator, synchronize
from paceline.runtime.memory import forget_peak, held_bytes, peak_bytes, reserved_bytes


class Recording:
    """A device module that has no allocator to ask, as a new backend's."""

    def __init__(self) -> None:
        self.calls = []

    def set_device(self, index):
        self.calls.append(("set_device", index))

    def current_device(self):
        return 3

    def synchronize(self, device):
        self.calls.append(("synchronize", device.index))


@pytest.fixture
def module(monkeypatch):
    module = Recording()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_beside_nccl_stands_gloo_for_what_lies_on_the_host():
    assert DEVICES["nccl"].transports == "cpu:gloo,cuda:nccl"
    assert DEVICES["gloo"].transports == "gloo"


def test_a_rank_of_nccl_takes_the_device_of_its_place_and_waits_for_it(module):
    device = device_of("nccl", 1)
    synchronize(device)
    assert device == torch.device("cuda", 1)
    assert module.calls == [("set_device", 1), ("synchronize", 1)]
    assert current_device("cuda") == torch.device("cuda", 3)


def test_a_rank_of_gloo_asks_no_device_for_anything(module):
    device = device_of("gloo", 1)
    synchronize(device)
    assert device == current_device("cpu") == torch.device("cpu")
    assert module.calls == []


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", False), ("meta", False), ("cuda:1", True), ("xpu", True)]
)
def test_only_what_the_host_runs_ahead_of_is_an_accelerator(device, expected):
    assert is_accelerator(device) is expected


def test_memory_that_nothing_counts_is_none(module):
    device = torch.device("cuda", 0)
    forget_peak(device)
    assert held_bytes(device) is peak_bytes(device) is reserved_bytes(device) is None


def test_what_an_allocator_keeps_is_told_where_it_counts_that(module):
    module.max_memory_reserved = lambda device: 4096
    assert reserved_bytes(torch.device("cuda", 0)) == 4096
    assert reserved_bytes(torch.device("cpu")) is None
