"""Data parallelism without sharding: every rank holds its part whole and gradients are summed.

Two ways to the same sums. `Replica` is torch's DDP, for models whose parameters are plain tensors.
`GradientSums` is for the rest: parameters that tensor parallelism has made DTensors, which DDP
cannot take; experts, whose gradients are summed over fewer ranks; and pipelines, whose schedules
run many backward passes in one step.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.runtime._torch_private import GradBucket, build_reducer, settle_buckets, tree_leaves
from paceline.runtime.strategy.local import lay_out_gradient, local_of
from paceline.runtime.strategy.mesh import is_pretended

BUCKET_BYTES = 25 * 2**20
"""Gradients that are reduced in one collective. Source: DDP's default, Li et al., PVLDB 13(12),
2020, section 4.2."""

_DDP_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"
)
"""torch 2.13 renamed the option and warns about the old name; 2.11 knows only the old one."""

CommunicationHook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class Replica(DistributedDataParallel):
    """DDP that finds out by itself whether some parameters get no gradient.

    DDP has to be told, and fails in its second step otherwise; always telling it costs a walk
    through the graph in every step. Here the first forward pass of training looks, all ranks agree,
    and only if some parameter was unused on some rank does the reduction look in every step. A
    model that uses all its parameters first and leaves some out later needs `looks=True`.

    Gradients live in the reduction's own buckets, which saves one copy of them. DDP's own sending
    of buffers is off: the step loop does it once a step.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int | None = None,
        static_graph: bool = False,
        looks: bool = False,
    ) -> None:
        options: dict[str, Any] = {_SYNC_BUFFERS: False}
        if bucket_bytes is not None:
            options["bucket_cap_mb"] = bucket_bytes / 2**20
        super().__init__(
            module,
            process_group=group,
            init_sync=False,  # the weights are equal, and tables of positions are each rank's own
            gradient_as_bucket_view=True,
            static_graph=static_graph,
            find_unused_parameters=looks,
            **options,
        )
        self._has_looked = static_graph or looks
        self._hook: tuple[object, CommunicationHook] | None = None
        if not looks:
            self._settle_buckets()

    def _settle_buckets(self) -> None:
        """Fill the buckets in the order that gradients come in, once and for all.

        DDP itself does so after the first backward pass it sees: then the first step after every
        restart would add up the ranks' gradients in another order than an undisturbed run, and end
        with other last bits on more than two ranks.
        """
        settle_buckets(self)

    def _build_params_for_reducer(self) -> Any:
        parameters, is_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], is_sparse[::-1]

    def unwrap(self) -> nn.Module:
        """The model itself, to be wrapped anew after its process group is gone. The reduction's
        hooks on the gradients go with it; this wrapper can do nothing any more."""
        self.reducer = self.logger = None  # type: ignore[assignment]
        for parameter in self.module.parameters():
            parameter.grad = None  # it lies in the reduction's buckets
        module: nn.Module = self.module
        return module

    def reduce_by(self, state: object, hook: CommunicationHook) -> None:
        """Reduce gradients by a communication hook, which gives sums: see `hooks.py`."""
        self._hook = state, hook
        self.register_comm_hook(state, hook)

    @property
    def is_summed_by_hook(self) -> bool:
        """Whether gradients are sums; DDP's own reduction divides by the number of ranks."""
        return self._hook is not None

    def _post_forward(self, output: Any) -> Any:
        if not self._has_looked and torch.is_grad_enabled() and self.training:
            self._has_looked = True
            if self._some_rank_has_unused(output):
                self._look_in_every_step()
        with warnings.catch_warnings():
            # Said once where this rank uses all of them; another rank does not.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            return super()._post_forward(output)  # type: ignore[no-untyped-call]

    def _some_rank_has_unused(self, output: Any) -> bool:
        used = used_parameters(output)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        has_unused = any(p not in used for p in trained)
        if is_pretended(self.process_group):
            return has_unused
        is_unused = torch.tensor(float(has_unused), device=self.device)
        dist.all_reduce(is_unused, dist.ReduceOp.MAX, group=self.process_group)
        return bool(is_unused)

    def _look_in_every_step(self) -> None:
        """Build the reduction anew: torch's takes this option only when it is built."""
        self.find_unused_parameters = True
        # Given a size, torch turns the order round by itself.
        parameters, is_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        build_reducer(self, parameters, is_sparse, self._hook)


def used_parameters(output: Any) -> set[Tensor]:
    """Leaves of the graph that a backward pass from the output reaches."""
    waiting = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    seen: set[Any] = set()
    used: set[Tensor] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            used.add(leaf)
        waiting.extend(each for each, _ in node.next_functions)
    return used


@dataclass(slots=True, eq=False)
class _Bucket:
    """Parameters whose gradients go over the wire together."""

    group: dist.ProcessGroup
    parameters: list[nn.Parameter] = field(default_factory=list)
    num_bytes: int = 0
    num_ready: int = 0
    flat: Tensor | None = None
    work: dist.Work | None = None


class GradientSums:
    """Sums every parameter's gradient over the ranks that hold the same part of the model.

    A bucket is sent as soon as its gradients are final, while the backward pass goes on, if
    `overlaps` says that this backward pass is the step's last; `finish` sends what is left and
    waits. Buckets are sent in the same order on every rank.

    A parameter that has a gradient on some rank only gets the sum there is; one that has none on
    any rank keeps none.
    """

    def __init__(
        self,
        groups: Mapping[nn.Parameter, dist.ProcessGroup],
        *,
        bucket_bytes: int | None = None,
        wire_type: torch.dtype | None = None,
    ) -> None:
        self.overlaps = False
        """Whether the backward passes from now on are the step's last."""

        self._wire_type = wire_type
        self._buckets = list(_buckets(groups, bucket_bytes or BUCKET_BYTES))
        self._num_sent = 0
        self._is_finished = True
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        for parameter in groups:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def begin(self, *, overlaps: bool) -> None:
        """Before each micro-batch's forward pass."""
        self.overlaps = overlaps
        self._is_finished = False

    @torch.no_grad()
    def finish(self) -> None:
        """After the step's last backward pass. Collective. Nothing is done when it is called again
        before the next gradient."""
        if self._is_finished:
            return
        while self._num_sent < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            _receive(bucket)
        self._num_sent = 0
        self._is_finished = True

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        self._is_finished = False
        if not self.overlaps:
            return
        self._bucket_of[parameter].num_ready += 1  # type: ignore[index]
        while self._num_sent < len(self._buckets):
            following = self._buckets[self._num_sent]
            if following.num_ready < len(following.parameters):
                return
            self._send_next()

    def _send_next(self) -> None:
        """Gradients one after the other, then for each whether this rank has one."""
        bucket = self._buckets[self._num_sent]
        self._num_sent += 1
        bucket.num_ready = 0
        for parameter in bucket.parameters:
            lay_out_gradient(parameter)
        if bucket.group.size() == 1:
            return
        first = local_of(bucket.parameters[0])
        flags = first.new_ones(len(bucket.parameters))  # filled there: a copy would wait
        for index, parameter in enumerate(bucket.parameters):
            if parameter.grad is None:
                flags[index] = 0.0
        pieces = [
            (torch.zeros_like(local_of(p)) if p.grad is None else local_of(p.grad)).reshape(-1)
            for p in bucket.parameters
        ]
        bucket.flat = torch.cat([*pieces, flags]).to(self._wire_type or first.dtype)
        bucket.work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)


def _receive(bucket: _Bucket) -> None:
    if bucket.work is None or bucket.flat is None:
        return
    bucket.work.wait()
    sizes = [local_of(parameter).numel() for parameter in bucket.parameters]
    *sums, flags = torch.split(bucket.flat, [*sizes, len(sizes)])
    for index, (parameter, total) in enumerate(zip(bucket.parameters, sums, strict=True)):
        local = local_of(parameter)
        if parameter.grad is not None:
            local_of(parameter.grad).copy_(total.view_as(local))
        elif float(flags[index]) > 0:
            gradient = total.to(local.dtype, copy=True).view_as(local)
            parameter.grad = _like(parameter, gradient)
    bucket.flat = bucket.work = None


def _buckets(
    groups: Mapping[nn.Parameter, dist.ProcessGroup], most_bytes: int
) -> Iterator[_Bucket]:
    filling: dict[object, _Bucket] = {}
    for parameter, group in reversed(list(groups.items())):
        key = (group, parameter.dtype, parameter.device)
        bucket = filling.setdefault(key, _Bucket(group))
        bucket.parameters.append(parameter)
        bucket.num_bytes += local_of(parameter).nbytes
        if bucket.num_bytes >= most_bytes:
            yield filling.pop(key)
    yield from filling.values()


def _like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    data = parameter.data
    if not isinstance(data, DTensor):
        return local
    return DTensor.from_local(
        local,
        data.device_mesh,
        data.placements,
        run_check=False,
        shape=data.shape,
        stride=data.stride(),
    )
