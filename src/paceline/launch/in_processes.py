"""`map` over several processes of this machine, for work that is Python alone."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")
_A = TypeVar("_A")

_FEWEST = 32
"""Items below which starting processes takes longer than it saves. A guess."""

_function: Callable[[Any], Any] | None = None
"""What the processes call: they are forked with it, so that nothing of it is sent."""


def map_in_processes(function: Callable[[_A], _T], items: Sequence[_A]) -> Iterable[_T]:
    """What a function gives for each item, in any order. Only items and results are sent.

    A few items, or where processes cannot be forked: in this process.
    """
    global _function
    num = min(len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1, len(items) // _FEWEST)
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
