"""The loss of a step without all of its logits: head and cross entropy, some tokens at a time.

The whole logits of 8,192 tokens over 128,256 entries are 4 GiB in float32, and a plain loss holds
three such tensors. Here a chunk of tokens goes through the head, and its logits become its loss and
its gradients before the next chunk's are made. Gradients are computed in the forward pass; the
backward pass only scales them.

    defer_head(model, ways, 256)                # once, before the model is sharded
    with in_chunks(model) as loss_of:           # None for a model without a deferred head
        hidden_BSH = model(inputs_BS)           # the head hands its input on
        loss_sum, num_targets = loss_of(hidden_BSH, targets_BS)

Outside of `in_chunks` the model gives logits as ever: for generation, or a loss of the caller's.

The head's parameters are read after the model's forward pass, when FSDP2 has its root unit still
gathered, which they are part of. With tensor ranks each has its rows of the vocabulary: two
reductions a chunk, and the gradient of the hidden states is summed where they came in.

Letters: B samples, S tokens in a sample, T = B x S, H width of the residual stream, V size of the
vocabulary (with tensor ranks this rank's rows of it), C tokens in a chunk.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.errors import PlanError
from paceline.profile.ways import Ways
from paceline.runtime._torch_private import FUNCTIONAL, UNSAFE_VIEW, parameters_of
from paceline.runtime.strategy.blocks import parts_of
from paceline.runtime.strategy.tensor.modules import HeadLinear, class_of
from paceline.runtime.strategy.ways.ways import named_ways

IGNORED = -100
"""A target that does not count; torch's own number for it."""

ChunkedLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Hidden states and targets -> sum of the losses, number of targets."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a split vocabulary are."""

    group: dist.ProcessGroup
    first: int


class _Loss(torch.autograd.Function):
    """Sum of the cross entropies of `hidden_TH weight_VH^T + bias_V`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        chunk: int,
        rows: Rows | None,
        has_gradients: bool,
    ) -> Tensor:
        dtype = _product_type(hidden_TH, weight_VH)
        with torch.autocast(hidden_TH.device.type, enabled=False):
            total, gradients = _loss_and_gradients(
                (hidden_TH.to(dtype), weight_VH.to(dtype), bias_V),
                targets_T,
                chunk,
                rows,
                tuple(has_gradients and needed for needed in ctx.needs_input_grad[:3]),
            )
        ctx.gradients = gradients
        ctx.dtypes = [
            None if each is None else each.dtype for each in (hidden_TH, weight_VH, bias_V)
        ]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of a loss in chunks are used up by a backward pass")
        # The scale stays as it is: a loss scaler's would overflow in float16.
        scaled = [
            None if each is None else each.mul_(scale).to(dtype)
            for each, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None


def _loss_and_gradients(
    given: tuple[Tensor, Tensor, Tensor | None],
    targets_T: Tensor,
    chunk: int,
    rows: Rows | None,
    needed: tuple[bool, ...],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The sum of the losses, and of hidden states, weight and bias the gradients that are needed.

    Products are in the inputs' type; softmax and sums are in float32, or in float64.
    """
    hidden_TH, weight_VH, bias_V = given
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=hidden_TH.device)
    grad_hidden = torch.empty_like(hidden_TH) if needed[0] else None
    grad_weight = torch.zeros_like(weight_VH, dtype=wide) if needed[1] else None
    grad_bias = torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and needed[2] else None
    for start in range(0, len(targets_T), chunk):
        part = slice(start, start + chunk)
        total += _add_chunk(
            (hidden_TH[part], weight_VH, bias_V),
            targets_T[part],
            rows,
            (None if grad_hidden is None else grad_hidden[part], grad_weight, grad_bias),
            wide,
        )
    return total, (grad_hidden, grad_weight, grad_bias)


def _add_chunk(
    given: tuple[Tensor, Tensor, Tensor | None],
    targets_C: Tensor,
    rows: Rows | None,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    wide: torch.dtype,
) -> Tensor:
    """The sum of a chunk's losses; its gradients are written, or added, where they belong."""
    (hidden_CH, weight_VH, bias_V), (grad_hidden, grad_weight, grad_bias) = given, gradients
    logits_CV = (hidden_CH @ weight_VH.T).to(wide)
    if bias_V is not None:
        logits_CV += bias_V
    has_gradient = any(each is not None for each in gradients)
    loss, errors_CV = _cross_entropy(logits_CV, targets_C, rows, has_gradient)
    del logits_CV
    if errors_CV is None:
        return loss
    if grad_bias is not None:
        grad_bias += errors_CV.sum(0)
    errors_CV = errors_CV.to(hidden_CH.dtype)
    if grad_hidden is not None:
        torch.mm(errors_CV, weight_VH, out=grad_hidden)
    if grad_weight is not None and wide == errors_CV.dtype:
        grad_weight.addmm_(errors_CV.T, hidden_CH)
    elif grad_weight is not None:
        grad_weight += errors_CV.T @ hidden_CH
    return loss


def _cross_entropy(
    logits_CV: Tensor, targets_C: Tensor, rows: Rows | None, has_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The sum of a chunk's losses, and its gradient, which takes the logits' place."""
    counted_C = targets_C != IGNORED
    at_C, is_here_C = targets_C.masked_fill(~counted_C, 0), counted_C
    if rows is not None:
        at_C = at_C - rows.first
        is_here_C = counted_C & (at_C >= 0) & (at_C < logits_CV.shape[1])
        at_C = at_C.masked_fill(~is_here_C, 0)
    most_C = _reduced(logits_CV.amax(1), "max", rows)
    logits_CV.sub_(most_C[:, None])
    wanted_C = logits_CV.gather(1, at_C[:, None])[:, 0] * is_here_C
    powers_CV = logits_CV.exp_()
    sums_C, wanted_C = _reduced(torch.stack((powers_CV.sum(1), wanted_C)), "sum", rows)
    loss = ((sums_C.log() - wanted_C) * counted_C).sum()
    if not has_gradient:
        return loss, None
    errors_CV = powers_CV.mul_((counted_C / sums_C)[:, None])
    errors_CV.scatter_add_(1, at_C[:, None], -is_here_C.to(errors_CV.dtype)[:, None])
    return loss, errors_CV


def _reduced(tensor: Tensor, how: str, rows: Rows | None) -> Tensor:
    """Sum over the ranks that share a vocabulary."""
    if rows is None:
        return tensor
    reduced = FUNCTIONAL.all_reduce(tensor.contiguous(), how, rows.group.group_name)
    waited: Tensor = FUNCTIONAL.wait_tensor(reduced)
    return waited


def _product_type(hidden_TH: Tensor, weight_VH: Tensor) -> torch.dtype:
    """What `F.linear` would multiply in: autocast's type, else the weight's."""
    device = hidden_TH.device.type
    if torch.is_autocast_enabled(device) and weight_VH.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight_VH.dtype


def chunked_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    chunk: int,
    *,
    bias_V: Tensor | None = None,
    rows: Rows | None = None,
) -> Tensor:
    """Sum of the cross entropies of a linear head's logits, in float32 or float64.

    Args:
        targets_T: Entries of the vocabulary, or `IGNORED`.
        chunk: Tokens whose logits exist at a time.
        rows: Where tensor ranks share the vocabulary. The loss is then the same on all of them, the
            gradient of `hidden_TH` a term of a sum over them.
    """
    loss: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, bias_V, targets_T, chunk, rows, torch.is_grad_enabled()
    )
    return loss


class _Deferred(torch.autograd.Function):
    """A head's input, handed on as if it were its output: what looks for parameters that a forward
    pass has used (DDP, FSDP2) finds the head's."""

    @staticmethod
    def forward(ctx: Any, hidden_BSH: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        handed: Tensor = UNSAFE_VIEW(hidden_BSH, hidden_BSH.shape)  # FSDP2 hooks no views
        return handed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], *[None] * ctx.num_parameters


class _Head:
    """A head that can leave its work to the loss. Facts: `_chunk`, tokens in a chunk; `_defers`,
    whether it does so now; `_given`, what it handed on last."""

    _chunk: int
    _defers: bool
    _given: Tensor | None

    def forward(self, hidden_BSH: Tensor) -> Any:
        if not self._defers:
            return super().forward(hidden_BSH)  # type: ignore[misc]
        own = [each for each in parameters_of(self).values() if each is not None]
        self._given = _Deferred.apply(hidden_BSH, *own)  # type: ignore[no-untyped-call]
        return self._given

    def loss_of(self, hidden_BSH: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the losses, number of targets."""
        rows, weight, bias = None, getattr(self, "weight"), getattr(self, "bias")  # noqa: B009
        if isinstance(self, HeadLinear):
            hidden_BSH, weight, bias = self.entered(hidden_BSH)
            rows = Rows(self._crossings.group, self.first_row())
        hidden_TH, targets_T = hidden_BSH.flatten(0, -2), targets_BS.flatten()
        loss = chunked_loss(hidden_TH, weight, targets_T, self._chunk, bias_V=bias, rows=rows)
        return loss, (targets_T != IGNORED).sum()


def defer_head(model: nn.Module, ways: Ways | None, chunk: int) -> None:
    """Let the model's head compute the loss, `chunk` tokens at a time, inside `in_chunks`.

    Args:
        model: Split over tensor and pipeline ranks, not sharded or wrapped yet. A stage that has no
            head is left as it is.
        chunk: Tokens in a chunk; 0 changes nothing.

    Raises:
        PlanError: `L044`, nobody knows the head, or it is not a plain linear.
    """
    if not chunk:
        return
    if ways is None:
        raise _cannot(model, "which module is its head is not known")
    for part in parts_of(model):
        heads = [name for name, way in named_ways(part, ways).items() if way == "head"]
        for name in heads:
            head = part.get_submodule(name)
            own = set(parameters_of(head)) - {"weight", "bias"}
            if not isinstance(head, nn.Linear) or own:
                raise _cannot(model, f"its head {name} is not a plain nn.Linear")
            head.__dict__.update(_chunk=chunk, _defers=False, _given=None)
            original: Any = type(head)
            head.__class__ = class_of(original, _Head)
            part.register_forward_hook(partial(_check_output, head))


def _cannot(model: nn.Module, why: str) -> PlanError:
    return PlanError.of(
        code="L044",
        what=f"the loss of {type(model).__name__} cannot be computed in chunks: {why}",
        where="train.loss_chunk",
        fix="set train.loss_chunk to 0, which keeps all logits",
    )


def _check_output(head: Any, model: nn.Module, _: object, output: object) -> None:
    """What the model returns is what its head handed on: nothing scales or caps its logits."""
    given, head._given = head._given, None
    if head._defers and given is not output:
        raise _cannot(model, "what it returns is not what its head gives, but made from it")


def head_of(model: nn.Module) -> Any:
    """The deferred head that this rank has, or None."""
    modules = (module for part in parts_of(model) for module in part.modules())
    return next((module for module in modules if isinstance(module, _Head)), None)


def is_deferring(model: nn.Module) -> bool:
    """Whether the loss is going to read the head's parameters."""
    head = head_of(model)
    return head is not None and head._defers


@contextmanager
def in_chunks(model: nn.Module) -> Iterator[ChunkedLoss | None]:
    """The loss to use inside; None where all logits are kept."""
    head = head_of(model)
    if head is None:
        yield None
        return
    head._defers = True
    try:
        yield head.loss_of
    finally:
        head._defers, head._given = False, None
