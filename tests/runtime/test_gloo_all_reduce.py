"""DDP's all-reduce over gloo, and what becomes of whoever waits for it."""

import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.runtime.test_shard import decoder, layout_of
from torch import Tensor, nn
from torch.futures import Future

from paceline.runtime.strategy.data import gloo_all_reduce
from paceline.runtime.strategy.data.replica import Replica
from paceline.runtime.strategy.data.shard import shard
from paceline.runtime.strategy.mesh import make_meshes

pytestmark = pytest.mark.ranks


class Interruption(Exception):
    """What a test breaks waits off with."""


def backward_before_the_other(rank: int, world: int) -> tuple[str, float, list[bool]]:
    """What rank 0's backward pass raised, after how many seconds, and which of its all-reduces gloo
    had ended by then. Rank 1's begins later, so that gloo's own end well."""
    layout = layout_of(world, "none")
    model = shard(decoder(), layout, make_meshes(layout, "cpu"), "fp32")
    assert isinstance(model, Replica)
    store = dist.distributed_c10d._get_default_store()
    loss = model(torch.zeros(2, 8, dtype=torch.long)).sum()
    if rank:
        store.wait(["rank 0 is free"])
        loss.backward()
        return "", 0.0, []
    threading.Timer(
        0.3, gloo_all_reduce.break_off, [Interruption("this generation is over")]
    ).start()
    began = time.monotonic()
    try:
        loss.backward()
        raised = "nothing"
    except RuntimeError as error:
        raised = str(error)
    waited_s = time.monotonic() - began
    works = gloo_all_reduce.take_broken_off()
    had_ended = [work.is_completed() for work in works]
    assert gloo_all_reduce.take_broken_off() == []
    store.set("rank 0 is free", "yes")
    for work in works:
        work.wait()
    return raised, waited_s, had_ended


def test_a_backward_pass_that_waits_for_another_rank_can_be_broken_off():
    (raised, waited_s, had_ended), _ = run_ranks(backward_before_the_other, 2)
    assert "this generation is over" in raised
    assert 0.2 < waited_s < 120.0  # gloo itself would wait for half an hour
    assert had_ended
    assert not any(had_ended)


def reduce_thirds(rank: int, world: int) -> tuple[list[float], bool]:
    """The gradient of a weight whose ranks have gradients 1, 2 and 4; whether nothing is left."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    layout = layout_of(world, "none")
    replica = shard(model, layout, make_meshes(layout, "cpu"), "fp32")
    (replica(torch.full((1, 1), 2.0**rank)).sum()).backward()
    gradient: Tensor | None = model.weight.grad
    assert gradient is not None
    return (
        gradient.flatten().tolist(),
        not gloo_all_reduce._under_way and not gloo_all_reduce.take_broken_off(),
    )


def test_gradients_are_sums_over_the_ranks_and_nothing_is_kept_of_what_has_ended():
    assert run_ranks(reduce_thirds, 3) == [([7.0], True)] * 3


def step_that_waits_for_a_late_rank(rank: int, world: int) -> tuple[float, float]:
    """Seconds that rank 1 comes late to a backward pass, and its buckets' limit afterwards."""
    gloo_all_reduce._LEAST_S, gloo_all_reduce._TIMES_LONGEST = 0.5, 2.0
    layout = layout_of(world, "none")
    model = shard(decoder(), layout, make_meshes(layout, "cpu"), "fp32")
    assert isinstance(model, Replica)
    state = model._hook[0]
    assert isinstance(state, gloo_all_reduce.BucketSums)
    for _ in range(3):
        model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    late_s = state.limit_s + 2.0
    dist.barrier()
    loss = model(torch.zeros(2, 8, dtype=torch.long)).sum()
    if rank:
        time.sleep(late_s)
    loss.backward()
    return late_s, state.limit_s


def test_a_bucket_may_wait_longer_for_another_rank_than_its_own_limit():
    """What is broken off is let go of soon, and who is only late breaks nothing."""
    for late_s, limit_s in run_ranks(step_that_waits_for_a_late_rank, 2):
        assert limit_s < 2.0 * late_s  # the wait is not in it


class Bucket:
    """Something that a frame on the way of an error holds."""


def test_an_error_keeps_nothing_of_where_it_was_raised():
    ended: Future[Tensor] = Future()
    told = ended.then(lambda future: future.value())

    def settle(bucket: Bucket) -> "weakref.ref[Bucket]":
        try:
            raise RuntimeError("the peer is gone")
        except RuntimeError as error:
            gloo_all_reduce._fail(ended, error)
        return weakref.ref(bucket)

    held = settle(Bucket())
    with pytest.raises(RuntimeError, match="the peer is gone"):
        told.wait()
    assert held() is None
