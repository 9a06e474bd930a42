"""Wrap a model so that it trains in a layout.

Leaves out: moving the model to its device and seeding it (the session does both before), and
building the process group.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline.parallel.layout import Layout
from paceline.runtime.strategy.precision import Precision

WORTH_SHARDING = 0.1
"""Share of the model's parameters a list of blocks needs to be sharded block by block. A guess:
below it, the smaller gathered unit cannot matter much for memory."""

_DDP_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"
)
"""torch 2.13 renamed the option and warns about the old name; 2.11 knows only the old one."""


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The layout's ranks as a device mesh with one axis, `data`.

    Collective: every rank of an initialised process group calls it.
    """
    world = dist.get_world_size()
    assert world == layout.num_ranks, f"{layout.name} on a world of {world}"
    return init_device_mesh(device_type, (layout.data,), mesh_dim_names=("data",))


def apply(model: nn.Module, layout: Layout, mesh: DeviceMesh, *, precision: Precision) -> nn.Module:
    """The model, ready to train in the layout; every rank starts from rank 0's weights.

    Args:
        model: Any module, whole, on its device (or on meta, for a dry run).
        layout: How the work is split. One rank needs no wrapping, whatever the sharding.
        mesh: From `make_mesh`.
        precision: `bf16` is set up here for FSDP2 only; elsewhere `autocast` does it.

    Returns:
        The module to call: a new wrapper for DDP, the same object otherwise.
    """
    if layout.num_ranks == 1:
        return model
    if layout.sharding == "none":
        return _replicate(model, mesh)
    return _shard(model, mesh, precision)


def _replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """DDP. Gradients live in the reduction's own buckets, which saves one copy of them.

    DDP's own sending of buffers is off: the step loop does it once a step, see `send_buffers`.
    """
    options: dict[str, Any] = {_SYNC_BUFFERS: False}
    return DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
        **options,
    )


def _shard(model: nn.Module, mesh: DeviceMesh, precision: Precision) -> nn.Module:
    """FSDP2, bottom-up: each block is gathered on its own, what is left belongs to the root.

    In bf16 the root hands out float32, so that the loss is float32 as under autocast.
    """
    _send_from_first_rank(model, mesh)
    policy, root_policy = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if precision == "bf16":
        narrow, wide = torch.bfloat16, torch.float32
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide)
        root_policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide, output_dtype=wide)
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=root_policy)
    return model


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of any module: the children of its outermost lists of same-typed modules.

    A list counts when it holds two modules or more and a tenth of the parameters, so a decoder
    gives its blocks, an encoder-decoder both stacks, and the experts inside a block do not count.
    Empty when the model has no such list.
    """
    enough = WORTH_SHARDING * _num_parameters(model)
    return list(_blocks_below(model, enough))


def _blocks_below(module: nn.Module, enough: float) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.Sequential) and _is_stack(module, enough):
        yield from module.children()
        return
    for child in module.children():
        yield from _blocks_below(child, enough)


def _is_stack(module: nn.Module, enough: float) -> bool:
    children = list(module.children())
    same_type = len({type(child) for child in children}) == 1
    return len(children) >= 2 and same_type and _num_parameters(module) >= max(enough, 1)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def saved_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Buffers that are saved with the model. Those can change while training, as batch norm's
    averages do, and then differ between ranks; others follow from the shape."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    saved = inner.state_dict(keep_vars=True)
    return [buffer for name, buffer in inner.named_buffers() if name in saved]


def send_buffers(buffers: Sequence[torch.Tensor]) -> None:
    """Every rank takes over rank 0's buffers: at the end of each step, in every layout alike, so
    that a checkpoint of any rank's is a checkpoint of all ranks'. Collective."""
    with torch.no_grad():
        for buffer in buffers:
            dist.broadcast(buffer, 0)


def _send_from_first_rank(model: nn.Module, mesh: DeviceMesh) -> None:
    """What DDP does when it is built: FSDP2 would shard each rank's own, differing weights."""
    group = mesh.get_group()
    with torch.no_grad():
        for tensor in (*model.parameters(), *saved_buffers(model)):
            if not tensor.is_meta:
                dist.broadcast(tensor, group=group, group_src=0)
