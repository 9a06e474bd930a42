"""The ways of a peft model: those of the model inside it, by the names that peft gives.

Beside a linear that is split by outputs, `lora_B` is split as it is and `lora_A` whole; beside one
that is split by inputs, `lora_A` is, and `lora_B` takes the sum over the ranks. Both are linears of
their own in peft, and so have ways of their own.

Leaves out: adapters other than LoRA's, beside linears that are several in one or lie in a block
itself, and DoRA: the module that peft put in their linear's place is refused by its name on tensor
ranks.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from paceline.profile.ways import Way, Ways
from paceline.runtime._torch_private import parameters_of
from paceline.runtime.strategy.adapter.linear import FROZEN
from paceline.runtime.strategy.ways.ways import block_modules, named_ways, written_out

_INSIDE = "base_model.model"
"""Place of the model that peft was given."""


def is_peft(model: nn.Module) -> bool:
    """Whether a module is a model of peft, which need not be imported for this."""
    loaded = sys.modules.get("peft.peft_model")
    return loaded is not None and isinstance(model, loaded.PeftModel)


def model_inside(model: nn.Module) -> nn.Module:
    """The model that peft was given, with peft's linears in it."""
    return model.get_submodule(_INSIDE)


def mark_frozen(model: nn.Module) -> None:
    """Have what peft has frozen left out of what is saved, sent and compared."""
    for module in model.modules():
        own = {n for n, p in parameters_of(module).items() if p is not None and not p.requires_grad}
        if own:
            setattr(module, FROZEN, frozenset(own))


def peft_ways(model: nn.Module, ways: Ways) -> Ways:
    """The ways of a peft model."""
    inside = model_inside(model)
    several = dict(written_out(inside, ways, ways.fused))
    blocks = {name for name, _ in block_modules(inside, ways)}
    tensor: dict[str, Way] = {}
    for name, way in named_ways(inside, ways).items():
        layer = inside.get_submodule(name)
        container = name.rpartition(".")[0]
        is_known = name not in several and container not in blocks
        names = dict(_of_layer(layer, way)) if is_known else {}
        if names:
            tensor[f"{_INSIDE}.{container}"] = "gather"
        found = {f"{name}.{own}": each for own, each in names.items()} or {name: way}
        tensor |= {f"{_INSIDE}.{place}": each for place, each in found.items()}
    return replace(
        ways,
        blocks=f"{_INSIDE}.{ways.blocks}",
        first=tuple(f"{_INSIDE}.{name}" for name in ways.first),
        last=tuple(f"{_INSIDE}.{name}" for name in ways.last),
        tensor=tensor,
    )


def _of_layer(layer: Any, way: Way) -> Iterator[tuple[str, Way]]:
    """What is inside a linear of peft, with its way; nothing where it is none, or of a kind that is
    not split."""
    is_lora = hasattr(layer, "base_layer") and hasattr(layer, "lora_A")
    if not is_lora or way not in ("column", "row") or len(layer.lora_variant):
        return
    yield "base_layer", way
    for name in layer.lora_A:
        yield f"lora_A.{name}", "sequence" if way == "column" else "row"
        yield f"lora_B.{name}", "column" if way == "column" else "behind"
