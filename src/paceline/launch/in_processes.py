"""`map` over several processes of this machine, for work that is Python alone."""

import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from typing import Any, TypeVar

_T = TypeVar("_T")
_A = TypeVar("_A")

_FEWEST = 32
"""Items below which starting processes takes longer than it saves. A guess."""

_MOST_AHEAD = 4
"""Processes that call ahead. A guess: whoever gives them items has a quarter of their work."""

_function: Callable[[Any], Any] | None = None
"""What the processes call: they are forked with it, so that nothing of it is sent."""


def map_in_processes(function: Callable[[_A], _T], items: Sequence[_A]) -> Iterable[_T]:
    """What a function gives for each item, in any order. Only items and results are sent.

    A few items, or where processes cannot be forked: in this process.
    """
    global _function
    num = min(_num_cores(), len(items) // _FEWEST)
    if num < 2:
        yield from map(function, items)
        return
    _function = function
    try:
        with get_context("fork").Pool(num, _ends_quietly) as pool:
            yield from pool.imap_unordered(_call, items, chunksize=8)
    finally:
        _function = None


def _ends_quietly() -> None:
    """A process of the pool: Ctrl-C is its parent's, which ends it by a signal that it obeys."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)


def _num_cores() -> int:
    """Cores that forked processes may use: one where forking is not safe."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


Item = tuple[bytes, Any]
"""A block of bytes, and what else the function is to know."""


class MapAhead:
    """Calls one function on items in processes, one item ahead in each, and gives pairs in order.

    The first items are done here; the processes are then forked, with what the function knows by
    then, and kept until the context ends. Memory holds one item for each process.
    """

    def __init__(self, alone: int) -> None:
        """Args:
        alone: Items that are done here.
        """
        self._alone = alone
        self._pool: ProcessPoolExecutor | None = None

    def __call__(
        self, function: Callable[[Item], _T], items: Iterable[Item]
    ) -> Iterator[tuple[Item, _T]]:
        """Each item and what the function gives for it: the same function in every call."""
        left = iter(items)
        for item in islice(left, self._alone if _num_cores() > 1 else None):
            self._alone -= _num_cores() > 1
            yield item, function(item)
        num = min(_num_cores(), _MOST_AHEAD)
        waiting: deque[tuple[Item, Future[_T] | None]] = deque()
        for item in left:
            waiting.append((item, self._ahead(function, item, num)))
            if len(waiting) > num:
                oldest, future = waiting.popleft()
                yield oldest, _result(future, function, oldest)
        for item, future in waiting:
            yield item, _result(future, function, item)

    def _ahead(self, function: Callable[[Item], _T], item: Item, num: int) -> "Future[_T] | None":
        """None where the processes were killed."""
        global _function
        if self._pool is None:
            _function = function
            self._pool = ProcessPoolExecutor(num, get_context("fork"), _ends_quietly)
        with contextlib.suppress(BrokenProcessPool):
            return self._pool.submit(_call, item)
        return None

    def __enter__(self) -> "MapAhead":
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _result(future: "Future[_T] | None", function: Callable[[Item], _T], item: Item) -> _T:
    if future is not None:
        with contextlib.suppress(BrokenProcessPool):
            return future.result()
    return function(item)
