"""Which device a plan's ranks compute on, what their groups go over, and what differs by device.

Everything in the runtime that treats an accelerator otherwise than a CPU asks here. What only CUDA
has (kernels by capability, `cudaHostRegister`, Triton) stays with its one user.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Device:
    """What a plan's backend means in torch's words."""

    type: str
    transports: str
    """As for `init_process_group`. Beside an accelerator's own group stands gloo: NCCL refuses host
    tensors, which an offloaded state, optimizers' counters and every agreed object are."""


DEVICES: dict[str, Device] = {
    "gloo": Device("cpu", "gloo"),
    "nccl": Device("cuda", "cpu:gloo,cuda:nccl"),
}
"""By a plan's `cluster.backend`. The tests replace a row to run on a device of their own."""


def device_of(backend: str, local_rank: int) -> torch.device:
    """A rank's device, which is the current one from now on."""
    kind = DEVICES[backend].type
    if not is_accelerator(kind):
        return torch.device(kind)
    torch.get_device_module(kind).set_device(local_rank)
    return torch.device(kind, local_rank)


def current_device(kind: str) -> torch.device:
    """This process's device of a type."""
    if not is_accelerator(kind):
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def is_accelerator(device: torch.device | str) -> bool:
    """Whether the host runs ahead of the device: a call's return does not say that the data is
    there."""
    return torch.device(device).type not in ("cpu", "meta")


def synchronize(device: torch.device) -> None:
    """Wait for everything that was asked of the device; nothing to wait for on a CPU."""
    if is_accelerator(device):
        torch.get_device_module(device).synchronize(device)


def pins_memory(device: torch.device | str) -> bool:
    """Whether torch can pin host memory for copies that do not block."""
    return torch.device(device).type == "cuda"


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """CUDA's compute capability, such as (9, 0); None on anything else."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor there. To an accelerator from pinned memory, so that the host does not wait."""
    if pins_memory(device) and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
