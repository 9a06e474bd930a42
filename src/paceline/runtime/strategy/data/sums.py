"""DDP's all-reduce over gloo, with a wait that can be broken off.

When a connection breaks, gloo (torch 2.13, `Pair::signalException`) tells every operation that has
not begun, and none in the middle of a message: that one sleeps until the group's time limit, half
an hour, and so does DDP, which waits for its buckets in C++. Here it waits for futures of ours,
which end with the bucket's all-reduce or when `break_off` is called, whichever is first.

Leaves out: NCCL, which has `abort`; and FSDP2 and functional collectives, which wait for gloo
itself. A rank that does not come free of those is replaced.
"""

import threading
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

_lock = threading.Lock()
_under_way: "dict[Future[Tensor], dist.Work]" = {}
_broken_off: list[dist.Work] = []


def sum_bucket(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """The communication hook: gradients become their sums over the group's ranks."""
    gradients: Tensor = bucket.buffer()
    work = dist.all_reduce(gradients, group=group, async_op=True)
    assert work is not None  # this rank is in the group
    ended: Future[Tensor] = Future()
    with _lock:
        _under_way[ended] = work
    work.get_future().add_done_callback(partial(_settle, ended, gradients))
    # An error becomes one that C++ raises only by way of `then`.
    return ended.then(lambda future: future.value())


def _settle(ended: Future[Tensor], gradients: Tensor, done: Future[Any]) -> None:
    with _lock:
        if _under_way.pop(ended, None) is None:
            return  # broken off
    try:
        done.value()
    except RuntimeError as error:
        ended.set_exception(error)  # type: ignore[arg-type]
    else:
        ended.set_result(gradients)


def break_off(error: Exception) -> None:
    """Let everybody who waits for a bucket go with an error. Safe from any thread."""
    with _lock:
        waited_for = list(_under_way)
        _broken_off.extend(_under_way.values())
        _under_way.clear()
    for ended in waited_for:
        ended.set_exception(error)  # type: ignore[arg-type]


def take_broken_off() -> list[dist.Work]:
    """The all-reduces that were broken off, told once: gloo may not have ended them."""
    with _lock:
        works, _broken_off[:] = _broken_off[:], []
    return works
