"""How fast a run goes now, and what it costs until its end."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from paceline.plan import Plan

PACE_STEPS = 50
"""Last steps whose times say how long the rest takes. A guess."""


def pace_s(at: Sequence[float], generation: Sequence[float]) -> float | None:
    """Mean seconds from one of the newest steps to the next, saves and evaluations included and
    recoveries not; None when fewer than two are known.

    >>> pace_s([0, 2, 500, 502], [1, 1, 2, 2])
    2.0
    """
    steps = list(zip(at[-PACE_STEPS:], generation[-PACE_STEPS:], strict=True))
    gaps = [later - earlier for (earlier, a), (later, b) in pairwise(steps) if a == b]
    return float(fmean(gaps)) if gaps else None


def cost_of(
    plan: Plan | None, ran_s: float, *, left_s: float | None, is_on: bool
) -> tuple[float | None, float | None, str | None]:
    """Dollars so far, dollars at the end, and whose price; all None without a price.

    Args:
        ran_s: For how long the run has had its machines.
        left_s: Until the last step at the newest pace; None is not known yet.
        is_on: Whether it runs now: at the end of one that is over, nothing is to come.
    """
    if plan is None or plan.cost is None:
        return None, None, None
    cost = plan.cost
    per_s = cost.per_instance_hour_usd * cost.num_instances / 3600
    at_end = None
    if is_on:
        at_end = per_s * (ran_s + left_s) if left_s is not None else max(cost.usd, per_s * ran_s)
    return per_s * ran_s, at_end, f"{cost.provider} {cost.instance}, {cost.way}, {cost.as_of}"
