"""One optimizer step as the runtime makes it, on tensors that may have no values.

`strategy.forward_backward` and the optimizer are the runtime's own; what is left out of a step is
the vote of all ranks (a few numbers) and the learning rate.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.job import TrainSpec
from paceline.prove.replay import Replay
from paceline.prove.trace import Tracer
from paceline.runtime import strategy
from paceline.runtime._torch_private import fsdp_parameters, gathered_parameter
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.strategy.pipeline.schedules import Stage


class Rank:
    """A model in its layout with its optimizer, and its steps."""

    def __init__(
        self,
        model: nn.Module,
        meshes: strategy.Meshes,
        tracer: Tracer,
        *,
        precision: strategy.Precision,
        optimizer: Any,
        ways: strategy.Ways | None,
        seq_len: int,
        offloads: bool = False,
    ) -> None:
        self.model = model
        self.meshes = meshes
        self.tracer = tracer
        self.offloads = offloads
        self.precision: strategy.Precision = precision
        train = TrainSpec(global_batch=1, steps=1, optimizer=optimizer)
        self.optimizer = make_optimizer(model, train, ways)
        shape = (meshes.layout.micro_batch, seq_len)
        inputs_BS, targets_BS = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        self.batches = [(inputs_BS, targets_BS)] * meshes.layout.accumulation
        self.replay: Replay | None = None
        """Plays most micro-batches of a pipeline, when it is there."""

    def mark(self) -> None:
        """Tell the tracer what lives all the time."""
        mark = self.tracer.mark
        mark(self.model.parameters(), "parameters")
        mark(self.model.buffers(), "buffers")
        mark(self.batches[0], "inputs")
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        mark(states, "optimizer")
        if self.offloads:
            self.tracer.to_host(states)
        if self.meshes.layout.offload_parameters:
            self.tracer.to_host(self.model.parameters())

    def mark_gathered(self) -> None:
        """Tell the tracer where units keep whole parameters. Groups of one rank gather nothing, and
        copy them there without an operation of FSDP2's own."""
        for unit in self.model.modules():
            if isinstance(unit, FSDPModule):
                whole = [gathered_parameter(each) for each in fsdp_parameters(unit)]
                self.tracer.mark([each for each in whole if each is not None], "gathered")

    def create_state(self) -> None:
        """Optimizer state as after a first step, without forward and backward passes."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """One optimizer step."""
        places = self.tracer.places
        replay = self.replay
        with _followed_pipeline(self.tracer) if replay is None else replay.following():
            strategy.forward_backward(
                self.model, self.meshes, self.batches, precision=self.precision
            )
        held = (p.grad for p in self.model.parameters() if p.grad is not None)
        self.tracer.mark(held, "gradients")
        places.fixed_phase, places.micro_batch = "optimizer", 0
        strategy.gradient_norm(self.model, self.meshes)
        strategy.scale_gradients(self.model, 0.5)  # as when they are clipped, or targets missing
        trained = [each for each in self.model.parameters() if each.grad is not None]
        crosses = self.offloads and not self.meshes.layout.offload_parameters
        if crosses:
            self.tracer.note_copies((each.grad for each in trained), "to host")
        self.optimizer.step()
        if crosses:
            self.tracer.note_copies(trained, "from host")
        self.optimizer.zero_grad()
        places.fixed_phase = None
        if replay is not None:
            replay.end_step()


@contextmanager
def _followed_pipeline(tracer: Tracer) -> Iterator[None]:
    """A pipeline's stages say which micro-batch they are at."""

    def followed(name: str, phase: str) -> Any:
        original = getattr(Stage, name)

        def call(self: Any, chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            tracer.places.at_stage(self.stage_index, chunk_id + 1, phase)
            return original(self, chunk_id, *args, **kwargs)

        return patch.object(Stage, name, call)

    with (
        followed("forward_one_chunk", "forward"),
        followed("backward_one_chunk", "backward"),
        followed("backward_weight_one_chunk", "weights"),
    ):
        yield
