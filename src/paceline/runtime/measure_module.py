"""Helper process: count the model that a factory builds, without its memory.

    python -m paceline.runtime.measure_module FOLDER module:function [SEQ_LEN]

Prints one line of JSON, a `ModuleFacts`. The model is built on the meta device. A Hugging Face
model of a known family needs no more than its config; any other is run forward once on pretend
tensors that have a shape and no values, at one sample and at two: the difference is one sample's.

Leaves out: the loss; norms, activation functions and other operations that are no matrix product in
the FLOPs. A forward pass that looks at values, or takes other inputs than token ids and has no
`example_inputs(batch)`, cannot be run so; the facts then say why.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage: 3.3 s of a core with it, 2.0 s without (measured)

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from paceline.errors import JobError
from paceline.profile import FAMILIES, BlockFacts, ModuleFacts, profile_config
from paceline.runtime._torch_private import FLASH_CPU, GROUPED_MM, FakeTensorMode, storage_key
from paceline.runtime.huggingface import is_hf, let_experts_be_any_type
from paceline.runtime.initial.blueprint import why_whole
from paceline.runtime.models import build_factory, import_named
from paceline.runtime.strategy import repeated_blocks

OUTSIDE = -1
"""Stands for what is outside the blocks, which are counted from 0."""


def measure(model: nn.Module, seq_len: int = 256) -> ModuleFacts:
    """What planning needs to know of a module on the meta device; shared parameters count once."""
    if is_hf(model):
        let_experts_be_any_type(model)
    num_parameters = sum(p.numel() for p in model.parameters())
    config = _hugging_face_config(model)
    if config is not None and _family_parameters(config, seq_len) == num_parameters:
        return ModuleFacts(num_parameters=num_parameters, config=config)
    blocks = repeated_blocks(model)
    sizes = _own_parameters(blocks)
    names = [type(block).__name__ for block in blocks]
    costs, because = _try_sample_costs(model, seq_len)
    kinds = Counter(
        (name, size, *(costs.of(index) if costs is not None else (None, None)))
        for index, (name, size) in enumerate(zip(names, sizes, strict=True))
    )
    outside_flops, outside_saved = costs.of(OUTSIDE) if costs is not None else (None, None)
    return ModuleFacts(
        num_parameters=num_parameters,
        blocks=tuple(
            BlockFacts(
                name=name, count=count, num_parameters=size, forward_flops=flops, saved_bytes=saved
            )
            for (name, size, flops, saved), count in kinds.items()
        ),
        outside_flops=outside_flops,
        outside_saved_bytes=outside_saved,
        unknown_because=because,
        config=config,
    )


def _own_parameters(blocks: list[nn.Module]) -> list[int]:
    counted: set[nn.Parameter] = set()
    sizes = []
    for block in blocks:
        new = set(block.parameters()) - counted
        counted |= new
        sizes.append(sum(p.numel() for p in new))
    return sizes


def _hugging_face_config(model: nn.Module) -> dict[str, Any] | None:
    config: Any = getattr(model, "config", None)
    if not isinstance(getattr(config, "model_type", None), str) or not hasattr(config, "to_dict"):
        return None
    fields: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return fields


def _family_parameters(config: Mapping[str, Any], seq_len: int) -> int | None:
    if config.get("model_type") not in FAMILIES:
        return None
    try:
        return profile_config(config, seq_len).num_parameters
    except JobError:
        return None


class _Costs(NamedTuple):
    """FLOPs and saved bytes by block."""

    flops: Counter[int]
    saved: Counter[int] | None

    def of(self, block: int) -> tuple[float, int | None]:
        return float(self.flops[block]), None if self.saved is None else self.saved[block]


def _try_sample_costs(model: nn.Module, seq_len: int) -> tuple[_Costs | None, str | None]:
    """Costs of one sample, or why they are not known.

    Some kernels, as those of experts, are there in bfloat16 only: a module that cannot be run in
    float32 is run in that. Its FLOPs are the same; its saved bytes would be of another type and
    stay unknown.
    """
    try:
        return _sample_costs(copy.deepcopy(model), seq_len), None
    except Exception as error:  # noqa: BLE001 - whatever a person's forward raises is shown
        because = _reason(error)
    has_example = callable(getattr(model, "example_inputs", None))
    try:
        narrow = _sample_costs(model.to(torch.bfloat16), seq_len)
    except Exception:  # noqa: BLE001 - the first reason is the one that is shown
        return None, _cannot_run(because, has_example=has_example)
    return _Costs(narrow.flops, None), f"the model could be run in bfloat16 only ({because})"


def _sample_costs(model: nn.Module, seq_len: int) -> _Costs:
    """Costs of one sample: what a second one adds, so that tables shared by all do not count."""
    pretend = FakeTensorMode(allow_non_fake_inputs=True)
    with pretend:
        model.to_empty(device="cpu")
    (flops, saved), (more_flops, more_saved) = (
        _batch_costs(model, pretend, seq_len, batch) for batch in (1, 2)
    )
    return _Costs(more_flops - flops, more_saved - saved)


def _batch_costs(
    model: nn.Module, pretend: FakeTensorMode, seq_len: int, batch: int
) -> tuple[Counter[int], Counter[int]]:
    """FLOPs and saved bytes of one forward pass, each credited to the block in which it arises."""
    flops: Counter[int] = Counter()
    saved: Counter[int] = Counter()
    held = {
        storage_key(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())
    }
    kept: dict[int, Tensor] = {}  # storages stay alive, so that no two have the same address
    inside, flops_at = [OUTSIDE], [0]
    counter = FlopCounterMode(display=False, custom_mapping=_uncounted())

    def settle() -> None:
        total = counter.get_total_flops()
        flops[inside[-1]] += total - flops_at[0]
        flops_at[0] = total

    def enter(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            settle()
            inside.append(index)

        return hook

    def leave(*_: Any) -> None:
        settle()
        inside.pop()

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor.untyped_storage())
        if key not in held and key not in kept:
            kept[key] = tensor
            saved[inside[-1]] += tensor.untyped_storage().nbytes()
        return tensor

    hooks = []
    for index, block in enumerate(repeated_blocks(model)):
        hooks.append(block.register_forward_pre_hook(enter(index)))
        hooks.append(block.register_forward_hook(leave))
    try:
        with pretend, counter, saved_tensors_hooks(pack, lambda tensor: tensor):
            args, kwargs = _inputs(model, pretend, seq_len, batch)
            output = model(*args, **kwargs)
            settle()
            del output
    finally:
        for each in hooks:
            each.remove()
    return flops, saved


def _inputs(
    model: nn.Module, pretend: FakeTensorMode, seq_len: int, batch: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    example = getattr(model, "example_inputs", None)
    if not callable(example):
        return (torch.zeros(batch, seq_len, dtype=torch.int64),), {}
    given = example(batch)

    def pretended(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and type(value) is Tensor
        return pretend.from_tensor(value.to("cpu")) if is_real else value

    if isinstance(given, Mapping):
        return (), {name: pretended(value) for name, value in given.items()}
    values = given if isinstance(given, tuple | list) else (given,)
    return tuple(pretended(value) for value in values), {}


def _attention_flops(query: Any, key: Any, value: Any, *rest: Any, **_: Any) -> int:
    """FLOPs of the flash kernel on a CPU, which torch does not count; half of the scores when
    causal."""
    is_causal = len(rest) > 1 and bool(rest[1])
    seen = (key[-2] + 1) / (2 * key[-2]) if is_causal else 1
    return int(sdpa_flop_count(query, key, value) * seen)  # type: ignore[no-untyped-call]


def _grouped_flops(tokens: Any, weights: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of experts in one kernel, which torch does not count: every token meets one of them."""
    return int(2 * tokens[-2] * tokens[-1] * weights[-1])


def _uncounted() -> dict[Any, Callable[..., int]]:
    """Products that torch's counter does not know; transformers' operator is there with it."""
    known: dict[Any, Callable[..., int]] = {
        FLASH_CPU: _attention_flops,
        GROUPED_MM: _grouped_flops,
    }
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        known[torch.ops.transformers.grouped_mm_fallback] = _grouped_flops
    return known


def _cannot_run(because: str, *, has_example: bool) -> str:
    """Why a model's costs are unknown, and what its author can do about it."""
    if has_example:
        return (
            "the model could not be run on what its example_inputs(batch) returns, as tensors "
            f"without values ({because})"
        )
    return (
        f"the model could not be run on example token ids ({because}); if it takes another input, "
        "give it a method example_inputs(batch) that returns one (`paceline explain models`)"
    )


_LONGEST_REASON = 100
"""Characters of an exception that are shown. A guess: it is quoted inside a sentence."""


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


def _on_meta(factory: Callable[[], Any]) -> nn.Module:
    """The factory's model without numbers. One that looks at its numbers is built with them first,
    which takes the memory of the whole model for a moment."""
    try:
        with torch.device("meta"):
            return build_factory(factory)
    except Exception:  # noqa: BLE001 - whatever a person's code raises that has no values
        return build_factory(factory).to("meta")


def main() -> None:
    gc.enable()
    gc.freeze()  # what was imported is looked through by no collection, at the end neither
    folder, name, *rest = sys.argv[1:]
    factory = import_named(Path(folder), name)
    model = _on_meta(factory)
    facts = measure(model, int(rest[0]) if rest else 256)
    facts = replace(facts, whole_because=why_whole(lambda: build_factory(factory)))
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(facts) + b"\n")


if __name__ == "__main__":
    main()
