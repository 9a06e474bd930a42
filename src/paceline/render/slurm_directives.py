"""What a batch script asks Slurm for: its `#SBATCH` lines.

Leaves out: what the script then does (`slurm.py`).
"""

import math
from dataclasses import dataclass

from paceline.errors import JobError
from paceline.job import SlurmSpec

SAVE_S = 30
"""Before the grace begins that Slurm gives after the signal: time to hear of it. A guess; Slurm may
send it up to 60 s too early (sbatch(1), --signal)."""

_EARLY_S = 60
"""How much too early Slurm may send a signal; sbatch(1), --signal."""

_WORK_S = 60
"""The least that a start must have before it is told that its time is over. A guess: with less it
would do nothing but begin again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a batch script asks Slurm for."""

    name: str
    nodes: int
    accelerators: int
    """Accelerators of each node, where the job does not say; 0 where ranks run on CPUs."""

    ranks: int
    """Ranks of each node."""

    grace_s: float
    outlives_nodes: bool
    """Whether what runs goes on when a node is lost, so that Slurm must not end the job."""

    slurm: SlurmSpec
    where: str
    """The job file's place of `slurm.time`, for messages."""


def directives(ask: Ask) -> list[str]:
    """The `#SBATCH` lines. Every value was checked when it was read, and has no space in it.

    Raises:
        JobError: `W018`, the time is too short to do anything in.
    """
    slurm = ask.slurm
    least_s = ask.grace_s + SAVE_S + _EARLY_S + _WORK_S
    if slurm.time is not None and slurm.time < least_s:
        raise JobError.of(
            code="W018",
            what=f"slurm.time is {slurm.time:.0f} s, and Slurm tells the job "
            f"{math.ceil(ask.grace_s) + SAVE_S} s before its end, or {_EARLY_S} s earlier: "
            "it would save and go back into the queue before it had worked",
            where=ask.where,
            fix=f"set slurm.time to {math.ceil(least_s / 60)}m or more, or a shorter "
            "recovery.grace",
        )
    cpus = _cpus(ask)
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    gpus = ask.accelerators if slurm.gpus_per_node == "auto" else slurm.gpus_per_node
    options = [
        f"--job-name={ask.name}",
        f"--nodes={ask.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={kind}{gpus}"] if gpus else []),
        *([f"--partition={slurm.partition}"] if slurm.partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
        *([f"--qos={slurm.qos}"] if slurm.qos else []),
        *([f"--constraint={slurm.constraint}"] if slurm.constraint else []),
        *([f"--time={to_slurm_time(slurm.time)}"] if slurm.time else []),
        *([f"--mem={slurm.memory}"] if slurm.memory else []),
        *(["--exclusive"] if _is_exclusive(slurm) else []),
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *(["--no-kill"] if ask.outlives_nodes else []),
        "--requeue" if slurm.requeue else "--no-requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{math.ceil(ask.grace_s) + SAVE_S}",
        *([f"--array={slurm.array}"] if slurm.array else []),
        *slurm.options,
    ]
    return [f"#SBATCH {option}" for option in options]


def _cpus(ask: Ask) -> int | None:
    """Cores of the one task of each node; None is all that an exclusive node has.

    Without either Slurm gives a task one core, whatever its number of GPUs (salloc(1),
    --cpus-per-task).
    """
    if ask.slurm.cpus != "auto":
        return ask.slurm.cpus
    return None if _is_exclusive(ask.slurm) else ask.ranks


def _is_exclusive(slurm: SlurmSpec) -> bool:
    if slurm.exclusive != "auto":
        return slurm.exclusive
    return slurm.cpus == "auto" and slurm.array is None


def to_slurm_time(seconds: float) -> str:
    """A time limit as sbatch reads it, rounded up to a minute, which is as fine as Slurm counts.

    >>> to_slurm_time(90_000)
    '1-01:00:00'
    """
    minutes = math.ceil(seconds / 60)
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02}:{rest % 60:02}:00"
