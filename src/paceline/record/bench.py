"""What `paceline bench` asks of the ranks, and the facts they write down.

`launch/bench.py` starts the ranks, `runtime/bench/` times them, `check/bench.py` judges.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import Problem
from paceline.plan import Plan

PHASES = ("data", "forward", "backward", "agree", "optimizer", "bookkeeping")
"""Phases of a step, in the order people read them. `agree` is the gradient norm and the vote of all
ranks; `bookkeeping` is what the loop does between two steps."""

Scaling = Literal["strong", "weak"]
"""`strong`: the same global batch on every number of ranks. `weak`: the same batch a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """How many steps a rank makes."""

    warm_up: int
    """Left out: first-time allocations, DDP's and FSDP2's first step, caches."""

    timed: int
    """Counted."""

    profiled: int
    """After those, under PyTorch's profiler, which slows them: only for communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One rank's collectives in the profiled steps, in seconds a step."""

    in_flight_s: float
    """At least one collective is under way: sent and not finished, waiting for slower ranks and for
    earlier collectives included."""

    exposed_s: float
    """The part of `in_flight_s` in which the rank computes nothing."""

    waiting_s: float | None = None
    """Part of `exposed_s` in which it only waits for another rank's message; None where that was
    not looked at."""

    vote_s: float | None = None
    """From its last backward pass to the outcome of all ranks' vote: a rank that was done before
    others waits here for them. None where that was not looked at."""

    num_collectives: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """What one rank saw. Seconds by `time.perf_counter`."""

    rank: int
    step_s: tuple[float, ...] = ()
    """Seconds of every timed step: the end of one step to the end of the next."""

    phases: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Phase -> its seconds in every timed step. Their sum is the step; on an accelerator,
    `optimizer` is the step before's."""

    communication: Communication | None = None
    peak_bytes: int | None = None
    """Highest in all steps: resident on a CPU, allocated on an accelerator; None where that is not
    counted."""

    baseline_bytes: int | None = None
    """Memory before the model was built, counted as in `peak_bytes`."""

    backend: str = ""
    problems: tuple[Problem, ...] = ()
    """What a person can fix, when that is why the rank ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One number of ranks: its plan and what every rank saw."""

    plan: Plan
    tokens_per_sample: int | None
    """None where samples are not rows of tokens that the job knows of."""

    notes: tuple[str, ...]
    ranks: tuple[RankTimes, ...]

    @property
    def num_ranks(self) -> int:
        """Processes that shared the work."""
        return self.plan.layout.num_ranks
