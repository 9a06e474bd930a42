"""What was chosen: a `Plan`, every decision with its reason, and the case against the rest."""

from dataclasses import dataclass
from typing import Literal

from paceline.estimate import Estimate
from paceline.parallel import Layout
from paceline.profile import DecoderShape, ModelProfile
from paceline.topology import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One thing that was left open and is now decided."""

    field: str
    """Dotted field of the job, such as `layout.micro_batch`."""

    value: str
    """What was decided, for people."""

    reason: str
    """Why, in the job's own numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A layout that was considered and lost."""

    layout: Layout
    estimate: Estimate
    reason: str
    """Why it lost, in numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen layout of one job on one cluster, and why."""

    cluster: Cluster
    profile: ModelProfile
    decoder: DecoderShape | None
    """Sizes of the built-in decoder; None for a model of your own."""

    layout: Layout
    estimate: Estimate
    precision: Literal["fp32", "bf16"]
    """Type of the matrix multiplications."""

    checkpoint_every: int
    """Steps between checkpoints."""

    evaluate_every: int
    """Steps between evaluations."""

    decisions: tuple[Decision, ...]
    """Everything the job left open."""

    rejected: tuple[Rejected, ...]
    """The other layouts, best first."""
