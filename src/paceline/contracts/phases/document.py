"""Phase 16: everything in one document, for programs and for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.contracts.phases.case import Case, Gate, Phase
from paceline.contracts.phases.gates import gate_rows
from paceline.report.plan_markdown import plan_tables
from paceline.units import bytes_apart, format_amount, format_bytes, format_count, format_seconds

PROCESS_ID = "distributed-training-orchestration"
VERSION = "1.0.0"

GROUPS: Mapping[str, tuple[str, ...]] = {
    "distributionStrategy": ("parallelization-strategy",),
    "resourceAllocation": ("resource-assessment", "model-analysis"),
    "trainingPlan": ("training-configuration", "distributed-hyperparameters"),
    "performanceOptimizations": ("memory-optimization", "performance-optimization"),
    "faultToleranceConfig": ("fault-tolerance",),
    "dataStrategy": ("data-distribution",),
    "communicationPlan": ("communication-optimization", "gradient-synchronization"),
    "monitoringPlan": ("monitoring-plan",),
    "costAnalysis": ("cost-estimation",),
    "launchConfiguration": ("launch-orchestration",),
    "validationPlan": ("validation-plan",),
}
"""Group of the final object -> phases whose output it holds, by name."""


def document(case: Case) -> dict[str, Any]:
    """The names of the documents, the summary, and what to do next."""
    return {
        "json": "final-training-plan.json",
        "markdown": "final-training-plan.md",
        "nextSteps": next_steps(case),
        "executiveSummary": summary(case),
        "quickReference": quick_reference(case),
    }


def summary(case: Case) -> str:
    """The plan in two sentences."""
    plan, view = case.plan, case.view
    if not case.feasible:
        return f"{plan.profile.name} does not fit: it takes {case.required.text}."
    time = (
        "in a time that is unknown"
        if view.wall_s is None
        else f"in about {format_seconds(view.wall_s)}, failures included"
    )
    cost = next((each for each in view.costs if each.way == "on demand"), None)
    dollars = (
        ""
        if cost is None
        else f", for ${format_amount(cost.usd)} at {cost.provider} ({cost.as_of})"
    )
    sizes = bytes_apart(plan.estimate.memory.known_bytes, plan.limit_bytes)
    return (
        f"Train {plan.profile.name} ({format_count(plan.profile.num_parameters)} parameters) on "
        f"{plan.cluster.name} as {plan.layout_name}: {plan.layout.global_batch} samples a step, "
        f"{view.num_steps} steps {time}{dollars}. The fullest rank holds "
        f"{' of '.join(sizes)}. All of it is estimated."
    )


def quick_reference(case: Case) -> dict[str, str]:
    """The figures one looks up."""
    plan, view = case.plan, case.view
    layout, rate = plan.layout, plan.estimate.tokens_per_s
    found = {
        "layout": plan.layout_name,
        "batch": f"{layout.micro_batch} x {layout.accumulation} x {layout.data} data ranks = "
        f"{layout.global_batch}",
        "precision": plan.precision,
        "memory": f"{format_bytes(plan.estimate.memory.known_bytes)} a rank",
        "checkpoint": f"every {plan.checkpoint_every} steps",
        "learning rate": f"{case.job.spec.train.learning_rate:g}",
    }
    if case.feasible:
        found["start"] = "bash launch-script.sh"
    if view.step_s is not None:
        found["step"] = format_seconds(view.step_s)
    if rate is not None:
        found["rate"] = f"{format_count(rate)} tokens/s"
    if view.accelerator_hours is not None and case.feasible:
        found["accelerator-hours"] = f"{view.accelerator_hours:,.0f}"
    return found


def next_steps(case: Case) -> list[str]:
    """What to do now."""
    if not case.feasible:
        return [
            "choose one of phase 7's changes",
            f"or a cluster with {case.required.text}",
        ]
    return [
        "read phase 11: batch and learning rate",
        "run phase 13's validation script on every node",
        "run phase 15's three steps, and compare memory_bytes and tokens_per_s with its baselines",
        "bash launch-script.sh",
    ]


def final_object(case: Case, phases: Sequence[Phase], gates: tuple[Gate, ...]) -> dict[str, Any]:
    """The whole plan as JSON values: eleven groups and the metadata."""
    by_name = {phase.name: dict(phase.output) for phase in phases}
    if not case.feasible:
        return {
            "success": False,
            "phase": "resource-assessment",
            "requiredResources": by_name["resource-assessment"]["minimumRequirements"],
            "reason": str(case.refused),
            "alternatives": by_name["memory-optimization"]["aggressiveOptimizations"],
            "metadata": _metadata(case),
        }
    found: dict[str, Any] = {"success": True}
    for group, names in GROUPS.items():
        found[group] = (
            by_name[names[0]] if len(names) == 1 else {name: by_name[name] for name in names}
        )
    return found | {"gates": gate_rows(gates), "metadata": _metadata(case)}


def _metadata(case: Case) -> dict[str, str | None]:
    return {"processId": PROCESS_ID, "timestamp": case.created, "version": VERSION}


def markdown(case: Case, gates: Sequence[Gate]) -> str:
    """The plan on one page for people. Where nothing fits, why and what to do come first, and the
    plan is marked as that of a cluster which would fit."""
    head = [f"# Training plan: {case.job.spec.name}", "", summary(case), ""]
    end = ["## Gates", ""]
    end += [
        f"- phase {gate.phase}, {gate.name}: **{gate.status}**. {gate.summary}" for gate in gates
    ]
    steps = ["## Next", ""]
    steps += [f"{number}. {step}" for number, step in enumerate(next_steps(case), 1)]
    if case.refused is None:
        lines = [*head, *_figures(case), *end, "", *_decided(case), *steps]
    else:
        cluster = case.plan.cluster
        memory = format_bytes(cluster.memory_bytes)
        lines = [*head, "```text", str(case.refused), "```", "", *end, "", *steps, ""]
        lines += [
            f"## Not this job's plan: {cluster.name} with {memory} each",
            "",
            "The smallest memory with which it would fit: there is nothing to start or to price.",
            "",
            *(each.replace("## ", "### ", 1) for each in (*_figures(case), *_decided(case))),
        ]
    return "\n".join([*lines, ""])


def _figures(case: Case) -> list[str]:
    plan = case.plan
    lines = ["| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in quick_reference(case).items()]
    lines += ["", *plan_tables(plan)]
    if case.view.costs and case.feasible:
        lines += [
            "## Cost",
            "",
            "| where | dollars | hours | price of |",
            "| --- | ---: | ---: | --- |",
        ]
        lines += [
            f"| {cost.provider} {cost.instance} x {cost.num_instances}, {cost.way} | "
            f"{format_amount(cost.usd)} | {cost.hours:,.1f} | {cost.as_of} |"
            for cost in case.view.costs[:8]
        ]
    return [*lines, ""]


def _decided(case: Case) -> list[str]:
    """Leaves out the memory that nobody declared."""
    made = [one for one in case.plan.decisions if case.feasible or one.field != "cluster.memory"]
    rows = [f"- `{one.field}` = {one.value}: {one.reason}" for one in made]
    return ["## Decided", "", *rows, ""] if rows else []
