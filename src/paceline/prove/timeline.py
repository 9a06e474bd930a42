"""The step in time: what every stage computes and sends, on streams, with what waits for what.

Each rank has a host that launches, one stream of kernels, and one stream for each group it talks
in. A collective begins when it is issued, its stream is free and what it sends is computed; kernels
wait where the traced code reads its result, and the host where it reads a value itself: how many
rows experts get. Stages wait for each other's sends.

As FSDP2 does on CUDA: gathers do not wait for compute but for the copy out of the gather before,
what follows a reduction of gradients runs on its stream, and a second reduce-scatter waits for the
first; DDP's all-reduces follow each other on theirs. (Read in torch 2.13,
distributed/fsdp/_fully_shard/_fsdp_collectives.py and csrc/distributed/c10d/reducer.cpp.)

One rank of each stage is simulated. What it receives from a rank that is not, such as another
context rank of a ring, arrives when its own send of the same turn does: such ranks do alike work.

Leaves out: contention between streams, stragglers, the data loader; the planner's rates are medians
of what was measured, so this is no measurement.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from paceline.prove.collectives import Issued
from paceline.prove.segments import Arrive, Compute, Issue, Read, Segment, Step, Wait
from paceline.units import counted

_REDUCTIONS = ("reduce-scatter", "all-reduce")


@dataclass(slots=True)
class RankTime:
    """One rank's step in seconds."""

    end_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    bubble_s: float = 0.0
    launch_s: float = 0.0
    offload_s: float = 0.0
    ends: list[float] = field(default_factory=list)
    """When each stretch ends."""

    events: list[dict[str, Any]] = field(default_factory=list)
    """For chrome://tracing."""


class WaitsForeverError(Exception):
    """Ranks that wait for each other's messages, which none sends."""


def simulate(
    steps: Sequence[Step],
    ranks: Sequence[int],
    seconds_of: Callable[[Issued], float],
    *,
    host_s: float,
    wants_events: bool = False,
) -> list[RankTime]:
    """One time for each rank, in order.

    Args:
        steps: Of one rank of each stage.
        ranks: Their numbers, by which sends find their receives.
        seconds_of: How long a collective takes.
        host_s: How long the host takes to launch one kernel.
        wants_events: Whether events are kept, which take memory.

    Raises:
        WaitsForeverError: Ranks would wait for each other forever.
    """
    post: _Post = {}
    simulated = frozenset(ranks)
    machines = [
        _Rank(step, rank, stage, seconds_of, host_s, post, simulated, wants_events)
        for stage, (step, rank) in enumerate(zip(steps, ranks, strict=True))
    ]
    running = {machine: machine.run() for machine in machines}
    while running:
        has_moved = False
        for machine, turns in list(running.items()):
            before = machine.num_done
            if next(turns, None) is None:
                del running[machine]
                has_moved = True
            has_moved |= machine.num_done > before
        if not has_moved:
            waiting = sorted(machine.waits_for for machine in running)
            raise WaitsForeverError(
                "; ".join(f"rank {each[0]} waits for rank {each[1]}" for each in waiting)
            )
    return [machine.time for machine in machines]


_Post = dict[tuple[int, int], list[float]]
"""Sender and receiver -> when each of its messages has arrived."""


class _Rank:
    """One rank's clocks."""

    def __init__(
        self,
        step: Step,
        rank: int,
        stage: int,
        seconds_of: Callable[[Issued], float],
        host_s: float,
        post: _Post,
        simulated: Set[int],
        wants_events: bool,
    ) -> None:
        self.time = RankTime()
        self.waits_for: tuple[int, ...] = (rank, rank)
        self.num_done = 0
        self._step = step
        self._rank = rank
        self._stage = stage
        self._seconds_of = seconds_of
        self._host_s = host_s
        self._post = post
        self._simulated = simulated
        self._wants_events = wants_events
        self._kernels = self._host = self._copies = self._copies_out = self._on_host = 0.0
        self._streams: dict[tuple[int, ...], float] = {}
        self._issued: list[tuple[Issued, float, int]] = []
        self._received: dict[int, int] = {}
        self._copied_out: dict[tuple[int, ...], float] = {}
        self._reduced: dict[tuple[int, ...], float] = {}
        self._just_copied_in = False

    def run(self) -> Iterator[bool]:
        """Goes on until it has to wait for another rank; True each time it does."""
        passing = None
        for segment in self._step.segments:
            begin = self._kernels
            if segment.place.phase == "optimizer":
                self._join()
            before, passing = passing, segment.key[:3]
            if segment.place.phase == "forward" and passing != before:
                # FSDP2's root: `all_gather_copy_in_stream.wait_stream` of `_root_pre_forward`.
                self._copies = max(self._copies, self._kernels)
            for work in segment.work:
                if isinstance(work, Compute):
                    self._compute(work)
                elif isinstance(work, Issue):
                    self._issue(work.what)
                elif isinstance(work, Arrive):
                    self.time.exposed_s += max(0.0, self._copies - self._kernels)
                    self._kernels = max(self._kernels, self._copies)
                elif isinstance(work, Read):
                    self._host = max(self._host, self._kernels)
                else:
                    while not self._is_here(work):
                        self.waits_for = self._issued[len(self._issued) - work.back][0].ranks
                        yield True
                    self._wait(work, segment)
                self.num_done += 1
            self.time.ends.append(self._kernels)
            self._note_segment(segment, begin)
        self._join()
        self.time.end_s = max(self._kernels, self._copies, self._on_host)

    def _compute(self, work: Compute) -> None:
        python_s = work.host_s if self._host_s else 0.0
        launched = self._host + self._host_s * work.num_kernels + python_s
        if work.num_kernels == 0:
            self._host = launched
            return
        if work.stream in ("copy in", "from host"):
            self._copies = max(self._copies, self._host, self._on_host) + work.seconds
            self._just_copied_in = True
        elif work.stream == "to host":
            ready = max(self._copies_out, self._host, self._kernels, *self._reduced.values())
            self._copies_out = ready + work.seconds
        elif work.stream == "host":
            launched = max(launched, self._copies_out) + work.seconds
            self._on_host = launched
        else:
            end = max(max(self._kernels, self._host) + work.seconds, launched)
            self.time.launch_s += end - self._kernels - work.seconds
            self._kernels = end
            self._just_copied_in = False
        if work.stream in ("from host", "to host", "host"):
            self.time.offload_s += work.seconds
        else:
            self.time.compute_s += work.seconds
        self._host = launched

    def _issue(self, what: Issued) -> None:
        key = what.ranks
        seconds = self._seconds_of(what)
        ready = max(self._host, self._kernels)
        if what.kind == "all-gather" and self._just_copied_in:
            ready = max(self._host, self._copies, self._copied_out.get(key, 0.0))
        if what.kind == "reduce-scatter" and what.is_overlapped:
            self._kernels = max(self._kernels, self._reduced.get(key, 0.0))
            ready = max(ready, self._kernels)
        stream = (*key, -1) if what.kind == "receive" else key
        start = max(self._streams.get(stream, 0.0), ready)
        end = start if what.kind == "receive" else start + seconds
        self._streams[stream] = end
        if what.kind == "reduce-scatter" and what.is_overlapped:
            self._reduced[key] = end
        place = 0
        if what.kind == "send":
            self._post.setdefault((self._rank, self._partner(what)), []).append(end)
        elif what.kind == "receive":
            peer = self._partner(what)
            place = self._received[peer] = self._received.get(peer, -1) + 1
        self._issued.append((what, end, place))
        self.time.communication_s += seconds if what.kind != "receive" else 0.0
        self._just_copied_in = False
        if self._wants_events and what.kind != "receive":
            self._note(f"{what.kind} {counted(len(key), 'rank')}", what.kind, start, seconds)

    def _partner(self, what: Issued) -> int:
        """The other rank of a send or receive; this rank itself, where that one does alike work."""
        peer = what.ranks[1]
        return peer if peer in self._simulated else self._rank

    def _is_here(self, work: Wait) -> bool:
        what, _, place = self._issued[len(self._issued) - work.back]
        if what.kind != "receive":
            return True
        return len(self._post.get((self._partner(what), self._rank), ())) > place

    def _wait(self, work: Wait, segment: Segment) -> None:
        what, end, place = self._issued[len(self._issued) - work.back]
        if what.kind == "receive":
            end = self._post[self._partner(what), self._rank][place]
        elif what.kind in _REDUCTIONS and what.is_overlapped and segment.place.phase != "optimizer":
            return
        stall = max(0.0, end - max(self._kernels, self._host))
        if what.kind == "receive" and self._partner(what) != self._rank:
            self.time.bubble_s += stall
        else:
            self.time.exposed_s += stall
        self._kernels = max(self._kernels, end)
        if what.kind == "all-gather":
            self._copied_out[what.ranks] = self._kernels

    def _join(self) -> None:
        """Kernels wait for every collective, as the optimizer does."""
        last = max((end for key, end in self._streams.items() if key[-1] >= 0), default=0.0)
        last = max(last, self._copies_out)
        self.time.exposed_s += max(0.0, last - self._kernels)
        self._kernels = max(self._kernels, last)

    def _note_segment(self, segment: Segment, begin: float) -> None:
        if self._wants_events and self._kernels > begin:
            place = segment.place
            what = f"block {place.block}" if place.block is not None else place.module or "model"
            name = f"{place.phase} {what}"
            self._note("kernels", name, begin, self._kernels - begin)

    def _note(self, stream: str, name: str, start: float, seconds: float) -> None:
        self.time.events.append(
            {
                "name": name,
                "ph": "X",
                "pid": self._stage,
                "tid": stream,
                "ts": round(start * 1e6, 3),
                "dur": round(seconds * 1e6, 3),
            }
        )
