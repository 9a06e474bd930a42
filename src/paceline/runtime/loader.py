"""The samples of a map-style `Dataset` by number, decoded by worker processes where that costs.

PyTorch's own DataLoader does the work. What it reads is a function of (seed, step, slot), so there
is no loader state: after a recovery, or with another number of ranks, its workers start again at
the micro-batch that is due. Random numbers that a sample is made with are its own as well.

Leaves out: iterables (`stream.py`).
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from paceline.control.parent import die_with_parent
from paceline.errors import RunError
from paceline.runtime.determinism import own_random
from paceline.runtime.devices import pins_memory
from paceline.runtime.feed import Fed
from paceline.runtime.sampling import DataRank, Place

Key = tuple[int, int]
"""Position in the run, which a sample's random numbers follow from, and the sample's id."""


class MapStyle(Protocol):
    """What torch calls a map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Loader:
    """Micro-batches of a dataset. `Session.loader` makes one; `Step.batches` takes from it."""

    def __init__(
        self, dataset: MapStyle, *, collate_fn: Callable[[list[Any]], Any] | None, num_workers: int
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise RunError.of(
                code="R066",
                what=f"session.loader was given a {type(dataset).__name__}, which has no length or "
                "no samples by number",
                where="program",
                fix="give the Dataset itself (of a DataLoader its .dataset), or give "
                "session.stream an iterable that keeps a state",
            )
        if not len(dataset) or num_workers < 0:
            raise RunError.of(
                code="R066",
                what=f"session.loader was given {len(dataset)} samples and num_workers "
                f"{num_workers}",
                where="program",
                fix="give a Dataset with samples, and num_workers of 0 or more",
            )
        self._dataset, self._collate, self._num_workers = dataset, collate_fn, num_workers
        self._rank: DataRank | None = None
        self._pins = False
        self._iterator: Iterator[Any] | None = None
        self._next: Place = (0, 0)

    def join(self, rank: DataRank, device: torch.device) -> None:
        """A generation begins, in which this process is that data rank."""
        self.leave()
        self._rank, self._pins = rank, pins_memory(device)

    def leave(self) -> None:
        self._iterator = None

    def take(self, place: Place) -> Fed:
        """The micro-batch of this place; waits until it is decoded."""
        rank, num_samples = self._rank, len(self._dataset)
        assert rank is not None, "session.steps comes first"
        ids = rank.ids(place, num_samples)
        digest = "" if place[1] else rank.digest(place, num_samples)
        if self._iterator is None or place != self._next:
            self._iterator = self._begin(rank, place)
        try:
            batch = next(self._iterator)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step raises it
            self._iterator = None
            return Fed(ids=ids, digest=digest, error=error)
        self._next = rank.after(place)
        return Fed(batch=batch, ids=ids, digest=digest)

    def _begin(self, rank: DataRank, place: Place) -> Iterator[Any]:
        self._iterator = None  # its workers end before others start
        loader: DataLoader[Any] = DataLoader(
            _Seeded(self._dataset, rank.seed),  # type: ignore[arg-type]
            batch_sampler=_Coming(rank, len(self._dataset), place),
            collate_fn=self._collate,
            num_workers=self._num_workers,
            pin_memory=self._pins,
            worker_init_fn=partial(_begin_worker, os.getpid()),
            generator=torch.Generator(),  # else it draws from the step's
        )
        return iter(loader)


@dataclass(frozen=True, slots=True)
class _Coming:
    """The keys of every micro-batch from a place on."""

    rank: DataRank
    num_samples: int
    place: Place

    def __iter__(self) -> Iterator[list[Key]]:
        rank, place = self.rank, self.place
        while True:
            start = rank.batches.start(place[0])
            ids = rank.ids(place, self.num_samples).tolist()
            yield [(start + slot, each) for slot, each in zip(rank.slots(place), ids, strict=True)]
            place = rank.after(place)


class _Seeded:
    """A dataset whose samples draw their random numbers from their position in the run."""

    def __init__(self, dataset: MapStyle, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        with own_random() as draw:
            samples = []
            for position, number in keys:
                draw(self._seed, position)
                samples.append(self._dataset[number])
        return samples


def _begin_worker(parent: int, number: int) -> None:
    """A worker ends with its rank, also if that is killed, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() == parent:  # not where Python starts processes from a server
        die_with_parent(parent)
