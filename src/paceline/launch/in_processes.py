"""`map` over several processes of this machine, for work that is Python alone."""

import contextlib
import mmap
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

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
        with multiprocessing.get_context("fork").Pool(num, _ends_quietly) as pool:
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


class _Process(NamedTuple):
    process: multiprocessing.process.BaseProcess
    connection: Connection
    memory: mmap.mmap
    """The block, shared with the process: through the connection it would be copied four times."""


class MapAhead:
    """Calls one function on items in processes, one item ahead in each, and gives pairs in order.

    The first items are done here; the processes are then forked, with what the function knows by
    then, and kept until the context ends. Memory holds one item for each process.

    Args:
        alone: Items that are done here.
        most_bytes: Of one item's block.
    """

    def __init__(self, alone: int, most_bytes: int = 4 << 20) -> None:
        self._alone = alone
        self._most_bytes = most_bytes
        self._processes: list[_Process] = []

    def __call__(
        self, function: Callable[[Item], _T], items: Iterable[Item]
    ) -> Iterator[tuple[Item, _T]]:
        """Each item and what the function gives for it: the same function in every call."""
        left = iter(items)
        for item in islice(left, self._alone if _num_cores() > 1 else None):
            self._alone -= _num_cores() > 1
            yield item, function(item)
        waiting: deque[tuple[Item, Connection]] = deque()
        num = min(_num_cores(), _MOST_AHEAD)
        for item, number in zip(left, cycle(range(num))):
            if number == len(self._processes):
                self._fork(function)
            _, connection, memory = self._processes[number]
            done = None
            if len(waiting) == num:
                oldest = waiting.popleft()[0]
                done = oldest, _result(connection, function, oldest)
            block, more = item
            with contextlib.suppress(OSError):  # a process that was killed: `_result` does its work
                memory[: len(block)] = block
                connection.send((len(block), more))
            waiting.append((item, connection))
            if done is not None:
                yield done
        for item, connection in waiting:
            yield item, _result(connection, function, item)

    def _fork(self, function: Callable[[Item], Any]) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        memory = mmap.mmap(-1, self._most_bytes)
        not_theirs = [*(each.connection for each in self._processes), ours]
        arguments = (theirs, not_theirs, memory, function)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._processes.append(_Process(process, ours, memory))

    @property
    def processes(self) -> Sequence[multiprocessing.process.BaseProcess]:
        """Those that were started."""
        return [each.process for each in self._processes]

    def __enter__(self) -> "MapAhead":
        return self

    def __exit__(self, *error: object) -> None:
        for process, connection, _ in self._processes:
            connection.close()
            process.terminate()
            process.join()


def _result(connection: Connection, function: Callable[[Item], _T], item: Item) -> _T:
    try:
        found: _T = connection.recv()
    except (EOFError, OSError):
        return function(item)
    return found


def _serve(
    connection: Connection,
    not_ours: Sequence[Connection],
    memory: mmap.mmap,
    function: Callable[[Item], Any],
) -> None:
    _ends_quietly()
    for each in not_ours:  # so that this process ends when its parent does
        each.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            size, more = connection.recv()
            connection.send(function((memory[:size], more)))
