"""Micro-batches are read ahead in a thread: the same ones, at most two, and errors in place."""

import threading

import pytest
import torch

from paceline.parallel.layout import Layout
from paceline.runtime import feed as module
from paceline.runtime.batches import Batches
from paceline.runtime.feed import Feed
from paceline.runtime.sampling import DataRank, rank_slots, sample_ids

RANK = DataRank(
    seed=3,
    layout=Layout(data=2, sharding="none", micro_batch=2, accumulation=3),
    rank=1,
    batches=Batches(12),
)
PLACES = [(step, index) for step in range(1, 7) for index in range(3)]
LIMIT_S = 60.0
"""Nothing here takes as long; only a broken feed waits for it."""


class Device:
    """An accelerator's module, of which a feed's thread asks one thing."""

    def __init__(self) -> None:
        self.devices: list[tuple[str, torch.device]] = []

    def set_device(self, device: torch.device) -> None:
        self.devices.append((threading.current_thread().name, device))


@pytest.fixture
def accelerator(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(module, "pins_memory", lambda _: False)
    return device


def a_feed(samples, *, ahead: bool = True) -> Feed:
    return Feed(samples, 50, rank=RANK, device=torch.device("cuda", 1), ahead=ahead)


def ids_of(place) -> list[int]:
    step, index = place
    slots = rank_slots(RANK.layout, 1)[index]
    return sample_ids(step - 1, slots, seed=3, global_batch=12, num_samples=50).tolist()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_feed_gives_every_micro_batch_its_samples(accelerator, ahead):
    feed = a_feed(lambda ids: -ids, ahead=ahead)
    for place in PLACES:
        fed = feed.take(place)
        assert fed.ids.tolist() == ids_of(place)
        assert (fed.batch == -fed.ids).all()
        assert bool(fed.digest) is (place[1] == 0)


def test_the_thread_computes_on_the_ranks_device(accelerator):
    a_feed(len).take((1, 0))
    ((thread, device),) = accelerator.devices
    assert thread.startswith("paceline-feed")
    assert device == torch.device("cuda", 1)


def test_the_coming_micro_batch_is_read_before_it_is_asked_for(accelerator):
    second = threading.Event()

    def samples(ids):
        if ids.tolist() == ids_of((1, 1)):
            second.set()
        return ids

    feed = a_feed(samples)
    feed.take((1, 0))
    assert second.wait(LIMIT_S)


def test_no_more_than_two_micro_batches_are_ahead(accelerator):
    read = []
    feed = a_feed(lambda ids: read.append(ids.tolist()) or ids)
    for number, place in enumerate(PLACES, 1):
        feed.take(place)
        assert number <= len(read) <= number + 2
    assert read[: len(PLACES)] == [ids_of(place) for place in PLACES]


def test_on_a_cpu_nothing_is_read_ahead():
    read = []
    feed = Feed(read.append, 50, rank=RANK, device=torch.device("cpu"), ahead=True)
    feed.take((1, 0))
    assert len(read) == 1


@pytest.mark.parametrize("again", [(1, 0), (2, 0), (5, 1)])
def test_a_step_out_of_order_gets_its_own_samples(accelerator, again):
    feed = a_feed(lambda ids: ids)
    for place in [*PLACES[:4], again, RANK.after(again)]:
        assert feed.take(place).batch.tolist() == ids_of(place)


def test_an_error_comes_with_the_micro_batch_that_raised_it_and_no_other(accelerator):
    bad = ids_of((1, 2))

    def samples(ids):
        if ids.tolist() == bad:
            raise OSError("the disk is gone")
        return ids

    feed = a_feed(samples)
    errors = {place: feed.take(place).error for place in PLACES}
    assert str(errors.pop((1, 2))) == "the disk is gone"
    assert set(errors.values()) == {None}
