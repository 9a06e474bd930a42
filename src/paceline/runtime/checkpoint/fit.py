"""Compare the names and shapes of another program's weights with the model of their config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import JobError, Problem, reason_of
from paceline.job.safetensors import StoredTensor
from paceline.runtime.pretrained_names import map_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What came of one comparison; one of the three is there."""

    checked: str = ""
    skipped: str = ""
    """Why the comparison was not made."""

    problems: tuple[Problem, ...] = ()
    """`M013`: tensors are missing, left over or of another shape."""


def check_fit(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, where: str
) -> Fit:
    """Whether the weights are those of the model. Nothing of it is allocated.

    Args:
        config: A config.json of transformers.
        shapes: Name of a stored tensor -> its shape. Types are not compared.
        where: Place of the weights in messages.
    """
    named = (config.get("architectures") or [None])[0]
    if config.get("quantization_config"):
        return Fit(skipped="names and shapes: the weights are quantised")
    try:
        import transformers

        fields = {name: value for name, value in config.items() if name != "auto_map"}
        kind = fields.pop("model_type")
        with torch.device("meta"):
            model = getattr(transformers, named)(transformers.AutoConfig.for_model(kind, **fields))
            model.tie_weights()
    except Exception as error:  # noqa: BLE001 - whatever transformers says of the config is shown
        return Fit(
            skipped=f"names and shapes: transformers cannot build {named}: {reason_of(error)}"
        )
    stored = {
        name: StoredTensor(name=name, path=Path(where), dtype="F32", shape=shape, start=0)
        for name, shape in shapes.items()
    }
    try:
        map_weights(model, stored, where=where)
    except JobError as error:
        return Fit(problems=tuple(error.problems))
    return Fit(checked=f"names and shapes are those of {named} with this config.json")
