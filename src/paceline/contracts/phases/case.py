"""What every phase is handed, and what comes of one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.contracts.operate import applies_to
from paceline.contracts.phases.required import Requirements
from paceline.contracts.watched import Watched, watched
from paceline.errors import Problem
from paceline.job import Job
from paceline.plan.decision import Plan
from paceline.plan.outlook import Outlook


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """What the run may cost and take; None is no limit."""

    budget_usd: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan, seen from all sides."""

    job: Job

    plan: Plan
    """The plan; where nothing fits, the one that enough memory would give."""

    view: Outlook
    required: Requirements
    goals: Goals

    others: tuple[tuple[Plan, Outlook], ...] = ()
    """Plans of this job on other numbers of nodes, with their outlook."""

    tried_nodes: tuple[int, ...] = ()
    """The other numbers of nodes; on those without a plan in `others` nothing fits."""

    refused: Problem | None = None
    """Why nothing fits; None when something does."""

    available_bytes: int | None = None
    """Memory of an accelerator that there is, where nothing fits: the plan's is larger."""

    created: str | None = None
    """When, as text; None where the output must not depend on the day."""

    @property
    def feasible(self) -> bool:
        """Whether something fits."""
        return self.refused is None

    @property
    def seen(self) -> Watched:
        """What is seen of the run."""
        return watched(self.plan, self.job)

    @property
    def applies_to(self) -> str:
        """Which program the phase is about."""
        return applies_to(self.plan, self.job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One of the sixteen, with what it found."""

    number: int
    """From 1."""

    name: str
    """Such as `resource-assessment`."""

    file: str
    """Its name among the files."""

    output: Mapping[str, Any]
    """JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A point where somebody may want to stop."""

    phase: int
    name: str

    status: Literal["passed", "failed", "review"]
    """`review` wants a person's yes, and is no fault."""

    stops: bool = False
    """Whether what follows makes no sense: always an error."""

    problem: Problem | None = None
    """What is wrong, where `status` is `failed`."""

    summary: str = ""
    """What a person is asked to look at."""
