"""A session inside one process: what it keeps from a checkpoint, and what it tells."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.scene import Scene
from tests.runtime.test_prepared_data import prepare

from paceline.check.drill.ledger import pure_digest
from paceline.control import messages as say
from paceline.errors import RunError
from paceline.job import load_job
from paceline.job.corpus import find_corpus
from paceline.plan import plan_job
from paceline.record import events as log
from paceline.record.metrics import read_metrics
from paceline.record.run import RunFolder, create_run
from paceline.runtime.data import load_prepared, load_text
from paceline.runtime.faults import Faults
from paceline.runtime.language_model import train, train_on
from paceline.runtime.models import make_model
from paceline.runtime.recovery.groups import Interrupted
from paceline.runtime.recovery.member import Place, Settled
from paceline.runtime.session import Session
from paceline.runtime.strategy import LossScaler, local_of


class Said:
    """A channel whose other end only listens."""

    stop_wanted = False
    regroup_wanted = None
    save_wanted = False

    def forget_save(self) -> None:
        self.save_wanted = False

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message.event if isinstance(message, say.ForRecord) else message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


def session_in(folder: Path, rank: int, world: int, *overrides: str) -> tuple[Session, Said]:
    """A session of the scene's job, and what it says; the run's folder is made by rank 0."""
    job = load_job(folder / "job.yaml", (f"cluster.per_node={world}", *overrides))
    plan = plan_job(job)
    if rank == 0 and not (folder / "run").exists():
        create_run(job, plan, folder=folder / "run", runs=folder, data=find_corpus(job))
    torch.distributed.barrier()
    said: Any = Said()
    session = Session(
        job=job,
        plan=plan,
        run=RunFolder(folder / "run"),
        channel=said,
        member=Settled(
            Place(
                rank=rank,
                world_size=world,
                local_rank=rank,
                generation=1,
                device=torch.device("cpu"),
            ),
            Faults(rank=rank, channel=said),
        ),
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
        session.state.scaler = LossScaler(initial=2.0**26, patience=2)
        train(session)
        refused += [message.step for message in said.of(log.StepRefused)]
    session.complete()
    (record,) = said.of(say.Completed)
    return record.state_digest, session.state.scaler.state_dict(), refused


@pytest.mark.ranks
def test_s3_6_an_fp16_run_goes_on_with_its_loss_scale_and_ends_with_the_same_bits(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        Scene(folder)
    ((digest, scale, refused),) = run_ranks(train_in_fp16, 1, one, 9)
    ((digest_again, scale_again, refused_again),) = run_ranks(train_in_fp16, 1, two, 5, 9)
    assert scale["scale"] < 2.0**26
    assert refused
    lines = read_metrics(one / "run" / "metrics.jsonl")
    assert lines[-1].loss_scale == scale["scale"]
    assert len({line.loss_scale for line in lines}) > 1
    assert refused_again == refused
    assert (digest_again, scale_again) == (digest, scale)


class Unsettled(Settled):
    """As when the groups are aborted before what they carry has come."""

    def settle(self, device: torch.device) -> None:
        raise Interrupted


def begin_unsettled(rank: int, world: int, folder: Path) -> bool:
    """Whether the state counts as one, though the initial weights may not have come."""
    session, said = session_in(folder, rank, world)
    session.member = Unsettled(*session.member.join())
    model = session.build(lambda: torch.nn.Linear(4, 1))
    steps = session.steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(Interrupted):
        next(steps)
    return session.held.is_whole or bool(said.of(say.Restored))


@pytest.mark.ranks
def test_no_state_is_held_before_the_initial_weights_are_known_to_have_come(tmp_path):
    Scene(tmp_path)
    assert run_ranks(begin_unsettled, 1, tmp_path) == [False]


def refuse_a_gradient(rank: int, world: int, folder: Path, precision: str) -> Any:
    """Steps in which only the last rank's reduced gradient is not finite; why, and what changed."""
    options = ("train.steps=3", "layout.sharding=none", "train.max_refused_steps=9")
    session, _ = session_in(folder, rank, world, *options)
    session.plan = replace(session.plan, precision=precision)
    if precision == "fp16":
        session.state.scaler = LossScaler(initial=2.0**-12)  # its least is 2^-14
    model = session.build(lambda: torch.nn.Linear(4, 1))
    before = [parameter.clone() for parameter in model.parameters()]
    told = []
    for step in session.steps(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        step.train(
            lambda ids: (torch.ones(len(ids), 4), torch.ones(len(ids), 1)),
            8,
            loss_of=lambda output, targets: ((output - targets).square().sum(), len(targets)),
        )
        if rank == world - 1:
            next(model.parameters()).grad[0, 0] = torch.nan
        step.apply()
        scale = session.state.scaler.factor if session.state.scaler is not None else 1.0
        told.append((step.refused, step.overflowed, scale))
    same = all(map(torch.equal, before, model.parameters()))
    return told, same


@pytest.mark.ranks
def test_a_gradient_that_is_not_finite_on_one_rank_is_refused_by_all(tmp_path):
    Scene(tmp_path)
    one, other = run_ranks(refuse_a_gradient, 2, tmp_path, "fp32")
    assert one == other
    told, same = one
    assert told == [("the gradient norm is not finite on rank 1", False, 1.0)] * 3
    assert same


@pytest.mark.ranks
def test_fp16_excuses_overflows_only_while_its_scale_can_be_lowered(tmp_path):
    Scene(tmp_path)
    one, other = run_ranks(refuse_a_gradient, 2, tmp_path, "fp16")
    assert one == other
    told, same = one
    assert [(overflowed, scale) for _, overflowed, scale in told] == [
        (True, 2.0**-13),
        (True, 2.0**-14),
        (False, 2.0**-14),
    ]
    assert same


def misuse(rank: int, world: int, folder: Path) -> dict[str, str]:
    """What is said of a step that is applied so many times."""
    told = {}
    for times, how in ((0, "not applied"), (2, "applied twice")):
        session, _ = session_in(folder / how, rank, world, "train.steps=3")
        with pytest.raises(RunError) as caught:
            apply_each_step(session, times)
        told[how] = caught.value.problems[0].what
    return told


def apply_each_step(session: Session, times: int) -> None:
    model = session.build(lambda: torch.nn.Linear(4, 1))
    for step in session.steps(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        for ids in step.micro_batches(8):
            step.backward(model(torch.ones(len(ids), 4)).square().mean())
        for _ in range(times):
            step.apply()


@pytest.mark.ranks
def test_a_step_that_is_not_applied_or_applied_twice_is_named(tmp_path):
    for how in ("not applied", "applied twice"):
        Scene(tmp_path / how)
    assert run_ranks(misuse, 1, tmp_path) == [
        {
            "not applied": "step 1 was left without step.apply()",
            "applied twice": "step 1 was applied twice",
        }
    ]


def train_by(rank: int, world: int, folder: Path, way: str) -> Any:
    """Losses and norms of two steps of the built-in model on tensor ranks."""
    options = ("train.steps=2", "layout.tensor=2", "layout.data=1", "checkpoint.every=9")
    session, _ = session_in(folder, rank, world, *options)
    text, _ = load_text(session.job)
    model = session.build(make_model(session.job, session.plan.decoder))
    seen = []
    for step in session.steps(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        if way == "train":
            step.train(text.samples, text.num_samples)
        else:
            for ids in step.micro_batches(text.num_samples):
                inputs_BS, targets_BS = text.samples(ids)
                logits_BSV = model(inputs_BS)
                step.backward(
                    torch.nn.functional.cross_entropy(
                        logits_BSV.flatten(0, 1), targets_BS.flatten()
                    )
                )
        step.apply()
        seen += [step.loss, step.grad_norm]
    return seen, sum(float(local_of(each.detach()).double().sum()) for each in model.parameters())


@pytest.mark.ranks
def test_a_loop_over_micro_batches_on_tensor_ranks_does_what_train_does(tmp_path):
    for way in ("train", "loop"):
        Scene(tmp_path / way)
    expected = run_ranks(train_by, 2, tmp_path / "train", "train")
    found = run_ranks(train_by, 2, tmp_path / "loop", "loop")
    for (seen, total), (own_seen, own_total) in zip(expected, found, strict=True):
        # Divided by the number of tokens before instead of after the sum: float32's rounding.
        assert own_seen == pytest.approx(seen, rel=1e-5)
        assert own_total == pytest.approx(total, rel=1e-5)


def build_compressed(rank: int, world: int, folder: Path, kind: str) -> list[str]:
    compression = f"train.gradient_compression={kind}"
    session, said = session_in(folder, rank, world, compression, "layout.sharding=none")
    session.build(lambda: torch.nn.Linear(4, 4))
    return [note.text for note in said.of(log.Noted)]


@pytest.mark.ranks
def test_the_risk_of_a_compression_is_said_once_by_the_first_rank(tmp_path):
    Scene(tmp_path)
    (note,), nothing = run_ranks(build_compressed, 2, tmp_path, "powersgd")
    assert note.startswith("train.gradient_compression powersgd: gradients are approximated")
    assert nothing == []


def train_without_a_digest(rank: int, world: int, folder: Path) -> Any:
    options = ("train.steps=2", "recovery.final_digest=false")
    session, said = session_in(folder, rank, world, *options)
    train(session)
    session.complete()
    (record,) = said.of(say.Completed)
    return record.outcome, record.step, record.state_digest


@pytest.mark.ranks
def test_a_run_whose_final_digest_is_left_out_finishes_without_one(tmp_path):
    Scene(tmp_path)
    assert run_ranks(train_without_a_digest, 2, tmp_path) == [("finished", 2, None)] * 2


def train_on_prepared(rank: int, world: int, folder: Path) -> Any:
    """Losses, samples and held-out losses of a few steps on windows of two sources."""
    session, said = session_in(folder, rank, world, "train.steps=3", "evaluate.samples=8")
    data, _ = load_prepared(folder / "prepared")
    train_on(session, data, data)
    lines = read_metrics(session.run.metrics_file)
    return (
        [line.samples_digest for line in lines],
        said.of(log.Evaluated),
        said.of(log.BaselineEvaluated),
    )


@pytest.mark.ranks
def test_the_built_in_trainer_trains_on_a_mixture_and_evaluates_it_by_source(tmp_path):
    Scene(tmp_path)
    spec = load_job(tmp_path / "job.yaml").spec
    documents = [list(range(1, 200)), [7, 8] * 150, list(range(250, 3, -1))]
    sources = {"up": documents[:1], "others": documents[1:]}
    weights = (3.0, 1.0)
    folder = tmp_path / "prepared"
    prepare(folder, sources, seq_len=spec.data.seq_len, pack="windows", vocab=256, weights=weights)
    ((digests, evaluated, baselines),) = run_ranks(train_on_prepared, 1, tmp_path)
    order = load_prepared(folder)[0].order
    digest_of = pure_digest(spec.train.seed, spec.train.global_batch, order)
    assert digests == [digest_of(step) for step in (1, 2, 3)]
    assert [set(event.by_source) for event in evaluated] == [{"up", "others"}] * len(evaluated)
    least, most = sorted(evaluated[-1].by_source.values())
    assert least < evaluated[-1].loss < most
    assert baselines == []
