"""A script of a person's own that does not use our runtime: what to start, and how often.

A job file with `command:` is one of these, and has nothing to plan. Only `paceline run` takes it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from paceline.job.alerts import AlertsSpec
from paceline.job.metrics import MetricsSpec
from paceline.job.places import RaySpec, SlurmSpec, SshSpec
from paceline.job.section import Positive, Seconds, Whole, section


def _no_silence(value: object) -> object:
    """YAML reads `off` as a truth value, and earlier versions wrote none for it."""
    return "off" if value is False or value is None else value


Silence = Annotated[Seconds | Literal["auto", "off"], BeforeValidator(_no_silence)]


@section
class ScriptRecovery:
    """What happens when a process ends badly, or none prints anything."""

    max_restarts: Whole = 3
    """Attempts in a row that may fail before the run gives up. One of ten minutes is no failure. An
    error before the first sign of progress is not tried again."""

    backoff: Seconds = 1.0
    """Pause before the first restart; each next one in a row is twice as long, up to 60 s."""

    silence: Silence = "auto"
    """Restart when no process has printed anything for so long: `10m`. `auto` waits until the
    script prints steps or losses, then takes 20 times its longest pause so far, at least 10
    minutes. `off` never restarts. Take a value well above the longest compilation, evaluation and
    save."""

    grace: Seconds = 60.0
    """How long the processes may take to end after SIGTERM when the run is asked to stop."""


@section
class ScriptSpec:
    """A program to start, watch and start again from its own checkpoint."""

    command: Annotated[list[str], Field(min_length=1)]
    """Program and arguments, such as `[python, train.py, --lr, "0.1"]`, run in the job's folder."""

    processes: Positive = 1
    """How many are started, each with the environment that torchrun gives: RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR and a fresh MASTER_PORT."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "script"
    """Name of the run: letters, digits, `.`, `_` and `-`."""

    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables. No secrets: they are kept in the run's folder."""

    nodes: Positive = 1
    """Machines, each with so many processes. More than one only in a queue, such as
    `paceline run --on slurm`, where torchrun starts them; with `starts: nodes` over ssh, on Ray and
    in a Slurm allocation too."""

    starts: Literal["ranks", "nodes"] = "ranks"
    """What the command is. `ranks`: the program of one rank, started `processes` times on each
    node. `nodes`: a launcher, such as `[bash, launch.sh]`, started once on each node with
    NODE_RANK; on several nodes also with HEAD_ADDRESS, HEAD_PORT and RUN_ID, the same on all."""

    steps: Positive | None = None
    """Steps that the script trains. Exits with 0 before the last of them count as a failure: a
    launcher may end well although nothing was trained. Null counts every exit with 0 as an end."""

    profile: bool = False
    """Measure where the time of a few steps of rank 0 goes, with torch.profiler; the report has the
    table. For a Python script that steps an optimizer of torch's."""

    recovery: ScriptRecovery = Field(default_factory=ScriptRecovery)
    """What happens when a process ends badly, or none prints anything."""

    alerts: AlertsSpec = Field(default_factory=AlertsSpec)
    """Rules on the run's numbers, and who is sent a message."""

    metrics: MetricsSpec = Field(default_factory=MetricsSpec)
    """Where metrics go besides the run's folder."""

    slurm: SlurmSpec = Field(default_factory=SlurmSpec)
    """What to ask Slurm for, with `paceline run --on slurm`."""

    ssh: SshSpec = Field(default_factory=SshSpec)
    """The hosts of `starts: nodes`, with `paceline run --on ssh`."""

    ray: RaySpec = Field(default_factory=RaySpec)
    """The cluster of `starts: nodes`, with `paceline run --on ray`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script job as it was read."""

    spec: ScriptSpec
    folder: Path
    """Where it runs, absolute."""

    source: str
    """The file's name as the reader gave it, or the option."""

    @property
    def num_ranks(self) -> int:
        """Processes of the program on all nodes."""
        return self.spec.nodes * self.spec.processes

    @property
    def num_watched(self) -> int:
        """Processes that the controller starts and watches: ranks, or a launcher on each node."""
        return self.spec.nodes if self.spec.starts == "nodes" else self.spec.processes
