"""Every private name of torch that the runtime and `prove` use: all of them here, and nowhere else.

Read in torch 2.13; `SINCE` has what older ones that run, from 2.11, do not have. For each name
`tests/runtime/test_torch_private.py` has a test that fails, with the name, where a torch no longer
has it or it behaves otherwise; `tests/test_laws.py` finds private names in other files. Imported
where they are used are names whose import is slow (the compiler, DTensor's tools) or optional.

Leaves out: private names of transformers, and texts that are only compared with (operators' names
in tables, wrappers' prefixes in parameters' names): nothing breaks where torch renames those.
"""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

# Public as torch.distributed.X, but typed only where they are defined.
from torch._C._distributed_c10d import (
    AllreduceOptions,
    Backend,
    ErrorType,
    GradBucket,
    PrefixStore,
    TCPStore,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "AllreduceOptions",
    "Backend",
    "ErrorType",
    "FakeTensor",
    "FakeTensorMode",
    "GradBucket",
    "PrefixStore",
    "TCPStore",
    "TorchDispatchMode",
    "tree_leaves",
    "tree_map_only",
]

_aten = torch.ops.aten

OVERRIDDEN: Mapping[str, tuple[str, ...]] = {
    "torch.nn.parallel:DistributedDataParallel": ("_build_params_for_reducer", "_post_forward"),
    "torch.distributed.pipelining:PipelineStage": (
        "_retrieve_recv_activations",
        "_retrieve_recv_grads",
        "_setup_backward_recv_info",
        "_setup_forward_recv_info",
        "_warmup_backward_result",
        "_warmup_forward_vote",
    ),
}
"""Private methods that `Replica` and `Stage` override: torch calls them, so they keep its names."""


def detached_in_mode(tensor: torch.Tensor) -> torch.Tensor:
    """`detach()` inside a dispatch mode, with the tensor's version counter, as torch's selective
    checkpointing does it (`torch.utils.checkpoint._detach_helper`, torch 2.13)."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


SINCE: Mapping[str, str] = {
    "FSDPState._fsdp_param_groups": "2.12",
    "PipelineStage._setup_forward_recv_info": "2.12",
    "FSDPModule.set_reduce_scatter_unused_params": "2.13",
}
"""Name that torch 2.11 lacks -> the first release with it, read in the wheels of each. What uses
the names of FSDP2 has the older way, too; pipelines are refused without theirs (`R064`)."""


# Modules and tensors.


def parameters_of(module: Any) -> dict[str, Any]:
    """A module's own parameters by name, to be changed: None where a name has none, and anything
    that stands in for a parameter. `register_parameter` takes parameters alone."""
    return cast("dict[str, Any]", module._parameters)


def without_parameters(module: nn.Module) -> nn.Module:
    """A shallow copy of a module that has none of its parameters, and room for others."""
    copied = copy.copy(module)
    copied._parameters = {}
    return copied


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name, to be changed."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own children by name, to be changed: a container's with numbers as names too."""
    return module._modules


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Names of a module's own buffers that its `state_dict` leaves out."""
    return module._non_persistent_buffers_set


def storage_key(storage: Any) -> int:
    """What two tensors share that lie in the same memory, also without any (fake, meta)."""
    return int(storage._cdata)


def is_used_elsewhere(storage: Any) -> bool:
    """Whether anything but this object holds a storage: tensors, or other objects of it."""
    return int(torch._C._storage_Use_Count(storage._cdata)) > 1


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was changed."""
    return int(tensor._version)


TRUNC_NORMAL_NAME = "_no_grad_trunc_normal_"
"""In `nn.init`: draws again what lies outside its bounds, and so looks at numbers."""

TRUNC_NORMAL: Any = getattr(nn.init, TRUNC_NORMAL_NAME)


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    schema = operator._schema.arguments
    named = [(each, kwargs[each.name]) for each in schema if each.name in kwargs]
    given = [*zip(schema, args, strict=False), *named]
    return [value for a, value in given if a.alias_info is not None and a.alias_info.is_write]


def returns_alias(operator: Any) -> bool:
    """Whether what an operator returns shares memory with what it is given."""
    return any(each.alias_info is not None for each in operator._schema.returns)


def written_in_place(operator: Any, args: Sequence[Any]) -> list[Any]:
    """Arguments that an operator writes. Fused optimizers take gradients as such, and store them
    only with a gradient scaler (torch 2.13, aten/src/ATen/native/cuda/fused_adam_utils.cuh)."""
    given = zip(operator._schema.arguments, args, strict=False)
    return [value for each, value in given if each.is_write and each.name != "grads"]


def forget_tensors(mode: FakeTensorMode) -> None:
    """Drop a mode's weak references: they keep `nn.Module.to` from exchanging a parameter."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another."""
    return bool(tensor._is_view())


def local_tensor(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, itself: `to_local` gives a parameter's as a new view."""
    return cast(Tensor, tensor._local_tensor)


def scale_each(tensors: list[Tensor], factor: float) -> None:
    """Multiply all in place, in one kernel where the device has one."""
    torch._foreach_mul_(tensors, factor)


def norm_of_each(tensors: list[Tensor]) -> Sequence[Tensor]:
    """L2 norms. The public `get_total_norm` adds them up in the tensors' own type."""
    return torch._foreach_norm(tensors)


# Operators that have no public name.

ITEM = _aten._local_scalar_dense.default
"""What `Tensor.item` calls: the one number of a tensor, for Python."""

SCALED_MM = torch._scaled_mm
"""float8 @ float8 with scales. The public `nn.functional.scaled_mm` (same numbers) calls another
operator, whose FLOPs torch does not count."""

GROUPED_MM = _aten._grouped_mm
"""What `nn.functional.grouped_mm` runs, as tracers and counters see it."""

UNSAFE_VIEW = _aten._unsafe_view
"""A reshape that autograd does not take for a view."""

# Attention kernels that return the log-sum-exp; the public attention does not.
FLASH_CPU = _aten._scaled_dot_product_flash_attention_for_cpu
FLASH_CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
FLASH = _aten._scaled_dot_product_flash_attention
FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward
EFFICIENT = _aten._scaled_dot_product_efficient_attention
EFFICIENT_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward

FUNCTIONAL = torch.ops._c10d_functional
"""Collectives that return a new tensor, which a tracer and a compiler can follow."""


def process_group_of(args: Sequence[Any]) -> dist.ProcessGroup:
    """The group among a communication operator's arguments: an object in `c10d`, a name, the last
    of its words, in functional collectives.

    Raises:
        IndexError: There is none.
    """
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # the kind of reduction is an object too
                continue
    names = [arg for arg in args if isinstance(arg, str)]
    find: Any = c10d._resolve_process_group  # type: ignore[attr-defined]
    return cast(dist.ProcessGroup, find(names[-1]))


# Autograd.


def backward_node() -> Any:
    """The node of the backward pass that runs now, in this thread; None outside of one."""
    return torch._C._current_autograd_node()


def sequence_number(node: Any = None) -> int:
    """The number that a node was given in the forward pass; the next one to give without a node."""
    if node is not None:
        return int(node._sequence_nr())
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


# Meshes and process groups.


def all_groups() -> list[dist.ProcessGroup]:
    """Every process group of this process, oldest first: the default one and all made beside it."""
    return list(c10d._world.pg_map)


def backends_of(group: dist.ProcessGroup) -> dict[Backend, set[torch.device]]:
    """What sends a group's tensors, with the devices whose tensors it sends. A group of gloo alone
    has gloo for a GPU's too, also in a torch without CUDA."""
    found: dict[Backend, set[torch.device]] = {}
    for device in group._device_types:
        found.setdefault(group._get_backend(device), set()).add(device)
    return found


def set_time_limit(backend: Backend, limit: timedelta) -> None:
    """How long its operations may take from now on; gloo's and NCCL's have one."""
    set_limit = getattr(backend, "_set_default_timeout", None)
    if set_limit is not None:
        set_limit(limit)


def number_ranks(group: dist.ProcessGroup) -> None:
    """Tell the backends of a default group which ranks are in it, so that it can be split. torch
    tells those of every other group; of this one, only the first backend in a process knows, and
    in a later one the split ends the process (torch 2.11 to 2.13, `groupRanks` of NCCL and gloo).
    """
    for backend in backends_of(group):
        backend.options.global_ranks_in_group = list(range(group.size()))


def forget_group_count() -> None:
    """Name process groups as in a new process: torch counts them, and resets the count only where
    a default group is destroyed."""
    c10d._world.group_count = 0


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A 1-D mesh as one of several axes, of the same root."""
    return mesh._unflatten(0, sizes, names)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one, of the same root."""
    return mesh._flatten(name)


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Meshes of one root side by side, as the axes of one."""
    return DeviceMesh._concatenate(list(meshes))


def forget_groups(meshes: Sequence[DeviceMesh] = ()) -> None:
    """Take process groups out of meshes and of DTensor's caches of what it has seen, which keep
    them alive for ever, with their sockets and threads, and hand out an old mesh for an equal one.
    """
    from torch.distributed.tensor import DTensor

    # As in `torch.distributed.tensor.debug`, which brings the compiler along.
    known: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    known.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    for mesh in meshes:
        mesh._get_root_mesh()._pg_registry.clear()
        mesh._pg_registry.clear()


def local_shape_and_offset(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's part of a DTensor and where in the whole it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(size), tuple(offset)


# DDP.


def settle_buckets(replica: DistributedDataParallel) -> None:
    """Fill the buckets in the order in which parameters are registered, as a first backward pass
    would."""
    replica.reducer._push_all_rebuilt_params()
    replica.reducer._rebuild_buckets()


def build_reducer(
    replica: DistributedDataParallel,
    parameters: Any,
    is_sparse: Any,
    hook: tuple[object, Callable[..., Any]] | None,
) -> None:
    """Build DDP's reduction anew: its options count only when it is built."""
    names = replica._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
    replica._ddp_init_helper(parameters, is_sparse, names, False)  # type: ignore[no-untyped-call]
    if hook is not None:
        from torch._C._distributed_c10d import _register_comm_hook

        _register_comm_hook(replica.reducer, *hook)


DDP_START = ("_verify_param_shape_across_processes", "_sync_module_states")
"""Names in `torch.nn.parallel.distributed` of what DDP does once, when it is built: it compares
shapes and sends weights."""

BUCKET_CONFIG, BUCKET_LIMITS = "_BucketCapacityConfig", "compute_bucket_size_limits"
"""Names of what says how large DDP's buckets are: as they are built, and after the first step."""

REBUILD_BUCKETS = "_rebuild_buckets"
"""Name of the reducer's method that sorts buckets anew after a first backward pass."""


# FSDP2.


def fsdp_parameters(unit: "FSDPModule") -> list[Any]:
    """FSDP2's own objects for the parameters of a unit."""
    return [each for group in _fsdp_groups(unit) for each in group.fsdp_params]


def _fsdp_groups(unit: "FSDPModule") -> list[Any]:
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reduce_unused(part: "FSDPModule") -> None:
    """From now on every rank reduces zeros for parameters that its backward pass did not reach."""
    if hasattr(part, "set_reduce_scatter_unused_params"):
        part.set_reduce_scatter_unused_params(True)
        return
    for module in cast(Any, part).modules():
        for group in _fsdp_groups(module) if hasattr(module, "_get_fsdp_state") else ():
            group.post_backward = partial(_reduce_all_of, group, group.post_backward)


def _reduce_all_of(group: Any, post_backward: Callable[..., None], *given: Any) -> None:
    """What FSDP2 does after a unit's backward pass, with zeros where no gradient came."""
    for each in group.fsdp_params if group.reduce_grads else ():
        parameter = gathered_parameter(each)
        if parameter is None or not parameter.requires_grad:
            continue
        if parameter.grad is None and each.unsharded_accumulated_grad is None:
            parameter.grad = torch.zeros_like(parameter)
    post_backward(*given)


def gathered_parameter(fsdp_parameter: Any) -> Any:
    """What one of `fsdp_parameters` is while it is gathered; None before it first was."""
    return getattr(fsdp_parameter, "_unsharded_param", None)


def fsdp_compute_type(unit: "FSDPModule") -> torch.dtype | None:
    """The type that a unit's parameters are gathered in; None where it is their own."""
    found = unit._get_fsdp_state()._mp_policy.param_dtype
    return found if isinstance(found, torch.dtype) else None


def unshard_handle() -> type:
    """The class of what `FSDPModule.unshard(async_op=True)` returns."""
    from torch.distributed.fsdp._fully_shard._fully_shard import _UnshardHandleImpl

    return _UnshardHandleImpl


# Pipelines.

BATCH_P2P = "_batch_p2p"
"""Name in `torch.distributed.pipelining.schedules` of what posts sends and receives."""

COMPUTE_LOSS = "_maybe_compute_loss"
"""Name of `schedule_base()`'s method that computes a micro-batch's loss."""


def schedule_base() -> Any:
    """The class that all of torch's pipeline schedules are."""
    from torch.distributed.pipelining import schedules

    return schedules._PipelineSchedule


def schedule_has_loss(schedule: Any) -> bool:
    """Whether a schedule computes a loss: not when it only evaluates."""
    return schedule._loss_fn is not None


def schedule_losses(schedule: Any) -> list[Any]:
    """The losses of the step's micro-batches so far, to be added to."""
    return cast("list[Any]", schedule._internal_losses)


# Tracing.

leave_modes = _disable_current_modes
"""Context: no dispatch mode sees what runs in it."""

PROPAGATE = "_propagate_tensor_meta_non_cached"
"""Name of the method of `sharding_propagator()` that finds a result's shape by running the
operation on whole tensors."""

IS_TRACING = "_are_we_tracing"
"""Name in `tracing_modules()`, of those that have it, by which DTensor asks whether it is compiled:
it then looks nothing up in its cache."""


def sharding_propagator() -> Any:
    """DTensor's class that finds placements and shapes of results."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator


def tracing_modules() -> tuple[Any, ...]:
    """DTensor's modules that ask `IS_TRACING`."""
    from torch.distributed.tensor import _dispatch, _sharding_prop

    return _sharding_prop, _dispatch


def fake_store() -> Any:
    """A store for the process group `fake`, which answers every collective without sending."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# The flight recorder.


def recorded_collectives() -> list[dict[str, Any]]:
    """The last collectives of NCCL's and gloo's groups, as torch's flight recorder has them, oldest
    first; empty where it cannot be had or is off. Some milliseconds."""
    from torch._C import _distributed_c10d

    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            entries += pickle.loads(dump(True, False, False)).get("entries", [])
    return entries


def ranks_by_group() -> dict[str, list[int]]:
    """The ranks of every process group of this process, by the group's name."""
    names, ranks = c10d._world.pg_names, c10d._world.pg_group_ranks
    return {name: sorted(ranks[group]) for group, name in list(names.items()) if group in ranks}


# Checkpoints.


def storage_info(path: str, offset: int, length: int) -> Any:
    """Where a tensor lies in the files of a checkpoint, as torch's table of contents has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


def table_classes() -> dict[str, Any]:
    """Every class of torch in a checkpoint's table of contents, by its name in the pickle."""
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.serialization import _get_layout

    classes = (
        *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, torch.Size),
        *(metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, _StorageInfo),
        *(metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata._MEM_FORMAT_ENCODING),
    )
    found: dict[str, Any] = {f"{each.__module__}.{each.__qualname__}": each for each in classes}
    return {**found, "torch.serialization._get_layout": _get_layout}


# The compiler.


def load_compiler() -> None:
    """Import torch's compiler now: the first optimizer does otherwise."""
    import torch._dynamo  # noqa: F401


def on_compiling(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Have two functions called before and after torch.compile compiles anything."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: begin())
    callback_handler.register_end_callback(lambda _: end())


def has_triton() -> bool:
    """Whether torch.compile can write kernels for this machine's GPU."""
    from torch.utils._triton import has_triton as torch_has_triton

    return bool(torch_has_triton())
