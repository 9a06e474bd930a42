"""What the built-in trainer asks of its data."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.runtime.sampling import Mixture
from paceline.runtime.strategy.train import Batch


class Samples(Protocol):
    """Samples of equal length, each with a number."""

    @property
    def num_samples(self) -> int:
        """Ids run from 0 to one less."""

    @property
    def order(self) -> int | Mixture:
        """What ids are drawn from: all samples alike, or sources by weight."""

    @property
    def sources(self) -> dict[str, range]:
        """Name of each source, and the ids of its samples."""

    @property
    def targets_per_sample(self) -> float | None:
        """Mean number of targets that count; None where every sample has as many."""

    def samples(self, ids: Sequence[int] | NDArray[np.int64]) -> Batch:
        """`(inputs_BS, targets_BS)` of these samples in this order, both int64; where documents
        in a sample are kept apart also where they end."""
