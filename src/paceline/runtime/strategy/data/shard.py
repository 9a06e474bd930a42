"""What the ranks that read different tokens (data x context: dp x cp) share, and exchange.

==========  =============================  =========================  =============================
sharding    held by every rank             parameters are gathered    gradients are summed
==========  =============================  =========================  =============================
`none`      all of its part                never                      all-reduce, once a step
`zero1`     its shard of parameters and    once a step, before the    reduce-scatter, once a step
            optimizer state                first micro-batch
`zero2`     the same                       once a step                reduce-scatter, each
                                                                      micro-batch
`full`      the same                       each block before its      reduce-scatter, once a step,
                                           forward and its backward   or each micro-batch
`hybrid`    the same, of a group's copy    as `full`, in the group    as `full`, in the group; then
                                                                      all-reduce, once a step
==========  =============================  =========================  =============================

Between micro-batches, `zero1` and `zero2` keep the gathered parameters, in the type they are
multiplied in, beside their shards. Whole gradients are kept by `zero1`, and by `full` and `hybrid`
that reduce once a step; by the others a shard of them.

Gradients are sums over the dp x cp ranks and nothing divides, except DDP: see `loss_factor`. The
routed experts are exchanged among the ranks that hold the same ones, all else among the dp x cp
ranks.

Leaves out: which micro-batch is the last one (the step says it: `set_gradient_sync`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from paceline.choices import Precision
from paceline.errors import PlanError
from paceline.parallel.layout import Layout
from paceline.parallel.layout_laws import check_all_reduce, check_compression, check_offload_of
from paceline.runtime._torch_private import fsdp_parameters, gathered_parameter, reduce_unused
from paceline.runtime.devices import pins_memory
from paceline.runtime.strategy.adapter.nf4 import units_of
from paceline.runtime.strategy.blocks import HasBlocks, numbered_blocks, parts_of
from paceline.runtime.strategy.chunked import is_deferring
from paceline.runtime.strategy.data.hooks import Compression, set_reduction, wire_type
from paceline.runtime.strategy.data.replica import GradientSums, Replica, used_parameters
from paceline.runtime.strategy.expert.split import (
    expert_modules,
    expert_parameters,
)
from paceline.runtime.strategy.local import local_of
from paceline.runtime.strategy.mesh import Meshes, is_pretended
from paceline.runtime.strategy.precision import narrow_type

UNEVEN = 1.1
"""Largest share of the fullest rank that rows are shared with. A guess: another dim than 0 costs
FSDP2 a copy more for each gathering."""

_SUMS = "paceline_gradient_sums"
"""Attribute of a model whose gradients `GradientSums` reduces."""


def shard(
    model: nn.Module,
    layout: Layout,
    meshes: Meshes,
    precision: Precision,
    *,
    ways: HasBlocks | None = None,
    hook: Compression | None = None,
    bucket_bytes: int | None = None,
    static_graph: bool = False,
) -> nn.Module:
    """The model, ready to train; the last step of the recipe.

    Collective. Ranks that hold the same part of the model already have the same weights.

    Args:
        model: On its device or on meta, already split over tensor, expert and pipeline ranks.
        precision: With sharding over several ranks, the type that parameters are gathered in.
            Elsewhere `autocast` does it.
        hook: How gradients are compressed on the wire. Only without sharding.
        bucket_bytes: Only without sharding: gradients that are reduced together; torch's 25 MiB
            when left out.
        static_graph: Only with DDP: promise that every step runs the same graph, so that DDP
            learns it in the first one.

    Returns:
        A new wrapper (`Replica`) for DDP, the same object otherwise.

    Raises:
        PlanError: `L024`, sharding, offloading or the reduction cannot do what is asked.
    """
    is_plain = _is_plain(model, layout)
    PlanError.raise_for(
        [
            *check_offload_of(layout),
            *check_compression(layout, hook.kind if hook else "none", precision, is_plain=is_plain),
            *check_all_reduce(
                layout, is_plain=is_plain, bucket_bytes=bucket_bytes, static_graph=static_graph
            ),
        ]
    )
    if layout.keeps_shards:
        for part in parts_of(model):
            _shard_part(part, layout, meshes, precision, ways)
        return model
    if meshes.dp_cp.size() > 1 and is_plain:
        replica = Replica(
            model, meshes.holders, bucket_bytes=bucket_bytes, static_graph=static_graph
        )
        set_reduction(replica, hook)
        return replica
    if layout.num_ranks > 1:
        sums = GradientSums(
            _groups(model, meshes), bucket_bytes=bucket_bytes, wire_type=wire_type(hook)
        )
        setattr(model, _SUMS, sums)
    return model


def loss_factor(layout: Layout, model: nn.Module) -> float:
    """What the loss is multiplied by, so that reduced gradients are sums over the dp x cp ranks.

    DDP's own reduction divides by its ranks; all others sum.
    """
    if isinstance(model, Replica) and model.is_summed_by_hook:
        return 1.0
    if isinstance(model, DistributedDataParallel):
        return float(model.process_group.size())
    return 1.0


def set_gradient_sync(model: nn.Module, layout: Layout, *, is_last: bool) -> None:
    """Say, before each micro-batch's forward pass, whether it is the step's last.

    Before the forward pass, because DDP prepares its reduction there. A pipeline's schedule, whose
    backward passes overlap, says False for all of them; `finish_gradients` then reduces.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = is_last
        return
    for sums in _gradient_sums(model):
        sums.begin(overlaps=is_last)
    exchange = _exchange(layout, is_last=is_last)
    for part in parts_of(model):
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(exchange.scatters)
            part.set_requires_all_reduce(is_last)
            part.set_reshard_after_backward(exchange.frees)


def finish_gradients(model: nn.Module) -> None:
    """Wait until the gradients are sums, after the last backward pass of a step. Collective.

    DDP and FSDP2 have done it by then; without them (tensor, expert and pipeline ranks that do not
    shard) it is here that the rest is reduced.
    """
    for sums in _gradient_sums(model):
        sums.finish()


def _gradient_sums(model: nn.Module) -> list[GradientSums]:
    modules = dict.fromkeys([model, *parts_of(model)])
    found = [getattr(module, _SUMS, None) for module in modules]
    return [sums for sums in found if isinstance(sums, GradientSums)]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What the backward pass of one micro-batch does to FSDP2's parameters and gradients."""

    scatters: bool
    """Gradients are reduce-scattered, and only a shard of them is kept."""

    frees: bool
    """Gathered parameters are given up."""


def _exchange(layout: Layout, *, is_last: bool) -> _Exchange:
    if layout.sharding == "zero1":
        return _Exchange(scatters=is_last, frees=is_last)
    if layout.sharding == "zero2":
        return _Exchange(scatters=True, frees=is_last)
    return _Exchange(scatters=is_last or layout.reduce_every_micro_batch, frees=True)


def _shard_part(
    part: nn.Module,
    layout: Layout,
    meshes: Meshes,
    precision: Precision,
    ways: HasBlocks | None,
) -> None:
    """FSDP2, bottom-up: experts, then each block; what is left belongs to the root.

    Narrow types come back as float32 from the root, so that the loss is float32 as under autocast;
    a pipeline's part hands on what its last block gives.
    """
    stays = False if layout.sharding in ("zero1", "zero2") else None
    pin = pins_memory(meshes.device_type)
    offload = CPUOffloadPolicy(pin_memory=pin) if layout.offload == "cpu" else OffloadPolicy()
    policy, root_policy, expert_policy = _policies(precision, is_whole=layout.pipeline == 1)
    units = [
        *((module, meshes.expert_fsdp, expert_policy) for module in expert_modules(part)),
        *((block, meshes.fsdp, policy) for block in _own_units(part, ways)),
        (part, meshes.fsdp, root_policy),
    ]
    for unit, mesh, unit_policy in units:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=stays,
            shard_placement_fn=even_placement(mesh),
            mp_policy=unit_policy,
            offload_policy=offload,
        )
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    part.register_forward_hook(_free_after_evaluation)
    handles: list[RemovableHandle] = []

    def look(_: nn.Module, __: object, output: object) -> None:
        if _look_for_unused(part, output, meshes.dp_cp):
            handles.pop().remove()

    handles.append(part.register_forward_hook(look))


def even_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """The dim that FSDP2 shards each parameter along: `shard_placement_fn`.

    Dim 0, unless the fullest rank would hold much more than its share and another dim divides
    evenly: eight experts, or the rows of a router, over 64 ranks would lie on eight of them.
    """
    num_shards = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard:
        shape = units_of(local_of(parameter))
        even = [dim for dim, size in enumerate(shape) if size % num_shards == 0]
        fullest = -(-shape[0] // num_shards) * num_shards if shape else 0
        return Shard(even[0] if even and fullest > UNEVEN * shape[0] else 0)

    return placement


def _policies(
    precision: Precision, *, is_whole: bool
) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Policies of blocks, of the root, and of experts, whose router weights keep their type."""
    narrow = narrow_type(precision)
    if narrow is None:
        plain = MixedPrecisionPolicy()
        return plain, plain, MixedPrecisionPolicy(cast_forward_inputs=False)
    wide = torch.float32
    return (
        MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide),
        MixedPrecisionPolicy(
            param_dtype=narrow, reduce_dtype=wide, output_dtype=wide if is_whole else None
        ),
        MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide, cast_forward_inputs=False),
    )


def _own_units(part: nn.Module, ways: HasBlocks | None) -> list[nn.Module]:
    """Blocks that are gathered on their own. One that shares a parameter with a module outside it
    (tied weights) stays in the root's unit: FSDP2 gives a parameter to one unit only."""
    held = Counter(
        parameter
        for module in part.modules()
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    blocks = [block for _, block in numbered_blocks(part, ways)]
    return [block for block in blocks if not _is_tied(block, held)]


def _is_tied(block: nn.Module, held: Counter[nn.Parameter]) -> bool:
    inside = Counter(
        parameter
        for module in block.modules()
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    return any(held[parameter] > count for parameter, count in inside.items())


def _free_after_evaluation(part: nn.Module, _: object, __: object) -> None:
    """Without gradients no backward pass frees what is gathered: `parameters()` would go on giving
    gathered copies, and a checkpoint or a digest miss the shards' optimizer state."""
    if not torch.is_grad_enabled() and not is_deferring(part):
        free_gathered(part)


def free_gathered(model: nn.Module) -> None:
    """After an evaluation whose loss reads the head, or a forward pass without gradients."""
    for part in parts_of(model):
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _look_for_unused(part: nn.Module, output: object, dp_cp: DeviceMesh) -> bool:
    """In the first forward pass of training: do ranks use different parameters? True when looked.

    Then FSDP2 has to reduce zeros for what a rank does not use, or its collectives would not fit
    together; a parameter that no rank uses gets zeros as well then. Where all ranks use the same,
    one without a gradient has none in FSDP2 as on one device. That every rank runs every *block* is
    taken for granted: blocks are gathered by all of them. Pretended ranks use what this one uses.
    """
    if not (torch.is_grad_enabled() and part.training):
        return False
    if is_pretended(dp_cp.get_group()):
        return True
    used = used_parameters(output)
    units = [module for module in part.modules() if isinstance(module, FSDPModule)]
    gathered = [gathered_parameter(each) for unit in units for each in fsdp_parameters(unit)]
    counts = torch.tensor([float(each in used) for each in gathered])
    counts = counts.to(dp_cp.device_type)
    dist.all_reduce(counts, group=dp_cp.get_group())
    if bool(((counts > 0) & (counts < dp_cp.size())).any()) and isinstance(part, FSDPModule):
        reduce_unused(part)
    return True


def _is_plain(model: nn.Module, layout: Layout) -> bool:
    """Whether DDP can take it: one backward pass at a time, through plain whole tensors."""
    has_parts = layout.tensor > 1 or layout.pipeline > 1 or layout.expert > 1
    return not has_parts and not any(isinstance(p, DTensor) for p in model.parameters())


def _groups(model: nn.Module, meshes: Meshes) -> dict[nn.Parameter, dist.ProcessGroup]:
    experts = set(expert_parameters(model).values())
    same_experts = meshes.expert_fsdp.get_group() if experts else meshes.holders
    return {
        parameter: same_experts if parameter in experts else meshes.holders
        for part in parts_of(model)
        for parameter in part.parameters()
        if parameter.requires_grad
    }
