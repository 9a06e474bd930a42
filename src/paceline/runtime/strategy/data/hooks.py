"""Communication hooks of DDP: what gradients look like on the wire.

Every hook gives *sums* over the ranks, in the type of the gradients.

- `none`: DDP's own reduction, which gives means; over gloo a hook of its own
  (`gloo_all_reduce.py`).
- `bf16`: half the bytes; each addition on the way rounds to 8 bits. torch's own refuses everything
  but NCCL.
- `fp16`: half the bytes, three bits more than bf16, and sums above 65,504 overflow. See
  `choices.COMPRESSION_RISKS`.
- `powersgd`: matrices as the product of two thin ones; what is lost is added to the next step's
  gradient. Source: Vogels et al., arXiv:1905.13727. torch's own starts its second collective in a
  callback, so that with several buckets the ranks' collectives mix; here their order is fixed.

Leaves out: reduce-scatter (FSDP2), which sends float32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.choices import Compression as CompressionKind
from paceline.runtime._torch_private import GradBucket
from paceline.runtime.strategy.data.gloo_all_reduce import BucketSums, sum_bucket
from paceline.runtime.strategy.data.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How gradients are compressed for the all-reduce."""

    kind: CompressionKind = "none"

    rank: int = 4
    """Only PowerSGD: columns of the thin matrices. Source: the paper's section 5.1, 1 to 4."""

    start_step: int = 10
    """Only PowerSGD: steps whose gradients go uncompressed first, because gradients change fast
    then. A guess; torch's default is 1,000, the paper's experiments have none."""

    least_saving: float = 2.0
    """Only PowerSGD: a matrix is compressed when that sends at least this many times less. Source:
    torch's default."""


def wire_type(hook: Compression | None) -> torch.dtype | None:
    """What gradients are cast to on the wire, or None to leave them as they are."""
    if hook is None:
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(hook.kind)


def set_reduction(replica: Replica, hook: Compression | None) -> None:
    """Make DDP reduce its gradients as asked."""
    group = replica.process_group
    narrow = wire_type(hook)
    if narrow is not None:
        replica.reduce_by((group, narrow), sum_narrow)
    elif hook is not None and hook.kind == "powersgd":
        replica.reduce_by(PowerSGD(group, hook), sum_low_rank)
    elif dist.get_backend(group) == "gloo":
        replica.reduce_by(BucketSums(group), sum_bucket)


def sum_narrow(state: tuple[dist.ProcessGroup, torch.dtype], bucket: GradBucket) -> Future[Tensor]:
    """Cast, all-reduce, cast back into the bucket."""
    group, narrow = state
    gradients: Tensor = bucket.buffer()
    sent = gradients.to(narrow)
    summed: Future[Any] = dist.all_reduce(sent, group=group, async_op=True).get_future()

    def widen(_: Future[Any]) -> Tensor:
        return gradients.copy_(sent)

    return summed.then(widen)


def sum_low_rank(state: "PowerSGD", bucket: GradBucket) -> Future[Tensor]:
    """The communication hook of `PowerSGD`."""
    return state.reduce(bucket)


@dataclass(slots=True, eq=False)
class _Sent:
    """One bucket on its way."""

    gradients: Tensor
    result: Future[Tensor]
    whole: list[Tensor]
    matrices: list["_LowRank"]
    flat: Tensor
    work: dist.Work | None


@dataclass(slots=True, eq=False)
class _LowRank:
    """One gradient as left_NR @ right_MR.T."""

    gradient: Tensor
    matrix_NM: Tensor
    error_NM: Tensor
    right_MR: Tensor
    left_NR: Tensor


class PowerSGD:
    """Sums of low-rank approximations, with each rank's error carried to its next step.

    Two collectives a bucket: first all `left = matrix @ right` together with the gradients that are
    not compressed, then all `right = matrix.T @ left` with orthogonal columns in `left`. The second
    of one bucket is sent when the first of the next is under way: an order that all ranks share.
    `right` starts from the last step's, so that steps together are a power iteration.

    State belongs to parameters, not to buckets, which DDP rebuilds after its first step.
    """

    def __init__(self, group: dist.ProcessGroup, asked: Compression) -> None:
        self.group = group
        self.asked = asked
        self.num_steps = 0
        self._errors: dict[Tensor, Tensor] = {}
        self._rights: dict[Tensor, Tensor] = {}
        self._waiting: list[_Sent] = []

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Send a bucket's first half, and what can be sent of those before it."""
        device = bucket.buffer().device
        devices: list[int | str | torch.device] | None = (
            [device] if device.index is not None else None
        )
        sent = self._send_first(bucket, Future(devices=devices))
        if self._waiting:
            self._send_second(self._waiting[-1])
        self._waiting.append(sent)
        if bucket.is_last():
            self._send_second(sent)
            for each in self._waiting:
                self._settle(each)
            self._waiting = []
            self.num_steps += 1
        return sent.result

    def _send_first(self, bucket: GradBucket, result: Future[Tensor]) -> _Sent:
        whole, matrices = [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self.num_steps >= self.asked.start_step and self._is_worth_it(gradient):
                matrices.append(self._low_rank(parameter, gradient))
            else:
                whole.append(gradient)
        flat, work = self._all_reduce([*whole, *(each.left_NR for each in matrices)])
        return _Sent(bucket.buffer(), result, whole, matrices, flat, work)

    def _is_worth_it(self, gradient: Tensor) -> bool:
        if gradient.dim() < 2:
            return False
        rows, columns = _as_matrix(gradient).shape
        rank = min(self.asked.rank, rows, columns)
        return (rows + columns) * rank * self.asked.least_saving < rows * columns

    def _low_rank(self, parameter: Tensor, gradient: Tensor) -> _LowRank:
        matrix_NM = _as_matrix(gradient)
        error_NM = self._errors.get(parameter)
        if error_NM is None:
            error_NM = self._errors[parameter] = torch.zeros_like(matrix_NM)
            self._rights[parameter] = self._first_right(matrix_NM)
        matrix_NM += error_NM
        right_MR = self._rights[parameter]
        return _LowRank(gradient, matrix_NM, error_NM, right_MR, matrix_NM @ right_MR)

    def _first_right(self, matrix_NM: Tensor) -> Tensor:
        rows, columns = matrix_NM.shape
        generator = torch.Generator().manual_seed(rows * 1_000_003 + columns)
        shape = columns, min(self.asked.rank, rows, columns)
        return torch.randn(shape, generator=generator, dtype=matrix_NM.dtype).to(matrix_NM.device)

    def _send_second(self, sent: _Sent) -> None:
        """Once the first sums are there: those that are final, and the other factors."""
        self._receive(sent, [*sent.whole, *(each.left_NR for each in sent.matrices)])
        for each in sent.matrices:
            each.left_NR = torch.linalg.qr(each.left_NR).Q
            each.right_MR.copy_(each.matrix_NM.T @ each.left_NR)
        sent.flat, sent.work = self._all_reduce([each.right_MR for each in sent.matrices])

    def _settle(self, sent: _Sent) -> None:
        """Gradients are the sums' approximations; what this rank's share of them misses is kept."""
        self._receive(sent, [each.right_MR for each in sent.matrices])
        num_ranks = self.group.size()
        for each in sent.matrices:
            approximation_NM = each.left_NR @ each.right_MR.T
            torch.sub(each.matrix_NM, approximation_NM, alpha=1 / num_ranks, out=each.error_NM)
            # Nothing stays of a step that is not finite; `right` begins anew.
            each.error_NM.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            each.right_MR.nan_to_num_(nan=1.0, posinf=1.0, neginf=1.0)
            each.gradient.copy_(approximation_NM.view_as(each.gradient))
        sent.result.set_result(sent.gradients)

    def _all_reduce(self, tensors: list[Tensor]) -> tuple[Tensor, dist.Work | None]:
        if not tensors:
            return torch.empty(0), None
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return flat, dist.all_reduce(flat, group=self.group, async_op=True)

    def _receive(self, sent: _Sent, tensors: list[Tensor]) -> None:
        if sent.work is None:
            return
        sent.work.wait()
        sums = torch.split(sent.flat, [tensor.numel() for tensor in tensors])
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total.view_as(tensor))


def _as_matrix(gradient: Tensor) -> Tensor:
    return gradient.view(gradient.shape[0], -1)
