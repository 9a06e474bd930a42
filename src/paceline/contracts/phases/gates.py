"""Where somebody may want to stop: five gates, and the last yes before the launch."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf, nextafter
from typing import Any

from paceline.contracts.phases.case import Case, Gate
from paceline.contracts.phases.cost import cheaper_than, cheapest_on_demand
from paceline.contracts.phases.memory import optimise_memory
from paceline.contracts.phases.split import choose_strategy
from paceline.errors import Problem
from paceline.estimate.cost import RunCost
from paceline.plan.infeasible import join_ways, ways_of
from paceline.plan.limits import affordable_steps
from paceline.prepare.checked import find_checked
from paceline.units import dollars_apart, format_amount, format_seconds, seconds_apart, significant

GATE_EXIT_CODE = 3
"""As of a plan that does not fit."""


def find_gates(case: Case) -> tuple[Gate, ...]:
    """Every gate, in order; after one that stops, only those that explain it."""
    return tuple(_gates(case))


def exit_code(gates: tuple[Gate, ...], *, yes: bool = False, fail_on_gate: bool = False) -> int:
    """What the command ends with: 3 when the plan is infeasible, or with `--fail-on gate` when any
    gate failed, or one wants a review and `--yes` is not given; else 0."""
    if any(gate.stops and gate.status == "failed" for gate in gates):
        return GATE_EXIT_CODE
    if not fail_on_gate:
        return 0
    wanted = ("failed",) if yes else ("failed", "review")
    return GATE_EXIT_CODE if any(gate.status in wanted for gate in gates) else 0


def _gates(case: Case) -> Iterator[Gate]:
    yield _resources(case)
    yield from _data_quality(case)
    if not case.feasible:
        yield _memory(case)
        return
    yield _strategy(case)
    yield _memory(case)
    layout, train = case.plan.layout, case.job.spec.train
    yield Gate(
        phase=11,
        name="Hyper-parameter Review",
        status="review",
        summary=f"batch {layout.global_batch}, learning rate {train.learning_rate:g}, "
        f"{train.warmup_steps} steps of warm-up, {train.optimizer}",
    )
    yield _budget(case)
    yield from _deadline(case)
    yield Gate(phase=16, name="Approve launch", status="review", summary="start it, or not")


def _data_quality(case: Case) -> Iterator[Gate]:
    """What `paceline data check` found, with the gates of another program's report."""
    checked = find_checked(case.job)
    if checked is not None:
        is_old = checked.has_changed
        worst = f": {checked.worst}" if checked.errors and not is_old else ""
        yield Gate(
            phase=1,
            name="Data Quality Review",
            status="review" if is_old else "failed" if checked.errors else "passed",
            summary=f"the data: {checked}{worst}",
        )


def _gate(
    phase: int, name: str, summary: str, problem: Problem | None = None, *, stops: bool = False
) -> Gate:
    return Gate(
        phase=phase,
        name=name,
        status="passed" if problem is None else "failed",
        stops=stops,
        summary=summary,
        problem=problem,
    )


def _resources(case: Case) -> Gate:
    name, need, refused = "Resource Assessment Review", case.required.text, case.refused
    if refused is None:
        return _gate(1, name, f"feasible on {case.plan.cluster.name}")
    problem = replace(
        refused,
        code="P020",
        what=f"not feasible: the job needs {need}. {refused.what.partition(chr(10))[0]}",
    )
    return _gate(1, name, f"needs {need}", problem, stops=True)


def _strategy(case: Case) -> Gate:
    strategy, name = choose_strategy(case), "Strategy Viability"
    summary = strategy["expectedScalingEfficiency"]
    if strategy["viable"]:
        return _gate(3, name, summary)
    problem = Problem(
        code="P021",
        what=f"{case.plan.layout_name} is hardly viable: {summary}; "
        + "; ".join(strategy["challenges"]),
        where=case.job.where("layout"),
        fix="; ".join(dict.fromkeys(strategy["mitigations"]))
        or "use fewer ranks, or a larger batch",
    )
    return _gate(3, name, summary, problem)


def _memory(case: Case) -> Gate:
    memory = optimise_memory(case)
    have = f"{memory['requiredMemory']} of {memory['availableMemory']} a rank"
    if not memory["memoryExceeded"]:
        return _gate(7, "Memory Constraint", have)
    tried, gap = ways_of(case.refused), f"{memory['memoryGap']} too much"
    rest = memory["aggressiveOptimizations"][len(tried) :]
    problem = Problem(
        code="P022",
        what=f"the leanest plan needs {have}: {gap}",
        where=case.job.where("cluster"),
        fix=join_ways([*tried, *(f"{each['setting']} saves {each['saves']}" for each in rest)]),
    )
    return _gate(7, "Memory Constraint Warning", f"{have}, {gap}", problem)


def _budget(case: Case) -> Gate:
    budget, chosen, name = case.goals.budget_usd, cheapest_on_demand(case), "Budget Constraint"
    if chosen is None:
        gate = _gate(14, name, f"the cost is unknown: no price of {case.plan.cluster.accelerator}")
        return gate if budget is None else replace(gate, status="review")
    usd, most = dollars_apart(chosen.usd, chosen.usd if budget is None else budget)
    cost = f"{usd} at {chosen.provider} on demand ({chosen.as_of})"
    if budget is None:
        return _gate(14, name, f"{cost}; no budget was given")
    if chosen.usd <= budget:
        return _gate(14, name, f"{cost}; the budget is {most}")
    problem = Problem(
        code="P023",
        what=f"the run costs {cost}, ${ceil(chosen.usd - budget):,} over the budget of {most}",
        where="--budget",
        fix="; or ".join(cheaper_plans(case, budget)) + _tried(case),
    )
    return _gate(14, f"{name} Warning", f"{cost}, the budget is {most}", problem)


def cheaper_plans(case: Case, budget: float) -> list[str]:
    """What would stay within a budget, the cheapest first, and the steps that it pays for; where
    nothing would, the cheapest that there is."""
    within = cheaper_than(case, nextafter(budget, inf))
    found = [_priced(told, cost) for told, cost in within]
    chosen = cheapest_on_demand(case)
    if not within and (least := cheaper_than(case, inf)):
        found.append(f"nothing is within it: the cheapest is {_priced(*least[0])}")
    if chosen is not None and (steps := affordable_steps(case.view.num_steps, budget, chosen.usd)):
        found.append(f"train.steps: {steps}, which the budget pays for at {chosen.provider}")
    return found


def _priced(told: str, cost: RunCost) -> str:
    return f"{told}: ${format_amount(cost.usd)} in {format_seconds(3600 * cost.hours)}"


def _tried(case: Case) -> str:
    """Which other numbers of nodes were planned."""
    nodes = ", ".join(map(str, case.tried_nodes))
    return f" (planned on {nodes} nodes as well)" if nodes else ""


def _deadline(case: Case) -> Iterator[Gate]:
    deadline, wall_s = case.goals.deadline_s, case.view.wall_s
    if deadline is None or wall_s is None:
        return
    summary = ", the deadline is ".join(seconds_apart(wall_s, deadline))
    if wall_s <= deadline:
        yield _gate(14, "Deadline", summary)
        return
    times = wall_s / deadline
    least = -(-case.plan.cluster.num_nodes * wall_s // deadline)
    fewest = next(
        (
            f"{plan.cluster.num_nodes}, which take {format_seconds(view.wall_s)}"
            for plan, view in case.others
            if view.wall_s is not None and view.wall_s <= deadline
        ),
        f"at least {least:.0f} (more, since it does not scale perfectly)",
    )
    problem = Problem(
        code="P024",
        what=f"the run takes {summary}: {significant(times, 2)} times too long",
        where="--deadline",
        fix=f"set cluster.nodes to {fewest}; or train.steps to "
        f"{int(case.view.num_steps / times)}{_tried(case)}",
    )
    yield _gate(14, "Deadline Warning", summary, problem)


def gate_rows(gates: tuple[Gate, ...]) -> list[dict[str, Any]]:
    """Gates as JSON values."""
    names = ("phase", "name", "status", "summary")
    return [
        {name: getattr(gate, name) for name in names}
        | {"problem": None if gate.problem is None else str(gate.problem)}
        for gate in gates
    ]


def format_gates(gates: tuple[Gate, ...]) -> str:
    """Every gate on a line, and under it what is wrong."""
    lines = []
    for gate in gates:
        lines.append(f"phase {gate.phase:>2}  {gate.status:<7} {gate.name}: {gate.summary}")
        if gate.problem is not None:
            lines.append("          " + str(gate.problem).replace("\n", "\n          "))
    return "\n".join(lines)
