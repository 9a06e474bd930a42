"""Equal numbers on every rank: the weights a run begins with, and buffers after each step."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.layout import Layout
from paceline.runtime._torch_private import buffers_of, unsaved_buffers
from paceline.runtime.strategy.mesh import Meshes


def send_from_first_rank(model: nn.Module, device_type: str) -> None:
    """Every rank takes over rank 0's weights and saved buffers, of the whole model: what is split
    afterwards is cut out of them. Nothing on meta. Collective.

    Args:
        model: Anywhere. It stays there.
        device_type: Where ranks talk: NCCL sends no host memory. One tensor at a time is there.
    """
    if dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *saved_buffers(model)):
            if tensor.is_meta:
                continue
            sent = tensor.to(device_type)
            dist.broadcast(sent, 0)
            if sent is not tensor:
                tensor.copy_(sent)


def move_parts(model: nn.Module, layout: Layout, device_type: str) -> None:
    """What is left of a model on this rank, on its device. In place; nothing on meta. FSDP2 moves
    and shards one unit after the other by itself, so that no device ever holds a whole part."""
    if layout.keeps_shards:
        return
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    if any(each.device.type != device_type for each in (*model.parameters(), *model.buffers())):
        model.to(device_type)  # not where all is there: tensors of a dry run cannot be swapped


class SavedBuffers:
    """Where a model keeps the buffers that are saved with it. Those can change while training, as
    batch norm's averages do, and then differ between ranks; others follow from the shape."""

    def __init__(self, model: nn.Module) -> None:
        places = {
            id(buffer): (module, name)
            for module in model.modules()
            for name, buffer in buffers_of(module).items()
            if buffer is not None and name not in unsaved_buffers(module)
        }
        self._places = list(places.values())

    def tensors(self) -> list[Tensor]:
        """As they are now: a module may have put another tensor in a buffer's place."""
        found = (buffers_of(module)[name] for module, name in self._places)
        return [buffer for buffer in found if buffer is not None]


def saved_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that are saved with a model, as they are now."""
    return SavedBuffers(model).tensors()


def send_buffers(buffers: Sequence[Tensor], meshes: Meshes) -> None:
    """Ranks that hold the same part take over the first one's buffers: at the end of each step, in
    every layout alike, so that a checkpoint of any rank's is a checkpoint of all ranks'.
    Collective."""
    if meshes.dp_cp.size() == 1:
        return
    with torch.no_grad():
        for buffer in buffers:
            dist.broadcast(buffer, group=meshes.dp_cp.get_group(), group_src=0)
