"""Give a model that was split on meta its memory, and the numbers of what this rank has of it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.errors import RunError
from paceline.runtime._torch_private import buffers_of, fsdp_parameters, parameters_of
from paceline.runtime.initial.blueprint import Blueprint
from paceline.runtime.initial.program import Target, View
from paceline.runtime.optimizer.sharded import like
from paceline.runtime.pretrained import Weights
from paceline.runtime.state import local_part, model_state, named_parameters, parameter_places
from paceline.runtime.strategy.adapter.linear import (
    FROZEN_DIGEST,
    MAGNITUDE,
    frozen_parameters,
    weight_norms,
)
from paceline.runtime.strategy.adapter.nf4 import byte_span, is_packed, store, value_box
from paceline.runtime.strategy.blocks import parts_of
from paceline.runtime.strategy.local import local_of

NF4_MARK = ":nf4"
"""Ends the digest of frozen weights of which matrices were quantised."""

Box = tuple[tuple[int, ...], Tensor]
"""Where this rank's part of a parameter begins in it, and the part, in its memory."""


def give_memory(
    model: nn.Module,
    device: torch.device | str = "cpu",
    ready: Mapping[int, nn.Parameter] | None = None,
) -> None:
    """Memory for every parameter and buffer on meta, one for all places of a tensor.

    `nn.Module.to_empty` would give a tied parameter two.

    Args:
        ready: By id of a parameter on meta: what to put in its place.
    """
    given: dict[int, Any] = dict(ready or {})
    for module in model.modules():
        for places in (parameters_of(module), buffers_of(module)):
            for name, tensor in list(places.items()):
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in given:
                    empty: Any = torch.empty_like(tensor.detach(), device=device)
                    if isinstance(tensor, nn.Parameter):
                        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    given[id(tensor)] = empty
                places[name] = given[id(tensor)]
    exchanges = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)  # FSDP2 refuses new objects else
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for each in fsdp_parameters(module):
                each.reset_sharded_param()
    torch.__future__.set_swap_module_params_on_conversion(exchanges)


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """DoRA's magnitudes as they begin: the lengths of the frozen matrices' rows. One matrix at a
    time is whole on each rank, so that all layouts begin with the same bits. Collective."""
    for part in parts_of(model):
        for module in part.modules():
            magnitude = parameters_of(module).get(MAGNITUDE)
            weight = parameters_of(module).get("weight")
            if magnitude is None or weight is None:
                continue
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            (begin,), local = local_part(magnitude)
            local.copy_(weight_norms(module, whole)[begin : begin + len(local)])


class Filler:
    """Fills the model of a blueprint."""

    def __init__(
        self,
        blueprint: Blueprint,
        device: torch.device,
        *,
        live: nn.Module | None = None,
        draws: bool = True,
        weights: Weights | None = None,
    ) -> None:
        """Args:
        device: Where parameters live: the host's, where the layout keeps them there.
        live: The same model, of the same layout and rank, over the groups of an earlier
            generation: its memory is taken over, with what is in it.
        draws: Whether the numbers are needed; not where others are put in their place at once.
        weights: Reads parameters from files; left out, all are drawn.
        """
        self._blueprint = blueprint
        self._device = device
        self._live = live
        self._draws = draws
        self._weights = weights

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> None:
        """Collective, if numbers are drawn or read. What adapters are trained beside is in no
        rank's state, so each rank makes it again where others are put in the place of all else.

        Raises:
            RunError: `R065`, ranks would make different weights for adapters to be trained beside.
        """
        ready = self._ready(model)
        give_memory(model, self._device, ready)
        has_frozen = next(frozen_parameters(model), None) is not None
        if not self._draws and not has_frozen:
            return
        kept = {id(parameter) for parameter in ready.values()}
        made = (each for each in frozen_parameters(model) if id(each) not in kept)
        boxes = _boxes(model, None if self._draws else made)
        digest = ""
        if self._weights is not None:
            digest, stored = self._weights.digest, self._weights.names
            self._weights.fill(boxes, is_shared=self._draws)
            boxes = {name: parts for name, parts in boxes.items() if name not in stored}
        if self._weights is None or self._drawn(boxes):
            is_exact = has_frozen and self._weights is None
            drawn = self._fill(boxes, is_shared=self._draws, is_exact=is_exact)
            digest = digest or drawn
        if self._draws and not _has_magnitudes(self._weights):
            set_magnitudes(model)
        if has_frozen:
            is_quantised = any(map(is_packed, frozen_parameters(model)))
            setattr(model, FROZEN_DIGEST, digest + NF4_MARK * is_quantised)

    def _drawn(self, boxes: dict[str, list[Box]]) -> bool:
        """Whether some parameters are drawn although others are read; alike on all ranks where all
        draw."""
        assert self._weights is not None, "asked where some are read"
        return not self._blueprint.names <= self._weights.names if self._draws else bool(boxes)

    def _ready(self, model: nn.Module) -> dict[int, nn.Parameter]:
        if self._live is None:
            return {}
        model_state(self._live)  # after which no parameter is gathered any more
        ready: dict[int, nn.Parameter] = {}
        for part, old_part in zip(parts_of(model), parts_of(self._live), strict=True):
            before = named_parameters(old_part)
            for name, parameter in named_parameters(part).items():
                local, old = local_of(parameter), local_of(before[name])
                if not parameter.is_meta or local.shape != old.shape or local.dtype != old.dtype:
                    continue
                data: Tensor = old.detach()
                if isinstance(parameter, DTensor):
                    data = like(parameter.data, data, tuple(parameter.shape))
                ready[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        return ready

    def _fill(self, boxes: dict[str, list[Box]], *, is_shared: bool, is_exact: bool) -> str:
        """Put the numbers into their places; returns what they follow from.

        Args:
            is_shared: Whether all ranks fill at once, and may send each other values.
            is_exact: Whether one rank must be able to make the same numbers alone, later.
        """
        numbers = self._blueprint.take_numbers()
        digest = numbers.digest()
        if is_exact and numbers.value_bytes:
            digest += numbers.digest_of_values()
        if is_shared and not _all_equal(digest):
            if is_exact:
                raise _other_numbers()
            numbers = self._blueprint.take_numbers(whole=True)
        targets: dict[View, Target] = {}
        wanted: dict[View, list[Box]] = {}
        sent: dict[int, Tensor] = {}
        for name, source in numbers.sources.items():
            mine = boxes.get(name, [])
            if isinstance(source, View):
                if mine:
                    wanted.setdefault(source, []).extend(mine)
                    targets[source] = Target(source, _putter(wanted[source]))
                continue
            if is_shared and id(source) not in sent:
                sent[id(source)] = source
                _send_from_first(source, self._device)
            _putter(mine)((0,) * source.dim(), source)
        if numbers.program is not None:
            numbers.program.run(list(targets.values()))
        return digest


def _has_magnitudes(weights: Weights | None) -> bool:
    return weights is not None and any(name.endswith(MAGNITUDE) for name in weights.names)


def _boxes(model: nn.Module, only: Iterable[nn.Parameter] | None = None) -> dict[str, list[Box]]:
    """By name in the whole model: what lies on this rank of each parameter, or of these."""
    boxes: dict[str, list[Box]] = {}
    wanted = None if only is None else {id(parameter) for parameter in only}
    for part in parts_of(model):
        places = parameter_places(part)
        for name, parameter in named_parameters(part).items():
            if wanted is not None and id(parameter) not in wanted:
                continue
            place = places[name]
            offset, local = local_part(parameter)
            begin = tuple(a + b for a, b in zip(place.offset, offset, strict=True))
            boxes.setdefault(place.name, []).append((begin, local))
    return boxes


def _other_numbers() -> RunError:
    return RunError.of(
        code="R065",
        what="ranks would draw different weights for adapters to be trained beside, as their "
        "processors or versions of torch differ",
        where="train.adapter",
        fix="give trained weights by model.pretrained, or ranks of one kind",
    )


def _putter(boxes: list[Box]) -> Callable[[tuple[int, ...], Tensor], None]:
    def put(start: tuple[int, ...], block: Tensor) -> None:
        for begin, local in boxes:
            here, there = [], []
            sides = zip(*value_box(begin, local), start, block.shape, strict=True)
            for b, n, s, m in sides:
                low = max(b, s)
                high = max(low, min(b + n, s + m))
                here.append(slice(low - b, high - b))
                there.append(slice(low - s, high - s))
            store(local[byte_span(local, here)], block[tuple(there)])

    return put


def _send_from_first(values: Tensor, device: torch.device) -> None:
    """Every rank takes over rank 0's values: ranks may have read others. Collective."""
    if dist.get_world_size() == 1:
        return
    sent = values.to(device)
    dist.broadcast(sent, 0)
    if sent is not values:
        values.copy_(sent)


def _all_equal(digest: str) -> bool:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, digest)
    return len(set(told)) == 1
