"""Where the time of a simulated run went: one ledger, whose shares sum to the whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Part = Literal[
    "useful", "detect", "fence", "meet", "state", "recompute", "stall", "degraded", "idle"
]
PARTS: Mapping[Part, str] = {
    "useful": "steps that are kept, at the fault-free step time",
    "detect": "from the fault to the controller knowing",
    "fence": "until every survivor has left its process groups",
    "meet": "new processes start and all meet",
    "state": "the state comes back",
    "recompute": "steps, and parts of one, that are repeated",
    "stall": "training waits for a checkpoint or a snapshot",
    "degraded": "steps slower than the fault-free time",
    "idle": "waiting for a machine, or for a person",
}


@dataclass(slots=True)
class Ledger:
    """Seconds by part."""

    seconds: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, part: Part, seconds: float) -> None:
        """Time that went by."""
        assert seconds >= -1e-6, f"{seconds} s of {part}"
        self.seconds[part] += seconds

    def lose(self, seconds: float) -> None:
        """Steps that counted as useful have to be repeated."""
        self.seconds["useful"] -= seconds
        self.seconds["recompute"] += seconds
        assert self.seconds["useful"] >= -1e-6, "more was lost than was done"

    def shares(self, wall_s: float) -> dict[Part, float]:
        """Share of the wall time by part; they sum to 1, which is asserted."""
        total = sum(self.seconds.values())
        assert abs(total - wall_s) <= 1e-9 * wall_s + 1e-3, f"{total} s of {wall_s} s accounted for"
        return {part: seconds / wall_s for part, seconds in self.seconds.items()}
