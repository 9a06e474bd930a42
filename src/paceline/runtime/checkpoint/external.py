"""The weights and optimizer state in other programs' checkpoints, by the names they have there.

    torch      .pt, .pth, .bin: a state_dict, or a table that has one beside other things
    dcp        a folder of torch.distributed.checkpoint

DeepSpeed is `zero.py`, Megatron `megatron.py`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from paceline.errors import CheckpointError, did_you_mean
from paceline.record.external_checkpoints import FSDP_FOLDER, OPTIMIZER_FOLDER
from paceline.runtime.checkpoint.pickles import Settings, read_pickle
from paceline.runtime.checkpoint.state_files import StateFiles

_WEIGHTS = ("model", "state_dict", "model_state_dict", "module", "weights", "params")
"""What trainers call the state_dict of the model: the first that is there is taken."""

_OTHER = re.compile(r"optim|sched|scaler|rng|random|loader|train_state|hyper", re.I)
"""Keys of a trainer's state whose tensors are no weights."""

_OPTIMIZER = re.compile(r"optim\w*(\.|$)", re.I)
"""What stands before the names of optimizer state."""

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

    optimizer: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    """Optimizer state: parameter -> key -> value, as torch.optim has it (`step` is float32)."""

    unread: str = ""
    """Why the optimizer state that is there is not read; empty where it is, or there is none."""

    others: Mapping[str, Entry] = field(default_factory=dict)
    """Every other tensor that is there (an EMA, optimizer state of another form), by the keys that
    lead to it."""


def read_files(paths: Sequence[Path], key: str | None = None) -> Weights:
    """The weights in files of `torch.save`.

    Args:
        key: Where in them the weights are; None finds it.

    Raises:
        CheckpointError: `C015`, `M012`: one cannot be read; `C012`, none or several have weights.
    """
    groups: dict[str, dict[str, Entry]] = {}
    others: dict[str, Entry] = {}
    for path in paths:
        found = read_pickle(path)
        others |= tensors_in(found)
        for group, tensors in _groups(found):
            groups.setdefault(group, {}).update(tensors)
    return _chosen(groups, key, paths[0], others)


def tensors_in(found: Any, name: str = "") -> dict[str, Entry]:
    """Every tensor in what a pickle holds, also in lists and settings, by the keys that lead to
    it."""
    if isinstance(found, Tensor):
        return {name: entry(found)}
    if isinstance(found, Settings):
        found = vars(found)
    if isinstance(found, list | tuple):
        found = dict(enumerate(found))
    held: dict[str, Entry] = {}
    for key, value in found.items() if isinstance(found, Mapping) else ():
        held |= tensors_in(value, f"{name}.{key}".lstrip("."))
    return held


def _groups(found: Any, name: str = "") -> Iterator[tuple[str, dict[str, Entry]]]:
    """Each table that has tensors, by the keys that lead to it."""
    if not isinstance(found, Mapping):
        return
    tensors = {str(each): entry(v) for each, v in found.items() if isinstance(v, Tensor)}
    if tensors and isinstance(steps := found.get("step"), int | float):
        tensors["step"] = counted(steps)
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


def _chosen(
    groups: Mapping[str, dict[str, Entry]],
    key: str | None,
    path: Path,
    others: Mapping[str, Entry],
) -> Weights:
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
    notes, entries, wrapped = [], groups[chosen], ""
    for prefix in _WRAPPED:
        if all(name.startswith(prefix) for name in entries):
            entries = {name.removeprefix(prefix): each for name, each in entries.items()}
            wrapped += prefix
            notes.append(f"every name began with `{prefix}`, which a wrapper adds: it is taken off")
    state = {n: each for n, each in groups.items() if _OPTIMIZER.match(n) and n != chosen}
    optimizer, unread = optimizer_in(state, entries, wrapped)
    rest = [each for each in groups if each != chosen and not (optimizer and each in state)]
    if rest:
        outermost = dict.fromkeys(each.partition(".")[0] or "tensors outside" for each in rest)
        notes.append(f"the weights are under `{chosen}`; left out: {', '.join(outermost)}")
    taken = {
        f"{group}.{name}".lstrip(".")
        for group, tensors in groups.items()
        if group == chosen or (optimizer and group in state)
        for name in tensors
    }
    return Weights(
        entries=entries,
        notes=tuple(notes),
        optimizer=optimizer,
        unread=unread,
        others={name: each for name, each in others.items() if name not in taken},
    )


def optimizer_in(
    groups: Mapping[str, Mapping[str, Entry]], entries: Mapping[str, Entry], wrapped: str = ""
) -> tuple[dict[str, dict[str, Entry]], str]:
    """Optimizer state by parameter and key, or why it cannot be read.

    torch.distributed.checkpoint.state_dict names it `optimizer.state.PARAMETER.KEY`, in tables or
    in one flat name.
    """
    found: dict[str, dict[str, Entry]] = {}
    strange: list[str] = []
    for group, tensors in groups.items():
        for name, each in tensors.items():
            whole = name if _OPTIMIZER.match(name) else f"{group}.{name}"
            inside = _OPTIMIZER.sub("", whole, count=1).removeprefix("state.")
            owner, _, key = inside.rpartition(".")
            owner = owner.removeprefix(wrapped)
            if owner in entries and each.shape in ((), entries[owner].shape):
                found.setdefault(owner, {})[key] = counted(each) if key == "step" else each
            else:
                strange.append(whole)
    if strange:
        return {}, (
            f"{len(strange)} of its tensors are of no parameter by name and shape, such as "
            f"{strange[0]}"
        )
    return found, ""


def counted(each: Entry | float) -> Entry:
    """A count of steps as torch.optim has it: one float32."""

    def load() -> Tensor:
        value = each.load() if isinstance(each, Entry) else torch.tensor(each)
        return value.reshape(()).float()

    return Entry(torch.float32, (), load)


def read_dcp(path: Path, key: str | None = None) -> Weights:
    """The weights in a folder of torch.distributed.checkpoint.

    Accelerate and Trainer write the optimizer into a folder of its own beside that of the weights.

    Raises:
        CheckpointError: As of `read_files`.
    """
    groups = _dcp_groups(path)
    beside = path.with_name(OPTIMIZER_FOLDER)
    if path.name == FSDP_FOLDER and (beside / ".metadata").is_file():
        groups |= _dcp_groups(beside)
    others = {
        f"{g}.{n}".lstrip("."): each for g, held in groups.items() for n, each in held.items()
    }
    return _chosen(groups, key, path, others)


def _dcp_groups(path: Path) -> dict[str, dict[str, Entry]]:
    files = StateFiles(path)
    keys = files.metadata.planner_data or {}
    groups: dict[str, dict[str, Entry]] = {}
    for name, each in tensors_of(files).items():
        first, *rest = keys.get(name, (name,))
        group, inner = (str(first), ".".join(map(str, rest))) if rest else ("", name)
        if _OTHER.match(name):
            group = name.partition(".")[0]
        groups.setdefault(group, {})[inner] = each
    return groups


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


def not_whole(path: Path, why: str) -> CheckpointError:
    """`M012`: some of a checkpoint's files, or a part of one, are not there."""
    return CheckpointError.of(
        code="M012",
        what=f"{path.name} is not whole: {why}",
        where=str(path),
        fix="copy the folder again, with the files of every rank, or take an earlier step",
    )
