"""The samples of the coming micro-batches, read in a thread while the device computes.

Which samples a micro-batch has is known beforehand, so a feed has no state to restore: what is
asked for out of order (a step computed again, one left out) drops what was read, and a new
generation makes a new feed.

Leaves out: decoding in other processes (`loader.py`), and a CPU's ranks, which read in the step:
a thread beside them would compete for the cores that compute.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.runtime.devices import is_accelerator, pins_memory
from paceline.runtime.sampling import DataRank, Ids, Mixture, Place

_DEPTH = 2
"""Micro-batches that are read ahead: one while the device computes, one more for a slow read. A
guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """One micro-batch, or why it could not be read."""

    batch: Any = None
    ids: Ids | None = None
    """Its samples; None where they have no numbers."""

    digest: str = ""
    """Digest of the ids of the whole step, with its first micro-batch."""

    error: Exception | None = None
    """Raised by the step that takes it."""


class Source(Protocol):
    """Gives a step its micro-batches."""

    def take(self, place: Place) -> Fed:
        """The micro-batch of this place."""


class Feed:
    """Micro-batches that are a function of their samples' ids."""

    def __init__(
        self,
        samples: Callable[[Ids], Any],
        num_samples: int | Mixture,
        *,
        rank: DataRank,
        device: torch.device,
        ahead: bool,
    ) -> None:
        """Args:
        samples: Ids -> a micro-batch.
        ahead: Whether `samples` depends on the ids alone, so that it may be called in a thread.
            That needs an accelerator to pay.
        """
        self.reads = samples, num_samples
        """What it was made with."""

        self._rank, self._device = rank, device
        self._coming: deque[tuple[Place, Future[Fed]]] = deque()
        self._pool = _thread(device) if ahead and is_accelerator(device) else None

    def take(self, place: Place) -> Fed:
        """The micro-batch of this place; waits until it is read."""
        if self._pool is None:
            return self._read(place)
        if self._coming and self._coming[0][0] != place:
            for _, future in self._coming:
                future.cancel()
            self._coming.clear()
        newest = self._coming[-1][0] if self._coming else None
        while len(self._coming) <= _DEPTH:
            newest = place if newest is None else self._rank.after(newest)
            self._coming.append((newest, self._pool.submit(self._read, newest)))
        return self._coming.popleft()[1].result()

    def _read(self, place: Place) -> Fed:
        samples, num_samples = self.reads
        ids = self._rank.ids(place, num_samples)
        digest = "" if place[1] else self._rank.digest(place, num_samples)
        try:
            batch = samples(ids)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step raises it
            return Fed(ids=ids, digest=digest, error=error)
        if self._pool is not None and pins_memory(self._device):
            batch = tuple(each.pin_memory() for each in batch)
        return Fed(batch=batch, ids=ids, digest=digest)


def only_ids(ids: Ids) -> Ids:
    """The samples of a program that reads them itself."""
    return ids


def _thread(device: torch.device) -> ThreadPoolExecutor:
    """A thread on the device, without which pinning memory opens another device's context. It ends
    once nothing refers to its pool."""
    module = torch.get_device_module(device)
    return ThreadPoolExecutor(
        1, thread_name_prefix="paceline-feed", initializer=module.set_device, initargs=(device,)
    )
