"""Pipeline parallelism: this rank's stages of a model, and one step over many micro-batches.

    pipeline = split_stages(model, layout, meshes, ways)   # then split, shard each of its parts
    loss_sum, num_targets, *_ = forward_backward(pipeline, micro_batches, loss_of)

What goes from stage to stage is whole on every tensor rank, also with sequence parallelism: so a
stage can be given the same as the model it is cut out of, which counts positions by it.

A matrix that is both embedding and head is on the first and on the last rank, and one parameter for
everything outside: both have it under its first name, and their gradients are summed.

Leaves out: which blocks a stage gets (`parallel.stages`), splitting and sharding a stage's modules.
A rank that dies leaves its neighbours waiting no longer than the process group's time limit.

Letters in tensor names:
    B  samples in a micro-batch        H  width of the residual stream
    S  tokens in a sample, of this rank
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.errors import PlanError
from paceline.parallel.layout import Layout
from paceline.parallel.layout_laws import check_micro_batches, check_schedule
from paceline.parallel.stages import num_stages, stages_of_rank
from paceline.runtime.devices import current_device
from paceline.runtime.strategy.context.documents import Documents, check_asked, kept_apart
from paceline.runtime.strategy.data.shard import finish_gradients, set_gradient_sync
from paceline.runtime.strategy.mesh import Meshes
from paceline.runtime.strategy.pipeline import tied
from paceline.runtime.strategy.pipeline.schedules import (
    ForwardContext,
    Stage,
    make_schedule,
    stream_type,
)
from paceline.runtime.strategy.pipeline.stages import (
    StageWays,
    blocks_of,
    check_stages,
    check_trained,
    hidden_width,
    take_stage,
    tied_ends,
)

LossOf = Callable[[Any, Tensor], tuple[Any, ...]]
"""Logits and `targets_BS` -> sum of the losses, number of targets, and of those that are right,
where the loss counts them."""

Sums = tuple[Tensor, Tensor, Tensor, Tensor]
"""Sum of the losses, number of targets, and of those that are right."""

MicroBatches = Sequence[tuple[Tensor, Tensor]]
"""`inputs_BS` and `targets_BS` of each, all of one shape."""

Apart = Sequence[Documents | None] | None
"""Where the documents of each micro-batch are; None where no sample is packed."""


def split_stages(model: nn.Module, layout: Layout, meshes: Meshes, ways: StageWays) -> "Pipeline":
    """This rank's stages of a whole model, which may be on meta. Nothing is sent.

    The model's own modules are used, so it should not be used itself any more; the modules of other
    stages are freed with it. Before anything else is split, sharded or wrapped.

    Raises:
        PlanError: The schedule lacks blocks or micro-batches, a parameter has no stage, or a rank
            nothing to train.
    """
    num_blocks = len(list(model.get_submodule(ways.blocks).children()))
    PlanError.raise_for([*check_schedule(layout, num_blocks), *check_stages(model, ways)])
    blocks = blocks_of(model, ways, layout)
    PlanError.raise_for(list(check_trained(model, ways, layout, blocks)))
    mine = stages_of_rank(layout, meshes.place.pipeline)
    last = num_stages(layout) - 1
    parts = [
        take_stage(model, ways, blocks[index], is_first=index == 0, is_last=index == last)
        for index in mine
    ]
    made = Pipeline(parts, mine, meshes, hidden_width(model, ways), tied_ends(model, ways))
    made.has_blocks = any(len(blocks[index]) for index in mine)
    return made


class Pipeline(nn.Module):
    """This rank's stages of a model, under the names that the whole model has.

    A parameter with two places on different stages (tied embedding and head) has its first name.
    Where both places are on this rank, it is there once, and the second place follows it.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        stages: tuple[int, ...],
        meshes: Meshes,
        width: int,
        second_names: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        """One module a stage; each is called, split and sharded as if it were a whole model."""

        self.stages = stages
        """Place of each among all stages."""

        self.meshes = meshes
        self.width = width
        """H, of what goes from stage to stage."""

        self.second_names = dict(second_names)
        """Second name -> first name of parameters with a place on two stages."""

        self.has_blocks = True
        """Whether a stage here has blocks: the last may have the head alone."""

        self._loss = _Loss()
        self._documents: Sequence[Documents | None] = ()
        self._schedules: dict[object, Any] = {}

    def forward(self, *_: Any) -> NoReturn:
        """A stage alone has no answer."""
        raise RuntimeError("a pipeline is run by forward_backward or evaluate, not called")

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Every part's modules under the whole model's names."""
        memo = set() if memo is None else memo
        if self not in memo:
            memo.add(self)
            yield prefix, self
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter that this rank trains, once, under the whole model's names."""
        seen: set[str] = set()
        for own_name, parameter in super().named_parameters("", recurse, remove_duplicate):
            name = self.second_names.get(own_name, own_name)
            if name not in seen:
                seen.add(name)
                yield f"{prefix}.{name}" if prefix else name, parameter

    def state_dict(self, *_: Any, prefix: str = "", keep_vars: bool = False, **__: Any) -> Any:
        """Every part's state under the whole model's names."""
        state: dict[str, Any] = {}
        for part in self.parts:
            for own_name, value in part.state_dict(keep_vars=keep_vars).items():
                state.setdefault(prefix + self.second_names.get(own_name, own_name), value)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Hand each part what it has of a whole model's state."""
        for part in self.parts:
            first_names = {name: self.second_names.get(name, name) for name in part.state_dict()}
            mine = {
                name: state_dict[first]
                for name, first in first_names.items()
                if first in state_dict
            }
            part.load_state_dict(mine, strict=strict, assign=assign)
        return nn.Module().load_state_dict({})  # nothing is missing

    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Parameters that the first stage's rank has too: the gradient norm counts them there."""
        ends = self.places_of_tied()
        return [second for first, second in ends if first is None and second is not None]

    def places_of_tied(self) -> Iterator[tuple[nn.Parameter | None, nn.Parameter | None]]:
        """Both places of each tied parameter, None for one that is on another rank."""
        here = dict(super().named_parameters(remove_duplicate=False))
        for second, first in self.second_names.items():
            yield here.get(first), here.get(second)


def forward_backward(
    pipeline: Pipeline,
    micro_batches: MicroBatches,
    loss_of: LossOf,
    *,
    documents: Apart = None,
    loss_scale: float = 1.0,
    forward_context: ForwardContext = nullcontext,
) -> Sums:
    """One step's loss and gradients: those of the sum of all losses, times `loss_scale`.

    Collective. Gradients are added to what `.grad` holds and are sums over the dp x cp ranks when
    it returns, reduced once, after the last backward pass.

    Args:
        micro_batches: This data rank's, the same on all its stages. Inputs are read by the first,
            targets by the last.
        loss_scale: Usually 1 / (expected number of targets in the global batch).
        forward_context: Entered around each forward pass and loss: autocast.

    Returns:
        Sum of the losses, unscaled, number of targets and of right ones, of this rank's
        micro-batches: float64 on the rank with the last stage, zeros elsewhere.
    """
    layout = pipeline.meshes.layout
    set_gradient_sync(pipeline, layout, is_last=False)
    for part in pipeline.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False, recurse=False)
                module.set_requires_all_reduce(True, recurse=False)
    pipeline._loss.scale = loss_scale
    sums = _run(pipeline, micro_batches, documents, loss_of, forward_context, trains=True)
    finish_gradients(pipeline)
    tied.sum_gradients(pipeline.places_of_tied(), pipeline.meshes.pipeline.get_group())
    return sums


@torch.no_grad()
def evaluate(
    pipeline: Pipeline,
    micro_batches: MicroBatches,
    loss_of: LossOf,
    *,
    documents: Apart = None,
    forward_context: ForwardContext = nullcontext,
) -> Sums:
    """The sums as `forward_backward` returns them, no gradients."""
    pipeline._loss.scale = 1.0
    return _run(pipeline, micro_batches, documents, loss_of, forward_context, trains=False)


class _Loss:
    """What torch's schedules call on the last stage; it keeps the sums of a step."""

    def __init__(self) -> None:
        self.loss_of: LossOf | None = None
        self.context: ForwardContext = nullcontext
        self.scale = 1.0
        self.sums: list[tuple[Any, ...]] = []

    def __call__(self, logits: Any, targets_BS: Tensor) -> Any:
        assert self.loss_of is not None
        with self.context():
            loss_sum, *counts = self.loss_of(logits, targets_BS)
        if isinstance(loss_sum, DTensor):  # whole on every tensor rank
            loss_sum = loss_sum.to_local()
        self.sums.append((loss_sum.detach(), *counts))
        return loss_sum * self.scale


def _run(
    pipeline: Pipeline,
    micro_batches: MicroBatches,
    documents: Apart,
    loss_of: LossOf,
    forward_context: ForwardContext,
    *,
    trains: bool,
) -> Sums:
    loss = pipeline._loss
    loss.loss_of, loss.context, loss.sums = loss_of, forward_context, []
    pipeline._documents = documents or [None] * len(micro_batches)
    tied.follow(pipeline.places_of_tied())
    schedule = _schedule(pipeline, micro_batches, trains=trains)
    inputs, targets = zip(*micro_batches, strict=True)
    given = (torch.cat(inputs),) if 0 in pipeline.stages else ()
    last = num_stages(pipeline.meshes.layout) - 1
    wanted = torch.cat(targets) if last in pipeline.stages else None
    step = schedule.step if trains else schedule.eval
    step(*given, target=wanted, return_outputs=False)
    for each in pipeline._documents if pipeline.has_blocks else ():
        check_asked(each)
    device = inputs[0].device
    totals = tuple(torch.zeros((), dtype=torch.float64, device=device) for _ in range(4))
    for sums in loss.sums:
        for total, each in zip(totals, sums, strict=False):
            total += each
    loss.sums = []
    return totals  # type: ignore[return-value]  # four


def _device_of(part: nn.Module, meshes: Meshes) -> torch.device:
    if next(part.parameters()).is_meta:
        return torch.device("meta")
    return current_device(meshes.device_type)


def _schedule(pipeline: Pipeline, micro_batches: MicroBatches, *, trains: bool) -> Any:
    layout = pipeline.meshes.layout
    tokens_BS = micro_batches[0][0]
    stream = stream_type(pipeline.parts[0])
    key = (len(micro_batches), tokens_BS.shape, tokens_BS.dtype, stream, trains)
    if key not in pipeline._schedules:
        PlanError.raise_for(list(check_micro_batches(layout, len(micro_batches))) if trains else [])
        shape = (*tokens_BS.shape[:2], pipeline.width)
        stages = [
            Stage(
                part,
                index,
                layout,
                pipeline.meshes.pipeline.get_group(),
                torch.empty_like(tokens_BS, device="meta"),
                torch.empty(shape, dtype=stream, device="meta"),
                _device_of(part, pipeline.meshes),
                lambda: pipeline._loss.context(),
                lambda index: kept_apart(pipeline._documents[index]),
            )
            for part, index in zip(pipeline.parts, pipeline.stages, strict=True)
        ]
        made = make_schedule(layout, stages, len(micro_batches), pipeline._loss, trains=trains)
        pipeline._schedules[key] = made
    return pipeline._schedules[key]
