"""The faults that a drill can inject: one grammar, for the job file and for `--fault`, and the rows
of the fault matrix that they stand for.

    kill rank=1 step=20 phase=backward

A kind, then who (`rank`), when (`step`, `phase`) and what else the kind takes. `rank` passes the
place and thereby triggers the fault; who suffers it follows from the kind.

Leaves out: carrying it out (`runtime/faults.py` inside a worker, `control/injection.py` from
outside).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from paceline.errors import did_you_mean
from paceline.job.section import shipped

Maker = Literal["worker", "agent"]
"""Who carries a fault out: the worker itself, or its agent from outside."""

End = Literal["recovers", "unharmed", "refuses", "stops", "relaunches"]
"""What a run should do: go on with the same bits after a worker is lost; notice nothing; refuse the
step by a vote; end and name the cause; or go on when it is started again."""

STEP_PHASES = ("start", "forward", "backward", "reduce", "vote", "apply", "applied", "save")
"""Places in a step, in its order: before its first sample; before the forward and the backward pass
of a micro-batch; with its gradients, when other ranks may wait in the reduction; at the vote; after
the vote, with the update begun; with the update done and nobody told; and in the thread that writes
the step's checkpoint."""

RECOVERY_PHASES = ("parked", "meet", "restore")
"""Places in a recovery: waiting for the next generation; about to meet the others; in the new
groups, about to get or give the state."""

PHASES = STEP_PHASES + RECOVERY_PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault."""

    does: str
    """What happens, in a line of help."""

    maker: Maker = "worker"
    end: End = "recovers"
    verdict: str | None = None
    """Pattern that `WorkerLost.how` should match: the right name for what happened."""

    takes: tuple[str, ...] = ()
    """Keys besides rank, step, phase, times and when."""

    phase: str = "backward"
    """Where it happens unless said otherwise."""

    for_s: float | None = None
    """Seconds that it lasts unless said otherwise."""

    is_whole_node: bool = False
    """Whether every worker of the trigger's node is lost."""


_ROWS = shipped("faults.toml")

KINDS: Mapping[str, Kind] = msgspec.convert(_ROWS["kinds"], dict[str, Kind])
"""Every kind, from `faults.toml`."""

GRAMMAR = "KIND rank=R[+R...] step=S [phase=P] [times=N] [when=spare]"

_OLD_KILL = re.compile(r"rank=(\d+)@step=(\d+)(?:@(forward|backward|apply|save))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, as its text says."""

    text: str
    kind: str
    ranks: tuple[int, ...]
    """Who passes the place, and for most kinds suffers it; empty is any rank."""

    step: int
    """0 for a kind that waits for a sample."""

    phase: str
    times: int = 1
    """How often it happens."""

    for_s: float | None = None
    of: str = "parameters"
    sample: int | None = None
    when: Literal["now", "spare"] = "now"
    """`spare`: the worker waits at the place until a warm spare is ready."""

    @property
    def row(self) -> Kind:
        """What there is to know of its kind."""
        return KINDS[self.kind]

    @property
    def in_recovery(self) -> bool:
        """Whether its place is in a recovery and not in a step."""
        return self.phase in RECOVERY_PHASES

    def victims(self, trigger: int) -> tuple[int, ...]:
        """Ranks that suffer it when a rank passes its place."""
        if self.kind == "store":
            return (0,)
        return self.ranks if self.row.maker == "agent" and self.ranks else (trigger,)


def parse_fault(text: str) -> Fault:
    """The fault that a text means.

    >>> parse_fault("kill rank=1 step=20").phase
    'backward'
    >>> parse_fault("rank=1@step=20@apply").kind
    'kill'

    Raises:
        ValueError: It is none; says what is wrong with it.
    """
    old = _OLD_KILL.fullmatch(text.strip())
    if old is not None:
        rank, step, phase = old.groups()
        return Fault(
            text=text, kind="kill", ranks=(int(rank),), step=int(step), phase=phase or "backward"
        )
    name, *words = text.split() or [""]
    if name not in KINDS:
        meant = f"; {did_you_mean(name, KINDS)}".removesuffix("; ")
        raise ValueError(
            f"{text!r} is not a fault; write it like `kill rank=1 step=150`, or "
            f"`kill rank=1 step=150 phase=apply`{meant} Kinds: {', '.join(KINDS)}"
        )
    return _filled(text, name, dict(_pairs(text, words, KINDS[name])))


def expand(faults: Iterable[str]) -> tuple[str, ...]:
    """One text for each time that a fault is to happen. Those that workers do themselves happen on
    every rank they name.

    >>> expand(["nan rank=0+1 step=3", "raise rank=1 step=9 times=2"])
    ('nan rank=0 step=3', 'nan rank=1 step=3', 'raise rank=1 step=9', 'raise rank=1 step=9')
    """
    found: list[str] = []
    for text in faults:
        fault = parse_fault(text)
        single = re.sub(r"\s+times=\d+", "", text)
        texts = [single]
        if fault.row.maker == "worker" and len(fault.ranks) > 1:
            texts = [re.sub(r"rank=\S+", f"rank={rank}", single) for rank in fault.ranks]
        found += texts * fault.times
    return tuple(found)


def shifted(text: str, steps: int) -> str:
    """The fault, so many steps later.

    >>> shifted("kill rank=1 step=3 phase=vote", 40)
    'kill rank=1 step=43 phase=vote'
    """
    fault = parse_fault(text)
    return text.replace(f"step={fault.step}", f"step={fault.step + steps}")


def _pairs(text: str, words: Iterable[str], kind: Kind) -> Iterable[tuple[str, str]]:
    known = ("rank", "step", "phase", "times", "when", *kind.takes)
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value or key not in known:
            raise ValueError(f"{text!r}: {word!r} is none of {', '.join(f'{k}=' for k in known)}")
        if key in given:
            several = f", or write rank={given[key]}+{value} for both" if key == "rank" else ""
            raise ValueError(f"{text!r}: {key}= is written twice; keep one of them{several}")
        given[key] = value
        yield key, value


def _filled(text: str, name: str, given: Mapping[str, str]) -> Fault:
    kind = KINDS[name]
    phase, when = given.get("phase", kind.phase), given.get("when", "now")
    if phase not in PHASES:
        raise ValueError(f"{text!r}: phase is one of {', '.join(PHASES)}")
    if phase == "parked" and kind.maker != "agent":
        raise ValueError(f"{text!r}: a parked worker runs no code; take kill, stop, agent or node")
    if when not in ("now", "spare"):
        raise ValueError(f"{text!r}: when is `now` or `spare`")
    if "sample" in kind.takes and "sample" not in given:
        raise ValueError(f"{text!r}: {name} needs sample=ID")
    needed = () if "sample" in kind.takes else ("rank", "step")
    for key in needed:
        if key not in given:
            raise ValueError(f"{text!r} is not a fault yet: {key}= is missing; {GRAMMAR}")
    if given.get("of", "parameters") not in ("parameters", "optimizer"):
        raise ValueError(f"{text!r}: of is `parameters` or `optimizer`")
    ranks = (
        tuple(_whole(text, part) for part in given["rank"].split("+")) if "rank" in given else ()
    )
    twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
    if twice is not None:
        named = "+".join(str(rank) for rank in dict.fromkeys(ranks))
        raise ValueError(f"{text!r}: rank {twice} is named twice; write rank={named}")
    times = _whole(text, given.get("times", "1"))
    if times == 0:
        raise ValueError(f"{text!r}: times=0 never happens; leave the fault out, or write times=1")
    fault = Fault(
        text=text,
        kind=name,
        ranks=ranks,
        step=_whole(text, given.get("step", "0")),
        phase=phase,
        times=times,
        of=given.get("of", "parameters"),
        sample=_whole(text, given["sample"]) if "sample" in given else None,
        when="spare" if when == "spare" else "now",
    )
    return replace(fault, for_s=_seconds(text, given["for"]) if "for" in given else kind.for_s)


def _whole(text: str, value: str) -> int:
    if not value.isdigit():
        raise ValueError(f"{text!r}: {value!r} is not a whole number")
    return int(value)


def _seconds(text: str, value: str) -> float:
    from paceline.units import parse_seconds

    try:
        return float(parse_seconds(value if not value.replace(".", "").isdigit() else f"{value}s"))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


Needs = Literal["root", "spares", "nodes", "checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the fault matrix: what can go wrong, and how a drill makes it go wrong.

    Its source is a survey of what published systems recover from and what breaks in practice.
    Figures and tests name the rows by their numbers.
    """

    number: int
    title: str
    faults: tuple[str, ...] = ()
    """Examples that `--fault` takes, for two ranks; empty when a drill cannot make it."""

    elsewhere: str = ""
    """What proves it instead, where it is no drill's."""

    skipped: str = ""
    """Why nothing here can make it."""

    needs: tuple[Needs, ...] = ()


MATRIX: tuple[Row, ...] = tuple(
    msgspec.convert({**row, "number": int(number)}, Row) for number, row in _ROWS["matrix"].items()
)
"""Every row, from `faults.toml`."""


def rows_of(kind: str) -> tuple[int, ...]:
    """Numbers of the rows that a kind of fault stands for.

    >>> rows_of("agent")
    (7,)
    """
    return tuple(
        row.number for row in MATRIX if any(text.split()[0] == kind for text in row.faults)
    )
