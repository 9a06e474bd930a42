"""A pipeline's step without running every micro-batch: what a few did is played again for the rest.

Torch's own schedule runs with all micro-batches. What it does between them (receiving, sending,
keeping and dropping what goes from stage to stage) is done for each; a stage's forward pass, loss
and backward pass are run for the first micro-batches only. The first differs (gradients and
gathered parameters appear), the second stands for all that follow, and the third shows whether it
may. A stage like one of another rank plays that one's passes, and so does a whole rank.

Leaves out: micro-batches that leave something behind; those are found out (`is_steady`), and the
rank is then traced whole.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.prove.extrapolate import renumbered
from paceline.prove.segments import Issue, Segment, cut_between
from paceline.prove.trace import Operation, Trace, Tracer
from paceline.runtime._torch_private import (
    COMPUTE_LOSS,
    local_tensor,
    schedule_base,
    schedule_has_loss,
    schedule_losses,
    unshard_handle,
)
from paceline.runtime.strategy.pipeline import pipeline
from paceline.runtime.strategy.pipeline.schedules import Stage

FIRST, STEADY, CHECK = range(3)
"""Micro-batches that are run; the others play what the second did."""

WHOLE_STEP = -1
"""In the place of a micro-batch: what is done once, such as the sum over replicas."""


class NotAlikeError(Exception):
    """A micro-batch does what none of those did that were run."""


CLOSE = 1e-4
"""Difference of two micro-batches, as a share of the larger one's rise, that counts as none."""

_SMALL = 4096
"""Bytes that a micro-batch may leave behind: its loss and such numbers."""


@dataclass(slots=True, eq=False)
class Passage:
    """One call of a stage for one micro-batch, as it was traced."""

    trace: Trace
    start: int
    end: int
    outside: set[int]
    """Storages that go in or out: they live as long as the schedule holds them, not as here."""

    rank: int
    stage: int
    first_block: int
    result: tuple[int, torch.Size, torch.dtype] | None
    """Storage, shape and type of what is handed on."""

    segments: list[Segment] = field(default_factory=list)
    result_part: str = ""

    def finish(self, seconds_of: Callable[[Operation], float]) -> None:
        """Cut it, once its trace is classified."""
        self.segments = cut_between(
            self.trace, self.start, self.end, seconds_of, outside=self.outside
        )
        if self.result is not None:
            self.result_part = self.trace.parts[self.result[0]]


Key = tuple[str, int]
"""Which call, and of which micro-batch: the first, the second or the third."""

Passages = dict[Key, Passage]


@dataclass(slots=True, eq=False)
class Play:
    """A passage that comes again, in another micro-batch or on another rank."""

    at: int
    """Index of the event before which it comes."""

    passage: Passage
    micro_batch: int
    rank: int
    stage: int
    first_block: int
    result: int | None = None
    """Storage that stands for what is handed on."""

    def segments(self) -> list[Segment]:
        """Its stretches, under its own names and in its own groups."""
        return [self._as_own(segment) for segment in self.passage.segments]

    def _as_own(self, segment: Segment) -> Segment:
        place = segment.place
        if place.phase != "optimizer":
            place = place._replace(micro_batch=self.micro_batch, chunk=self.stage)
        own = replace(segment, place=place)
        shift = self.first_block - self.passage.first_block
        if place.block is not None and shift:
            own = renumbered(own, place.block + shift)
        by = self.rank - self.passage.rank
        if by:
            own.work = [_moved(work, by) for work in own.work]
        return own


def _moved(work: Any, by: int) -> Any:
    """A collective in the same group of another stage; a group across stages is the same."""
    if not isinstance(work, Issue) or max(work.what.ranks) - min(work.what.ranks) >= abs(by):
        return work
    return Issue(work.what._replace(ranks=tuple(rank + by for rank in work.what.ranks)))


class Replay:
    """Stands between torch's schedule and the stages for one rank's trace.

    Args:
        tracer: Of the rank.
        rank: Its number.
        first_blocks: Stage -> its first block.
        known: Stage -> passages of a stage like it. Its first micro-batch is run all the same, for
            what it brings into being, unless `is_hollow`.
        tail: Of a rank like this one; given to hollow ranks.
        is_hollow: Whether nothing is run: the stages have no blocks.
    """

    def __init__(
        self,
        tracer: Tracer,
        rank: int,
        first_blocks: Mapping[int, int],
        known: Mapping[int, Passages],
        *,
        tail: Passage | None = None,
        is_hollow: bool = False,
    ) -> None:
        self.tracer = tracer
        self.rank = rank
        self.first_blocks = first_blocks
        self.tail = tail
        self.recorded: dict[int, Passages] = {}
        self.stream = torch.bfloat16
        self.width = 0
        """Width of what goes from stage to stage, known once a stage has run."""

        self._known = known
        self._is_hollow = is_hollow
        self._outside: set[int] = set()
        self._held: dict[int, list[Any]] = {}
        self._gathers: dict[int, list[Passage]] = {}
        self._handles: dict[int, int] = {}

    def begin_step(self) -> None:
        """Forget an earlier step."""
        self.recorded, self.tail = {}, self.tail if self._is_hollow else None
        self._outside = set()
        self.tracer.trace.plays = []

    def end_step(self) -> None:
        """The tail ends here."""
        if self.tail is not None:
            self.tail.end = len(self.tracer.trace.events)

    @contextmanager
    def following(self) -> Iterator[None]:
        """The schedule's calls come here as long as this lasts."""
        with ExitStack() as stack:
            for owner, name, handler in (
                (Stage, "forward_one_chunk", self._forward),
                (Stage, "backward_one_chunk", self._backward),
                (Stage, "backward_weight_one_chunk", self._weights),
                (Stage, "perform_reduce_grad", self._reduce),
                (schedule_base(), COMPUTE_LOSS, self._loss),
                (FSDPModule, "unshard", self._gather),
                (unshard_handle(), "wait", self._gather),
                (pipeline, "finish_gradients", self._finish),
            ):
                stack.enter_context(patch.object(owner, name, _bound(owner, name, handler)))
            yield

    # What the schedule calls.

    def _forward(self, original: Any, stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        self._go(stage.stage_index, number, "forward")
        if number == FIRST:
            self._gathered(stage)
        passage = self._passage(stage, "forward", number)
        if passage is None:
            start = self._start()
            out = original(stage, number, *args, **kwargs)
            outputs, inputs = stage.fwd_cache[number]
            self._leave_out(inputs)
            self._record(stage, "forward", number, start, outputs[0])
            self.stream, self.width = stage.hidden_BSH.dtype, stage.hidden_BSH.shape[-1]
            return out
        inputs = args[0] if stage.is_first else stage._retrieve_recv_activations(number)
        out = self._play(passage, stage, number, inputs)
        stage.fwd_cache[number] = ((out,), list(inputs))
        return out

    def _loss(
        self, original: Any, schedule: Any, stage: Any, output: Any, targets: Any, number: int,
        *rest: Any,
    ) -> None:  # fmt: skip
        if not stage.is_last or not schedule_has_loss(schedule):
            return
        passage = self._passage(stage, "loss", number)
        if passage is None:
            start = self._start()
            original(schedule, stage, output, targets, number, *rest)
            self._record(stage, "loss", number, start, None)
            return
        self._play(passage, stage, number, ())
        # A loss keeps the inputs of its graph until the schedule ends, and their gradients where
        # the backward pass is split.
        self._held[number] = []
        is_held = schedule_losses(schedule)[0].grad_fn is not None if not self._is_hollow else True
        schedule_losses(schedule).append(self._held[number] if is_held else None)

    def _backward(
        self,
        original: Any,
        stage: Any,
        number: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        self._go(stage.stage_index, number, "backward")
        name = "backward" if full_backward else "inputs"
        passage = self._passage(stage, name, number)
        if passage is None:
            start = self._start()
            if not stage.is_last:
                self._leave_out(info.buffer for info in stage.grad_recv_info[number])
            original(stage, number, loss, full_backward, last_backward)
            grads = stage.bwd_cache[number]
            self._record(stage, name, number, start, grads[0] if grads else None)
            return
        outputs, inputs = stage.fwd_cache.pop(number)
        grads_out = () if stage.is_last else stage._retrieve_recv_grads(number)
        grad = self._play(passage, stage, number, grads_out)
        if not full_backward:
            kept = None if stage.is_last else outputs
            stage.backward_state[number] = (inputs, None, kept, grads_out)
            stage.dw_runner[number] = lambda: None
        stage.bwd_cache[number] = (grad,)
        if stage.is_last:
            self._held.pop(number).append((inputs, None if full_backward else grad))

    def _weights(self, original: Any, stage: Any, number: int, *args: Any, **kwargs: Any) -> None:
        self._go(stage.stage_index, number, "weights")
        passage = self._passage(stage, "weights", number)
        if passage is None:
            start = self._start()
            original(stage, number, *args, **kwargs)
            self._record(stage, "weights", number, start, None)
            return
        self._play(passage, stage, number, ())
        stage.backward_state.pop(number)

    def _reduce(self, original: Any, stage: Any, *args: Any, **kwargs: Any) -> None:
        if self._is_hollow:
            self._play(self._known[stage.stage_index]["reduce", FIRST], stage, 0, ())
            return
        start = self._start()
        original(stage, *args, **kwargs)
        self._record(stage, "reduce", 0, start, None)

    def _finish(self, original: Any, model: Any) -> None:
        """The schedule is over."""
        trace, stage = self.tracer.trace, min(self.first_blocks)
        if self._is_hollow:
            assert self.tail is not None, "a hollow rank is like one that was traced"
            trace.plays.append(self._play_of(self.tail, stage, WHOLE_STEP))
            return
        self._go(stage, WHOLE_STEP, "backward")
        start = self._start()
        self.tail = Passage(
            trace, start, start, self._outside, self.rank, stage, self.first_blocks[stage], None
        )
        original(model)

    def _gather(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The schedule gathers a stage's parameters, or begins to."""
        start = self._start()
        out = original(module, *args, **kwargs)
        key = self._handles.get(id(module), id(module))
        if out is not None:
            self._handles[id(out)] = key
        trace = self.tracer.trace
        passage = Passage(trace, start, len(trace.events), self._outside, self.rank, 0, 0, None)
        self._gathers.setdefault(key, []).append(passage)
        return out

    def _gathered(self, stage: Any) -> None:
        """What was gathered of this stage's modules is its own."""
        index = stage.stage_index
        if self._is_hollow:
            for (name, _), passage in self._known[index].items():
                if name.startswith("gather "):
                    self._play(passage, stage, FIRST, ())
            return
        of_stage = (self._gathers.get(id(module), ()) for module in stage.submod.modules())
        found = sorted((each for some in of_stage for each in some), key=lambda each: each.start)
        for number, passage in enumerate(found):
            passage.stage, passage.first_block = index, self.first_blocks[index]
            self.recorded.setdefault(index, {})[f"gather {number}", FIRST] = passage

    # How.

    def _go(self, stage: int, number: int, phase: str) -> None:
        self.tracer.places.at_stage(stage, number + 1, phase)

    def _passage(self, stage: Any, name: str, number: int) -> Passage | None:
        """What is played; None when it has to run."""
        known = self._known.get(stage.stage_index, {})
        key = (name, min(number, STEADY))
        if self._is_hollow:
            if key not in known:
                raise NotAlikeError
            return known[key]
        if number == FIRST:
            return None
        if key in known:
            return known[key]
        mine = self.recorded.get(stage.stage_index, {})
        if number <= CHECK:
            return None
        if key not in mine:
            raise NotAlikeError
        return mine[key]

    def _start(self) -> int:
        self.tracer._place = None  # what is recorded says itself where it is
        return len(self.tracer.trace.events)

    def _record(self, stage: Any, name: str, number: int, start: int, result: Any) -> None:
        trace, index = self.tracer.trace, stage.stage_index
        given = None
        if isinstance(result, Tensor):
            local = _local(result)
            self._leave_out((local,))
            given = self._storage(local), local.shape, local.dtype
        self.recorded.setdefault(index, {})[name, number] = Passage(
            trace,
            start,
            len(trace.events),
            self._outside,
            self.rank,
            index,
            self.first_blocks[index],
            given,
        )

    def _leave_out(self, tensors: Any) -> None:
        self._outside |= {self._storage(_local(t)) for t in tensors if isinstance(t, Tensor)}

    def _storage(self, tensor: Tensor) -> int:
        return int(self.tracer._entry(tensor.untyped_storage())[2])

    def _play_of(self, passage: Passage, stage: int, number: int) -> Play:
        return Play(
            at=len(self.tracer.trace.events),
            passage=passage,
            micro_batch=number + 1,
            rank=self.rank,
            stage=stage,
            first_block=self.first_blocks[stage],
        )

    def _play(self, passage: Passage, stage: Any, number: int, inputs: Any) -> Tensor | None:
        """Note that it comes again, and make what it hands on."""
        tracer = self.tracer
        for tensor in inputs:
            if isinstance(tensor, Tensor):
                tracer._wait(_local(tensor))
        play = self._play_of(passage, stage.stage_index, number)
        tracer.trace.plays.append(play)
        tracer._place = None
        if passage.result is None:
            return None
        _, shape, dtype = passage.result
        out = torch.empty(shape, dtype=dtype, device=stage.device)
        play.result = self._storage(out)
        del tracer.trace.events[play.at :]  # it appears inside the passage
        tracer._place = None
        tracer.trace.played.add(play.result)
        return out


def _bound(owner: Any, name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(original, *args, **kwargs)

    return call


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def is_steady(passages: Passages, peak_bytes: float) -> bool:
    """Whether a third micro-batch did what the second did, and leaves memory as it found it."""
    left = 0.0
    for (name, number), passage in passages.items():
        if number != STEADY:
            continue
        other = passages.get((name, CHECK))
        if other is not None and not _alike(passage.segments, other.segments):
            return False
        left += sum(sum(segment.delta.values()) for segment in passage.segments)
        if passage.result is not None:
            left -= _size(passage)
    return abs(left) <= max(_SMALL, CLOSE * peak_bytes)


def _size(passage: Passage) -> float:
    assert passage.result is not None
    _, shape, dtype = passage.result
    return float(shape.numel() * dtype.itemsize)


def _alike(one: list[Segment], other: list[Segment]) -> bool:
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        close = CLOSE * max(abs(a.peak), abs(b.peak)) + _SMALL
        ends = sum(a.delta.values()) - sum(b.delta.values())
        if abs(a.peak - b.peak) > close or abs(ends) > close or a.flops != b.flops:
            return False
    return True
