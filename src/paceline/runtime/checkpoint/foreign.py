"""The weights in other programs' checkpoints, by the names that they have there.

    torch      .pt, .pth, .bin: a state_dict, or a table that has one beside other things
    dcp        a folder of torch.distributed.checkpoint
    deepspeed  ZeRO 1, 2 and 3 as their ranks wrote them, universal, and without ZeRO

Leaves out optimizers: no two programs lay them out alike. Megatron is `megatron.py`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from paceline.errors import CheckpointError, did_you_mean
from paceline.runtime.checkpoint.pickles import read_pickle
from paceline.runtime.checkpoint.state_files import StateFiles

_WEIGHTS = ("model", "state_dict", "model_state_dict", "module", "weights", "params")
"""What trainers call the state_dict of the model: the first that is there is taken."""

_OTHER = re.compile(r"optim|sched|scaler|rng|random|loader|train_state|hyper", re.I)
"""Keys of a trainer's state whose tensors are no weights."""

_WRAPPED = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name."""


class Entry(NamedTuple):
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a checkpoint holds."""

    entries: dict[str, Entry]
    notes: tuple[str, ...] = ()
    """What was left out or renamed."""

    config: Mapping[str, Any] | None = None
    """config.json of the model, where the checkpoint itself tells."""


def read_files(paths: Sequence[Path], key: str | None = None) -> Weights:
    """The weights in files of `torch.save`.

    Args:
        key: Where in them the weights are; None finds it.

    Raises:
        CheckpointError: `C015`, `M012`: one cannot be read; `C012`, none or several have weights.
    """
    groups: dict[str, dict[str, Entry]] = {}
    for path in paths:
        for group, tensors in _groups(read_pickle(path)):
            groups.setdefault(group, {}).update(tensors)
    return _chosen(groups, key, paths[0])


def _groups(found: Any, name: str = "") -> Iterator[tuple[str, dict[str, Entry]]]:
    """Each table that has tensors, by the keys that lead to it."""
    if not isinstance(found, Mapping):
        return
    tensors = {str(each): entry(v) for each, v in found.items() if isinstance(v, Tensor)}
    if tensors:
        yield name, tensors
    for each, value in found.items():
        yield from _groups(value, f"{name}.{each}".lstrip("."))


def entry(tensor: Tensor) -> Entry:
    """A tensor that is there, copied when it is read: tied ones share memory, which safetensors
    refuses."""
    tensor = tensor.detach()
    copy = partial(tensor.clone, memory_format=torch.contiguous_format)
    return Entry(tensor.dtype, tuple(tensor.shape), copy)


def _chosen(groups: Mapping[str, dict[str, Entry]], key: str | None, path: Path) -> Weights:
    about = {"code": "C012", "where": str(path)}
    names = [each for each in groups if not _OTHER.search(each)]
    if key is not None:
        chosen: str | None = key
        if key not in groups:
            there = ", ".join(groups) or "none"
            fix = did_you_mean(key, groups) or "give one of these to --key"
            what = f"{path.name} has no tensors under {key}; it has them under: {there}"
            raise CheckpointError.of(what=what, fix=fix, **about)
    else:
        known = [each for each in ("", *_WEIGHTS) if each in names]
        chosen = known[0] if known else names[0] if len(names) == 1 else None
    if chosen is None:
        what = f"{path.name} has no weights: no table of tensors is in it"
        fix = "give what torch.save(model.state_dict(), ...) wrote"
        if names:
            what = f"{path.name} has {len(names)} tables of tensors: {', '.join(names[:8])}"
            fix = "name the one that is the model: --key NAME"
        raise CheckpointError.of(what=what, fix=fix, **about)
    notes, entries = [], groups[chosen]
    for prefix in _WRAPPED:
        if all(name.startswith(prefix) for name in entries):
            entries = {name.removeprefix(prefix): each for name, each in entries.items()}
            notes.append(f"every name began with `{prefix}`, which a wrapper adds: it is taken off")
    rest = [each for each in groups if each != chosen]
    if rest:
        outermost = dict.fromkeys(each.partition(".")[0] or "tensors outside" for each in rest)
        notes.append(f"the weights are under `{chosen}`; left out: {', '.join(outermost)}")
    return Weights(entries=entries, notes=tuple(notes))


def read_dcp(path: Path, key: str | None = None) -> Weights:
    """The weights in a folder of torch.distributed.checkpoint.

    Raises:
        CheckpointError: As of `read_files`.
    """
    files = StateFiles(path)
    keys = files.metadata.planner_data or {}
    groups: dict[str, dict[str, Entry]] = {}
    for name, each in tensors_of(files).items():
        first, *rest = keys.get(name, (name,))
        group, inner = (str(first), ".".join(map(str, rest))) if rest else ("", name)
        if _OTHER.match(name):
            group = name.partition(".")[0]
        groups.setdefault(group, {})[inner] = each
    return _chosen(groups, key, path)


def tensors_of(files: StateFiles) -> dict[str, Entry]:
    """Every tensor of a folder of torch.distributed.checkpoint by its whole name.

    Raises:
        CheckpointError: `M012`, a file lacks what the table says it has.
    """
    sizes: dict[str, int] = {}
    stored: dict[str, int] = {}
    for index, place in files.metadata.storage_data.items():
        file = files.path / place.relative_path
        if file.name not in sizes:
            sizes[file.name] = file.stat().st_size if file.is_file() else -1
        size, end = sizes[file.name], place.offset + place.length
        if size < end:
            lies = (
                f"is missing: {index.fqn} lies in it"
                if size < 0
                else (f"ends after {size} bytes, and {index.fqn} lies up to {end}")
            )
            raise CheckpointError.of(
                code="M012",
                what=f"{file.name} {lies}",
                where=str(files.path),
                fix="copy the folder again, with every .distcp file",
            )
        stored[index.fqn] = stored.get(index.fqn, 0) + 1
    entries = {}
    for name, facts in files.metadata.state_dict_metadata.items():
        if not isinstance(facts, TensorStorageMetadata):
            continue
        held = sum(prod(chunk.sizes) for chunk in facts.chunks)
        if held != prod(facts.size) or stored.get(name) != len(facts.chunks):
            raise CheckpointError.of(
                code="M012",
                what=f"the table has only a part of {name}",
                where=str(files.path / ".metadata"),
                fix="copy the folder again; it was joined from several, or is not whole",
            )
        shape = tuple(facts.size)
        entries[name] = Entry(facts.properties.dtype, shape, partial(files.value, name))
    return entries


def read_deepspeed(path: Path) -> Weights:
    """The weights of a DeepSpeed step: float32, as the optimizer keeps them, where ZeRO has cut
    them up. Source: DeepSpeed 0.19.6, utils/zero_to_fp32.py and checkpoint/ds_to_universal.py.

    Raises:
        CheckpointError: As of `read_files`; `C012`, it is of tensor or pipeline ranks.
    """
    models = sorted(path.glob("*mp_rank_*_model_states.pt"), key=_natural)
    own = [each for each in models if each.name.startswith("mp_rank_")]
    is_universal = (path / "zero").is_dir()
    split = max((int(re.findall(r"mp_rank_(\d+)", each.name)[0]) for each in models), default=0)
    if (split or any(path.glob("layer_*"))) and not is_universal:
        kind = f"{split + 1} tensor or pipeline ranks" if split else "pipeline stages or experts"
        raise CheckpointError.of(
            code="C012",
            what=f"{path.name} is of {kind}, and only DeepSpeed knows how the model was cut",
            where=str(path),
            fix="make it universal first: python -m deepspeed.checkpoint.ds_to_universal "
            f"--input_folder {path} --output_folder {path}_universal",
        )
    ranks = [read_pickle(each) for each in sorted(path.glob("*_optim_states.pt"), key=_natural)]
    if is_universal:
        side = read_pickle(models[0]) if models and not split else {}
        entries, stage = _universal(path / "zero", side), 0
    elif own and (not ranks or "zero_stage" not in ranks[0]["optimizer_state_dict"]):
        return read_files(own, "module")
    elif not ranks or not models:
        raise _cut_off(path, f"*_{'optim' if models else 'model'}_states.pt are not there")
    else:
        states = [each["optimizer_state_dict"] for each in ranks]
        stage = states[0]["zero_stage"]
        stage = int(stage if isinstance(stage, int) else stage.made_of[0])  # an enum of DeepSpeed's
        partitions = states[0]["partition_count"]
        count = max(partitions) if isinstance(partitions, list) else partitions
        if count != len(ranks):
            raise _cut_off(
                path, f"{count} ranks wrote it, and {len(ranks)} of their files are there"
            )
        sides = [read_pickle(each) for each in (models if stage == 3 else own)]
        side, entries = sides[0], _frozen(sides, stage)
        field = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        flat = [state[field] for state in states]
        entries |= (_stage_3 if stage == 3 else _stage_2)(path, flat, side["param_shapes"])
    for name in side.get("buffer_names") or ():
        if name in side["module"]:
            entries[name] = entry(side["module"][name].float())
    shared = dict(side.get("shared_params") or {})
    entries |= {name: entries[other] for name, other in shared.items() if other in entries}
    note = "the weights are float32, as the optimizer keeps them; its moments are left out"
    return Weights(entries=entries, notes=(note,))


def _stage_2(path: Path, flat: Any, shapes: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """Each group of parameters is one row of numbers, cut into as many parts as there are ranks."""
    entries = {}
    for number, group in enumerate(shapes):
        parts, start = [rank[number] for rank in flat], 0
        for name, shape in group.items():
            size = prod(shape)
            entries[name] = _float32(shape, partial(_cut, parts, start, size, shape))
            start += size
        align, there = 2 * len(flat), sum(part.numel() for part in parts)
        if ceil(start / align) != ceil(there / align):
            raise _cut_off(path, f"group {number} has {there} numbers, and its parameters {start}")
    return entries


def _stage_3(path: Path, flat: Any, shapes: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """Each parameter is cut by itself, into equal parts with padding behind the last."""
    entries, start = {}, 0
    for name, shape in (pair for group in shapes for pair in group.items()):
        part = ceil(prod(shape) / len(flat))
        entries[name] = _float32(shape, partial(_join, flat, start, part, shape))
        start += part
    for rank, groups in enumerate(flat):
        there = sum(each.numel() for each in groups)
        if there != start:
            raise _cut_off(path, f"rank {rank} has {there} numbers, and its parameters {start}")
    return entries


def _float32(shape: Sequence[int], load: Callable[[], Tensor]) -> Entry:
    return Entry(torch.float32, tuple(shape), load)


def _cut(parts: Sequence[Tensor], start: int, size: int, shape: Sequence[int]) -> Tensor:
    pieces = []
    for part in parts:
        piece = part[start : start + size] if start < part.numel() else part[:0]
        pieces.append(piece)
        start, size = max(start - part.numel(), 0), size - piece.numel()
    return torch.cat(pieces).view(tuple(shape))


def _join(flat: Any, start: int, part: int, shape: Sequence[int]) -> Tensor:
    parts = [_cut(groups, start, part, (-1,)) for groups in flat]
    return torch.cat(parts)[: prod(shape)].view(tuple(shape))


def _frozen(sides: Sequence[Mapping[str, Any]], stage: int) -> dict[str, Entry]:
    """Parameters that were not trained, which no optimizer has."""
    shapes = sides[0].get("frozen_param_shapes") or {}
    parts = [side["frozen_param_fragments"] for side in (sides if stage == 3 else sides[:1])]
    entries = {}
    for name, shape in shapes.items():
        mine = [each[name].reshape(-1) for each in parts]
        load = partial(_cut, mine, 0, prod(shape), shape)
        entries[name] = Entry(mine[0].dtype, tuple(shape), load)
    return entries


def _universal(folder: Path, side: Mapping[str, Any]) -> dict[str, Entry]:
    """One folder for each parameter; in it fp32.pt, a tensor or a table with it as `param`."""
    shapes = {
        name: each for group in side.get("param_shapes") or () for name, each in group.items()
    }
    entries = {}
    for file in sorted(folder.glob("*/fp32.pt")):
        found = read_pickle(file)
        tensor = found["param"] if isinstance(found, Mapping) else found
        shape = tuple(tensor.shape) if tensor.dim() > 1 else shapes.get(file.parent.name)
        shape = tuple(tensor.shape) if shape is None else tuple(shape)
        if prod(shape) != tensor.numel():
            what = f"{file.parent.name} has {tensor.numel()} numbers, and its shape is {shape}"
            raise _cut_off(folder.parent, what)
        entries[file.parent.name] = entry(tensor.view(shape))
    lost = sorted(each for each in shapes if each not in entries)
    if lost or not entries:
        raise _cut_off(
            folder.parent, f"zero/ has no fp32.pt of {', '.join(lost[:5]) or 'anything'}"
        )
    return entries


def _cut_off(path: Path, why: str) -> CheckpointError:
    return CheckpointError.of(
        code="M012",
        what=f"{path.name} is not whole: {why}",
        where=str(path),
        fix="copy the folder again, with the files of every rank, or take an earlier step",
    )


def _natural(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]
