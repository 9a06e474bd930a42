"""Bring back a state: the newest checkpoint that is whole, the same one on every rank."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from paceline.errors import CheckpointError, Problem
from paceline.record import checkpoints
from paceline.record.checkpoints import CheckpointEntry
from paceline.runtime.checkpoint._agree import Group, attempt, from_first
from paceline.runtime.state import (
    MODEL,
    OPTIMIZER,
    named_parameters,
    named_state,
    optimizer_name,
    set_other_model_state,
    split_optimizer_name,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a run goes on from."""

    step: int = 0
    """Optimizer steps done; 0 when there was no checkpoint."""

    path: Path | None = None
    """The checkpoint that was loaded, or None when there was none: a fresh start."""

    held_out_loss: float | None = None
    """From its manifest."""

    refused: list[tuple[Path, Problem]] = field(default_factory=list)
    """Newer checkpoints that were not whole, and why."""


def restore_newest(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, group: Group = None
) -> Restored:
    """Load the newest valid checkpoint of a folder into a model and its optimizer. Collective.

    Rank 0 checks every byte of each candidate against its manifest, newest first; all ranks load
    the one it chooses. One that any rank fails to load is refused like a damaged one. It may have
    been written by any number of ranks in any layout.

    Raises:
        CheckpointError: There are checkpoints and none could be used. The state may be half loaded
            then, so a run must not go on with it.
    """
    first = dist.get_rank(group) == 0
    entries = from_first(checkpoints.list_checkpoints(folder) if first else [], group)
    refused: list[tuple[Path, Problem]] = []
    for entry in entries:
        problem = from_first(checkpoints.verify_checkpoint(entry.path) if first else None, group)
        if problem is None:
            problem = _try_load(entry, model, optimizer, group)
        if problem is None:
            return Restored(
                step=entry.step,
                path=entry.path,
                held_out_loss=entry.held_out_loss,
                refused=refused,
            )
        refused.append((entry.path, problem))
    if refused:
        raise CheckpointError(*(problem for _, problem in refused))
    return Restored()


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, group: Group = None
) -> None:
    """Load one checkpoint folder as it is, without checking its hashes. Collective.

    Raises:
        CheckpointError: On all ranks alike, when any rank could not; the state may be half loaded.
    """
    entry = CheckpointEntry(step=0, path=path, is_complete=True)
    problem = _try_load(entry, model, optimizer, group)
    if problem is not None:
        raise CheckpointError(problem)


def _try_load(
    entry: CheckpointEntry, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group
) -> Problem | None:
    """Load, and agree whether it worked: None, or the same problem on every rank."""
    target, reason = attempt(lambda: _target_state(entry.path, model, optimizer), group)
    if reason is None and target is not None:
        _, reason = attempt(lambda: _read(entry.path, target, group), group)
        if reason is None:
            _, reason = attempt(lambda: _take_over(target, model, optimizer), group)
    if reason is None:
        return None
    return Problem(
        code="C009",
        what=f"{entry.path.name} could not be loaded: {reason}",
        where=str(entry.path),
        fix="use the model it was saved from, or another folder",
    )


def _read(path: Path, state: dict[str, Any], group: Group) -> None:
    state_dict_loader.load(state, storage_reader=FileSystemReader(path), process_group=group)


def _target_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Where each saved value goes: the live tensors, and new memory for optimizer state.

    The optimizer may be new and hold no state yet. Its state is made as the checkpoint has it,
    laid out like the parameter it belongs to, with no step taken to make torch create it.
    """
    metadata: Metadata = FileSystemReader(path).read_metadata()
    saved = metadata.state_dict_metadata
    state = {
        name: value
        for name, value in named_state(model, optimizer).items()
        if name.startswith(MODEL) or name in saved
    }
    _check_same_model(state, saved)
    parameters = named_parameters(model)
    for name, facts in saved.items():
        if not name.startswith(OPTIMIZER) or name in state:
            continue
        parameter_name, _ = split_optimizer_name(name)
        if isinstance(facts, TensorStorageMetadata):
            state[name] = _room_for(facts, parameters[parameter_name])
        else:
            state[name] = None
    return state


def _room_for(facts: TensorStorageMetadata, parameter: nn.Parameter) -> Tensor:
    dtype = facts.properties.dtype
    if facts.size == parameter.shape:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(facts.size, dtype=dtype)


def _check_same_model(state: dict[str, Any], saved: dict[str, Any]) -> None:
    here = {name for name in state if name.startswith(MODEL)}
    there = {name for name in saved if name.startswith(MODEL)}
    for name in sorted(here - there):
        raise ValueError(f"the model has {name.removeprefix(MODEL)}, the checkpoint has not")
    for name in sorted(there - here):
        raise ValueError(f"the checkpoint has {name.removeprefix(MODEL)}, the model has not")
    for name in sorted(here):
        facts, value = saved[name], state[name]
        if isinstance(facts, TensorStorageMetadata) and facts.size != value.shape:
            raise ValueError(
                f"{name.removeprefix(MODEL)} is {list(value.shape)} in the model and "
                f"{list(facts.size)} in the checkpoint"
            )


def _take_over(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer exactly the state that was loaded, and the model what is no tensor."""
    set_other_model_state(model, state)
    options = {p: group for group in optimizer.param_groups for p in group["params"]}
    keys: dict[str, list[str]] = {}
    for name in state:
        if name.startswith(OPTIMIZER):
            parameter_name, key = split_optimizer_name(name)
            keys.setdefault(parameter_name, []).append(key)
    for parameter_name, parameter in named_parameters(model).items():
        loaded = {
            key: state[optimizer_name(parameter_name, key)] for key in keys.get(parameter_name, [])
        }
        group = options.get(parameter, {})
        # A count of steps lives on the device for the optimizers that read it there.
        on_device = bool(group.get("fused") or group.get("capturable"))
        for key, value in loaded.items():
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and on_device:
                loaded[key] = value.to(parameter.device)
        optimizer.state.pop(parameter, None)
        if loaded:
            optimizer.state[parameter] = loaded
