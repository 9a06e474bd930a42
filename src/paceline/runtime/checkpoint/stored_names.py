"""A model's tensors as its family's files have them: experts that are one tensor in memory apart.

The rules are those of transformers, backwards: what other programs read is what they write.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from paceline.errors import JobError
from paceline.runtime.huggingface import build_hf

Load = Callable[[], Any]
"""Reads one value."""

_KEPT = 2
"""Merged tensors in memory at once: an expert's parts come from two, and follow each other."""


def as_stored(values: Mapping[str, Load], config: Mapping[str, Any]) -> dict[str, Load]:
    """Name in a file -> how to read it. Unchanged for a family whose names are the same in memory,
    and where transformers is not there or does not know the model."""
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        rules: Any = importlib.import_module("transformers.conversion_mapping")
        with torch.device("meta"):
            model = build_hf(config)
    except (ImportError, JobError):
        return dict(values)
    if not rules.get_model_conversion_mapping(model, add_legacy=False):
        return dict(values)

    @lru_cache(maxsize=_KEPT)
    def apart(name: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = loading.revert_weight_conversion(model, {name: values[name]()})
        return found

    def load(name: str, part: str) -> Tensor:
        return apart(name)[part].contiguous()

    stored: dict[str, Load] = {}
    for name, read in values.items():
        size = read().to("meta")
        parts = loading.revert_weight_conversion(model, {name: size})
        stored |= {part: partial(load, name, part) for part in parts}
    return stored
