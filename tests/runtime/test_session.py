"""A session inside one process: what it keeps from a checkpoint, and what it tells."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.scene import Scene

from paceline.control import messages as say
from paceline.parallel.layout import Layout
from paceline.plan import plan_job
from paceline.record.run import RunFolder, create_run
from paceline.runtime.faults import Faults
from paceline.runtime.language_model import train
from paceline.runtime.session import Place, Session
from paceline.runtime.strategy import LossScaler
from paceline.runtime.worker import transports
from paceline.spec import load_job
from paceline.spec.corpus import find_corpus


class Said:
    """A channel whose other end only listens."""

    stop_wanted = False

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


def session_in(folder: Path, rank: int, world: int, *overrides: str) -> tuple[Session, Said]:
    """A session of the scene's job, and what it says; the run's folder is made by rank 0."""
    job = load_job(folder / "job.yaml", (f"cluster.per_node={world}", *overrides))
    plan = plan_job(job)
    if rank == 0 and not (folder / "run").exists():
        create_run(job, plan, folder=folder / "run", runs=folder, corpus=find_corpus(job))
    torch.distributed.barrier()
    said: Any = Said()
    session = Session(
        job=job,
        plan=plan,
        run=RunFolder(folder / "run"),
        place=Place(
            rank=rank, world_size=world, local_rank=rank, generation=1, device=torch.device("cpu")
        ),
        channel=said,
        faults=Faults((), rank=rank, channel=said),
    )
    return session, said


def train_in_fp16(rank: int, world: int, folder: Path, *steps: int) -> Any:
    """Train to each number of steps in turn; the last state, the loss scale and refused steps."""
    refused: list[int] = []
    for number in steps:
        options = (f"train.steps={number}", "train.schedule=constant", "checkpoint.every=4")
        session, said = session_in(folder, rank, world, *options)
        session.plan = replace(session.plan, precision="fp16")  # planned for no CPU, but it can
        # Far above what fits, and doubled every other step: it changes all the time.
        session.scaler = LossScaler(initial=2.0**26, patience=2)
        train(session)
        refused += [message.step for message in said.of(say.StepVotedDown)]
    return session.completion().state_digest, session.scaler.state_dict(), refused


@pytest.mark.ranks
def test_an_fp16_run_goes_on_with_its_loss_scale_and_ends_with_the_same_bits(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        Scene(folder)
    ((digest, scale, refused),) = run_ranks(train_in_fp16, 1, one, 9, limit_s=150)
    ((digest_again, scale_again, refused_again),) = run_ranks(
        train_in_fp16, 1, two, 5, 9, limit_s=150
    )
    assert scale["scale"] < 2.0**26
    assert refused
    assert refused_again == refused
    assert (digest_again, scale_again) == (digest, scale)


def build_compressed(rank: int, world: int, folder: Path, kind: str) -> list[str]:
    compression = f"train.gradient_compression={kind}"
    session, said = session_in(folder, rank, world, compression, "layout.sharding=none")
    session.build(lambda: torch.nn.Linear(4, 4))
    return [note.text for note in said.of(say.NoteMade)]


@pytest.mark.ranks
def test_the_risk_of_a_compression_is_said_once_by_the_first_rank(tmp_path):
    Scene(tmp_path)
    (note,), nothing = run_ranks(build_compressed, 2, tmp_path, "powersgd", limit_s=150)
    assert note.startswith("train.gradient_compression powersgd: gradients are approximated")
    assert nothing == []


@pytest.mark.parametrize(
    ("backend", "offload", "expected"),
    [
        ("nccl", "cpu", "cpu:gloo,cuda:nccl"),
        ("nccl", "none", "nccl"),
        ("gloo", "cpu", "gloo"),
    ],
)
def test_what_is_offloaded_to_the_host_is_sent_over_gloo(backend, offload, expected):
    layout = Layout(data=2, sharding="full", offload=offload, micro_batch=1, accumulation=1)
    assert transports(backend, layout) == expected
