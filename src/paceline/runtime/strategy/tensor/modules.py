"""Modules that compute with this rank's part of their parameters.

Each module of a split model becomes an instance of a subclass of its own class, made here: its
parameters stay DTensors under their names, as the optimizer and FSDP2 want them, and its forward
computes on the local tensors. Outside of `forward` nothing changes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, float32, get_autocast_dtype, is_autocast_enabled, nn, rsqrt
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from paceline.runtime._torch_private import parameters_of
from paceline.runtime.strategy.adapter.linear import ADAPTER, has_adapter, with_adapter
from paceline.runtime.strategy.product import multiply
from paceline.runtime.strategy.tensor.randomness import SplitRandom
from paceline.runtime.strategy.tensor.regions import (
    copy_to,
    gather_from,
    join_shares,
    keep_share,
    reduce_from,
    scatter_to,
    sum_everywhere,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossings:
    """How tensors enter and leave the parts of a block that are split by heads or features."""

    mesh: DeviceMesh
    """1-D: the tensor ranks."""

    group: dist.ProcessGroup
    tokens_split: bool
    """Whether between those parts each rank has a share of the tokens (sequence parallelism)."""

    random: SplitRandom | None
    """Switched where ranks need dropout masks of their own; None without dropout."""

    def enter(self, hidden_BSH: Tensor) -> Tensor:
        """The whole tensor, for ranks that each compute a part with it."""
        hidden_BSH = _as_computed(hidden_BSH)
        if self.tokens_split:
            return gather_from(hidden_BSH, self.group)
        if self.random is not None:
            self.random.enter(hidden_BSH)
        return copy_to(hidden_BSH, self.group)

    def leave(self, partial_BSH: Tensor) -> Tensor:
        """The sum of the ranks' parts: this rank's tokens of it, or all."""
        if self.tokens_split:
            return scatter_to(partial_BSH, self.group)
        if self.random is not None:
            self.random.leave(partial_BSH)
        return reduce_from(partial_BSH, self.group)

    def begin(self, hidden_BSH: Tensor) -> Tensor:
        """This rank's tokens, before the first block."""
        if self.random is not None:
            self.random.enter(hidden_BSH)
        return keep_share(hidden_BSH, self.group)

    def join(self, hidden_BSH: Tensor) -> Tensor:
        """All tokens after the last block, for what every rank computes alike."""
        if self.random is not None:
            self.random.leave(hidden_BSH)
        return join_shares(hidden_BSH, self.group)

    def end(self, hidden_BSH: Tensor) -> Tensor:
        """The whole tensor after the last block, for a head of which each rank has a part."""
        hidden_BSH = _as_computed(hidden_BSH)
        if not self.tokens_split:
            return copy_to(hidden_BSH, self.group)
        if self.random is not None:
            self.random.leave(hidden_BSH)
        return gather_from(hidden_BSH, self.group)


def _as_computed(hidden_BSH: Tensor) -> Tensor:
    """In the type that autocast multiplies in: the matrices behind a crossing cast to it, so that
    it and its gradient cross in half the bytes and are cast once."""
    device = hidden_BSH.device.type
    if hidden_BSH.dtype != float32 or not is_autocast_enabled(device):
        return hidden_BSH
    return hidden_BSH.to(get_autocast_dtype(device))


def swap_class(module: nn.Module, kind: type, **facts: Any) -> None:
    """Make a module an instance of `kind` over its own class, which then knows these facts."""
    names = tuple(
        name for name, value in parameters_of(module).items() if isinstance(value, DTensor)
    )
    module.__dict__.update(facts, _local=None)
    original: Any = type(module)
    module.__class__ = class_of(original, kind, names)


@cache
def class_of(original: type, kind: type, names: tuple[str, ...] = ()) -> type:
    """One class for all modules of a class that become of a kind, under its name: a compiler sees
    one and not one a block."""
    properties = {name: _local_or_own(name) for name in names}
    body = {"__module__": original.__module__, "__qualname__": original.__qualname__, **properties}
    return type(original.__name__, (kind, original), body)


def _local_or_own(name: str) -> property:
    def get(module: Any) -> Any:
        local = module.__dict__["_local"]
        return parameters_of(module)[name] if local is None else local[name]

    return property(get)


class OnLocal:
    """Any module: its own forward, on local parameters.

    Facts: `_crossings`; `_summed`, names of parameters whose gradients are summed over the ranks,
    because each sees other tokens or other heads.
    """

    _crossings: Crossings
    _summed: frozenset[str]
    _local: dict[str, Tensor] | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_local(super().forward, *args, **kwargs)  # type: ignore[misc]

    def _on_local(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._local = {name: self._part(name) for name in self._split_names()}
        try:
            return function(*args, **kwargs)
        finally:
            self._local = None

    def _split_names(self) -> list[str]:
        parameters = parameters_of(self).items()
        return [name for name, value in parameters if isinstance(value, DTensor)]

    def _part(self, name: str) -> Any:
        parameter = parameters_of(self).get(name)
        if not isinstance(parameter, DTensor):
            return parameter
        local: Tensor = parameter.to_local()
        return copy_to(local, self._crossings.group) if name in self._summed else local

    def _product(
        self, input_BSI: Tensor, bias: Tensor | None, total: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """What a linear gives, with its adapter's share.

        Args:
            total: Sums over the ranks, where each has a part of the inputs.
        """
        weight = self._part("weight")
        if not has_adapter(self):  # type: ignore[arg-type]
            return multiply(self, input_BSI, weight, bias)
        adapter = [self._part(name) for name in ADAPTER]
        return with_adapter(self, input_BSI, weight, bias, adapter, total)


class ColumnLinear(OnLocal):
    """A linear with this rank's output features. `_crosses`: its input is not whole yet."""

    _crosses: bool

    def forward(self, input_BSI: Tensor) -> Tensor:
        if self._crosses:
            input_BSI = self._crossings.enter(input_BSI)
        return self._product(input_BSI, self._part("bias"), None)


class RowLinear(OnLocal):
    """A linear with this rank's input features; the bias is added once, to the sum. Unless it
    `_crosses`, it gives its term of the sum, without a bias."""

    _crosses: bool

    def forward(self, input_BSI: Tensor) -> Tensor:
        group = self._crossings.group
        partial_BSH = self._product(input_BSI, None, lambda part: sum_everywhere(part, group))
        if not self._crosses:
            return partial_BSH
        output_BSH = self._crossings.leave(partial_BSH)
        bias = self._part("bias")
        return output_BSH if bias is None else output_BSH + bias


class HeadLinear(OnLocal):
    """The output matrix with this rank's rows of the vocabulary; the logits are a DTensor.

    Unless it `_crosses`, its input is whole already and takes a part of the gradient.
    """

    _crosses: bool

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        crossings = self._crossings
        hidden_BSH, weight, bias = self.entered(hidden_BSH)
        logits_BSV = multiply(self, hidden_BSH, weight, bias)
        vocab = parameters_of(self)["weight"].shape[0]
        shape = (*logits_BSV.shape[:-1], vocab)
        split = Shard(logits_BSV.dim() - 1)
        return DTensor.from_local(
            logits_BSV,
            crossings.mesh,
            [split],
            run_check=False,
            shape=shape,  # type: ignore[arg-type]
            stride=_strides(shape),
        )

    def entered(self, hidden_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The whole input, which takes a part of the gradient here, and this rank's rows of weight
        and bias."""
        if self._crosses:
            hidden_BSH = self._crossings.end(hidden_BSH)
        return hidden_BSH, self._part("weight"), self._part("bias")

    def first_row(self) -> int:
        """Number of this rank's first row."""
        return _first_row(self)


class VocabularyEmbedding(OnLocal):
    """An embedding with this rank's rows: others' tokens give zero, and the ranks are summed."""

    padding_idx: int | None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        weight = self._part("weight")
        rows = weight.shape[0]
        first = _first_row(self)
        local_BS = tokens_BS - first
        absent_BS = (local_BS < 0) | (local_BS >= rows)
        padding = self.padding_idx
        if padding is not None:  # a row without a gradient, known by its local number
            self.padding_idx = padding - first if 0 <= padding - first < rows else None
        try:
            forward = super(OnLocal, self).forward  # type: ignore[misc]
            hidden_BSH = self._on_local(forward, local_BS.masked_fill(absent_BS, 0))
        finally:
            self.padding_idx = padding
        return reduce_from(hidden_BSH.masked_fill(absent_BS[..., None], 0), self._crossings.group)


class SplitExperts(OnLocal):
    """Routed experts, of which this rank has some: it gives their terms of the sum.

    Called as in transformers 5, whose experts take `num_experts` as the number of nobody's tokens.
    """

    num_experts: int

    def forward(self, hidden_TH: Tensor, chosen_TE: Tensor, weights_TE: Tensor) -> Tensor:
        local_TE = chosen_TE - self.num_experts * self._crossings.group.rank()
        absent_TE = (local_TE < 0) | (local_TE >= self.num_experts)
        output_TH: Tensor = super().forward(
            hidden_TH,
            local_TE.masked_fill(absent_TE, self.num_experts),
            weights_TE.masked_fill(absent_TE, 0),
        )
        if weights_TE.requires_grad and not output_TH.requires_grad:
            return output_TH + self._nothing(weights_TE)
        return output_TH

    def _nothing(self, weights_TE: Tensor) -> Tensor:
        """Zero that hangs on all that the experts would have used: when no token chose any of this
        rank's, the backward pass still joins the other ranks' collectives."""
        own = (self._part(name).sum() for name in self._split_names())
        return sum((part * 0 for part in own), start=weights_TE.sum() * 0)


class WideNorm(OnLocal):
    """RMSNorm over the features of all heads, of which this rank has some."""

    def forward(self, query_BSI: Tensor) -> Tensor:
        dtype = query_BSI.dtype
        wide_BSI = query_BSI.float()  # as the models that have such a norm do
        weight = self._part("weight")
        features = parameters_of(self)["weight"].shape[0]
        squares_BS1 = wide_BSI.square().sum(-1, keepdim=True)
        mean_BS1 = sum_everywhere(squares_BS1, self._crossings.group) / features
        scaled_BSI = wide_BSI * rsqrt(mean_BS1 + self.variance_epsilon)  # type: ignore[attr-defined]
        normed_BSI: Tensor = (weight * scaled_BSI).to(dtype)
        return normed_BSI


def _first_row(module: OnLocal) -> int:
    group = module._crossings.group
    vocab: int = parameters_of(module)["weight"].shape[0]
    return group.rank() * -(-vocab // group.size())


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
