"""Where a lost rank's state comes from, as lines of plain text."""

from collections.abc import Iterator

from paceline.estimate.recovery import LEAST_GAIN, StatePlan, StateTier
from paceline.plan import Plan
from paceline.report.table import wrapped
from paceline.units import counted, format_bytes, format_interval, format_seconds


def recovery_lines(plan: Plan) -> Iterator[str]:
    """Where a lost rank's state comes from: every tier with its cost, the chosen one first."""
    state = plan.state
    if state is None:
        return
    yield ""
    asked = "asked for" if state.is_asked else f"chosen: {_why_chosen(state)}"
    is_spot = plan.cost is not None and plan.cost.way == "spot"
    taken = "; failures alone, without spot instances that are taken"
    if state.chosen != "checkpoint":  # the machines that hold the copies are taken with it
        every = counted(plan.checkpoint_every, "step")
        taken = f" after a failure; from the checkpoint, saved every {every}, where a spot instance"
        taken += " is taken; below are failures alone"
    often = f"; assumed: a failure every {format_interval(state.mtbf_s)}"
    yield from wrapped(
        "recovery    ",
        f"from {RECOVERS_FROM[state.chosen]} ({asked})"
        + (often if plan.goodput is None or plan.wall_s is None else "")
        + (taken if is_spot else ""),
    )
    for tier in sorted(state.tiers, key=lambda each: each.name != state.chosen):
        label = "host memory" if tier.name == "memory" else tier.name
        yield from wrapped(f"  {label:<13}", tier_text(tier))


def _why_chosen(state: StatePlan) -> str:
    """As `state_plan` chooses."""
    if all(each.why_not for each in state.tiers if each.name != state.chosen):
        return "the only way here"
    return {
        "replica": "no extra cost",
        "memory": "the highest goodput",
        "checkpoint": f"other ways gain less than {LEAST_GAIN:.1%}",
    }[state.chosen]


RECOVERS_FROM = {
    "replica": "another rank's copy of the state",
    "memory": "a copy in host memory",
    "checkpoint": "the checkpoint",
}
"""Tier -> where a lost rank's state comes from."""


def tier_text(tier: StateTier) -> str:
    """One tier's worth, costs and losses."""
    if tier.useful is None:
        return f"not possible: {tier.why_not}"
    costs = []
    if tier.host_bytes:
        costs.append(f"takes {format_bytes(tier.host_bytes)} of a node's memory")
    if tier.network_bytes_per_step:
        costs.append(f"sends {format_bytes(tier.network_bytes_per_step)} a rank and step")
    if tier.step_s:
        costs.append(f"adds {format_seconds(tier.step_s)} to a step")
    if tier.interval_s is not None:
        costs.append(f"saves every {format_seconds(tier.interval_s)}")
    costs.append(
        f"a failure costs {format_seconds(tier.recover_s)} and repeats "
        f"{format_seconds(tier.lost_s)} of work"
    )
    if tier.name != "checkpoint":
        # Copies on the node itself outlive failures of a process; those elsewhere most others too.
        of = "" if tier.outlives_node is not False else " (a process ends, its node stays up)"
        costs.append(
            f"covers {tier.covered:.1%} of failures{of}; others: resume from the checkpoint"
        )
    return "; ".join([f"goodput {tier.useful:.2%}", *costs])
