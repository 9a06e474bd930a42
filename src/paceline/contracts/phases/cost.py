"""Phase 14: what it costs, where it is cheapest, and what would be cheaper."""

from typing import Any

from paceline.contracts.phases.case import Case
from paceline.estimate.cost import RunCost
from paceline.units import format_seconds


def estimate_cost(case: Case) -> dict[str, Any]:
    """Dollars at every provider with a price, the cheapest on demand in front."""
    view, goals = case.view, case.goals
    chosen = cheapest_on_demand(case)
    steps = view.num_steps
    usd = None if chosen is None else chosen.usd
    return {
        "estimatedCost": _headline(case, chosen),
        "estimatedCostUSD": usd,
        "breakdown": {"compute": usd, "storage": None, "network": None, "other": None},
        "gpuHours": view.accelerator_hours,
        "rate": "unknown"
        if chosen is None
        else f"${chosen.per_instance_hour_usd:.2f} an hour for one {chosen.instance} at "
        f"{chosen.provider}, {chosen.as_of}",
        "costPerEpoch": None if chosen is None else chosen.usd_per_epoch,
        "costPerCheckpoint": None if chosen is None else chosen.usd_per_checkpoint,
        "costPerThousandSteps": None if usd is None else 1000 * usd / steps,
        "savingOpportunities": saving_opportunities(case),
        "costVsTimeTradeoffs": _tradeoffs(case),
        "providerComparison": [
            {
                "provider": cost.provider,
                "instance": cost.instance,
                "way": cost.way,
                "instances": cost.num_instances,
                "usd": cost.usd,
                "hours": cost.hours,
                "usefulShare": cost.useful,
                "asOf": cost.as_of,
                "source": cost.source,
                "terms": dict(cost.terms),
            }
            for cost in view.costs
        ],
        "budget": goals.budget_usd,
        "withinBudget": None
        if goals.budget_usd is None or usd is None
        else usd <= goals.budget_usd,
    }


def cheapest_on_demand(case: Case) -> RunCost | None:
    """The price that the plan is judged by: it is not taken away half-way."""
    return next((cost for cost in case.view.costs if cost.way == "on demand"), None)


def saving_opportunities(case: Case) -> list[str]:
    """What would cost less, with its dollars."""
    chosen = cheapest_on_demand(case)
    if chosen is None:
        return []
    found = [
        f"{cost.provider} {cost.instance}, spot: ${cost.usd:,.0f} instead of ${chosen.usd:,.0f} in "
        f"{cost.hours:.4g} h instead of {chosen.hours:.4g} h (interruptions assumed)"
        for cost in case.view.costs
        if cost.usd < chosen.usd
    ][:3]
    lost = chosen.terms.get("lost", 0.0) + chosen.terms.get("restart", 0.0)
    if lost > 0.01 * chosen.usd:
        found.append(f"${lost:,.0f} are lost to failures: restart faster, or save more often")
    best = case.view.checkpoints
    if best is not None and case.view.goodput is not None:
        gain = best.goodput.useful - case.view.goodput.useful
        if gain > 0.001:
            found.append(
                f"a checkpoint every {best.every_steps} steps instead of "
                f"{case.plan.checkpoint_every} saves {gain:.1%} of the time, "
                f"${gain * chosen.usd:,.0f}"
            )
    return found


def _headline(case: Case, chosen: RunCost | None) -> str:
    if chosen is None:
        if case.view.train_s is None:
            return "unknown: the step's time is"
        return f"unknown: the catalog has no price of {case.plan.cluster.accelerator}"
    return (
        f"${chosen.usd:,.2f} for {chosen.hours:.4g} h of {chosen.num_instances} {chosen.provider} "
        f"{chosen.instance} on demand ({chosen.as_of}), compute only"
    )


def _tradeoffs(case: Case) -> list[dict[str, Any]]:
    """The layouts that lost: other ways of using the same accelerators."""
    chosen, step_s = cheapest_on_demand(case), case.plan.estimate.step_s
    if chosen is None or not step_s:
        return []
    found: list[dict[str, Any]] = []
    for each in case.plan.rejected[:3]:
        if each.estimate.step_s is None:
            continue
        times = each.estimate.step_s / step_s
        found.append(
            {
                "strategy": each.layout.name,
                "hours": chosen.hours * times,
                "usd": chosen.usd * times,
                "basis": f"{format_seconds(each.estimate.step_s)} a step",
            }
        )
    return found
