"""What one rank does: the single device's run on rank 0, then every run of the case on all."""

import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.record.verification import Case, RankFacts, Reference
from paceline.runtime.strategy import make_meshes
from paceline.runtime.verify.model import with_vocab
from paceline.runtime.verify.reference import make_reference
from paceline.runtime.verify.steps import Bench, read_epochs, train

OnProgress = Callable[[str], None]


def verify_rank(
    case: Case,
    folder: Path,
    device: torch.device,
    *,
    on_progress: OnProgress = lambda line: None,
) -> tuple[RankFacts, Reference | None]:
    """Everything this rank sees, and on rank 0 the single device's numbers. Collective."""
    rank = dist.get_rank()
    case = with_vocab(case)
    reference = None
    if rank == 0:
        on_progress("the single device")
        reference, tensors = make_reference(case, device)
        torch.save(tensors, folder / "truth.pt")
    ones = torch.ones((), device=device)
    dist.all_reduce(ones)  # the others wait here for rank 0
    truth = torch.load(folder / "truth.pt", map_location=device, weights_only=True)
    meshes = make_meshes(case.layout, device.type)
    bench = Bench(
        case=case, device=device, truth=truth, folder=folder, meshes={case.layout: meshes}
    )
    runs = {}
    for run in case.runs:
        on_progress(f"{run.name}: {run.layout.name}, {run.precision}")
        runs[run.name] = train(run, bench)
    facts = RankFacts(
        rank=rank,
        world_size=int(ones.item()),
        device=str(device),
        host=platform.node(),
        pid=os.getpid(),
        tensor=meshes.place.tensor,
        context=meshes.place.context,
        data=meshes.place.data,
        pipeline=meshes.place.pipeline,
        sampler=read_epochs(case, meshes),
        runs=runs,
    )
    return facts, reference
