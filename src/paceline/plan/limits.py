"""Budget, deadline and memory: what the job sets against what is expected."""

from collections.abc import Iterator
from math import ceil

from paceline.errors import Problem
from paceline.job import Job
from paceline.plan.decision import Limit, Plan
from paceline.units import format_amount


def limits_of(job: Job, plan: Plan) -> Iterator[Limit]:
    """Each limit that the job has, with what the plan expects."""
    wanted = job.spec.plan
    if wanted.budget is not None:
        expected = None if plan.cost is None else plan.cost.usd
        yield Limit(name="budget", limit=wanted.budget, expected=expected)
    if wanted.deadline is not None:
        yield Limit(name="deadline", limit=wanted.deadline, expected=plan.wall_s)
    total = plan.estimate.memory.total_bytes
    yield Limit(name="memory", limit=plan.limit_bytes, expected=total)


def limit_not_kept(job: Job, plan: Plan) -> Problem:
    """P002 of the first limit that is known not to be kept."""
    limit = next(each for each in plan.limits if each.is_kept is False)
    return limit_problem(job, plan, limit)


def limit_problem(job: Job, plan: Plan, limit: Limit) -> Problem:
    """P002: a limit that the plan does not keep, in the job's numbers."""
    *needs, most = limit.texts
    expected = f"needs {needs[0]}" if needs else "unknown"
    against = "not known to be within" if limit.expected is None else "over"
    fixes = {
        "budget": _ways_to_afford(job, plan, limit),
        "deadline": _ways_to_hurry(job, limit),
        "memory": "name the model by its config or a preset, whose activations are counted",
    }
    return Problem(
        code="P002",
        what=f"{plan.layout_name} on {plan.cluster.name}: {expected}, {against} the {limit.name} "
        f"of {most}",
        where=job.where(f"plan.{limit.name}"),
        fix=fixes[limit.name],
    )


def affordable_steps(num_steps: int, limit: float, whole: float) -> int:
    """Steps within a limit of dollars or seconds, of a run that takes `whole`: a little less than
    its share, since checkpoints of a shorter run come more often."""
    return int(0.97 * num_steps * limit / whole)


def _ways_to_hurry(job: Job, limit: Limit) -> str:
    """The time that the run takes, and the steps that the deadline has time for."""
    if limit.expected is None:
        return "leave plan.deadline out: how long a step takes is not known"
    ways = [f"raise plan.deadline to {ceil(limit.expected / 60)}m"]
    if steps := affordable_steps(job.spec.train.steps, limit.limit, limit.expected):
        ways.append(f"set train.steps to {steps}")
    return "; or ".join([*ways, "try more nodes (cluster.nodes)"])


def _ways_to_afford(job: Job, plan: Plan, limit: Limit) -> str:
    """What the run costs at the least where prices are known, and what the budget pays for."""
    if plan.cost is None:
        return "add a price to a catalog file of your own: `paceline catalog --write`"
    wanted = job.spec.plan
    least = min((plan.cost, *plan.costs), key=lambda cost: cost.usd)
    ways = [f"raise plan.budget to {ceil(plan.cost.usd)}"]
    if least.usd < plan.cost.usd and least.usd <= limit.limit:
        spot = f"set plan.spot to {'true' if least.way == 'spot' else 'false'}"
        at = "" if wanted.provider is None else f" and plan.provider to {least.provider}"
        ways.append(f"{spot}{at}: ${least.usd:,.2f} at {least.provider}, {least.way}")
    elif least.usd < plan.cost.usd:
        ways[0] += f" (at the least ${format_amount(least.usd)}: {least.provider}, {least.way})"
    steps = affordable_steps(job.spec.train.steps, limit.limit, plan.cost.usd)
    if steps:
        ways.append(f"set train.steps to {steps}: what the budget pays for at {plan.cost.provider}")
    if wanted.objective == "time" and not plan.cluster.is_local:
        ways.append("try fewer ranks: `paceline plan --set plan.objective=cost JOB`")
    return "; or ".join(ways)
