"""How far from a single device a right layout may be: rounding, and nothing else.

**In float64.** A layout adds up the same numbers in another order. A sum of n numbers in any order
is off by at most (n-1) u sum|x|, u = 2^-53 (Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., section 4.2, equation 4.4). With d operations one after another, forward and backward, and
sums of at most n numbers, first-order errors add up to d n u of the size of what is computed:
`wide`. How much a model amplifies what is wrong before, that bound does not know; the single
device's own run shows it: its rounding in the job's precision, of unit v, is to first order a
multiple of v, so in float64 it would be u / v times that. Two orders of the same sum differ by at
most n u where one alone is usually off by sqrt(n) u (section 2.8): hence sqrt(d n) times it. The
larger of the two is allowed. It is around 1e-12; a wrong factor, a missing sum or a stale copy is
off by 1e-4 and more.

**In the job's precision.** The truth is the float64 run of the single device. The single device
itself is off by e. Layouts are off by as much, up to the order of their sums: the error of a sum of
n numbers grows between sqrt(log2 n) (pairwise) and sqrt(n) (one by one) u (section 4.2 and 4.6), so
by a factor of at most sqrt(n / log2 n); three of those, as both are single draws. Where the single
device happens to be exact, one unit of the result stands for e.
"""

from math import isnan, log2, sqrt
from typing import Literal

from paceline.record.verification import Case, Deviation, Reading, Reference

UNITS = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "tf32": 2.0**-11,
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
    "fp8": 2.0**-4,
}
"""Largest relative error of rounding to nearest. Source: IEEE 754-2019; bfloat16: 8 bits of
significand; OCP 8-bit floating point, E4M3: 4."""


Kind = Literal["gradients", "parameters"]


def order_of_sums(num_terms: int) -> float:
    """How many times a single device's rounding error is right for another order of its sums, of
    at most so many numbers. Source: above, "in the job's precision".

    >>> round(order_of_sums(256), 1)
    17.0
    """
    return 3 * sqrt(num_terms / log2(num_terms))


class Tolerance:
    """What is allowed of one case."""

    def __init__(self, case: Case, reference: Reference) -> None:
        self.reference = reference
        layout = case.layout
        self.longest = reference.longest_sum + layout.num_ranks + layout.accumulation
        self.chained = reference.num_chained
        self.unit = UNITS[case.precision]

    def off(self, deviation: Deviation, kind: Kind, step: int) -> float:
        """Root mean square of a difference, as a share of the single device's; NaN if it is.

        Of at least the model's usual number: a gradient that is zero but for rounding (a key's
        bias, to which attention is blind) is a sum of numbers that are not, and rounds like those.
        """
        of = max(deviation.of, deviation.count * self._usual(kind, step))
        return sqrt(deviation.squares / of) if deviation.squares > 0 else deviation.squares

    def _usual(self, kind: Kind, step: int) -> float:
        deviations = getattr(self.reference.narrow[step - 1], kind).values()
        count = sum(each.count for each in deviations)
        return sum(each.of for each in deviations) / count if count else 1.0

    @property
    def wide(self) -> float:
        """In float64, from the number of terms alone."""
        return self.chained * self.longest * UNITS["fp64"]

    def gradient(self, step: int, name: str) -> float:
        """In float64."""
        return max(self.forward(step), self._scaled(name, "gradients", step))

    def parameter(self, step: int, name: str) -> float:
        """In float64, after a step."""
        return max(self.forward(step), self._scaled(name, "parameters", step))

    def forward(self, step: int) -> float:
        """In float64, of outputs: after the first step parameters are off already."""
        if step == 1:
            return self.wide
        names = self.reference.shapes
        return max(self.wide, *(self._scaled(name, "parameters", step - 1) for name in names))

    def loss(self, step: int) -> float:
        """In float64, of the loss and of the gradients' norm."""
        return self.forward(step)

    @property
    def order(self) -> float:
        """In the job's precision: how many times the single device's error is right."""
        return order_of_sums(self.longest)

    def narrow(self, single_device: float) -> float:
        """In the job's precision, where the single device is off by so much; both relative."""
        return self.order * max(single_device, self.unit)

    def _scaled(self, name: str, kind: Kind, step: int) -> float:
        """What the single device's rounding in the job's precision would be in float64."""
        narrow = getattr(self.reference.narrow[step - 1], kind).get(name)
        if narrow is None:
            return 0.0
        share = self.off(narrow, kind, step)
        if not share < 1:  # nothing of it is right, so it is no multiple of the unit either
            return 0.0
        return sqrt(self.chained * self.longest) * share * UNITS["fp64"] / self.unit


def reading_is_off(found: Reading, truth: Reading, allowed: float) -> float:
    """How far a reading is off, in multiples of what is allowed.

    A sum of n numbers is compared with sqrt(n sum x^2), which is at least sum|x|.
    """
    size = sqrt(truth.count * truth.squares)
    parts = (
        _share(found.total - truth.total, size),
        _share(found.squares - truth.squares, 2 * truth.squares),
        _share(found.largest - truth.largest, truth.largest),
    )
    return max(parts) / allowed


def _share(difference: float, of: float) -> float:
    share = abs(difference) / of if of else abs(difference)
    return float("inf") if isnan(share) else share
