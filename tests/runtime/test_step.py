"""One step without a run: what it asks of its hooks, and what an interruption leaves."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from paceline.parallel.layout import Layout
from paceline.runtime import strategy
from paceline.runtime.feed import Fed
from paceline.runtime.recovery.groups import Interrupted
from paceline.runtime.step import Step
from paceline.runtime.step_hooks import NO_HOOKS, NoHooks
from paceline.runtime.trainer import Trainer
from paceline.runtime.vote import Outcome

LAYOUT = Layout(data=1, sharding="none", micro_batch=2, accumulation=1)


class Alone:
    """What a step asks of the meshes, on one rank."""

    counts_loss = True
    layout, device_type = LAYOUT, "cpu"
    place = type("Place", (), {"data": 0, "context": 0, "pipeline": 0})


class Watched:
    """Hooks that note what happens, and raise where nothing more can be settled."""

    def __init__(self, *, settles: int = 9) -> None:
        self.happened: list[str] = []
        self.left = settles
        for name in ("enter", "pass_by", "see", "wishes", "fingerprint", "judge", "step_done"):
            setattr(self, name, getattr(NO_HOOKS, name))

    def settle(self, device: torch.device) -> None:
        self.left -= 1
        if self.left < 0:
            raise Interrupted
        self.happened.append("settled")

    def decided(self, outcome: Outcome) -> None:
        self.happened.append("decided")

    def updating(self) -> None:
        self.happened.append("updating")

    def updated(self, step: int) -> None:
        self.happened.append(f"updated to {step}")

    def after_update(self, step: int, seconds: float) -> None:
        pass


class Summing(torch.optim.SGD):
    """An optimizer that is not known to update each number by itself."""


@pytest.fixture(autouse=True)
def _on_one_rank(monkeypatch):
    """What goes over ranks."""
    monkeypatch.setattr(strategy, "send_buffers", lambda buffers, meshes: None)
    monkeypatch.setattr(strategy, "finish_gradients", lambda model: None)
    monkeypatch.setattr(strategy, "loss_factor", lambda layout, model: 1.0)
    monkeypatch.setattr(
        strategy, "gradient_norm", lambda model, meshes: next(model.parameters()).grad.norm()
    )


def voted(hooks, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> tuple[Step, nn.Module]:
    """A step whose gradients are there, about to be applied."""
    step, model = begun(hooks, kind)
    step.backward(model(torch.ones(2, 3)).square().mean())
    return step, model


def begun(hooks, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> tuple[Step, nn.Module]:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    trainer = Trainer(
        model=model,
        optimizer=kind(model.parameters(), lr=0.1),
        layout=LAYOUT,
        meshes=Alone(),  # type: ignore[arg-type]
        device=torch.device("cpu"),
        precision="fp32",
        seed=1,
        clip_norm=1.0,
        hooks=hooks,
    )
    return Step(7, trainer, 0.1), model


def test_nothing_is_decided_before_the_vote_is_settled():
    hooks = Watched()
    step, _ = voted(hooks)
    step.apply()
    assert hooks.happened == ["settled", "decided", "updating", "updated to 7"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, Summing])
def test_a_vote_that_was_aborted_is_not_applied(kind):
    hooks = Watched(settles=0)
    step, model = voted(hooks, kind)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(Interrupted):
        step.apply()
    assert hooks.happened == []
    assert (step.finished, step.loss) == (False, 0.0)
    assert all(map(torch.equal, before, model.parameters()))


def test_an_update_that_may_have_communicated_is_whole_only_once_it_is_settled():
    hooks = Watched(settles=1)
    step, _ = voted(hooks, Summing)
    with pytest.raises(Interrupted):
        step.apply()
    assert hooks.happened == ["settled", "decided", "updating"]
    assert not step.finished
    assert not step.can_roll


def test_without_hooks_a_step_only_trains():
    step, model = voted(NoHooks())
    before = model.weight.detach().clone()
    step.apply()
    assert step.finished
    assert not torch.equal(before, model.weight)


def test_the_rates_of_groups_keep_their_ratio():
    model = nn.Linear(3, 1)
    groups: Sequence[dict[str, object]] = [
        {"params": [model.weight], "lr": 0.2},
        {"params": [model.bias], "lr": 0.1},
    ]
    trainer = Trainer(
        model=model,
        optimizer=torch.optim.SGD(groups),
        layout=LAYOUT,
        meshes=Alone(),  # type: ignore[arg-type]
        device=torch.device("cpu"),
        precision="fp32",
        seed=1,
        clip_norm=None,
    )
    Step(1, trainer, 0.01)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.01, 0.005]


class Rows:
    """A source without ids."""

    def __init__(self, error: Exception | None = None) -> None:
        self.taken: list[tuple[int, int]] = []
        self.error = error

    def take(self, place: tuple[int, int]) -> Fed:
        self.taken.append(place)
        return Fed(batch=(torch.ones(2, 3), torch.zeros(2)), error=self.error)


def squared(output, targets):
    return (output.squeeze(1) - targets).square().sum(), targets.numel()


def test_the_wait_for_a_sources_batches_is_the_steps_own_part():
    source, (step, model) = Rows(), begun(NoHooks())
    for inputs, _ in step.batches(source):
        step.backward(model(inputs).square().mean())
    step.apply()
    assert source.taken == [(7, 0)]
    assert step.times.data_s is not None
    assert step.samples_digest == ""


def test_a_program_that_reads_its_samples_itself_has_the_wait_in_its_forward_part():
    step, model = begun(NoHooks())
    for ids in step.micro_batches(9):
        step.backward(model(torch.ones(len(ids), 3)).square().mean())
    step.apply()
    assert step.times.data_s is None
    assert step.times.forward_s is not None
    assert len(step.samples_digest) == 16


@pytest.mark.parametrize("how", ["batches", "train_on", "train"])
def test_what_reading_raised_comes_out_of_the_step_with_its_place(how):
    error = OSError("the disk is gone")
    step, _ = begun(NoHooks())

    def samples(ids):
        raise error

    reads = {
        "batches": lambda: list(step.batches(Rows(error))),
        "train_on": lambda: step.train_on(Rows(error), loss_of=squared),
        "train": lambda: step.train(samples, 9, loss_of=squared, ahead=True),
    }
    with pytest.raises(OSError, match="the disk is gone") as raised:
        reads[how]()
    (note,) = raised.value.__notes__
    assert note.startswith("while step 7 read its data")
    assert ("samples [" in note) == (how == "train")
    assert len(step.samples_at) == (2 if how == "train" else 0)
