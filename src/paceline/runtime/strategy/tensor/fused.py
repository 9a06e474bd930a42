"""A linear that computes several at once, taken apart: its parts must be split one by one.

Query, key and value one after another cannot be split as one matrix, as the first rank would get
queries only. Apart, they are ordinary linears with ordinary names, and the model sees their outputs
together as before.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.profile.ways import Ways
from paceline.runtime._torch_private import parameters_of, without_parameters
from paceline.runtime.strategy.adapter.linear import LORA_A, LORA_B, MAGNITUDE, has_adapter
from paceline.runtime.strategy.adapter.nf4 import value_box
from paceline.runtime.strategy.product import is_transposed
from paceline.runtime.strategy.ways.ways import named_ways, written_out


class SplitLinear(nn.Module):
    """The parts of a linear; together they give what it gave."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, input_BSI: Tensor) -> Tensor:
        return torch.cat([part(input_BSI) for part in self.children()], dim=-1)


def split_fused(model: nn.Module, ways: Ways) -> None:
    """Replace each linear in `ways.fused` by its parts.

    `self_attn.qkv_proj.weight` becomes `self_attn.qkv_proj.query.weight` and so on: call it before
    parameters are read by name. The first part is as wide as the input of the `row` in the same
    module, the others share the rest. What is apart already stays as it is.
    """
    named = named_ways(model, ways)
    for name, parts in written_out(model, ways, ways.fused):
        module = model.get_submodule(name)
        if isinstance(module, SplitLinear):
            continue
        parent, _, last = name.rpartition(".")
        rows = [row for row, way in named.items() if way == "row" and row.startswith(f"{parent}.")]
        if len(rows) != 1:
            raise _misnamed(
                name,
                f"its parts are as wide as the one `row` beside it, and {parent} has {len(rows)}",
            )
        if len(parts) < 2:
            raise _misnamed(name, f"{len(parts)} part is named, and several are one linear")
        widths = _widths(name, module, model.get_submodule(rows[0]), len(parts))
        setattr(model.get_submodule(parent), last, _split(module, parts, widths))


def out_features(linear: nn.Module) -> int:
    return _weight(linear).shape[1 if is_transposed(linear) else 0]


def in_features(linear: nn.Module) -> int:
    weight = _weight(linear)
    return value_box((0, 0), weight)[1][0 if is_transposed(linear) else 1]


def _weight(linear: nn.Module) -> Tensor:
    weight: Tensor | None = parameters_of(linear)["weight"]
    assert weight is not None
    return weight


def _widths(name: str, fused: nn.Module, row: nn.Module, num_parts: int) -> list[int]:
    first = in_features(row)
    rest, left = divmod(out_features(fused) - first, num_parts - 1)
    if left or rest <= 0:
        raise _misnamed(
            name,
            f"{out_features(fused)} features are not {num_parts} parts, the "
            f"first of {first} and the others alike",
        )
    return [first, *[rest] * (num_parts - 1)]


def _misnamed(name: str, why: str) -> PlanError:
    return PlanError.of(
        code="L020",
        what=f"{name} cannot be taken apart as Ways.fused says: {why}",
        where="layout.tensor",
        fix="correct `fused` in the model's Ways, or set layout.tensor = 1",
    )


def _split(fused: nn.Module, names: tuple[str, ...], widths: list[int]) -> SplitLinear:
    weights = torch.split(_weight(fused), widths, dim=1 if is_transposed(fused) else 0)
    parts: dict[str, dict[str, Tensor | None]]
    parts = {name: {"weight": weight} for name, weight in zip(names, weights, strict=True)}
    for kind in ("bias", LORA_B, MAGNITUDE):
        value = parameters_of(fused).get(kind)
        pieces = [None] * len(names) if value is None else torch.split(value, widths)
        for name, piece in zip(names, pieces, strict=True):
            parts[name][kind] = piece
    return SplitLinear({name: _part(fused, values) for name, values in parts.items()})


def _part(fused: nn.Module, values: Mapping[str, Tensor | None]) -> nn.Module:
    part = without_parameters(fused)
    for name, value in values.items():
        needs_grad = value is not None and value.requires_grad
        own = None if value is None else nn.Parameter(value.detach().clone(), needs_grad)
        if own is not None or name in parameters_of(fused):
            part.register_parameter(name, own)
    if has_adapter(fused):
        part.register_parameter(LORA_A, parameters_of(fused)[LORA_A])
    setattr(part, "nf" if is_transposed(fused) else "out_features", out_features(part))
    return part
