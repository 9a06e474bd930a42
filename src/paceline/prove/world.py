"""One rank of a world that is not there: a fake process group, fake tensors, the real code.

A fake process group answers every collective at once without sending; a fake tensor has a shape, a
type and no values. On the `cpu` device, because torch's autograd needs a device that is linked in.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

from paceline.choices import Offload
from paceline.parallel.layout import Layout
from paceline.prove import model as models
from paceline.prove.parts import classify, leave_out_host
from paceline.prove.patches import dry_run, moves_to_host, reads_counts, waits_for_sends
from paceline.prove.proof import Request
from paceline.prove.replay import Replay
from paceline.prove.step import Rank
from paceline.prove.trace import Trace, Tracer
from paceline.runtime import strategy
from paceline.runtime._torch_private import FakeTensorMode, children_of, fake_store, forget_groups
from paceline.runtime.initial.fill import give_memory
from paceline.runtime.strategy.blocks import numbered_blocks
from paceline.runtime.strategy.data.hooks import Compression
from paceline.runtime.strategy.local import unwrapped
from paceline.runtime.strategy.pipeline import pipeline
from paceline.runtime.strategy.pipeline.stages import Skip, take_stage
from paceline.runtime.strategy.ways.find import ways_of

CUDA_ROUNDING = 512
"""Bytes that CUDA's caching allocator rounds every allocation up to.
Source: c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize."""

TRACED_MICRO_BATCHES = 3
"""The first, the last and one between them, which stands for all that are between."""

Kept = Callable[[int], int]
"""Blocks of a model, or of a pipeline's stage -> how many of them are traced, from the first."""


@contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process plays one."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=size)
    try:
        yield
    finally:
        forget_groups()  # an equal mesh of a later world would be given these groups
        dist.destroy_process_group()


def trace_rank(
    request: Request,
    rank: int,
    kept: Kept | None = None,
    make_replay: Callable[[Tracer], Replay] | None = None,
) -> Trace:
    """One rank's second step, when optimizer state is there.

    Args:
        request: What is proved.
        rank: Which rank this process plays.
        kept: How many blocks are left in; all when None.
        make_replay: Gives what plays most micro-batches of a pipeline; all are run when None.
    """
    was_collecting = gc.isenabled()
    gc.disable()  # memory of cycles would be given back at moments that mean nothing
    try:
        with world(rank, request.layout.num_ranks), dry_run(is_cuda=request.is_cuda):
            return trace_step(request, kept=kept, make_replay=make_replay)
    finally:
        if was_collecting:
            gc.enable()


def trace_step(
    request: Request,
    *,
    kept: Kept | None = None,
    make_replay: Callable[[Tracer], Replay] | None = None,
    is_fake: bool = True,
    before_step: Callable[[], None] = lambda: None,
) -> Trace:
    """The second step of a model in its layout, inside a process group.

    With `is_fake=False` the tensors are real, and the process group may be: what tests compare
    with. A real first step is made then; a dry run makes only the optimizer's state, where that
    is all that a first step leaves. `before_step` is called before the counted step.
    """
    layout = traced_layout(request.layout)
    precision: Any = request.precision
    meshes = strategy.make_meshes(layout, "cpu")  # it looks at values, so no fake tensors yet
    tracer = Tracer(round_to=CUDA_ROUNDING if request.is_cuda else 1)
    if layout.expert == 1:  # tensor ranks share the experts: `strategy/tensor/modules.py`
        tracer.routed_share = 1 / layout.tensor
    pretended = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else nullcontext()
    # Hooks on the parameters themselves sum gradients that are not sharded: those must be there.
    needs_memory = not layout.keeps_shards
    model = models.build(request.model, request.seq_len)  # never under two names: stages free it
    ways = ways_of(model)
    given: Any = {
        "precision": precision,
        "ways": ways,
        "options": _options(request),
    }
    if not needs_memory:
        with _pruned(model, layout, kept):
            model = strategy.apply(model, layout, meshes, **given)
    offloads = request.layout.offload != "none"
    moving = moves_to_host(tracer) if offloads else nullcontext()
    with pretended, tracer, reads_counts(tracer), waits_for_sends(tracer), moving:
        if needs_memory:
            with _pruned(model, layout, kept):
                give_memory(model)
                model = strategy.apply(model, layout, meshes, **given)
        else:
            give_memory(model)
        rank = Rank(
            model,
            meshes,
            tracer,
            precision=precision,
            optimizer=request.optimizer,
            ways=ways,
            seq_len=request.seq_len,
            offloads=offloads,
        )
        if make_replay is not None:
            rank.replay = make_replay(tracer)
        inner = unwrapped(model)
        tracer.places.watch(model, numbered_blocks(inner, ways))
        if inner is not model or not is_fake:
            rank.step()  # DDP gives its gradients to their buckets in its first step
        else:
            rank.create_state()
        rank.mark()
        before_step()
        tracer.begin_step()
        if rank.replay is not None:
            rank.replay.begin_step()
        rank.step()
        rank.mark_gathered()
    classify(tracer.trace)
    if offloads:
        leave_out_host(tracer.trace)
    return tracer.trace


def _options(request: Request) -> strategy.Options:
    """What a run of the job has besides its layout, after PowerSGD's first, uncompressed steps."""
    asked = Compression(kind=request.compression, rank=request.powersgd_rank, start_step=0)
    return strategy.Options(
        loss_chunk=request.loss_chunk,
        router_loss=request.router_loss,
        compression=None if request.compression == "none" else asked,
    )


def traced_layout(layout: Layout) -> Layout:
    """The layout with no more micro-batches than stand for all."""
    # Where state alone is offloaded, shards and their ranks are as without: it is left out after.
    offload: Offload = "cpu" if layout.offload_parameters else "none"
    layout = replace(layout, offload=offload)
    if layout.pipeline > 1:
        return layout
    return replace(layout, accumulation=min(layout.accumulation, TRACED_MICRO_BATCHES))


@contextmanager
def _pruned(whole: nn.Module, layout: Layout, kept: Kept | None) -> Iterator[None]:
    """Leave out blocks: of the model, or of every stage after the pipeline was cut."""
    if kept is None:
        yield
        return
    if layout.pipeline == 1:
        models.keep_blocks(whole, kept)
        yield
        return
    with _pruned_stages(kept):
        yield


def _pruned_stages(kept: Kept) -> AbstractContextManager[Any]:
    original = take_stage

    def take(model: nn.Module, ways: Any, blocks: range, **ends: Any) -> nn.Module:
        stage = original(model, ways, blocks, **ends)
        holder = stage.get_submodule(ways.blocks)
        for index in blocks[kept(len(blocks)) :]:
            children_of(holder)[str(index)] = Skip()
        return stage

    return patch.object(pipeline, "take_stage", take)
