"""Where a larger batch stops paying, from two measured gradient norms.

It is a measurement at one moment of one run: the noise scale grows during training, so measure it
again later. There is no honest value without a measurement, and this page gives none.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalBatch:
    """The simple noise scale: samples at which gradient and noise are equally large."""

    samples: float
    """The batch at which steps and samples are both twice their least."""

    gradient_square: float
    """Estimate of the true gradient's squared norm."""

    noise: float
    """Estimate of the trace of one sample's gradient covariance."""

    def steps_ratio(self, batch: float) -> float:
        """Steps needed at a batch, over the least possible with an infinite one."""
        return 1 + self.samples / batch

    def samples_ratio(self, batch: float) -> float:
        """Samples needed at a batch, over the least possible with the smallest one."""
        return 1 + batch / self.samples


def critical_batch(
    *, small_batch: int, small_square: float, big_batch: int, big_square: float
) -> CriticalBatch | None:
    """The simple noise scale from squared gradient norms at two batch sizes; None when the two
    are too noisy to tell (average more steps).

    In data-parallel training both come for free: the norm on one rank before the all-reduce
    (small), and the norm after it (big). Average each over many steps before this.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training, arXiv:1812.06162,
    appendix A.1; the trade of steps against samples is its equation 2.11.

    >>> found = critical_batch(small_batch=8, small_square=5.0, big_batch=64, big_square=1.5)
    >>> round(found.samples), round(found.steps_ratio(32), 1)
    (32, 2.0)
    """
    if not 0 < small_batch < big_batch:
        raise ValueError("the big batch is larger than the small one, and both are above 0")
    square = (big_batch * big_square - small_batch * small_square) / (big_batch - small_batch)
    noise = (small_square - big_square) / (1 / small_batch - 1 / big_batch)
    if square <= 0 or noise <= 0:
        return None
    return CriticalBatch(samples=noise / square, gradient_square=square, noise=noise)
