"""A layout, carried out on a model: the recipe. Each line is a file of its own.

Leaves out: building the process group, and the model.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from paceline.choices import Precision
from paceline.errors import PlanError
from paceline.job import TrainSpec
from paceline.parallel.layout import Layout
from paceline.profile.ways import Ways
from paceline.runtime.strategy.adapter.nf4 import quantise_marked
from paceline.runtime.strategy.blocks import parts_of
from paceline.runtime.strategy.chunked import defer_head
from paceline.runtime.strategy.compiling import compile_blocks
from paceline.runtime.strategy.context.split import split_context
from paceline.runtime.strategy.data.hooks import Compression
from paceline.runtime.strategy.data.replica import Replica
from paceline.runtime.strategy.data.shard import shard
from paceline.runtime.strategy.expert.balance import balance_routers
from paceline.runtime.strategy.expert.split import check_expert, split_experts, tensor_ways
from paceline.runtime.strategy.fp8 import use_float8
from paceline.runtime.strategy.initial import move_parts, send_from_first_rank
from paceline.runtime.strategy.mesh import Meshes
from paceline.runtime.strategy.pipeline.pipeline import split_stages
from paceline.runtime.strategy.recompute import recompute_blocks
from paceline.runtime.strategy.tensor.split import split_tensors
from paceline.runtime.strategy.ways.find import ways_of
from paceline.runtime.strategy.ways.generic import generic_ways


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a layout is carried out, where that does not change what is split."""

    compile: bool = False
    compression: Compression | None = None
    """How DDP sends gradients; None is as they are."""

    bucket_bytes: int | None = None
    """Gradients that DDP reduces together; torch's own when None."""

    loss_chunk: int = 0
    """Tokens whose logits exist at a time in the loss; 0 is all."""

    router_loss: float = 0.0
    """What the balancing loss of routed experts is multiplied by; 0 is none."""

    static_graph: bool = False
    """Promise DDP that every step runs the same graph."""


def options_of(train: TrainSpec, *, loss_chunk: int = 0, router_loss: float = 0.0) -> Options:
    """What a job asks for, and how its plan has the loss computed."""
    compression = Compression(
        kind=train.gradient_compression, rank=train.powersgd_rank, start_step=train.powersgd_start
    )
    return Options(
        compile=train.compile,
        loss_chunk=loss_chunk,
        router_loss=router_loss,
        compression=None if compression.kind == "none" else compression,
        bucket_bytes=None if train.bucket == "auto" else train.bucket,
        static_graph=train.static_graph,
    )


def apply(
    model: nn.Module,
    layout: Layout,
    meshes: Meshes,
    *,
    precision: Precision,
    ways: Ways | None = None,
    options: Options = Options(),
    sends: bool = True,
    fill: Callable[[nn.Module], None] | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> nn.Module:
    """The model, ready to train in the layout; every rank starts from rank 0's weights.

    Args:
        model: Any module, whole, its parameters on meta or in memory. Only what this rank has of
            it is moved to its device. Not to be used by itself afterwards.
        precision: Narrow types are set up here for FSDP2 only; elsewhere `autocast` does it.
        ways: Where the blocks are and how matrices split. Left out, it is found: for known models
            by their kind, for others from their structure, and only where the layout needs it.
        sends: Whether all start from rank 0's weights; not where other ones are loaded at once.
        fill: Gives a model that was split on meta its memory and numbers: of each parameter what
            this rank has. Left out, what is on meta stays there, as for a dry run.
        on_note: Told of what is done otherwise than it was asked for.

    Returns:
        The module to train: a wrapper for DDP, a `Pipeline` of this rank's stages, or the same
        object.

    Raises:
        PlanError: The model cannot be split like that; it says which module and number.
    """
    if sends:
        send_from_first_rank(model, meshes.device_type)
    quantise_marked(model)
    ways = ways or ways_of(model)
    if ways is None and (layout.tensor > 1 or layout.pipeline > 1):
        ways = generic_ways(model, splits_tensors=layout.tensor > 1)
    PlanError.raise_for(check_expert(model, layout, ways))
    if layout.pipeline > 1 and ways is not None:
        model = split_stages(model, layout, meshes, ways)
    for part in parts_of(model):
        split_context(part, layout, meshes, ways)
        split_experts(part, layout, meshes, ways)
        if ways is not None:
            split_tensors(part, layout, meshes, tensor_ways(ways, layout))
    fills_shards = layout.keeps_shards
    if fill is not None and not fills_shards:
        fill(model)
    move_parts(model, layout, meshes.device_type)
    if precision == "fp8":
        note = use_float8(model, ways)
        if note is not None:
            on_note(note)
    defer_head(model, ways, options.loss_chunk)
    balance_routers(model, layout, meshes, options.router_loss)
    recompute_blocks(model, layout, ways)
    if options.compile:
        compile_blocks(model, ways, device_type=meshes.device_type)
    model = _shard(model, layout, meshes, precision, ways, options)
    if fill is not None and fills_shards:
        fill(model)
    return model


def rejoin(
    model: nn.Module,
    layout: Layout,
    meshes: Meshes,
    *,
    precision: Precision,
    ways: Ways | None,
    options: Options,
) -> nn.Module | None:
    """A live model over the process groups of a new generation; None where it has to be built anew,
    because its parts have the old groups in them."""
    if not isinstance(model, Replica) or layout.num_ranks > layout.data:
        return None
    return _shard(model.unwrap(), layout, meshes, precision, ways, options)


def _shard(
    model: nn.Module,
    layout: Layout,
    meshes: Meshes,
    precision: Precision,
    ways: Ways | None,
    options: Options,
) -> nn.Module:
    return shard(
        model,
        layout,
        meshes,
        precision,
        ways=ways,
        hook=options.compression,
        bucket_bytes=options.bucket_bytes,
        static_graph=options.static_graph,
    )
