"""The small model of a case, its samples and its settings: the same on every rank.

Samples are drawn from their own number, so that they need no files, and two ranks that read the
same one see the same tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.job import Job, TrainSpec
from paceline.job.load import parse_job
from paceline.record.verification import Case
from paceline.runtime.determinism import seed_everything
from paceline.runtime.huggingface import build_hf
from paceline.runtime.models import make_model
from paceline.runtime.sampling import Ids
from paceline.runtime.strategy import Meshes
from paceline.runtime.strategy.tensor.fused import split_fused
from paceline.runtime.strategy.ways.find import ways_of


def job_of(case: Case) -> Job:
    """The job, as it was read, without adapters: all of the model is trained."""
    job = parse_job(case.job, source=case.source, folder=Path(case.folder))
    return replace(job, spec=replace(job.spec, train=replace(job.spec.train, adapter=None)))


def build_model(case: Case, *, is_wide: bool, dropout: bool = False) -> nn.Module:
    """The whole model on the CPU, with the same weights wherever it is called.

    Args:
        is_wide: In float64, else float32. The weights are the same numbers.
    """
    job = job_of(case)
    seed_everything(job.spec.train.seed)
    if case.config is not None:
        fields: Mapping[str, Any] = case.config | (case.dropout if dropout else {})
        model = build_hf(fields, source=case.source, where=job.where("model"))
    else:
        model = make_model(job, case.decoder)()
    if not dropout:
        _turn_dropout_off(model)
    if case.layout.tensor > 1 and (ways := ways_of(model)) is not None:
        split_fused(model, ways)  # as tensor parallelism does: so all have the same names
    return model.double() if is_wide else model


def _turn_dropout_off(model: nn.Module) -> None:
    """Turn dropout off in modules, and in functions that read their share from an attribute, as
    attention does."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def with_vocab(case: Case) -> Case:
    """The case of a model of one's own, with as many tokens as its smallest embedding has.

    Raises:
        JobError: `V003`, it has none.
    """
    if case.vocab > 0:
        return case
    model = build_model(case, is_wide=False)
    sizes = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    if sizes:
        return replace(case, vocab=min(sizes))
    raise JobError.of(
        code="V003",
        what=f"{type(model).__name__} has no nn.Embedding, so what goes into it is not known",
        where=job_of(case).where("model.factory"),
        fix="verify a model that turns token ids into logits; or compare your training's own "
        "loss curve with one rank's",
    )


def dropouts(model: nn.Module) -> dict[str, nn.Dropout]:
    return {name: each for name, each in model.named_modules() if isinstance(each, nn.Dropout)}


def has_dropout(case: Case) -> bool:
    """Whether any dropout module drops anything."""
    return any(
        each.p > 0 for each in dropouts(build_model(case, is_wide=False, dropout=True)).values()
    )


def train_spec(case: Case) -> TrainSpec:
    """How the job trains, at its full learning rate from the first step on: a rate that warms up
    from zero would hide what updates do."""
    train = job_of(case).spec.train
    steps = max(case.steps, 2)
    batch = case.layout.global_batch
    return replace(train, global_batch=batch, steps=steps, warmup_steps=0, schedule="constant")


def samples(case: Case, ids: Ids) -> tuple[Tensor, Tensor]:
    """`(inputs_BS, targets_BS)` of these samples."""
    rows = [
        np.random.Philox(key=np.array([7, sample], dtype=np.uint64)).random_raw(case.seq_len + 1)
        for sample in ids.tolist()
    ]
    tokens = torch.from_numpy((np.stack(rows) % np.uint64(case.vocab)).astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def micro_batches(
    case: Case, ids: Ids, meshes: Meshes, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's samples of one step, a micro-batch at a time."""
    size = meshes.layout.micro_batch
    for start in range(0, len(ids), size):
        inputs_BS, targets_BS = samples(case, ids[start : start + size])
        yield inputs_BS.to(device), targets_BS.to(device)
