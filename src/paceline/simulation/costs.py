"""How long each phase of a recovery takes, how it grows with the ranks, and how that is known.

Nothing is tuned here: a phase is measured on a small number of ranks and carried to others by a law
that is stated, or cited, or assumed, and says which.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import exp, log, log2
from typing import Literal

from paceline.simulation.failures import Kind

Known = Literal["measured", "cited", "assumed", "estimated", "given"]
Law = Literal["constant", "log2", "linear", "points"]
Lost = Literal["step", "checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Seconds, at a number of ranks, and how they grow."""

    seconds: float
    known: Known
    source: str
    steps: float = 0.0
    """Steps that it takes besides."""

    law: Law = "constant"
    ranks: int = 1
    """At which the seconds hold, for `log2` and `linear`."""

    points: tuple[tuple[int, float], ...] = ()
    """Seconds by ranks for the law `points`: between and beyond them straight lines in
    logarithms."""

    def at(self, ranks: int, step_s: float = 0.0) -> float:
        """Seconds on so many ranks.

        >>> Phase(seconds=0.1, law="log2", ranks=16, known="assumed", source="").at(256)
        0.2
        """
        return self._grown(ranks) + self.steps * step_s

    def _grown(self, ranks: int) -> float:
        if self.law == "log2":
            return self.seconds * log2(max(2, ranks)) / log2(max(2, self.ranks))
        if self.law == "linear":
            return self.seconds * ranks / self.ranks
        if self.law == "points":
            return _on_line(self.points, ranks)
        return self.seconds


def _on_line(points: tuple[tuple[int, float], ...], ranks: int) -> float:
    places = list(pairwise(points))
    (low, low_s), (high, high_s) = next(
        (pair for pair in places if ranks <= pair[1][0]), places[-1]
    )
    slope = log(high_s / low_s) / log(high / low)
    return low_s * exp(slope * log(ranks / low))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The phases of a recovery in which survivors stay."""

    detect: Phase
    """From the end of a process to the controller knowing."""

    detect_node: Phase
    """From the loss of a node to the controller knowing."""

    detect_hang: Phase
    """From the last progress of a process that hangs to its end."""

    fence: Phase
    """Until every survivor has left its process groups."""

    meet: Phase
    """Until new process groups stand."""

    state: Phase
    """Until a rank that lost its state has it from a live copy."""

    reload: Phase
    """Until everybody has the state of a checkpoint."""

    cold_start: Phase
    """Until a new process is ready to take a rank."""

    first_step: Phase

    def of(self, kind: Kind) -> Phase:
        """The detection of a kind of fault."""
        return {"process": self.detect, "hang": self.detect_hang}.get(kind, self.detect_node)

    def phases(self) -> Mapping[str, Phase]:
        """By name, in the order of a recovery."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def with_phase(self, name: str, phase: Phase) -> "Costs":
        """The costs with another phase."""
        return replace(self, **{name: phase})


def read_phase(text: str) -> tuple[str, Phase]:
    """A phase as `--phase` gives it.

    Raises:
        ValueError: It is not one.

    >>> name, phase = read_phase("meet=0.5@64:log2")
    >>> name, phase.at(4096), phase.known
    ('meet', 1.0, 'given')
    """
    found = re.fullmatch(
        r"(\w+)=(\d+(?:\.\d*)?|\.\d+)(?:@(\d+):(log2|linear|constant))?", text.strip()
    )
    names = [each.name for each in fields(Costs)]
    if found is None:
        raise ValueError(f"{text!r} is not NAME=SECONDS")
    if found[1] not in names:
        raise ValueError(f"{found[1]!r} is no phase; there are {', '.join(names)}")
    law: Law = found[4] if found[4] is not None else "constant"  # type: ignore[assignment]
    phase = Phase(
        seconds=float(found[2]),
        law=law,
        ranks=int(found[3] or 1),
        known="given",
        source="--phase",
    )
    return found[1], phase


_NCCL_START = (
    (16, 0.1186),
    (16_384, 200.0),
    (22_000, 300.0),
    (64_000, 600.0),
    (98_304, 900.0),
)
_OWN = "Paceline's recovery benchmark: 2 ranks over gloo, one machine, n = 12"


def costs_on_gloo(*, copy_s: float, reload_s: float) -> Costs:
    """Measured on this project's own runtime, over gloo."""
    return Costs(
        detect=Phase(seconds=0.032, known="measured", source=_OWN),
        detect_node=_HEARTBEAT,
        detect_hang=_LEARNED,
        fence=Phase(seconds=0.036, known="measured", source=_OWN),
        meet=Phase(
            seconds=0.008,
            law="log2",
            ranks=4,
            known="measured",
            source="a prototype: 3 to 8 ms at 4 ranks on 2 cores; that it grows with the "
            "logarithm is assumed",
        ),
        state=_copied(copy_s),
        reload=_reloaded(reload_s),
        cold_start=Phase(
            seconds=8.0,
            known="measured",
            source="a prototype: 8 s for 4 processes on 2 cores",
        ),
        first_step=Phase(
            seconds=0.0, known="assumed", source="a spare has run the model before it takes a rank"
        ),
    )


def costs_on_nccl(*, copy_s: float, reload_s: float, meet: Literal["cited", "log2"]) -> Costs:
    """For accelerators: cited and assumed, as nothing of ours was measured there.

    Args:
        meet: `cited`: communicators of all ranks are made anew, as slowly as Meta's. `log2`: the
            rank table is pushed and the time grows with the logarithm, which is assumed.
    """
    source = "AccelPact: NCCL rebuild 118.6 ms at 16 ranks (arXiv:2609.18178)"
    slow = Phase(
        seconds=0.0,
        law="points",
        points=_NCCL_START,
        known="cited",
        source=f"{source}; cold NCCL start 200 s at 16k, 300 at 22k, 600 at 64k, 900 at 98k ranks "
        "(arXiv:2602.00277); a straight line in logarithms between them",
    )
    fast = Phase(
        seconds=0.1186,
        law="log2",
        ranks=16,
        known="assumed",
        source=f"{source}; that it grows with the logarithm is assumed",
    )
    return Costs(
        detect=Phase(seconds=0.032, known="measured", source=_OWN),
        detect_node=_HEARTBEAT,
        detect_hang=_LEARNED,
        fence=Phase(
            seconds=0.5426,
            known="cited",
            source="AccelPact: communicators retired in 542.6 ms at 16 ranks (arXiv:2609.18178)",
        ),
        meet=slow if meet == "cited" else fast,
        state=_copied(copy_s),
        reload=_reloaded(reload_s),
        cold_start=Phase(
            seconds=60.0,
            known="assumed",
            source="a guess: imports, device context, model; TrainMover's whole restart is 80 s at "
            "32 GPUs",
        ),
        first_step=Phase(
            seconds=0.0,
            steps=1.0,
            known="assumed",
            source="a guess: the first step takes twice the time",
        ),
    )


_HEARTBEAT = Phase(
    seconds=2.0,
    known="assumed",
    source="the target; a prototype took 0.71 to 0.74 s at 5 Hz and 2,048 agents",
)
_LEARNED = Phase(
    seconds=1.0,
    steps=3.0,
    known="assumed",
    source="three times the usual time of a step, then a second: a guess",
)


def _copied(copy_s: float) -> Phase:
    return Phase(
        seconds=copy_s,
        known="estimated",
        source="a rank's float32 parameters and moments over its share of the node's network",
    )


def _reloaded(reload_s: float) -> Phase:
    return Phase(
        seconds=reload_s,
        known="estimated",
        source="the checkpoint's bytes at the planner's storage rate",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Another way to recover, as far as a few published numbers say it."""

    name: str
    detect: Phase
    restart: Phase
    """From there to the first step."""

    lost: Lost
    """Repeated work: half a step on the mean, or what the last checkpoint lacks."""

    stall_share: float = 0.0
    """Share of the time that its copies of the state take when nothing fails."""

    save_s: float = 0.0
    """Training stands still for a checkpoint."""

    known: Known = "cited"
    assumptions: tuple[str, ...] = field(default=())


def _cited(seconds: float, source: str) -> Phase:
    return Phase(seconds=seconds, known="cited", source=source)


def _none() -> Phase:
    return Phase(seconds=0.0, known="cited", source="in the restart's figure")


CHECKPOINT_RESTART = System(
    name="checkpoint restart",
    detect=Phase(seconds=600.0, known="cited", source="torch's time-out of NCCL, 10 min"),
    restart=Phase(
        seconds=600.0, known="assumed", source="a guess: ten minutes to start a job again"
    ),
    lost="checkpoint",
    save_s=20.0,
)
FLASH_RECOVERY = System(
    name="150 s (FlashRecovery)",
    detect=_none(),
    restart=_cited(150.0, "150 s at 4,800 devices, flat with scale (arXiv:2509.03047)"),
    lost="step",
)
TRAIN_MOVER = System(
    name="21 s (TrainMover)",
    detect=_none(),
    restart=_cited(
        21.0,
        "19.6 to 21.1 s at 32 to 1,024 GPUs (arXiv:2412.12636); kept for all sizes",
    ),
    lost="step",
)
BYTE_ROBUST = System(
    name="10 s and 0.9 % stall",
    detect=_none(),
    restart=Phase(
        seconds=10.0,
        known="assumed",
        source="a guess; ByteRobust (SOSP 2025) finds a lost GPU in 10 s",
    ),
    lost="step",
    stall_share=0.009,
    known="assumed",
)
SYSTEMS: Mapping[str, System] = {
    "checkpoint": CHECKPOINT_RESTART,
    "flashrecovery": FLASH_RECOVERY,
    "trainmover": TRAIN_MOVER,
    "stall": BYTE_ROBUST,
}
"""To compare with, by the word of the command line."""
