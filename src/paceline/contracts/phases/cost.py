"""Phase 14: what it costs, where it is cheapest, and what would be cheaper."""

from math import inf
from typing import Any

from paceline.contracts.nulls import with_null_reasons
from paceline.contracts.phases.case import Case
from paceline.estimate.cost import RunCost
from paceline.plan.outlook import Outlook
from paceline.units import counted, format_amount, format_seconds


def estimate_cost(case: Case) -> dict[str, Any]:
    """Dollars at every provider with a price, the cheapest on demand in front."""
    view, goals = case.view, case.goals
    chosen = cheapest_on_demand(case)
    steps = view.num_steps
    usd = None if chosen is None else chosen.usd
    found: dict[str, Any] = {
        "estimatedCost": _headline(case, chosen),
        "estimatedCostUSD": usd,
        "breakdown": _breakdown(chosen),
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
    unpriced = _headline(case, None) if chosen is None else ""
    no_budget = "plan.budget is not given"
    kept = "nothing is kept or sent out that has a price"
    if chosen is not None and chosen.unknown:
        kept = f"unknown: {', '.join(chosen.unknown)}"
    reasons = {
        **dict.fromkeys(("estimatedCostUSD", "breakdown.compute"), unpriced),
        **dict.fromkeys(("costPerCheckpoint", "costPerThousandSteps"), unpriced),
        **dict.fromkeys(("breakdown.storage", "breakdown.network"), unpriced or kept),
        "breakdown.other": "nothing else is counted",
        "costPerEpoch": unpriced or "the job is given in steps: train.epochs is not set",
        "gpuHours": unpriced,
        "budget": no_budget,
        "withinBudget": no_budget if goals.budget_usd is None else unpriced,
    }
    return with_null_reasons(found, reasons)


def _breakdown(chosen: RunCost | None) -> dict[str, float | None]:
    """Dollars for accelerators, kept checkpoints and the model sent out; None without a price."""
    terms = {} if chosen is None else dict(chosen.terms)
    kept = {"storage": terms.pop("storage", None), "network": terms.pop("egress", None)}
    return {"compute": sum(terms.values()) if terms else None, **kept, "other": None}


def cheapest_on_demand(case: Case) -> RunCost | None:
    """The price that the plan is judged by: it is not taken away half-way."""
    return _on_demand(case.view)


def _on_demand(view: Outlook) -> RunCost | None:
    return next((cost for cost in view.costs if cost.way == "on demand"), None)


def cheaper_than(case: Case, usd: float) -> list[tuple[str, RunCost]]:
    """What to change, and its price, of each place and number of nodes that costs less and is known
    to meet the deadline; the cheapest first, three of either at most."""
    places = [
        (f"{cost.provider} {cost.instance}, {cost.way}{_interrupted(cost)}", cost)
        for cost in sorted(case.view.costs, key=lambda each: each.usd)
        if cost.usd < usd
    ][:3]
    deadline = inf if case.goals.deadline_s is None else case.goals.deadline_s
    nodes = [
        (f"cluster.nodes={plan.cluster.num_nodes} ({plan.layout_name}, {_at(cost)})", cost)
        for plan, view in case.others
        for cost in _best_of_ways(view)
        if cost.usd < usd and 3600 * cost.hours <= deadline
    ]
    nodes = sorted(nodes, key=lambda each: each[1].usd)[:3]
    return sorted([*nodes, *places], key=lambda each: each[1].usd)


def _best_of_ways(view: Outlook) -> list[RunCost]:
    """The cheapest on demand and on spot, of machines that are known to run it."""
    best: dict[str, RunCost] = {}
    for cost in sorted(view.costs, key=lambda each: each.usd):
        if cost.runs_as_planned:
            best.setdefault(cost.way, cost)
    return [*best.values()]


def _at(cost: RunCost) -> str:
    spot = f", spot{_interrupted(cost)}" if cost.way == "spot" else ""
    return f"at {cost.provider}{spot}"


def _interrupted(cost: RunCost) -> str:
    return " (interruptions assumed)" if cost.way == "spot" else ""


def saving_opportunities(case: Case) -> list[str]:
    """What would cost less, with its dollars."""
    chosen = cheapest_on_demand(case)
    if chosen is None:
        return []
    found = [
        f"{told}: ${format_amount(cost.usd)} instead of ${format_amount(chosen.usd)} in "
        f"{cost.hours:.4g} h instead of {chosen.hours:.4g} h"
        for told, cost in cheaper_than(case, chosen.usd)
        if round(cost.usd) < round(chosen.usd)
    ]
    lost = chosen.terms.get("lost", 0.0) + chosen.terms.get("restart", 0.0)
    if lost > 0.01 * chosen.usd:
        found.append(
            f"${format_amount(lost)} are lost to failures: restart faster, or save more often"
        )
    best, view = case.view.checkpoints, case.view
    if best is not None and view.goodput is not None and view.best_goodput is not None:
        gain = view.best_goodput.useful - view.goodput.useful
        if gain > 0.001 and round(gain * chosen.usd):
            found.append(
                f"a checkpoint every {best.every_steps} steps instead of "
                f"{case.plan.checkpoint_every} saves {gain:.1%} of the time, "
                f"${format_amount(gain * chosen.usd)}"
            )
    return found


def _headline(case: Case, chosen: RunCost | None) -> str:
    if chosen is None:
        if case.view.train_s is None:
            return "unknown: the step's time is"
        return f"unknown: the catalog has no price of {case.plan.cluster.accelerator}"
    return (
        f"${chosen.usd:,.2f} for {chosen.hours:.4g} h of {chosen.num_instances} {chosen.provider} "
        f"{chosen.instance} on demand ({chosen.as_of})"
        + "".join(f"; without {each}" for each in chosen.unknown)
    )


def _tradeoffs(case: Case) -> list[dict[str, Any]]:
    """Numbers of nodes of which none is both dearer and slower than another, the fastest first."""
    found = []
    for plan, view in ((case.plan, case.view), *case.others):
        cost = _on_demand(view)
        if cost is not None:
            found.append((cost.hours, cost.usd, plan, cost))
    front: list[dict[str, Any]] = []
    least = inf
    for hours, usd, plan, cost in sorted(found, key=lambda each: each[:2]):
        if usd >= least:
            continue
        least = usd
        front.append(
            {
                "strategy": f"{plan.layout_name} on {counted(plan.cluster.num_nodes, 'node')}",
                "hours": hours,
                "usd": usd,
                "chosen": plan is case.plan,
                "basis": f"{format_seconds(plan.estimate.step_s or 0.0)} a step at {cost.provider}",
            }
        )
    return front
