"""What is simulated, and what came of it."""

from dataclasses import dataclass, field

from paceline.control.state import Setup, State
from paceline.estimate.recovery import Tier
from paceline.simulation.costs import Costs
from paceline.simulation.failures import Fault
from paceline.simulation.goodput import Ledger
from paceline.simulation.rhythm import Rhythm

REPRESENTATIVES = 8
"""Nodes that the core sees."""


_MAX_RESTARTS = 3
"""As `recovery.max_restarts` is by default."""

_LEAST_SPARES = 4
"""Spares that the core sees of few parts; of more, one for eight."""

_ENDLESS = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is simulated."""

    num_nodes: int
    ranks_per_node: int
    rhythm: Rhythm
    costs: Costs
    tier: Tier
    """Where a lost rank's state comes from."""

    covered: float
    """Share of the faults that take nodes after which that state is there."""

    memory_every: int = 1
    """With the tier `memory`: steps between two snapshots."""

    num_spares: int
    repair_s: float
    horizon_s: float
    max_restarts: int = _MAX_RESTARTS
    representatives: int = REPRESENTATIVES
    tail: float = 0.0
    """Standard deviation of the logarithm of every phase, around its figure as the median. 0 has
    none."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def parts_of(self, fault: Fault, num_parts: int) -> range:
        """The parts that a fault hits: of a process one, of nodes those they are in."""
        parts, nodes = num_parts, self.num_nodes
        first = fault.first_node * parts // nodes
        if not fault.takes_nodes:
            return range(first, first + 1)
        if parts > nodes:
            return range(first, (fault.first_node + fault.num_nodes) * parts // nodes)
        return range(first, (fault.first_node + fault.num_nodes - 1) * parts // nodes + 1)


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    ledger: Ledger
    steps: int = 0
    """Steps that are kept."""

    num_faults: int = 0
    num_recoveries: int = 0
    in_place: int = 0
    from_checkpoint: int = 0
    num_given_up: int = 0
    """Times that the controller ended the run."""

    downtimes_s: list[float] = field(default_factory=list)
    """From each fault to the first step after it."""


def new_state(scene: Scene, *, num_parts: int, first_generation: int) -> State:
    """What the controller's core knows when it starts on a cluster of so many parts."""
    return State(
        setup=Setup(
            num_nodes=num_parts,
            ranks_per_node=1,
            num_steps=_ENDLESS,
            max_restarts=scene.max_restarts,
            grace_s=60.0,
            versions={},
            resumed=first_generation > 1,
            layout="simulated",
            num_spares=min(scene.num_spares, max(_LEAST_SPARES, num_parts // 8)),
            first_generation=first_generation,
            node_strikes=_ENDLESS,  # a part stands for many nodes
            park_timeout_s=scene.costs.fence.at(scene.num_ranks) + 5.0,
            # Waiting for a repaired machine comes between joining and meeting here.
            meet_timeout_s=scene.repair_s + 3600.0,
            agent_timeout_s=scene.repair_s + 3600.0,
        )
    )
