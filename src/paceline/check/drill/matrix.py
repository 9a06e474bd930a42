"""The fault matrix: what can go wrong, and how a drill makes it go wrong. One row, one line.

Its source is a survey of what published systems recover from and what breaks in practice; the row
numbers are those of the design page, so that figures and tests can name them.
"""

from dataclasses import dataclass
from typing import Literal

Needs = Literal["root", "spares", "nodes", "checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the matrix."""

    number: int
    title: str
    faults: tuple[str, ...] = ()
    """Examples that `--fault` takes, for two ranks; empty when a drill cannot make it."""

    elsewhere: str = ""
    """What proves it instead, where it is no drill's."""

    skipped: str = ""
    """Why nothing here can make it."""

    needs: tuple[Needs, ...] = ()


MATRIX: tuple[Row, ...] = (
    Row(number=1, title="SIGKILL of a worker", faults=("kill rank=1 step=6",)),
    Row(
        number=2,
        title="SIGSEGV, abort, os._exit, uncaught exception",
        faults=(
            "segv rank=1 step=6",
            "abort rank=1 step=6",
            "exit rank=1 step=6",
            "raise rank=1 step=6",
        ),
    ),
    Row(number=3, title="hang: SIGSTOP", faults=("stop rank=1 step=6",)),
    Row(number=4, title="a zombie returns: SIGCONT late", faults=("zombie rank=1 step=6 for=20s",)),
    Row(
        number=5,
        title="interpreter lock held, deadlock, endless loop",
        faults=("gil rank=1 step=6", "deadlock rank=1 step=6", "loop rank=1 step=6"),
    ),
    Row(number=6, title="node lost", faults=("node rank=1 step=6",)),
    Row(number=7, title="agent or launcher killed", faults=("agent rank=1 step=6",)),
    Row(
        number=8,
        title="store killed, at work and while meeting",
        faults=("store rank=1 step=6", "store rank=1 step=6 phase=meet"),
    ),
    Row(number=9, title="controller killed", faults=("controller rank=1 step=6",)),
    Row(number=10, title="rank 0 killed", faults=("kill rank=0 step=6",)),
    Row(
        number=11,
        title="partition",
        faults=("disconnect rank=1 step=6",),
        elsewhere="hosts that cannot reach each other: tests/run/test_partition.py, in network "
        "namespaces",
    ),
    Row(
        number=12,
        title="slow network",
        skipped="a token bucket on `lo` would slow every process of this machine; netem is not in "
        "this kernel",
    ),
    Row(number=13, title="slow CPU", faults=("slow rank=1 step=6 for=1s",)),
    Row(
        number=14,
        title="full disk while saving",
        elsewhere="tests/run/test_recovery.py, on a small tmpfs",
    ),
    Row(number=15, title="torn checkpoint", faults=("torn rank=0 step=6",)),
    Row(
        number=16,
        title="zeroed, swapped, missing checkpoint files",
        faults=("zeroed rank=0 step=6", "swapped rank=0 step=6", "missing rank=0 step=6"),
    ),
    Row(number=17, title="bit flip in a checkpoint", faults=("flipped rank=0 step=6",)),
    Row(
        number=18,
        title="bit flip in one replica",
        faults=("flip rank=1 step=6", "flip rank=1 step=6 of=optimizer"),
    ),
    Row(
        number=19,
        title="bit flip in gradients before the reduction",
        skipped="wrong on every rank once summed; only a replay on another machine can tell",
    ),
    Row(number=20, title="loss not finite", faults=("nan rank=1 step=6", "nan rank=0+1 step=6")),
    Row(number=21, title="poison batch", faults=("poison sample=3",)),
    Row(number=22, title="out of memory", faults=("oom rank=1 step=6",)),
    Row(number=23, title="clock jumps", faults=("clock rank=0 step=6",)),
    Row(number=24, title="killed while saving", faults=("kill rank=1 step=8 phase=save",)),
    Row(number=25, title="killed in the update", faults=("kill rank=1 step=6 phase=apply",)),
    Row(
        number=26,
        title="fault during a recovery, each phase",
        faults=(
            "kill rank=1 step=6 phase=meet",
            "kill rank=1 step=6 phase=restore",
            "kill rank=0 step=6 phase=parked",
        ),
    ),
    Row(number=27, title="two at once", faults=("kill rank=0+1 step=6",)),
    Row(
        number=28,
        title="a spare dies, parked or taking over",
        faults=("spare rank=1 step=6", "kill rank=1 step=6 phase=meet"),
        needs=("spares",),
    ),
    Row(
        number=29,
        title="no spare left",
        faults=("kill rank=1 step=6",),
        elsewhere="with recovery.spares 0",
    ),
    Row(number=30, title="SIGTERM with grace", faults=("term rank=1 step=6",)),
    Row(number=31, title="crash loop", faults=("raise rank=1 step=6 times=9",)),
    Row(
        number=32,
        title="false positives: long step, pause, stalled save, paused agent",
        faults=(
            "long rank=1 step=6 for=2s",
            "pause rank=1 step=6 for=1s",
            "long rank=1 step=8 phase=save for=1s",
            "pause-agent rank=1 step=6 for=500ms",
        ),
    ),
    Row(
        number=33,
        title="control messages duplicated, reordered, lost",
        elsewhere="tests/control: property tests of the controller's core",
    ),
    Row(
        number=34,
        title="leaks over 100 recoveries",
        elsewhere="benchmarks/recovery_leaks.py",
    ),
    Row(number=35, title="random schedules", elsewhere="paceline drill --random, --soak"),
    Row(
        number=36,
        title="the process that forks a node's workers",
        faults=("nursery rank=1 step=6",),
    ),
)


def rows_of(kind: str) -> tuple[int, ...]:
    """Numbers of the rows that a kind of fault stands for.

    >>> rows_of("agent")
    (7,)
    """
    return tuple(
        row.number for row in MATRIX if any(text.split()[0] == kind for text in row.faults)
    )
