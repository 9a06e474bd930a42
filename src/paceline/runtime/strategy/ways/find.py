"""The ways of a model that Paceline knows, by its kind."""

from dataclasses import replace
from typing import Any

from torch import nn

from paceline.profile.ways import HUGGING_FACE, OWN, UNSPLIT, Ways
from paceline.runtime.strategy.local import unwrapped
from paceline.runtime.strategy.ways.peft import is_peft, model_inside, peft_ways


def ways_of(model: nn.Module) -> Ways | None:
    """How a model may be split: what it carries as `paceline_ways`, else what is known of its kind.

    None when nothing is known; `generic_ways` may find something.
    """
    model = unwrapped(model)
    own = getattr(model, "paceline_ways", None)
    if isinstance(own, Ways):
        return own
    if is_peft(model):
        inside = ways_of(model_inside(model))
        return None if inside is None else peft_ways(model, inside)
    if type(model).__module__ == "paceline.runtime.decoder":
        return OWN
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if not isinstance(kind, str) or not hasattr(model, "lm_head"):
        return None
    ways = HUGGING_FACE.get(kind)
    if ways is None:
        return None
    if any(getattr(config, name, False) for name in UNSPLIT.get(kind, ())):
        ways = replace(ways, tensor={})
    first, last = (
        tuple(name for name in names if not _is_none(model, name))
        for names in (ways.first, ways.last)
    )
    return (
        ways if (first, last) == (ways.first, ways.last) else replace(ways, first=first, last=last)
    )


def _is_none(model: nn.Module, name: str) -> bool:
    """Whether a configuration leaves a module out: an attribute that is None, as OPT's projections
    are where embeddings are as wide as the residual stream."""
    found: Any = model
    for step in name.split("."):
        if not hasattr(found, step):
            return False
        found = getattr(found, step)
    return found is None
