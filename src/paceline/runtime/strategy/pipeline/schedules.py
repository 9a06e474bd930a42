"""The order of micro-batches in a pipeline: torch's schedules, by the layout's words.

    layout                      torch's schedule               stages of a rank
    gpipe                       ScheduleGPipe                  1
    1f1b                        Schedule1F1B                   1
    interleaved, v chunks       ScheduleInterleaved1F1B        v, in a loop
    zero-bubble                 ScheduleInterleavedZeroBubble  1 (ZB1P; the planner's ZB-H1)
    zero-bubble, 2 chunks       ScheduleZBVZeroBubble          2, in a v
    zero-bubble, 3 or more      ScheduleInterleavedZeroBubble  v, in a loop
    dualpipe-v                  ScheduleDualPipeV              2, in a v

The last four compute gradients of inputs and of matrices apart, where it fills a bubble; together,
where blocks are recomputed whole.

Leaves out: what a stage is made of (`stages`), and the step around a schedule (`pipeline`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleGPipe,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from paceline.choices.recomputes import WHOLE_BLOCKS
from paceline.errors import JobError
from paceline.parallel.layout import Layout
from paceline.parallel.stages import is_v_shaped, num_chunks, num_stages, torch_class
from paceline.runtime._torch_private import fsdp_compute_type, is_view
from paceline.runtime.strategy.adapter.linear import frozen_parameters
from paceline.runtime.strategy.mesh import is_pretended

ForwardContext = Callable[[], AbstractContextManager[object]]


def make_schedule(
    layout: Layout, stages: list["Stage"], num_micro_batches: int, loss: Any, *, trains: bool
) -> Any:
    """Torch's schedule for one step; gradients are summed over micro-batches, not averaged.

    For evaluation, which has no backward passes to order, each shape's most permissive one.
    """
    kind: Any = getattr(pipelining, torch_class(layout))
    if not trains:
        several = ScheduleZBVZeroBubble if is_v_shaped(layout) else ScheduleLoopedBFS
        kind = ScheduleGPipe if num_chunks(layout) == 1 else several
    given: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(given, num_micro_batches, loss_fn=loss, scale_grads=False)


def stream_type(part: nn.Module) -> torch.dtype:
    """Type of what goes from stage to stage: what FSDP2 multiplies in, else the parameters' own;
    beside adapters that of the frozen ones, embeddings among them."""
    if isinstance(part, FSDPModule):
        narrow = fsdp_compute_type(part)
        if narrow is not None:
            return narrow
    frozen = (each for each in frozen_parameters(part) if each.is_floating_point())
    return next(frozen, next(part.parameters())).dtype


class _Agreed:
    """What torch's stages vote on before their first step, already decided."""

    def item(self) -> int:
        return 1


class Stage(PipelineStage):
    """Torch's stage with shapes known beforehand, and buffers only while they are used.

    Torch (2.13) allocates a buffer for every micro-batch's input and gradient once and keeps all of
    them: with 32 micro-batches of 8 x 8192 x 8192 that would be gigabytes. Here a buffer lives
    from the receive to the backward pass that used it.
    """

    def __init__(
        self,
        part: nn.Module,
        index: int,
        layout: Layout,
        group: dist.ProcessGroup,
        tokens_BS: Tensor,
        hidden_BSH: Tensor,
        device: torch.device,
        forward_context: ForwardContext = nullcontext,
        around: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Args:
            group: One rank of each pipeline position.
            tokens_BS: Like one micro-batch's inputs, on meta.
            hidden_BSH: Like what goes from stage to stage, on meta; also its type.
            device: Where it computes, and receives: offloaded parameters are in host memory.
            forward_context: Around the forward pass and the loss: autocast.
            around: Around both passes of each micro-batch, by its number.

        Raises:
            JobError: `R064`, torch is older than 2.12, whose stages allocate otherwise.
        """
        if not hasattr(PipelineStage, "_setup_forward_recv_info"):
            raise JobError.of(
                code="R064",
                what=f"a pipeline needs torch 2.12 or newer; this is torch {torch.__version__}",
                where="layout.pipeline",
                fix="pip install 'torch>=2.12', or set layout.pipeline to 1",
            )
        is_last = index == num_stages(layout) - 1
        super().__init__(
            part,
            index,
            num_stages(layout),
            device,
            input_args=tokens_BS if index == 0 else hidden_BSH.requires_grad_(),
            # Of the last stage only the number of outputs is read.
            output_args=torch.empty(0, device="meta") if is_last else hidden_BSH.requires_grad_(),
            group=group,
            # Torch continues at each product's gradient by itself, and a block would be recomputed
            # for each of its parameters.
            dw_builder=_goes_backward_once if layout.recompute in WHOLE_BLOCKS else None,
        )
        self.hidden_BSH = hidden_BSH
        self.forward_context = forward_context
        self.around = around
        self._is_pretended = is_pretended(group)

    # A vote on whether all stages know their shapes: they do. It also opens the connections, so it
    # is held, but where the ranks are pretended nobody answers.

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        return _Agreed() if self._is_pretended else super()._warmup_forward_vote(*args, **kwargs)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        return _Agreed() if self._is_pretended else super()._warmup_backward_result(*args, **kwargs)

    # Buffers.

    def _setup_forward_recv_info(self, *args: Any, **kwargs: Any) -> None:
        device, self.device = self.device, torch.device("meta")
        super()._setup_forward_recv_info(*args, **kwargs)
        self.device = device

    def _setup_backward_recv_info(self, *args: Any, **kwargs: Any) -> None:
        device, self.device = self.device, torch.device("meta")
        super()._setup_backward_recv_info(*args, **kwargs)
        self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        _release(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        _release(self.grad_recv_info[bwd_chunk_id])
        return received

    def _allocate(self, infos: Any) -> None:
        for info in infos:
            if _is_ours(info):
                info.buffer = torch.empty_like(self.hidden_BSH, device=self.device)

    # The passes, which pipelines mix: a block that is recomputed needs its micro-batch's documents.

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.around(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        with self.around(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        # Torch keeps the losses of a step, and by their graphs what each micro-batch received here
        # and its gradient.
        if loss is not None and not is_view(loss):
            loss.detach_()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.around(bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.forward_context():
            output = self.submod(*args, **kwargs)
        if self.is_last:
            return output
        expected = self.hidden_BSH
        assert output.shape == expected.shape, (
            f"stage {self.stage_index} gave {tuple(output.shape)}, not {tuple(expected.shape)}"
        )
        output = output.to(expected.dtype).contiguous()
        # Torch detaches it in place when it splits a backward pass, which views do not allow.
        return output.clone() if is_view(output) else output

    # Evaluation: torch keeps every output, hands gradients on inside a v, and reduces none.

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward and hasattr(self, "fwd_cache"):  # torch 2.15 lets go by itself
            self.fwd_cache.pop(fwd_chunk_id)
        return ops

    def get_local_bwd_output(self, mb_index: int) -> Any:
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)
            return
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _goes_backward_once() -> Callable[[], None]:
    """What is left for the second half of a backward pass that has done both: nothing."""
    return lambda: None


def _release(infos: Any) -> None:
    """Forget the buffers: the graph keeps what it needs."""
    for info in infos:
        if _is_ours(info):
            info.buffer = info.buffer.new_empty(0)


def _is_ours(info: Any) -> bool:
    """Whether something is received there, and torch (before 2.15) keeps the buffer for good."""
    return not info.is_root_arg and not hasattr(info, "allocate_buffer")
