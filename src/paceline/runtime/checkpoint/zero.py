"""The weights and optimizer state in a DeepSpeed step: ZeRO 1, 2 and 3 as their ranks wrote it,
universal, and without ZeRO.

Source: DeepSpeed 0.19, utils/zero_to_fp32.py, checkpoint/ds_to_universal.py,
deepspeed/runtime/zero/stage_1_and_2.py and stage3.py (`state_dict`),
deepspeed/runtime/bf16_optimizer.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.external import (
    Entry,
    Weights,
    counted,
    entry,
    not_whole,
    read_files,
    tensors_in,
)
from paceline.runtime.checkpoint.pickles import read_pickle

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of each parameter beside its count of steps."""

_Flat = Sequence[Any]
"""By rank, and in each by group of parameters, one row of numbers."""


def read_deepspeed(path: Path) -> Weights:
    """The weights of a DeepSpeed step, float32 as the optimizer keeps them where ZeRO has cut them
    up, and Adam's state.

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
    adam: dict[str, dict[str, Entry]] = {}
    others: dict[str, Entry] = {}
    unread = ""
    if is_universal:
        side = read_pickle(models[0]) if models and not split else {}
        entries, adam = _universal(path / "zero", side)
        for file in sorted((path / "zero").glob("*/*.pt")):
            if file.stem not in (*MOMENTS, "fp32", "step"):
                others |= tensors_in(read_pickle(file), f"zero/{file.parent.name}/{file.stem}")
    elif own and (not ranks or not _FLAT_FIELDS & ranks[0]["optimizer_state_dict"].keys()):
        return read_files(own, "module")
    elif not ranks or not models:
        raise not_whole(path, f"*_{'optim' if models else 'model'}_states.pt are not there")
    else:
        states = [each["optimizer_state_dict"] for each in ranks]
        stage = states[0].get("zero_stage", 1)  # none in what the optimizer of bf16 writes
        stage = int(stage if isinstance(stage, int) else stage.made_of[0])  # an enum of DeepSpeed's
        partitions = states[0]["partition_count"]
        count = max(partitions) if isinstance(partitions, list) else partitions
        if count != len(ranks):
            raise not_whole(
                path, f"{count} ranks wrote it, and {len(ranks)} of their files are there"
            )
        sides = [read_pickle(each) for each in (models if stage == 3 else own)]
        side, entries = sides[0], _frozen(sides, stage)
        field = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        shapes = side["param_shapes"]
        cut = partial(_stage_3 if stage == 3 else _stage_2, path)
        entries |= cut([state[field] for state in states], shapes)
        try:
            adam = _adam([_groups_of(state) for state in states], shapes, cut)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            unread = f"it is not laid out as Adam's of DeepSpeed: {error!r}"
    for name in side.get("buffer_names") or ():
        if name in side["module"]:
            entries[name] = entry(side["module"][name])
    shared = dict(side.get("shared_params") or {})
    entries |= {name: entries[other] for name, other in shared.items() if other in entries}
    others |= tensors_in(side.get("module"), "module")
    note = "the weights are float32, as the optimizer keeps them"
    return Weights(entries=entries, notes=(note,), optimizer=adam, unread=unread, others=others)


_FLAT_FIELDS = {"single_partition_of_fp32_groups", "fp32_flat_groups"}
"""Float32 weights of a rank, in ZeRO 1 and 2, and in ZeRO 3."""


def _groups_of(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A rank's state of torch's optimizer, group of parameters by group."""
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    if isinstance(base, Mapping):
        return [each for _, each in sorted(base["state"].items())]
    step = state.get("base_optimizer_state_step")  # of an elastic checkpoint
    return [{"step": step, **each} for each in base or ()]


def _adam(
    ranks: Sequence[Sequence[Mapping[str, Any]]],
    shapes: Sequence[Mapping[str, Any]],
    cut: Callable[[_Flat, Sequence[Mapping[str, Any]]], dict[str, Entry]],
) -> dict[str, dict[str, Entry]]:
    """Adam's state of each parameter."""
    keys = {key for group in ranks[0] for key, each in group.items() if isinstance(each, Tensor)}
    if not keys - {"step"}:
        raise KeyError(MOMENTS[0])
    found: dict[str, dict[str, Entry]] = {}
    for key in sorted(keys - {"step"}):
        for name, each in cut([[group[key] for group in rank] for rank in ranks], shapes).items():
            found.setdefault(name, {})[key] = each
    # ZeRO 3 cuts a group that is too large, and all parts have made the same steps.
    steps = [ranks[0][min(n, len(ranks[0]) - 1)]["step"] for n in range(len(shapes))]
    for group, step in zip(shapes, steps, strict=True):
        for name in group:
            found[name]["step"] = counted(float(step))
    return found


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
            raise not_whole(path, f"group {number} has {there} numbers, and its parameters {start}")
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
            raise not_whole(path, f"rank {rank} has {there} numbers, and its parameters {start}")
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


def _universal(
    folder: Path, side: Mapping[str, Any]
) -> tuple[dict[str, Entry], dict[str, dict[str, Entry]]]:
    """Weights, and Adam's state: one folder for each parameter, in it fp32.pt, exp_avg.pt and
    exp_avg_sq.pt, a tensor or a table with it as `param`; and step.pt, or one for all."""
    shapes = {
        name: each for group in side.get("param_shapes") or () for name, each in group.items()
    }
    entries: dict[str, Entry] = {}
    adam: dict[str, dict[str, Entry]] = {}
    for file in sorted(folder.glob("*/fp32.pt")):
        name = file.parent.name
        entries[name] = _whole(file, shapes.get(name))
        others = {key: file.with_name(f"{key}.pt") for key in MOMENTS}
        adam[name] = {k: _whole(f, entries[name].shape) for k, f in others.items() if f.is_file()}
        if adam[name] and (step := _steps_in(file.parent)) is not None:
            adam[name]["step"] = counted(float(step))
    lost = sorted(each for each in shapes if each not in entries)
    if lost or not entries:
        raise not_whole(
            folder.parent, f"zero/ has no fp32.pt of {', '.join(lost[:5]) or 'anything'}"
        )
    adam = {name: each for name, each in adam.items() if each}
    keys = {key for each in adam.values() for key in each}
    for name, each in adam.items():
        if keys - each.keys():
            raise not_whole(folder.parent, f"zero/{name} has no {', '.join(keys - each.keys())}")
    return entries, adam


def _whole(file: Path, shape: Sequence[int] | None) -> Entry:
    """One tensor of a parameter; a row of numbers gets its shape, where that is known."""
    found = read_pickle(file)
    tensor = found.get("param") if isinstance(found, Mapping) else found
    if not isinstance(tensor, Tensor):
        raise not_whole(file.parent.parent.parent, f"{file.parent.name}/{file.name} has no tensor")
    shape = tuple(tensor.shape) if tensor.dim() > 1 or shape is None else tuple(shape)
    if prod(shape) != tensor.numel():
        what = f"{file.parent.name}/{file.name} has {tensor.numel()} numbers, and its shape is "
        raise not_whole(file.parent.parent.parent, f"{what}{shape}")
    return entry(tensor.view(shape))


def _steps_in(folder: Path) -> float | None:
    """Adam's count of steps: of this parameter (ZeRO 1 and 2), or of all (ZeRO 3)."""
    own, common = folder / "step.pt", folder.parent / "optimizer_state.pt"
    if own.is_file():
        return float(read_pickle(own))
    if not common.is_file():
        return None
    groups = _groups_of({"optimizer_state_dict": read_pickle(common).get("optimizer_state_dict")})
    return float(groups[0]["step"]) if groups and "step" in groups[0] else None


def _natural(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]
