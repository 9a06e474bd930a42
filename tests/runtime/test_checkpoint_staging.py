import pytest
import torch

from paceline.runtime.checkpoint import _staging
from paceline.runtime.checkpoint._save_plan import Share, _Facts, _record


class Cudart:
    """Keeps what is registered, as CUDA does, and refuses when it is told to."""

    def __init__(self, result=0):
        self.result = result
        self.registered = {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if self.result == 0:
            self.registered[address] = num_bytes
        return self.result

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


def share_of(*tensors):
    records = tuple(
        _record(
            (f"t{index}", (0,)),
            _Facts(each.nbytes, "float32", tuple(each.shape), tuple(each.shape)),
            None,
        )
        for index, each in enumerate(tensors)
    )
    return Share(records=records, tensors=tensors)


@pytest.fixture
def waited(monkeypatch):
    """Devices that were waited for; host tensors count as an accelerator's."""
    devices = []
    monkeypatch.setattr(_staging, "is_accelerator", lambda device: True)
    monkeypatch.setattr(_staging, "pins_memory", lambda device: True)
    monkeypatch.setattr(_staging, "synchronize", devices.append)
    return devices


def test_a_stage_that_grows_unregisters_its_memory_before(monkeypatch, waited):
    cudart, stage = Cudart(), _staging.Stage()
    monkeypatch.setattr(_staging, "_cudart", lambda: cudart)
    for count in (100_000, 50_000, 200_000):
        stage.copy(share_of(torch.arange(count, dtype=torch.float32)))
        assert list(cudart.registered.values()) == [stage.num_bytes]
    stage.close()
    assert cudart.registered == {}


def test_memory_that_cuda_does_not_register_is_used_and_never_unregistered(
    monkeypatch, waited, capsys
):
    monkeypatch.setattr(_staging, "_cudart", lambda: Cudart(result=2))
    stage = _staging.Stage()
    stage.copy(share_of(torch.ones(10)))
    stage.copy(share_of(torch.ones(100_000)))
    stage.close()
    assert "not pinned" in capsys.readouterr().err


def test_every_accelerator_is_waited_for_before_the_writer_reads(monkeypatch, waited):
    monkeypatch.setattr(_staging, "_cudart", lambda: Cudart())
    _staging.Stage().copy(share_of(torch.ones(10), torch.ones(10)))
    assert waited == [torch.device("cpu")]
