"""Batches of an iterable that keeps a state, at any step again.

The iterable has torchdata's protocol: `state_dict` and `load_state_dict`. Each checkpoint holds the
state of every data rank. Between two checkpoints a rank that needs another step (a new process, or
one that went back) starts from the newest state before it and draws forward; a rank that only lost
the step under way has that step's batches still.

Leaves out: another number of data ranks, or batches of another size. Who had drawn what cannot be
shared out anew, so it is refused.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import xxhash

from paceline.errors import RunError
from paceline.record.checkpoints import list_checkpoints
from paceline.runtime.checkpoint.state_files import StateFiles
from paceline.runtime.determinism import own_random
from paceline.runtime.feed import Fed
from paceline.runtime.sampling import DataRank, Place
from paceline.runtime.state import DATA

_ROUND_BYTES = 4096
"""States are filled up to a multiple, as a save is planned anew when a length has changed."""


class Stateful(Protocol):
    """What torchdata's loaders and `datasets`' iterables are."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """What a checkpoint holds of one data rank."""

    state: dict[str, Any]
    drawn: int
    epoch: int
    in_epoch: int
    batches: tuple[int, int, int]
    """Data ranks, accumulation and micro-batch it was drawn for."""


class Stream:
    """One data rank's batches. `Session.stream` makes one; `Step.batches` takes from it."""

    def __init__(self, name: str, make: Callable[[int, int], Stateful], folder: Path) -> None:
        """Args:
        make: `(data rank, data ranks)` -> that rank's iterable, at its beginning.
        """
        self.name = name
        self._make, self._folder = make, folder
        self._number = xxhash.xxh3_64_intdigest(name.encode())
        """In the seeds of its random numbers."""

        self._rank: DataRank | None = None
        self._source: Stateful | None = None
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._in_epoch = 0
        """Batches drawn of this epoch."""

        self._drawn = 0
        """Batches since the run's beginning."""

        self._again: list[Any] = []
        """Those that were drawn last, of one step: it may have to be computed again."""

    def join(self, rank: DataRank) -> None:
        """A generation begins, in which this process is that data rank.

        Raises:
            RunError: `R067`, batches were drawn for another number of data ranks.
        """
        before, self._rank = self._rank, rank
        if before is None or before == rank:
            return
        if self._drawn and _batches(before) != _batches(rank):
            self._refuse(_batches(before))
        self._source = self._iterator = None

    def take(self, place: Place) -> Fed:
        """The batch of this place."""
        assert self._rank is not None, "session.steps comes first"
        number = (place[0] - 1) * self._rank.layout.accumulation + place[1]
        first = self._drawn - len(self._again)
        if self._source is not None and first <= number < self._drawn:
            return Fed(batch=self._again[number - first])
        self._seek(number)
        if place[1] == 0:
            self._again = []
        try:
            batch = self._draw()
        except Exception as error:  # noqa: BLE001 - whatever it is, the step raises it
            self._source = None
            return Fed(error=error)
        self._again.append(batch)
        return Fed(batch=batch)

    def saved(self, step: int) -> dict[str, bytes]:
        """This data rank's state after a step, by its name in a checkpoint."""
        assert self._rank is not None, "session.steps comes first"
        self._seek(step * self._rank.layout.accumulation)
        assert self._source is not None
        with own_random():
            state = self._source.state_dict()
        saved = _Saved(
            state=state,
            drawn=self._drawn,
            epoch=self._epoch,
            in_epoch=self._in_epoch,
            batches=_batches(self._rank),
        )
        content = pickle.dumps(saved)
        return {self._key(self._rank.rank): content + bytes(-len(content) % _ROUND_BYTES)}

    def _key(self, rank: int) -> str:
        return f"{DATA}{self.name}/{rank}"

    def _seek(self, number: int) -> None:
        """Have so many batches drawn, from the newest state before."""
        if self._source is not None and self._drawn == number:
            return
        self._again = []
        if self._source is None or self._drawn > number:
            self._start(self._newest(number))
        while self._drawn < number:
            self._draw()

    def _newest(self, number: int) -> _Saved | None:
        """The newest state of this data rank at this batch or before; None at the beginning.

        Raises:
            RunError: `R067`, it is of another number of data ranks.
        """
        rank = self._rank
        assert rank is not None
        for entry in list_checkpoints(self._folder):
            files = StateFiles(entry.path)
            mine = [name for name in files.names if name.startswith(f"{DATA}{self.name}/")]
            if not mine:
                continue
            key = self._key(rank.rank)
            saved: _Saved = pickle.loads(files.value(key if key in mine else mine[0]))
            if saved.drawn <= number:
                if saved.batches != _batches(rank):
                    self._refuse(saved.batches)
                return saved
        return None

    def _start(self, saved: _Saved | None) -> None:
        rank = self._rank
        assert rank is not None
        self._iterator, self._epoch, self._in_epoch, self._drawn = None, 0, 0, 0
        with own_random() as draw:
            draw(rank.seed, self._number)
            self._source = self._make(rank.rank, rank.layout.data)
        if not hasattr(self._source, "state_dict") or not hasattr(self._source, "load_state_dict"):
            raise RunError.of(
                code="R066",
                what=f"stream {self.name}: a {type(self._source).__name__} keeps no state "
                "(state_dict, load_state_dict), so no step could be resumed",
                where="program",
                fix="make a torchdata StatefulDataLoader, or give a map-style Dataset to "
                "session.loader",
            )
        if saved is not None:
            self._epoch, self._in_epoch, self._drawn = saved.epoch, saved.in_epoch, saved.drawn
            with own_random():
                self._source.load_state_dict(saved.state)

    def _draw(self) -> Any:
        """The next batch; an iterable that ends begins again, as its next epoch."""
        rank = self._rank
        assert rank is not None
        assert self._source is not None
        with own_random() as draw:
            for _ in range(2):
                # An epoch begins alike on all data ranks, which may share out one order.
                draw(rank.seed, self._number, self._epoch)
                if self._iterator is None:
                    if hasattr(self._source, "set_epoch"):
                        self._source.set_epoch(self._epoch)
                    self._iterator = iter(self._source)
                if self._in_epoch:
                    draw(rank.seed, self._number, rank.rank, self._drawn)
                try:
                    batch = next(self._iterator)
                except StopIteration:
                    self._iterator, self._epoch, self._in_epoch = None, self._epoch + 1, 0
                    continue
                self._drawn, self._in_epoch = self._drawn + 1, self._in_epoch + 1
                return batch
        raise RunError.of(
            code="R066",
            what=f"stream {self.name} has no batch on data rank {rank.rank}",
            where="program",
            fix="give every data rank at least one batch",
        )

    def _refuse(self, drawn_for: tuple[int, int, int]) -> NoReturn:
        assert self._rank is not None
        names = ("data ranks", "micro-batches a step", "samples a micro-batch")
        before, now = (
            ", ".join(f"{value} {name}" for name, value in zip(names, each, strict=True))
            for each in (drawn_for, _batches(self._rank))
        )
        raise RunError.of(
            code="R067",
            what=f"stream {self.name} was read for {before}, and now there are {now}: its state "
            "cannot be shared out anew",
            where="program",
            fix=f"resume on {drawn_for[0]} data ranks (`recovery.shrink: false` waits for them), "
            "or give a map-style Dataset to session.loader, which any number of ranks may read",
        )


def states(streams: Mapping[str, Stream], step: int) -> dict[str, bytes]:
    """What a checkpoint after a step holds of this rank's streams."""
    return {name: state for each in streams.values() for name, state in each.saved(step).items()}


def _batches(rank: DataRank) -> tuple[int, int, int]:
    return rank.layout.data, rank.layout.accumulation, rank.layout.micro_batch
