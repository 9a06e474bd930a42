"""Whether a tensor degree goes with a model, said before anything is built.

Leaves out: whether it is a good choice, and what the planner checks from sizes alone.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from paceline.errors import Problem
from paceline.parallel.layout import Layout
from paceline.parallel.layout_laws import check_blocks, check_shared, check_vocabulary
from paceline.profile.ways import Way, Ways
from paceline.runtime._torch_private import parameters_of
from paceline.runtime.strategy.adapter.nf4 import is_packed
from paceline.runtime.strategy.tensor.fused import SplitLinear, in_features, out_features
from paceline.runtime.strategy.ways.ways import containers_of, is_inside, named_ways, written_out

_PEFT = re.compile(r"\.(base_layer|lora_[AB]\.[^.]+)$")
"""What peft adds to a linear's name."""

LINEARS = ("Linear", "Conv1D", "FalconLinear", "NonDynamicallyQuantizableLinear")
"""Classes whose forward is a product with the weight and the bias added."""


def check_tensor_ways(model: nn.Module, layout: Layout, ways: Ways) -> Iterator[Problem]:
    """Everything in the model that the tensor degree does not divide, or that cannot be split.

    The model may be on meta, and may be one pipeline stage of it. Of equal blocks only the first
    is named.
    """
    if layout.tensor == 1:
        return
    if not ways.tensor:
        yield _no_ways(model, layout)
        return
    named = named_ways(model, ways)
    told: set[str] = set()
    for name in named:
        place = _pattern(name, ways)
        if place in told:
            continue
        for problem in _check_module(model, layout, ways, named, name):
            told.add(place)
            yield problem
    if layout.sequence_parallel and not _attention_is_whole(model, ways, named):
        yield _attention_of_shares(ways)
    if layout.expert > 1 and "experts" in named.values():
        yield _experts_twice(layout)
    for name, attributes in written_out(model, ways, ways.divided):
        for attribute in attributes:
            place, count = f"{_pattern(name, ways)}.{attribute}", _number(model, name, attribute)
            if place in told or (count is not None and count % layout.tensor == 0):
                continue
            told.add(place)
            if count is None:
                yield _no_number(name, attribute)
            else:
                yield from check_shared(layout, name, count, f"{attribute} = {count}")


def head_width(attention: nn.Module) -> int | None:
    """Features of one head, where an attention module says them."""
    for holder in (attention, getattr(attention, "shape", None)):
        for name in ("head_dim", "head_size", "attention_head_size"):
            width = getattr(holder, name, None)
            if isinstance(width, int) and width > 0:
                return width
    return None


def _check_module(
    model: nn.Module, layout: Layout, ways: Ways, named: Mapping[str, Way], name: str
) -> Iterator[Problem]:
    module, way = model.get_submodule(name), named[name]
    if way in ("sequence", "gather", "sum", "join", "behind"):
        return
    if way == "experts":
        num_experts = _number(model, name, "num_experts")
        if num_experts is None:
            yield _no_number(name, "num_experts")
        else:
            yield from check_shared(layout, name, num_experts, f"{num_experts} experts")
        return
    is_linear = isinstance(module, SplitLinear) or type(module).__name__ in LINEARS
    if hasattr(module, "base_layer"):  # peft's own, of the same name
        yield _not_splittable(name, module, f"`{way}`")
        return
    if way in ("column", "row", "head") and not is_linear:
        yield _not_splittable(name, module, f"`{way}`")
        return
    if way == "row" and _is_term(named, name) and parameters_of(module)["bias"] is not None:
        yield _not_splittable(name, module, "`row` with a bias inside a `sum`")
    if way == "embedding" and _changes_its_rows(module):
        yield _not_splittable(name, module, "`embedding` with max_norm or gradients of its own")
    if way in ("embedding", "head"):
        rows = module.get_parameter("weight").shape[0]
        yield from check_vocabulary(layout, name, rows)
        return
    if way == "row" and is_packed(module.get_parameter("weight")):
        yield from check_blocks(layout, name, in_features(module))
    count, what = _shared(model, ways, named, name)
    yield from check_shared(layout, name, count, f"{count} {what}")


def _changes_its_rows(module: nn.Module) -> bool:
    names = ("max_norm", "scale_grad_by_freq", "sparse")
    return any(getattr(module, name, None) for name in names)


def _shared(model: nn.Module, ways: Ways, named: Mapping[str, Way], name: str) -> tuple[int, str]:
    module, way = model.get_submodule(name), named[name]
    parent = _owner(name)
    rows = [row for row, kind in named.items() if kind == "row" and row.startswith(f"{parent}.")]
    inputs = in_features(model.get_submodule(rows[0])) if len(rows) == 1 else 0
    if way == "row":
        features, what = in_features(module), "input features"
    elif way == "wide norm":
        features, what = module.get_parameter("weight").shape[0], "features"
    else:
        features, what = _narrowest_part(model, ways, name, inputs), "output features"
    is_attention = ways.attention is not None and parent.endswith(ways.attention)
    width = head_width(model.get_submodule(parent)) if is_attention else None
    if width is None or features % width:
        return features, what
    return features // width, "key/value heads" if 0 < features < inputs else "heads"


def _owner(name: str) -> str:
    """The module that a linear is in, which peft may have put a module around."""
    return _PEFT.sub("", name).rpartition(".")[0]


def _narrowest_part(model: nn.Module, ways: Ways, name: str, first: int) -> int:
    """Features of a linear; of one to be taken apart, those of its narrowest part."""
    module = model.get_submodule(name)
    if isinstance(module, SplitLinear):
        return min(out_features(part) for part in module.children())
    parts = dict(written_out(model, ways, ways.fused)).get(name)
    if parts is None or len(parts) < 2:  # `split_fused` refuses one part
        return out_features(module)
    return min(first, (out_features(module) - first) // (len(parts) - 1))


def _pattern(name: str, ways: Ways) -> str:
    """The name with its block's number left out, which equal blocks share."""
    inside = name.removeprefix(f"{ways.blocks}.")
    return f"*.{inside.partition('.')[2]}" if inside != name else name


def _number(model: nn.Module, name: str, attribute: str) -> int | None:
    value: Any = model.get_submodule(name)
    for step in attribute.split("."):
        value = getattr(value, step, None)
    return value if isinstance(value, int) else None


def _no_number(name: str, attribute: str) -> Problem:
    return Problem(
        code="L020",
        what=f"{name} has no whole number `{attribute}`, which its Ways divide",
        where="layout.tensor",
        fix="correct `divided` in the model's Ways, or set layout.tensor = 1",
    )


def _not_splittable(name: str, module: nn.Module, way: str) -> Problem:
    return Problem(
        code="L020",
        what=f"{name} is a {_kind(module)}, which cannot be split as {way}",
        where="layout.tensor",
        fix="set layout.tensor = 1, or give the model `paceline_ways` that split other modules",
    )


def _kind(module: nn.Module) -> str:
    place = "" if not hasattr(module, "base_layer") else f"{type(module).__module__}."
    return f"{place}{type(module).__name__}"


def _is_term(named: Mapping[str, Way], name: str) -> bool:
    """Whether a row gives a term of a sum around it."""
    return any(way == "sum" and name.startswith(f"{outer}.") for outer, way in named.items())


def _attention_is_whole(model: nn.Module, ways: Ways, named: Mapping[str, Way]) -> bool:
    """Whether attention sees all tokens: it is in a container in every block that has it."""
    if ways.attention is None:
        return False
    containers = containers_of(model, ways, named)
    return all(
        name in containers or is_inside(name, containers)
        for name, _ in written_out(model, ways, {f"*.{ways.attention}": None})
    )


def _attention_of_shares(ways: Ways) -> Problem:
    said = f"`{ways.attention}` is" if ways.attention else "no module is named as"
    return Problem(
        code="L020",
        what=f"with sequence parallelism attention would see only a rank's share of the tokens: "
        f"{said} attention, and no `row` or `gather` makes its input whole",
        where="layout.sequence_parallel",
        fix="say `attention` in the model's Ways and how its matrices are split, or set "
        "layout.sequence_parallel = false",
    )


def _experts_twice(layout: Layout) -> Problem:
    return Problem(
        code="L020",
        what=f"tensor is {layout.tensor} and expert is {layout.expert}: the experts would be split "
        "twice, which is not done",
        where="layout.tensor and layout.expert",
        fix="set one of them to 1",
    )


def _no_ways(model: nn.Module, layout: Layout) -> Problem:
    return Problem(
        code="L020",
        what=f"tensor is {layout.tensor}, and how {type(model).__name__} may be split is not known",
        where="layout.tensor",
        fix="set layout.tensor = 1, or give the model `paceline_ways` with its `tensor` table",
    )
