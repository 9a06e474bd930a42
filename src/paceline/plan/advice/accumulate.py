"""How a global batch is split into micro-batches and accumulation, and what to do when it does not
divide.
"""

from dataclasses import dataclass

from paceline.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """`achieved_batch` = `micro_batch` x `accumulation` x `data_ranks`."""

    wanted_batch: int
    """Samples a step that were asked for."""

    data_ranks: int
    """Ranks that read different samples: all ranks / (tensor x pipeline x context)."""

    micro_batch: int
    """Samples one rank computes at once."""

    accumulation: int
    """Micro-batches that are added up before one optimizer step."""

    achieved_batch: int
    """Samples a step that come of it."""

    nearest: tuple[int, ...]
    """Batches next to the wanted one that divide by the data ranks; empty when it does."""

    explanation: str
    """The equation, or what does not divide."""

    @property
    def rounding_error(self) -> float:
        """How far the achieved batch is from the wanted one, as a share of the wanted one."""
        return self.achieved_batch / self.wanted_batch - 1


def solve_batch(global_batch: int, *, data_ranks: int, max_micro_batch: int) -> BatchSplit:
    """The largest micro-batch that divides, with its accumulation.

    A batch that does not divide by the data ranks is rounded to the nearest that does, and so says
    `rounding_error`. Of two that are as near, the one with the larger micro-batch is taken.

    Args:
        global_batch: Samples in one optimizer step, over all ranks.
        data_ranks: Ranks that read different samples. Not all ranks: those that share a tensor,
            pipeline or context split read the same ones.
        max_micro_batch: Most samples that fit on a rank at once.

    >>> split = solve_batch(64, data_ranks=2, max_micro_batch=8)
    >>> split.micro_batch, split.accumulation, split.rounding_error
    (8, 4, 0.0)
    >>> split = solve_batch(100, data_ranks=8, max_micro_batch=4)
    >>> split.achieved_batch, split.nearest, round(split.rounding_error, 2)
    (96, (96, 104), -0.04)
    """
    for name, value in (
        ("global batch", global_batch),
        ("data ranks", data_ranks),
        ("micro-batch", max_micro_batch),
    ):
        if value < 1:
            raise ValueError(f"the {name} is {value}; it is at least 1")
    below = global_batch // data_ranks * data_ranks
    nearest: tuple[int, ...] = ()
    achieved = global_batch
    if below != global_batch:
        above = below + data_ranks
        nearest = (below, above) if below else (above,)
        achieved = min(
            nearest,
            key=lambda batch: (
                abs(batch - global_batch),
                -largest_divisor(batch // data_ranks, max_micro_batch),
                -batch,
            ),
        )
    share = achieved // data_ranks
    micro = largest_divisor(share, max_micro_batch)
    return BatchSplit(
        wanted_batch=global_batch,
        data_ranks=data_ranks,
        micro_batch=micro,
        accumulation=share // micro,
        achieved_batch=achieved,
        nearest=nearest,
        explanation=_explain(global_batch, data_ranks, achieved, share, micro, max_micro_batch),
    )


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most `most`.

    >>> largest_divisor(24, 10)
    8
    """
    return next(each for each in range(min(number, most), 0, -1) if number % each == 0)


def _explain(wanted: int, ranks: int, achieved: int, share: int, micro: int, most: int) -> str:
    equation = (
        f"{achieved} = {micro} a micro-batch x {share // micro} accumulated x "
        f"{counted(ranks, 'rank')}"
    )
    if achieved != wanted:
        each = f"{wanted / ranks:.2f} samples each"
        return f"{wanted} does not divide by {counted(ranks, 'rank')}: {each}; {equation}"
    if micro < min(share, most):
        return (
            f"{equation}; {most} would fit at once, and no divisor of a rank's {share} samples "
            f"lies between {micro} and {most}"
        )
    return equation
