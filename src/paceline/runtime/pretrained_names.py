"""Which tensors of safetensors files are which part of a model's parameters.

The built-in decoder takes the names of Llama, Mistral and Qwen2. Other models are of transformers,
whose own rules give what was renamed since a file was written, and which tensors are merged in
memory (routed experts: one tensor for each in the file, one for all in memory).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from paceline.errors import JobError, Problem
from paceline.job.safetensors import StoredTensor
from paceline.profile.fitting import COMPUTED, check_types, decoder_name, listed, mismatches
from paceline.profile.hf_names import to_hf_name
from paceline.runtime.checkpoint.adapter_files import peft_name
from paceline.runtime.decoder import Decoder
from paceline.runtime.huggingface import NEW_HEAD, import_transformers
from paceline.runtime.strategy.adapter.linear import ADAPTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a parameter, and the stored tensor that has its values."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the box: `lead` ones, then the stored tensor's."""

    stored: StoredTensor

    lead: int = 0
    """Dimensions that the parameter has before the stored tensor's: 1 for a merged expert."""


class Mapped(NamedTuple):
    """A model's parameters and saved buffers in files."""

    pieces: dict[str, tuple[Piece, ...]]
    """By every name: a tied parameter has several."""

    twins: tuple[tuple[StoredTensor, StoredTensor], ...]
    """Stored tensors of one tied parameter, which must be equal. The first one is read."""


class _Found(NamedTuple):
    """What the files have of one parameter."""

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]


class _Match(NamedTuple):
    """Where a stored tensor goes."""

    target: str
    pattern: str | None = None
    """By which its rule found it; None where it is the whole parameter."""

    converter: Any = None
    """The rule of transformers that merges it with others."""


def map_weights(model: nn.Module, stored: Mapping[str, StoredTensor], *, where: str) -> Mapped:
    """Where every parameter and saved buffer of a whole model lies in the files.

    Raises:
        JobError: `M013`, with every tensor that is missing, left over or of another shape; `M014`,
            one is of a type that is not read, or was merged in a way that is not read.
    """
    wanted = {name: tuple(each.shape) for name, each in _stored_of(model).items()}
    match = _match_built_in if isinstance(model, Decoder) else _match_hf
    matches = match(model, sorted(stored, key=_natural), wanted)
    found = _gather(matches, stored, where)
    left_over = [name for name in stored if name not in matches and not _is_ignored(model, name)]
    missing, twins = [], []
    pieces: dict[str, tuple[Piece, ...]] = {}
    for names in _ties(model):
        there = [name for name in names if name in found]
        if not there and names[0] == f"{NEW_HEAD}.weight":
            continue  # a classifier's, drawn
        if not there:
            missing.append(names[0])
            continue
        pieces |= dict.fromkeys(names, found[there[0]].pieces)
        first, *others = (found[name].pieces for name in there)
        twins += [
            (a.stored, b.stored) for other in others for a, b in zip(first, other, strict=True)
        ]
    wrong = {n: each.shape for n, each in found.items() if each.shape != wanted[n]}
    JobError.raise_for(mismatches(missing, left_over, wrong, wanted, where))
    return Mapped(pieces, tuple(twins))


def map_adapter(
    model: nn.Module, stored: Mapping[str, StoredTensor]
) -> dict[str, tuple[Piece, ...]]:
    """Where every parameter of a model's adapters lies in a file of peft.

    Raises:
        JobError: `M013`, with every tensor that is missing, left over or of another shape; `M014`,
            one is of a type that is not read.
    """
    where = "train.adapter.start"
    JobError.raise_for(check_types(stored.values(), where))
    wanted = {
        name: tuple(each.shape)
        for name, each in model.named_parameters()
        if name.rpartition(".")[2] in ADAPTER
    }
    names = {peft_name(to_hf_name(name) or name): name for name in wanted}
    found = {names[name]: each for name, each in stored.items() if name in names}
    missing = [name for name in wanted if name not in found]
    left_over = [name for name in stored if name not in names]
    wrong = {name: each.shape for name, each in found.items() if each.shape != wanted[name]}
    JobError.raise_for(mismatches(missing, left_over, wrong, wanted, where))
    return {
        name: (Piece(start=(0,) * len(each.shape), shape=each.shape, stored=each),)
        for name, each in found.items()
    }


def _match_built_in(
    model: nn.Module, names: Sequence[str], wanted: Mapping[str, Any]
) -> dict[str, _Match]:
    matches = {}
    for name in names:
        target = decoder_name(name)
        if target is not None and target in wanted:
            matches[name] = _Match(target)
    return matches


def _match_hf(
    model: nn.Module, names: Sequence[str], wanted: Mapping[str, Any]
) -> dict[str, _Match]:
    """Match by the rules of `from_pretrained`. Source: transformers 5.23, core_model_loading.py,
    `convert_and_load_state_dict_in_model`."""
    need = f"loading weights of {type(model).__name__} needs transformers 5 or newer"
    rules = import_transformers("transformers.conversion_mapping", need)
    loading = import_transformers("transformers.core_model_loading", need)
    mapping = rules.get_model_conversion_mapping(model)
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix
    matches = {}
    for name in names:
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = loading.rename_source_key(name, [], [], prefix, wanted)
        if target in wanted:
            matches[name] = _Match(target, pattern, by_pattern.get(pattern))
    return matches


def _gather(
    matches: Mapping[str, _Match], stored: Mapping[str, StoredTensor], where: str
) -> dict[str, _Found]:
    JobError.raise_for(check_types((stored[name] for name in matches), where))
    parts: dict[str, dict[str | None, list[StoredTensor]]] = {}
    converters: dict[str, Any] = {}
    for name, (target, pattern, converter) in matches.items():
        parts.setdefault(target, {}).setdefault(pattern, []).append(stored[name])
        converters[target] = converter
    found, problems = {}, []
    for target, by_pattern in parts.items():
        converter = converters[target]
        if converter is None:
            (whole, *others) = by_pattern[None]
            start = (0,) * len(whole.shape)
            found[target] = _Found(
                (Piece(start=start, shape=whole.shape, stored=whole),), whole.shape
            )
            if others:
                problems.append(_twice(whole, others, where))
            continue
        way = _way_of(converter)
        if way is None:
            problems.append(_unknown_way(target, converter, where))
            continue
        found[target] = _merged(way, [by_pattern.get(p, []) for p in converter.source_patterns])
    JobError.raise_for(problems)
    return found


class _Way(NamedTuple):
    """How stored tensors become one parameter."""

    merges: bool
    """Whether those of one pattern are put on top of each other, as a new first dimension."""

    dim: int
    """Along which those of one pattern follow those of the pattern before, in the parameter."""


def _way_of(converter: Any) -> _Way | None:
    steps = [(type(each).__name__, getattr(each, "dim", -1)) for each in converter.operations]
    merges = steps[:1] == [("MergeModulelist", 0)]
    rest = steps[1:] if merges else steps
    if merges and not rest and len(converter.source_patterns) == 1:
        return _Way(merges=True, dim=0)
    if len(rest) == 1 and rest[0][0] == "Concatenate" and len(converter.target_patterns) == 1:
        return _Way(merges=merges, dim=rest[0][1])
    return None


def _merged(way: _Way, lists: Sequence[Sequence[StoredTensor]]) -> _Found:
    """The parameter that stored tensors make. Parts that do not go together give a shape that no
    parameter has."""
    lead, dim, offset = int(way.merges), way.dim, 0
    pieces: list[Piece] = []
    rests: set[tuple[int, ...]] = set()
    for tensors in lists:
        shapes = {each.shape for each in tensors}
        if len(shapes) != 1 or (not lead and len(tensors) != 1):
            return _Found((), ())
        shape = shapes.pop()
        size = (len(tensors), *shape) if lead else shape
        for number, stored in enumerate(tensors):
            start = [number * lead, *[0] * (len(size) - 1)]
            start[dim] += offset
            box = (1,) * lead + shape
            pieces.append(Piece(start=tuple(start), shape=box, stored=stored, lead=lead))
        offset += size[dim]
        rests.add((*size[:dim], *size[dim + 1 :]))
    if len(rests) != 1:
        return _Found((), ())
    rest = rests.pop()
    return _Found(tuple(pieces), (*rest[:dim], offset, *rest[dim:]))


def _ties(model: nn.Module) -> Iterator[list[str]]:
    names: dict[int, list[str]] = {}
    for name, each in _stored_of(model).items():
        names.setdefault(id(each), []).append(name)
    return iter(names.values())


def _stored_of(model: nn.Module) -> dict[str, Tensor]:
    """What files of a model have: all it saves but its adapters."""
    saved: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {name: each for name, each in saved.items() if name.rpartition(".")[2] not in ADAPTER}


def _is_ignored(model: Any, name: str) -> bool:
    """Whether a stored tensor that the model lacks is none of its weights."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    if hasattr(model, NEW_HEAD):
        patterns = (*patterns, r"^lm_head\.")
    return any(re.search(pattern, name) for pattern in (COMPUTED, *patterns))


def _natural(name: str) -> list[Any]:
    """Order names as transformers does, so that merged experts get their numbers."""
    return [(0, int(p)) if p.isdigit() else (1, p) for p in name.split(".")]


def _twice(whole: StoredTensor, others: Sequence[StoredTensor], where: str) -> Problem:
    return Problem(
        code="M013",
        what=f"{whole.name} and {listed([each.name for each in others])} are the same parameter",
        where=where,
        fix="keep one of them in the files",
    )


def _unknown_way(target: str, converter: Any, where: str) -> Problem:
    steps = ", ".join(type(each).__name__ for each in converter.operations)
    return Problem(
        code="M014",
        what=f"transformers makes {target} of what is stored by {steps}, which cannot be read "
        "slice by slice",
        where=where,
        fix="save it again with a transformers that stores it as it is in memory, or build the "
        "model in a factory of your own (`paceline explain own-code`)",
    )
