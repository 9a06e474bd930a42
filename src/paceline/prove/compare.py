"""A proof beside the planner's estimate, part by part. Imports no torch.

Both speak of a rank at its fullest, in living tensors. What the estimate adds for the allocator and
the driver is no part of a proof, and is taken over as it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from paceline.estimate import MemoryEstimate
from paceline.plan import Plan
from paceline.prove.proof import Proof, StageProof

_ROWS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "parameters": (("parameters",), ("parameters",)),
    "gradients": (("gradients",), ("gradients",)),
    "optimizer": (("optimizer",), ("optimizer", "master copy")),
    "activations": (
        ("activations", "recomputed", "logits and loss", "temporaries", "inputs"),
        ("activations",),
    ),
    "gathered": (("gathered", "reducing"), ("gathered",)),
    "buffers": (("buffers",), ("buffers",)),
}
"""A row's name -> parts of the proof, parts of the estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCompared:
    """One part of one rank's memory."""

    part: str
    proved_bytes: int
    estimated_bytes: int | None
    """None is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The fullest stage against its estimate."""

    stage: int
    parts: tuple[PartCompared, ...]
    proved_bytes: int
    estimated_bytes: int
    """Estimated bytes of the parts that are known, in living tensors."""

    reserve_bytes: int
    """For the allocator, the driver and a checkpoint that is being written, as estimated."""

    limit_bytes: int
    """What a rank may use."""

    step_s: float | None
    """Simulated."""

    estimated_step_s: float | None
    estimated_terms: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds of the estimated step by term; none where it is not compared by term."""

    engine: str = ""
    """The job's engine, whose estimate this is, where that is not the runtime that was proved."""

    @property
    def fits(self) -> bool:
        """Whether what was proved and the reserve are within the limit."""
        return self.proved_bytes + self.reserve_bytes <= self.limit_bytes


def compare(proof: Proof, plan: Plan) -> Compared:
    """The proof of a plan's layout against what the plan estimated."""
    compared = compare_with(
        proof,
        plan.stages or (plan.estimate.memory,),
        limit_bytes=plan.limit_bytes,
        estimated_step_s=plan.estimate.step_s,
    )
    engine = "" if plan.engine == "paceline" else plan.engine
    return replace(compared, engine=engine, estimated_terms=plan.estimate.terms)


def compare_with(
    proof: Proof,
    stages: tuple[MemoryEstimate, ...],
    *,
    limit_bytes: int,
    estimated_step_s: float | None,
) -> Compared:
    """A proof against the estimates of its layout's stages, whatever the layout."""
    stage = proof.fullest
    memory = stages[min(stage.stage, len(stages) - 1)]
    slack, saving = (memory.parts[name] or 0 for name in ("slack", "checkpoint"))
    return Compared(
        stage=stage.stage,
        parts=tuple(_parts(stage, memory)),
        proved_bytes=stage.peak_bytes,
        estimated_bytes=memory.allocated_bytes - saving,
        reserve_bytes=memory.overhead_bytes + slack + saving,
        limit_bytes=limit_bytes,
        step_s=None if proof.simulated is None else proof.simulated.step_s,
        estimated_step_s=estimated_step_s,
    )


def _parts(stage: StageProof, memory: MemoryEstimate) -> Iterator[PartCompared]:
    for name, (ours, theirs) in _ROWS.items():
        sizes = [memory.parts[part] for part in theirs]
        known = [size for size in sizes if size is not None]
        yield PartCompared(
            part=name,
            proved_bytes=sum(stage.parts.get(part, 0) for part in ours),
            estimated_bytes=sum(known) if len(known) == len(sizes) else None,
        )
