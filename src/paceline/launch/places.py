"""Where a run can be: one row for each place; its module is imported only when it is asked for.

A place is one of two kinds. At an *attached* one the controller is the command that was started:
the place only starts the agents of its nodes, and ends them. A *queued* one takes the whole run and
starts that same command later, on machines of its own. Either way it is the same controller and the
same agents, so recovery, drills and records are those of a run on this machine.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Literal, Protocol, cast

from paceline.control.controller import Agents
from paceline.errors import JobError, Problem, did_you_mean
from paceline.job import Job, Script
from paceline.plan import Plan
from paceline.record.placement import Placement
from paceline.record.run import RunFolder
from paceline.topology.node.facts import Gathered, Question

Kind = Literal["attached", "queued"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One row of the table of places."""

    title: str
    """For people: `the hosts of a list, over ssh`."""

    module: str
    """What it is made of: `AttachedModule` or `QueuedModule`."""

    kind: Kind

    has_our_files: bool = True
    """Whether its machines read this one's files, by a shared file system or by being this one."""


PLACES: Mapping[str, Place] = {
    "local": Place(title="this machine", module="paceline.launch.local", kind="attached"),
    "ssh": Place(title="hosts that ssh reaches", module="paceline.launch.ssh", kind="attached"),
    "slurm": Place(title="Slurm, by sbatch", module="paceline.launch.slurm", kind="queued"),
    "srun": Place(
        title="the Slurm allocation that this runs in",
        module="paceline.launch.srun",
        kind="attached",
    ),
    "ray": Place(title="the nodes of a Ray cluster", module="paceline.launch.ray", kind="attached"),
    "kubernetes": Place(
        title="Kubernetes, by its API",
        module="paceline.launch.kubernetes",
        kind="queued",
        has_our_files=False,
    ),
    "sky": Place(
        title="machines that SkyPilot rents",
        module="paceline.launch.sky",
        kind="queued",
        has_our_files=False,
    ),
}
"""Name on the command line -> the place."""


class SiteAgents(Agents, Protocol):
    """The agents of one controller, and their end."""

    def end(self) -> None:
        """Wait until all have ended, and see to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The look that is taken at every machine on the visit that an attached place pays it anyway,
    before anything is started there."""

    question: Question
    """What each is asked, beyond the run's folder."""

    calls: bool
    """Whether the machines call each other too, which costs a visit more."""

    judge: Callable[[Gathered, str | None], Iterable[Problem]]
    """What keeps the run from being started; the text is that of the note in the run's folder."""


class Site(Protocol):
    """The machines of one run at an attached place."""

    @property
    def address(self) -> str:
        """Address of this machine on which every node reaches the controller."""

    def agents(self, lock: IO[bytes]) -> SiteAgents:
        """The agents of a controller, the first or the next. `lock` holds the run while an agent
        lives; one that cannot inherit it takes it itself (`agent --hold`)."""

    def end_by_force(self) -> None:
        """End every agent of the run, whoever started it; returns when those that can be reached
        are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One command of this machine that starts an agent."""

    host: str
    command: Sequence[str]
    """Run without a shell; the agent's secret is told apart from it."""


LATER = "ADDRESS:PORT"
"""Stands for the address of the controller, which has none before it is started."""


class AttachedModule(Protocol):
    """What the module of an attached place has."""

    check: Callable[[Job, Plan], Iterable[Problem]]
    """What keeps the job from running there; reaches for nothing that is not on this machine."""

    starts: Callable[[Job, Plan, RunFolder], Sequence[Start]]
    """The agents that would be started, one for each node in order; asks nobody. For a dry run."""

    open_site: Callable[[Job, Plan, RunFolder, Callable[[str], None], Inspection | None], Site]
    """Look at the machines, each by name. The function is told what a person should know; without
    an inspection it is only seen to that they can be used at all. Raises JobError where one
    cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Exactly what is handed to a queue."""

    files: Mapping[str, str]
    """Path inside the run's folder `place/` -> the whole text."""

    command: Sequence[str]
    """That hands them over; run in the folder `place/`, without a shell."""

    notes: Sequence[str] = field(default=())
    """What a person should know before."""


State = Literal["waiting", "running", "finished", "failed", "cancelled", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a queue says of a run that it was given."""

    state: State
    detail: str
    """In the queue's own words: `PENDING (Resources)`."""

    nodes: Sequence[str] = ()
    started_at: float | None = None
    """Unix time; None is not yet, or unknown."""

    ended_at: float | None = None
    restarts: int | None = None
    """How often the queue has started it again."""

    limit_s: float | None = None
    """Longest that the queue lets it run, from its last start."""


class QueuedModule(Protocol):
    """What the module of a queued place has."""

    check: Callable[[Job | Script, Plan | None], Iterable[Problem]]
    """What keeps it from being submitted, such as a command that is not installed. Not asked at a
    dry run."""

    prepare: Callable[[Job | Script, Plan | None, RunFolder, Sequence[str]], Submission]
    """What would be submitted; touches nothing. The plan of your own script is None; the words
    are options for the `paceline run` that starts there, if one does. Raises JobError where the
    place cannot take the job."""

    submit: Callable[[Submission, RunFolder], str]
    """Hand it over; the files are in place already. Returns the queue's id of it. Raises JobError
    when the queue refuses; nothing is left in the queue then."""

    look: Callable[[Placement], Sight]
    """What the queue says now. Raises RunError when it cannot be asked."""

    cancel: Callable[[Placement], None]
    """Ask for a gentle end: workers save at the next step boundary. Raises RunError when the queue
    refuses or cannot be asked."""

    log_command: Callable[[Placement, int | None, bool], Sequence[str] | None]
    """Command that prints the log of a rank (None: of the controller), and goes on doing so (True);
    None where the logs are in the run's folder."""


def find_place(name: str) -> Place:
    """The place of that name.

    Raises:
        JobError: `W001`, naming the command that writes files for it, or the nearest place.
    """
    place = PLACES.get(name)
    if place is None:
        from paceline.render import ENGINES

        fix = did_you_mean(name, PLACES) or f"one of {', '.join(PLACES)}"
        if name in ENGINES:
            fix = (
                f"`paceline render JOB --for {name} --out FOLDER` writes files to start there; "
                f"places are {', '.join(PLACES)}"
            )
        raise JobError.of(code="W001", what=f"there is no place {name!r}", where="--on", fix=fix)
    return place


def attached(name: str) -> AttachedModule:
    assert find_place(name).kind == "attached"
    return cast(AttachedModule, importlib.import_module(PLACES[name].module))


def queued(name: str) -> QueuedModule:
    assert find_place(name).kind == "queued"
    return cast(QueuedModule, importlib.import_module(PLACES[name].module))
