"""An iterable with a state gives the same batches at any step again, or is refused by name."""

import numpy as np
import pytest
import torch

from paceline.errors import RunError
from paceline.parallel.layout import Layout
from paceline.runtime.batches import Batches
from paceline.runtime.checkpoint.state_files import write_state
from paceline.runtime.sampling import DataRank
from paceline.runtime.stream import Stream

PER_STEP = 2
LENGTH = 7
"""Batches in an epoch: no multiple of a step's."""


class Counted:
    """A stateful iterable whose order and samples are drawn. Knows how often it was asked."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.at, self.order, self.given = 0, None, 0

    def __iter__(self):
        if self.order is None:
            self.order = torch.randperm(LENGTH * self.ranks).tolist()[self.rank :: self.ranks]
        while self.at < LENGTH:
            self.at += 1
            self.given += 1
            yield self.order[self.at - 1], np.random.rand()
        self.at, self.order = 0, None

    def state_dict(self):
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state):
        self.at, self.order = state["at"], state["order"]


def data_rank(rank: int = 0, data: int = 2, accumulation: int = PER_STEP) -> DataRank:
    where = Layout(data=data, sharding="none", micro_batch=3, accumulation=accumulation)
    return DataRank(seed=9, layout=where, rank=rank, batches=Batches(where.global_batch))


class Scene:
    """One rank's stream over its processes; every iterable that they made."""

    def __init__(self, folder, rank: DataRank | None = None) -> None:
        self.folder, self.rank = folder, rank or data_rank()
        self.made: list[Counted] = []
        self.start()

    def start(self) -> None:
        """A new process."""
        self.stream = Stream("rows", self.make, self.folder)
        self.stream.join(self.rank)

    def make(self, rank: int, ranks: int) -> Counted:
        self.made.append(Counted(rank, ranks))
        return self.made[-1]

    def take(self, *steps: int) -> list:
        """What these steps read."""
        places = [(step, index) for step in steps for index in range(PER_STEP)]
        fed = [self.stream.take(place) for place in places]
        assert not any(each.error for each in fed)
        return [each.batch for each in fed]

    def save(self, step: int) -> None:
        states = self.stream.saved(step)
        write_state(
            self.folder,
            {name: lambda v=value: v for name, value in states.items()},
            step,
        )


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


@pytest.fixture
def undisturbed(tmp_path):
    """Batches of the first twelve steps: three epochs."""
    found = Scene(tmp_path / "undisturbed").take(*range(1, 13))
    return {step: found[PER_STEP * (step - 1) : PER_STEP * step] for step in range(1, 13)}


def test_data_ranks_share_out_one_order_and_each_epoch_has_another(tmp_path):
    steps = range(1, 12)
    by_rank = [Scene(tmp_path, data_rank(rank)).take(*steps) for rank in (0, 1)]
    for start in (0, LENGTH, 2 * LENGTH):
        epoch = [place for found in by_rank for place, _ in found[start : start + LENGTH]]
        assert sorted(epoch) == list(range(2 * LENGTH))
    assert by_rank[0][:LENGTH] != by_rank[0][LENGTH : 2 * LENGTH]
    assert len({drawn for found in by_rank for _, drawn in found}) > 2 * len(steps)


@pytest.mark.parametrize("saved", [1, 3, 7])  # 7: an epoch has just been drawn whole
def test_a_new_process_reads_on_where_the_checkpoint_was_made(scene, undisturbed, saved):
    scene.take(*range(1, saved + 1))
    scene.save(saved)
    scene.start()
    steps = range(saved + 1, 13)
    assert scene.take(*steps) == [each for step in steps for each in undisturbed[step]]
    assert scene.made[-1].given == PER_STEP * len(steps)


def test_a_new_process_draws_forward_from_the_newest_checkpoint_before_its_step(scene, undisturbed):
    scene.take(1, 2)
    scene.save(2)
    scene.take(3, 4, 5)
    scene.start()
    assert scene.take(5) == undisturbed[5]
    assert scene.made[-1].given == PER_STEP * 3


def test_without_a_checkpoint_it_draws_from_the_beginning(scene, undisturbed):
    assert scene.take(4) == undisturbed[4]


def test_a_step_that_was_interrupted_gets_its_batches_again_without_reading(scene, undisturbed):
    scene.take(1)
    scene.stream.take((2, 0))
    scene.stream.join(data_rank())
    assert scene.take(2, 2, 3) == undisturbed[2] * 2 + undisturbed[3]
    assert len(scene.made) == 1


def test_a_process_that_goes_back_reads_the_steps_again(scene, undisturbed):
    scene.take(1, 2)
    scene.save(2)
    scene.take(3, 4)
    scene.save(4)
    scene.take(5, 6)
    assert scene.take(4, 5) == undisturbed[4] + undisturbed[5]
    assert scene.made[-1].given == PER_STEP * 3


def test_batches_of_a_step_that_is_left_out_are_passed_over(scene, undisturbed):
    assert scene.take(1, 3) == undisturbed[1] + undisturbed[3]


def test_a_checkpoint_in_mid_step_holds_the_state_of_its_step(scene, undisturbed):
    scene.take(1)
    scene.stream.take((2, 0))
    scene.save(1)
    scene.start()
    assert scene.take(2) == undisturbed[2]


def test_reading_leaves_the_steps_own_random_numbers_alone(scene):
    np.random.seed(1), torch.manual_seed(1)
    scene.take(1)
    scene.stream.saved(1)
    found = np.random.rand(), torch.rand(())
    np.random.seed(1), torch.manual_seed(1)
    assert found == (np.random.rand(), torch.rand(()))


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (data_rank(data=1), "2 data ranks, 2 micro-batches a step"),
        (data_rank(accumulation=4), "4 micro-batches a step"),
    ],
)
def test_another_number_of_ranks_is_refused_by_name(scene, rank, words):
    scene.take(1, 2)
    with pytest.raises(RunError, match="R067") as live:
        scene.stream.join(rank)
    assert words in str(live.value)
    assert "session.loader" in live.value.problems[0].fix


def test_another_number_of_ranks_is_refused_in_a_new_process(scene):
    scene.take(1, 2)
    scene.save(2)
    scene.rank = data_rank(data=1)
    scene.start()
    with pytest.raises(RunError, match="R067"):
        scene.take(3)


def test_an_iterable_without_a_state_is_refused_by_name(tmp_path):
    stream = Stream("rows", lambda rank, ranks: [1, 2], tmp_path)  # type: ignore[arg-type,return-value]
    stream.join(data_rank())
    with pytest.raises(RunError, match=r"R066.*list keeps no state"):
        stream.take((1, 0))


def test_an_iterable_without_a_batch_is_no_endless_loop(scene, monkeypatch):
    monkeypatch.setattr(Counted, "__iter__", lambda self: iter(()))
    assert "R066" in str(scene.stream.take((1, 0)).error)
