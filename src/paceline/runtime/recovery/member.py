"""How a worker gets a place among the ranks: told by the controller, or known from the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.control import messages as say
from paceline.control.slots import Phase
from paceline.parallel.layout import Layout
from paceline.record.run import RunFolder
from paceline.runtime.channel import Channel
from paceline.runtime.devices import DEVICES, device_of, synchronize
from paceline.runtime.faults import Faults
from paceline.runtime.own_gpu import check_own_gpu
from paceline.runtime.progress import Progress
from paceline.runtime.recovery.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who this worker is."""

    rank: int
    world_size: int
    local_rank: int
    generation: int
    """Which set of workers this is, from 1."""

    device: torch.device


class Membership(Protocol):
    """A worker's part in one generation after the other."""

    @property
    def generation(self) -> int:
        """The one it is in; 0 before its first."""

    @property
    def layout(self) -> Layout | None:
        """How the work is split in this generation; None as planned."""

    @property
    def skipped(self) -> Mapping[int, Sequence[int]]:
        """Steps that every rank of this generation leaves out, and the samples on whose account."""

    def join(self) -> tuple[Place, Faults]:
        """Wait for a place in the next one, and form the default process group. Collective."""

    def opening(self) -> AbstractContextManager[None]:
        """Around whatever makes more process groups."""

    def settle(self, device: torch.device) -> None:
        """Wait for the device; raise unless all that it was to receive until now has come."""

    def leave(self) -> None:
        """Be in no group any more."""


class Member:
    """A worker that an agent started: the controller says when it is who."""

    def __init__(
        self,
        *,
        channel: Channel,
        groups: Groups,
        run: RunFolder,
        backend: str,
        progress: Progress,
    ) -> None:
        self._progress = progress
        self._channel = channel
        self._groups = groups
        self._run = run
        self._backend = backend
        self._layout: Layout | None = None
        self._skipped: Mapping[int, Sequence[int]] = {}

    @property
    def generation(self) -> int:
        return self._channel.generation

    @property
    def layout(self) -> Layout | None:
        return self._layout

    @property
    def skipped(self) -> Mapping[int, Sequence[int]]:
        return self._skipped

    def join(self) -> tuple[Place, Faults]:
        if not self.generation:
            host, port = self._groups.address
            self._channel.send(say.Ready(host=host, port=port))
        self._progress.enter(Phase.PARKED)
        order = self._channel.wait_for_join()
        self._progress.begin(order.generation)
        self._progress.enter(Phase.JOINING)
        self._take_log(order.rank)
        self._layout, self._skipped = order.layout, order.skipped
        if DEVICES[self._backend].type == "cuda":
            check_own_gpu(order.local_rank, is_first=order.is_first)
        device = device_of(self._backend, order.local_rank)
        faults = Faults(order.faults, rank=order.rank, channel=self._channel)
        faults.pass_by("meet", 0)
        self._groups.join(order, device)
        place = Place(
            rank=order.rank,
            world_size=dist.get_world_size(),
            local_rank=order.local_rank,
            generation=order.generation,
            device=device,
        )
        return place, faults

    @contextmanager
    def opening(self) -> Iterator[None]:
        with self._groups.opening():
            yield

    def settle(self, device: torch.device) -> None:
        self._groups.settle(device)

    def leave(self) -> None:
        self._groups.leave()

    def _take_log(self, rank: int) -> None:
        """Everything this process prints from now on is of this rank."""
        if os.environ.get("RANK") == str(rank):
            return
        os.environ["RANK"] = str(rank)
        sys.stdout.flush()
        sys.stderr.flush()
        with self._run.rank_log(rank).open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)


class Settled:
    """A rank whose process group stands and stays: in `bench`, and in tests."""

    def __init__(self, place: Place, faults: Faults) -> None:
        self._place = place
        self._faults = faults

    @property
    def generation(self) -> int:
        return self._place.generation

    @property
    def layout(self) -> Layout | None:
        return None

    @property
    def skipped(self) -> Mapping[int, Sequence[int]]:
        return {}

    def join(self) -> tuple[Place, Faults]:
        return self._place, self._faults

    @contextmanager
    def opening(self) -> Iterator[None]:
        yield

    def settle(self, device: torch.device) -> None:
        synchronize(device)

    def leave(self) -> None:
        pass
