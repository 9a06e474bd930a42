"""Adapters as peft reads them, and merged into the weights that they were trained beside.

Leaves out: where those weights come from.
"""

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.job.adapters import without_pair
from paceline.profile.adapter import TRANSPOSED
from paceline.profile.fitting import listed
from paceline.profile.hf_names import are_built_in, to_hf_name
from paceline.record.conversion import AdapterFacts
from paceline.runtime.strategy.adapter.linear import ADAPTER, LORA_A, LORA_B, MAGNITUDE

Load = Callable[[], Any]
"""Reads one value."""

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_SHARED_TAILS = ("c_proj",)
"""Names that linears of attention and of the feed-forward both have."""


def adapters_of(values: Mapping[str, Load]) -> dict[str, Load]:
    """The adapters among a model's values, by the names of transformers.

    >>> list(adapters_of({"blocks.0.ffn.up.lora_A": list, "norm.weight": list}))
    ['model.layers.0.mlp.up_proj.lora_A']
    """
    found = {name: load for name, load in values.items() if name.endswith(ADAPTER)}
    if are_built_in(found):
        return {str(to_hf_name(name)): load for name, load in found.items()}
    return found


def adapter_files(values: Mapping[str, Load], out: Path, facts: AdapterFacts) -> tuple[Path, Path]:
    """Write the adapters as `PeftModel.from_pretrained` reads them.

    Returns:
        The file of tensors, and `adapter_config.json`.
    """
    from safetensors.torch import save_file

    adapters = adapters_of(values)
    tensors = {peft_name(name): load().contiguous() for name, load in adapters.items()}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(_config(adapters, facts), indent=2, sort_keys=True)
    (out / CONFIG).write_text(text + "\n", encoding="utf-8")
    return out / WEIGHTS, out / CONFIG


def peft_name(name: str) -> str:
    """peft's name of an adapter's parameter in its file.

    >>> peft_name("model.layers.0.mlp.up_proj.lora_A")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"base_model.model.{name}" + ("" if name.endswith(MAGNITUDE) else ".weight")


def check_pairs(names: Collection[str], source: Path) -> None:
    """See that each matrix of LoRA has its other half.

    Raises:
        CheckpointError: `M012`, some have not, by name.
    """
    if alone := without_pair(names):
        raise CheckpointError.of(
            code="M012",
            what=f"{source.name} has matrices of LoRA without their other half: {listed(alone)}",
            where=str(source),
            fix="copy or download the files again, all of them",
        )


def merged(
    base: Mapping[str, Load], adapters: Mapping[str, Load], facts: AdapterFacts
) -> dict[str, Load]:
    """The weights with the adapters in them: summed in float32, rounded once to the weight's type.

    Raises:
        CheckpointError: `M013`, there is an adapter beside a weight that is not in the base.
    """
    result = dict(base)
    for name, load in adapters.items():
        linear, _, kind = name.rpartition(".")
        if kind == LORA_A:
            matrices = load, adapters[f"{linear}.{LORA_B}"]
            magnitude = adapters.get(f"{linear}.{MAGNITUDE}")
            weight = f"{linear}.weight"
            if weight not in base:
                raise CheckpointError.of(
                    code="M013",
                    what=f"the adapter has {name}, and the base no {weight}",
                    where=facts.base or facts.run,
                    fix="give the base that it was trained beside",
                )
            result[weight] = partial(_merge, base[weight], *matrices, magnitude, facts)
    return result


@torch.no_grad()
def _merge(base: Load, a: Load, b: Load, magnitude: Load | None, facts: AdapterFacts) -> Tensor:
    weight: Tensor = base()
    is_transposed = facts.model_type in TRANSPOSED
    added = (b().float() @ a().float()) * scale_of(facts)
    total_OI: Tensor = (weight.T if is_transposed else weight).float() + added
    if magnitude is not None:
        total_OI *= magnitude()[:, None] / torch.linalg.vector_norm(total_OI, dim=1, keepdim=True)
    return (total_OI.T if is_transposed else total_OI).to(weight.dtype).contiguous()


def scale_of(facts: AdapterFacts) -> float:
    """What an adapter's product is multiplied by."""
    return facts.alpha / (sqrt(facts.rank) if facts.rslora else facts.rank)


def _config(adapters: Mapping[str, Load], facts: AdapterFacts) -> dict[str, Any]:
    linears = {name.rpartition(".")[0] for name in adapters}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": facts.base,
        "r": facts.rank,
        "lora_alpha": facts.alpha,
        "lora_dropout": facts.dropout,
        "use_rslora": facts.rslora,
        "use_dora": any(name.endswith(MAGNITUDE) for name in adapters),
        "target_modules": sorted({_target(linear) for linear in linears}),
        "fan_in_fan_out": facts.model_type in TRANSPOSED,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _target(linear: str) -> str:
    """A module's name as far as it tells it apart from those without an adapter."""
    parts = linear.split(".")
    tells = 2 if parts[-1] in _SHARED_TAILS or "expert" in linear else 1
    return ".".join(parts[-tells:])
