"""DDP's all-reduce over gloo, with a wait that can be broken off.

When a connection breaks, gloo (torch 2.13, `Pair::signalException`) tells every operation that has
not begun, and none in the middle of a message: that one sleeps until the group's time limit, half
an hour, and so does DDP, which waits for its buckets in C++. Here it waits for futures of ours,
which end with the bucket's all-reduce or when `break_off` is called, whichever is first.

What was broken off sleeps on in gloo's thread and keeps its group, so a bucket's all-reduce has a
time limit of its own. It must not count how long another rank takes to come to it: each of a
group's threads is first given a sum of one number, which ends when all ranks are there and is too
short to be broken in the middle. The buckets are queued behind.

Leaves out: NCCL, which has `abort`; and FSDP2 and functional collectives, which wait for gloo
itself. A rank that does not come free of those is replaced.
"""

import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.runtime._torch_private import AllreduceOptions, GradBucket

_NUM_THREADS = 2
"""Threads of a gloo group. Source: torch 2.13, ProcessGroupGloo.hpp, `Options::threads`."""

_UNKNOWN_S = 300.0
"""Limit of a bucket until one backward pass has ended; what the controller gives a phase of a step
that has not been seen (`control/adaptive_timeouts.py`)."""

_LEAST_S = 60.0
"""Limit of a bucket afterwards, at least. A guess: six times what the controller gives a phase of a
step at least, so that it is the one who finds a rank late."""

_TIMES_LONGEST = 20.0
"""... or this many times the longest backward pass. A guess."""

_lock = threading.Lock()
_under_way: "dict[Future[Tensor], dist.Work]" = {}
_broken_off: list[dist.Work] = []


class BucketSums:
    """The state of the communication hook `sum_bucket`: gradients become their sums."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._limit = _Limit()

    @property
    def limit_s(self) -> float:
        """Time limit of the next bucket's all-reduce, from when all ranks have come to the
        first."""
        return self._limit.seconds

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Send a bucket."""
        if bucket.index() == 0:
            for _ in range(_NUM_THREADS):
                here = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
                assert here is not None  # this rank is in the group
                here.get_future().add_done_callback(self._limit.begin)
        gradients: Tensor = bucket.buffer()
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=self.limit_s)
        work = self._group.allreduce([gradients], options)
        ended: Future[Tensor] = Future()
        # An error becomes one that C++ raises only by way of `then`.
        told = ended.then(lambda future: future.value())
        with _lock:
            _under_way[ended] = work
        work.get_future().add_done_callback(partial(_settle, ended, gradients))
        if bucket.is_last():
            work.get_future().add_done_callback(self._limit.learn)
        return told


class _Limit:
    """How long a bucket may take, learned. Callbacks hold it, and never the group: gloo's thread
    drops them, and the last reference to a group ends the process when it goes there."""

    def __init__(self) -> None:
        self.seconds = _UNKNOWN_S
        self._began = 0.0
        self._longest_s = 0.0

    def begin(self, _: Future[Any]) -> None:
        """All ranks have come to their first bucket."""
        self._began = time.monotonic()

    def learn(self, _: Future[Any]) -> None:
        """The last bucket's sums are there."""
        self._longest_s = max(self._longest_s, time.monotonic() - self._began)
        self.seconds = max(_LEAST_S, _TIMES_LONGEST * self._longest_s)


def sum_bucket(state: BucketSums, bucket: GradBucket) -> Future[Tensor]:
    """The communication hook of `BucketSums`."""
    return state.reduce(bucket)


def _fail(ended: Future[Tensor], error: Exception) -> None:
    """End it with an error, which whoever waits is told in C++.

    On the way there the error is raised in Python. Its frames hold the future and the bucket, and
    the future holds the error: a circle that Python cannot see, and so never lets go of.
    """
    ended.set_exception(error)  # type: ignore[arg-type]
    error.__traceback__ = None


def _settle(ended: Future[Tensor], gradients: Tensor, done: Future[Any]) -> None:
    with _lock:
        if _under_way.pop(ended, None) is None:
            return  # broken off
    try:
        done.value()
    except RuntimeError as error:
        _fail(ended, error)
    else:
        ended.set_result(gradients)


def break_off(error: Exception) -> None:
    """Let everybody who waits for a bucket go with an error. Safe from any thread."""
    with _lock:
        waited_for = list(_under_way)
        _broken_off.extend(_under_way.values())
        _under_way.clear()
    for ended in waited_for:
        _fail(ended, error)


def take_broken_off() -> list[dist.Work]:
    """The all-reduces that were broken off, told once: gloo may not have ended them."""
    with _lock:
        works, _broken_off[:] = _broken_off[:], []
    return works
