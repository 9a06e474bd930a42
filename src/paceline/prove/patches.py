"""What torch needs so that its own code runs on fake ranks; each with its reason.

All are undone at the end of `dry_run`. Read at torch 2.13.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.nn.parallel import distributed

from paceline.prove.trace import Tracer
from paceline.runtime._torch_private import (
    BATCH_P2P,
    BUCKET_CONFIG,
    BUCKET_LIMITS,
    DDP_START,
    IS_TRACING,
    PROPAGATE,
    GradBucket,
    leave_modes,
    sharding_propagator,
    tracing_modules,
)
from paceline.runtime.strategy.data import hooks, replica, shard
from paceline.runtime.strategy.expert import all_to_all


@contextmanager
def dry_run(*, is_cuda: bool) -> Iterator[None]:
    """Everything that a dry run needs, for as long as it runs."""
    with ExitStack() as stack:
        for each in (*_dtensor_patches(), *_replica_patches(), *_transformers_patches()):
            stack.enter_context(each)
        if is_cuda:
            stack.enter_context(patch.object(F, "rms_norm", _fused_rms_norm))
            attention = _without_dropout(F.scaled_dot_product_attention)
            stack.enter_context(patch.object(F, "scaled_dot_product_attention", attention))
            stack.enter_context(patch.object(F, "dropout", _masked_by_bytes))
        else:
            for owner, name in ((schedules, BATCH_P2P), (dist, "batch_isend_irecv")):
                stack.enter_context(patch.object(owner, name, _holding(getattr(owner, name))))
        yield


@contextmanager
def moves_to_host(tracer: Tracer) -> Iterator[None]:
    """FSDP2's copies between host and accelerator are copies, though a dry run has one device.

    `non_blocking` is what tells them: true on the way to the accelerator, and false on the way
    back, as memory is not pinned here. Source: torch/distributed/fsdp/_fully_shard, torch 2.13,
    `FSDPParam.all_gather_inputs` and `foreach_reduce`.
    """
    original = torch.Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "non_blocking" not in kwargs:
            return original(self, *args, **kwargs)
        return tracer.moved(self, "from host" if kwargs["non_blocking"] else "to host")

    with patch.object(torch.Tensor, "to", to):
        yield


@contextmanager
def reads_counts(tracer: Tracer) -> Iterator[None]:
    """Ranks that share experts read how many rows go where, which pretended tensors do not hold."""
    original = getattr(all_to_all, _COUNTS)

    def rows_per_rank(*args: Any) -> Any:
        tracer.read()
        return original(*args)

    with patch.object(all_to_all, _COUNTS, rows_per_rank):
        yield


_COUNTS = "_rows_per_rank"


@contextmanager
def waits_for_sends(tracer: Tracer) -> Iterator[None]:
    """A stage waits for what it sends where torch's schedule does, in 1F1B before each pass: the
    answers of a pretended process group hold no time."""
    original = getattr(schedules, BATCH_P2P)

    def batch(*args: Any, **kwargs: Any) -> list[_Batch]:
        first = len(tracer.trace.collectives)
        works = original(*args, **kwargs)
        return [_Batch(works, tracer, range(first, len(tracer.trace.collectives)))]

    with patch.object(schedules, BATCH_P2P, batch):
        yield


class _Batch(NamedTuple):
    """The answer to messages that are waited for together."""

    works: list[Any]
    tracer: Tracer
    messages: range

    def wait(self) -> None:
        """What was received is waited for where it is read: the next thing that is done."""
        for work in self.works:
            work.wait()
        self.tracer.wait_for_sends(self.messages)


def _dtensor_patches() -> Iterator[Any]:
    """DTensor works out the shape of a whole result by running the operation on whole tensors.

    That must neither be recorded nor run under our modes, and under a FakeTensorMode DTensor takes
    itself to be compiled and looks nothing up in its cache.
    """
    propagator = sharding_propagator()
    original = getattr(propagator, PROPAGATE)

    def clean(self: Any, schema: Any) -> Any:
        with leave_modes():
            return original(self, schema)

    yield patch.object(propagator, PROPAGATE, clean)
    for module in tracing_modules():
        if hasattr(module, IS_TRACING):
            yield patch.object(module, IS_TRACING, lambda: False)


def _replica_patches() -> Iterator[Any]:
    """DDP does in C++ what looks at memory that is not there, or at a collective's future.

    Comparing shapes, sending weights from rank 0 and asking all ranks for unused parameters are
    done once, not in a step. The all-reduce of a bucket is made by a hook in its place, as is the
    one of our hooks that does: they ask the fake process group for a future that it does not have.
    """
    for name in DDP_START:
        yield patch.object(distributed, name, lambda *_, **__: None)
    yield patch.object(replica.Replica, "_some_rank_has_unused", _has_unused)
    # Its buckets are then as torch makes them at first, but as large as settled ones: from the
    # last parameter on. Torch's own first ones are one that holds all, sent when all is computed.
    yield patch.object(replica.Replica, "_settle_buckets", lambda _: None)
    original_order = distributed.DistributedDataParallel._build_params_for_reducer
    yield patch.object(replica.Replica, "_build_params_for_reducer", original_order)
    config = getattr(distributed, BUCKET_CONFIG)
    yield patch.object(config, BUCKET_LIMITS, lambda self, **_: ([self.bucket_bytes_cap], []))
    yield patch.object(shard, "_look_for_unused", lambda *_: True)  # pretended ranks agree
    yield patch.object(hooks, "sum_narrow", _sum_narrow)
    original = hooks.set_reduction

    def set_reduction(made: Any, hook: Any) -> None:
        original(made, hook)
        if not made.is_summed_by_hook:
            made.register_comm_hook(None, _sum_bucket)
        made.reducer = _Buckets(made.reducer)

    yield patch.object(shard, "set_reduction", set_reduction)


def _transformers_patches() -> Iterator[Any]:
    """transformers looks whether several texts were packed into a sample, and where it cannot look
    makes a mask of them all, tokens x tokens. With values it finds none and makes none.

    Where it is not imported yet, no model of its kind has been built.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if hasattr(masks, "find_packed_sequence_indices"):
        yield patch.object(masks, "find_packed_sequence_indices", lambda position_ids: None)


class _Buckets:
    """DDP's reducer that keeps its first buckets: sorting them anew after the first step sends
    numbers in C++. They hold the same gradients, in the order of registration backwards."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _has_unused(self: Any, output: Any) -> bool:
    used = replica.used_parameters(output)
    return any(p not in used for p in self.module.parameters() if p.requires_grad)


def _sum_bucket(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    dist.all_reduce(buffer)
    return _done(buffer)


def _sum_narrow(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """As `hooks.sum_narrow`, which widens where the future of its all-reduce is there."""
    group, narrow = state
    buffer = bucket.buffer()
    sent = buffer.to(narrow)
    dist.all_reduce(sent, group=group)
    return _done(buffer.copy_(sent))


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _holding(send: Any) -> Any:
    """Sends and receives whose answers hold the tensors, as gloo's do for as long as they live:
    with most schedules of a pipeline until the end of the step. A fake process group's hold none.

    NCCL's let go once the tensor has been sent, seen by a watchdog every 0.1 s: there it is taken
    to be gone at once.
    """

    def call(ops: Any, *args: Any, **kwargs: Any) -> list[_Sent]:
        tensors = [op.tensor for op in ops]
        return [_Sent(work, tensors) for work in send(ops, *args, **kwargs)]

    return call


class _Sent:
    """The answer to a send or receive."""

    def __init__(self, work: Any, tensors: list[Tensor]) -> None:
        self._work = work
        self._tensors = tensors

    def wait(self) -> bool:
        """The tensors stay even then."""
        done: bool = self._work.wait()
        return done


def _without_dropout(attend: Any) -> Any:
    """Flash attention on CUDA drops scores inside its kernel. On a CPU torch has no such kernel:
    with dropout it would write all scores to memory."""

    def call(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
        out: Tensor = attend(*args, **kwargs)
        return out

    return call


def _masked_by_bytes(
    hidden: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout on CUDA is one kernel that keeps a byte for each element. On a CPU torch draws a mask
    in the type of its input."""
    if not training or not p:
        return hidden
    out: Tensor = torch.ops.aten.native_dropout(hidden, p, True)[0]
    return out


class _FusedRMSNorm(torch.autograd.Function):
    """What CUDA's kernel keeps: its input, its weight and one float32 number a row.

    On a CPU torch computes the norm in six operations and keeps what is between them. Layer norm's
    operators have the same shapes, and a DTensor knows how to split them.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        out, _, scale = torch.ops.aten.native_layer_norm(hidden, shape, weight, None, eps)
        ctx.shape = shape
        ctx.save_for_backward(hidden, weight, scale)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight, scale = ctx.saved_tensors
        mask = [True, True, False]
        back = torch.ops.aten.native_layer_norm_backward
        of_hidden, of_weight, _ = back(
            gradient, hidden, ctx.shape, scale, scale, weight, None, mask
        )
        return of_hidden, None, of_weight, None


def _fused_rms_norm(
    hidden: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is None:
        return torch.rms_norm(hidden, normalized_shape, weight, eps)
    out: Tensor = _FusedRMSNorm.apply(hidden, list(normalized_shape), weight, eps or 1e-6)  # type: ignore[no-untyped-call]
    return out
