"""What a script's modules, optimizers, batches and files hold: their tensors, and what differs.

Sharded tensors are read as this rank's part.
"""

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from paceline.runtime._torch_private import tree_leaves


def models_of(called: list[nn.Module], trained: Set[int]) -> list[nn.Module]:
    """The modules, the largest first, that together hold the trained tensors, by their `id`.

    An optimizer may train copies of its own (master weights): the largest module is the model then.
    """
    held = {module: {id(each) for each in module.parameters()} & trained for module in called}
    found, left = [], set(trained)
    for module in sorted(called, key=lambda each: -len(held[each])):
        if held[module] & left:
            found.append(module)
            left -= held[module]
    return found or sorted(called, key=size_of)[-1:]


def names_of(models: list[nn.Module]) -> dict[int, str]:
    """Parameters' names by their `id`, with the model's class where there are several models."""
    return {
        id(each): name if len(models) == 1 else f"{type(model).__name__}.{name}"
        for model in models
        for name, each in model.named_parameters()
    }


def size_of(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters() if each.requires_grad)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested containers and modules. A mapping, also one of a library's own, is read
    by its sorted names: a file of safetensors has another order than what was saved."""
    if isinstance(value, Mapping):
        value = [value[name] for name in sorted(value, key=str)]
    found: list[Tensor] = []
    for each in tree_leaves(value):
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, nn.Module):
            found += tensors_in(each.state_dict())
    return found


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local") or type(tensor).__name__ == "FlatParameter"


def digest_of(tensor: Tensor) -> str:
    content = _local(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(content.numpy().data)


def joined(digests: Iterable[str]) -> str:
    return xxhash.xxh3_64_hexdigest("".join(digests).encode())


def norm_of(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(_local(gradient).float()))


def not_finite(output: Any) -> str | None:
    for each in tensors_in(output):
        if each.is_floating_point() and not bool(each.isfinite().all()):
            return "its output has NaN or infinity"
    return None


def difference(first: Any, second: Any) -> str | None:
    """What differs between the tensors of two values of one structure."""
    ours, theirs = tensors_in(first), tensors_in(second)
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors became {len(theirs)}"
    wrong = sum(digest_of(a) != digest_of(b) for a, b in zip(ours, theirs, strict=True))
    return f"{wrong} of {len(ours)} tensors differ" if wrong else None
