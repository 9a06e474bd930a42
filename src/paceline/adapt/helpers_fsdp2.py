"""What a script in the form of FSDP2 gets: shards, and the whole state put together again."""

from collections.abc import Mapping

from paceline.adapt.helper import Helper
from paceline.adapt.helpers_torch import PLAIN

_SHARD = Helper(
    text='''\
def shard(model):
    """Split parameters, gradients and optimizer state over all ranks: every layer, then the rest.

    In place, and before the optimizer is made. All ranks start from rank 0's weights.
    """
    model.to(THIS_DEVICE)
    if THIS_DEVICE.type == "cuda":  # statistics over the whole batch, as on one device
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(THIS_DEVICE.type, (WORLD_SIZE,))
    for module in list(model.modules()):
        if isinstance(module, torch.nn.ModuleList):
            for layer in module:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
''',
    imports=(
        "import torch",
        "import torch.distributed as dist",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import fully_shard",
    ),
    needs=("RANK", "THIS_DEVICE"),
)

_FULL_STATE = Helper(
    text='''\
def full_state(state, everywhere=False):
    """A state dict with its shards put together, on the CPU: the form of the one-device script.

    All ranks have to call it. The tensors are kept on rank 0, or on all of them.
    """

    def whole(value):
        if not isinstance(value, DTensor):
            return value
        full = value.full_tensor()
        return full.cpu() if everywhere or RANK == 0 else None

    return tree_map(whole, state)
''',
    imports=(
        "from torch.distributed.tensor import DTensor",
        "from torch.utils._pytree import tree_map",
    ),
    needs=("RANK",),
)

_LOAD_MODEL = Helper(
    text='''\
def load_full_state(model, state, **options):
    """Each rank takes its shards out of a whole state dict."""
    here = model.state_dict()
    split = {name: like(value, here.get(name)) for name, value in state.items()}
    return model.load_state_dict(split, **options)
''',
    needs=("like",),
)

_LIKE = Helper(
    text='''\
def like(value, mine):
    """A whole tensor, split and placed as this rank holds it."""
    if isinstance(mine, DTensor) and not isinstance(value, DTensor):
        value = value.to(mine.device_mesh.device_type)
        return distribute_tensor(value, mine.device_mesh, mine.placements)
    return value
''',
    imports=("from torch.distributed.tensor import DTensor, distribute_tensor",),
)

_LOAD_OPTIMIZER = Helper(
    text='''\
def is_shaped_as(value, parameter):
    return getattr(value, "shape", None) == parameter.shape


def load_full_optimizer_state(optimizer, state):
    """Each rank takes its shards out of a whole optimizer state."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    saved = [number for group in state["param_groups"] for number in group["params"]]
    split = {
        number: {
            name: like(value, parameter) if is_shaped_as(value, parameter) else value
            for name, value in state["state"][number].items()
        }
        for number, parameter in zip(saved, parameters, strict=True)
        if number in state["state"]
    }
    optimizer.load_state_dict({**state, "state": split})
''',
    needs=("like",),
)

_WHOLE = Helper(
    text='''\
def whole(value):
    """A norm or a sum of all shards, as a plain tensor. All ranks have to call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
''',
    imports=("from torch.distributed.tensor import DTensor",),
)

FSDP2: Mapping[str, Helper] = {
    **PLAIN,
    "shard": _SHARD,
    "full_state": _FULL_STATE,
    "like": _LIKE,
    "load_full_state": _LOAD_MODEL,
    "load_full_optimizer_state": _LOAD_OPTIMIZER,
    "whole": _WHOLE,
    "register_fsdp_forward_method": Helper(
        text="", imports=("from torch.distributed.fsdp import register_fsdp_forward_method",)
    ),
}
