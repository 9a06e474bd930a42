"""A run's model, built as the run itself builds it and filled from one of its checkpoints."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import CheckpointError
from paceline.profile.hf_names import are_built_in, to_hf_name
from paceline.record.run import RunFolder
from paceline.runtime._torch_private import fake_store
from paceline.runtime.checkpoint.state_files import Load, StateFiles
from paceline.runtime.initial.blueprint import Blueprint
from paceline.runtime.initial.fill import Filler
from paceline.runtime.models import make_model
from paceline.runtime.pretrained import FromPretrained
from paceline.runtime.state import FROZEN_STATE, Stored, model_state, set_other_model_state
from paceline.runtime.strategy.adapter.linear import ADAPTER


@torch.no_grad()
def own_model(run: RunFolder, checkpoint: Path, *, precision: str = "fp32") -> nn.Module:
    """The run's model, whole on the CPU. What adapters were trained beside is in no checkpoint: it
    is read or drawn again, as a rank that resumes does.

    Args:
        precision: Of the frozen weights beside adapters.

    Raises:
        CheckpointError: `C012`, the checkpoint lacks a parameter of the model.
    """
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=1)
    try:
        return _filled(run, checkpoint, precision)
    finally:
        dist.destroy_process_group()


def frozen_weights(run: RunFolder, checkpoint: Path) -> dict[str, Load]:
    """The weights that a run drew and trained adapters beside, in the types that it had them in,
    by the names of transformers. A tied parameter is there once.

    Raises:
        RunError: `R065`, they are drawn otherwise here than they were in the run.
        CheckpointError: `C012`, the checkpoint lacks a parameter of the model.
    """
    model = own_model(run, checkpoint, precision=run.plan().precision)
    files = StateFiles(checkpoint)
    other = {name: files.value(name) for name in files.names if name == FROZEN_STATE}
    set_other_model_state(model, other)
    weights: dict[int, tuple[str, Load]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] not in ADAPTER:
            weights.setdefault(id(tensor), (name, tensor.detach))
    found = dict(weights.values())
    if are_built_in(found):
        return {str(to_hf_name(name)): load for name, load in found.items()}
    return found


def _filled(run: RunFolder, checkpoint: Path, precision: str) -> nn.Module:
    job = run.job()
    make = make_model(job, run.plan().decoder, precision)
    blueprint = Blueprint(make, job.spec.train.seed)
    model = blueprint.take_model()
    weights = None
    if isinstance(make, FromPretrained) and job.spec.train.adapter is not None:
        weights = make.weights_of(model, digest=run.info().weights_digest or "")
    Filler(blueprint, torch.device("cpu"), draws=False, weights=weights)(model)
    files = StateFiles(checkpoint)
    for name, stored in model_state(model).items():
        if not isinstance(stored, Stored):
            continue
        if name not in files.names:
            raise CheckpointError.of(
                code="C012",
                what=f"the checkpoint has no {name}, which the job's model has",
                where=str(checkpoint),
                fix="give a checkpoint of this run",
            )
        whole = files.value(name)
        for offset, piece in stored.pieces:
            sides = zip(offset, piece.shape, strict=True)
            piece.copy_(whole[tuple(slice(start, start + size) for start, size in sides)])
    return model
