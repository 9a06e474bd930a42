"""How large the global batch of each step is. A run that shrinks may have smaller ones from then on
(`recovery.batch`), and the learning rate follows them.

Which samples a step reads follows from the sizes of all steps before it, so these are a part of the
state: they come back with it from another rank, a checkpoint or memory.
"""

from dataclasses import dataclass

from paceline.record.checkpoints import BatchChanges


@dataclass(slots=True)
class Batches:
    """How large the global batch of each step is, and so where the data of a step begins.

    >>> batches = Batches(9)
    >>> batches.begin(7, 6)
    >>> batches.start(7), batches.start(8), batches.size(6), batches.size(7)
    (54, 60, 9, 6)
    """

    first: int
    """Samples of the run's first step."""

    changes: BatchChanges = ()

    def start(self, step: int) -> int:
        """How many samples the steps before this one read."""
        ends = (*(begin for begin, _ in self.changes if begin < step), step)
        sizes = (self.first, *(size for _, size in self.changes))
        begins = (1, *ends)
        return sum(
            size * (end - begin) for begin, end, size in zip(begins, ends, sizes, strict=False)
        )

    def size(self, step: int) -> int:
        """Samples of this step."""
        return self.start(step + 1) - self.start(step)

    def begin(self, step: int, size: int) -> None:
        """From this step on batches have this size; what was said of later ones is forgotten."""
        self.changes = tuple(change for change in self.changes if change[0] < step)
        if self.size(step) != size:
            self.changes += ((step, size),)
