"""Phase 15: how it is seen that the run does what the plan says."""

from typing import Any

from paceline.contracts.operate import health_checks
from paceline.contracts.phases.case import Case
from paceline.launch.default_alerts import alerts, silence_s
from paceline.units import format_bytes, format_seconds


def plan_validation(case: Case) -> dict[str, Any]:
    """Checks before, during and beside the run, each with the number it must meet."""
    plan, job = case.plan, case.job.spec
    price, ranks = plan.estimate, plan.layout.num_ranks
    on_cpu = "--set cluster.accelerator=cpu --set cluster.nodes=1 --set cluster.per_node=2"
    return {
        "preTrainingValidations": [
            {"name": each.name, "how": each.command, "passes": f"prints {each.expect}"}
            for each in health_checks(plan)
        ],
        "runtimeValidations": [
            {"name": rule.name, "how": rule.condition, "passes": f"never ({rule.severity})"}
            for rule in alerts(plan)
        ],
        "smokeTests": [
            {
                "name": "three steps",
                "how": _run(case, "train.steps=3"),
                "passes": "exit code 0, three finite losses, one checkpoint",
            },
            {
                "name": "memory",
                "how": "memory_bytes of the third step",
                "passes": f"at most {format_bytes(price.memory.known_bytes)} plus 10 %",
            },
        ],
        "reproducibilityTests": [
            {
                "name": "same samples",
                "how": f"two runs of 10 steps from seed {job.train.seed}",
                "passes": "equal samples_digest in every step",
            },
            {
                "name": "same bits after a resume",
                "how": f"on two CPU ranks: paceline run job.yaml {on_cpu}, killed and resumed",
                "passes": "equal state digest at the end",
            },
        ],
        "scalingTests": _scaling(case),
        "faultInjectionTests": [
            {
                "name": f"kill rank {rank}",
                "how": _run(case, f"drill.kill=[rank={rank}@step={step}]")
                if plan.cluster.is_local
                else f"kill -9 of rank {rank}'s process at step {step}",
                "passes": f"training goes on, at most {plan.checkpoint_every} steps repeated",
            }
            for rank, step in ((ranks - 1, min(job.train.steps, plan.checkpoint_every + 1)),)
        ],
        "baselines": {
            "step_s": price.step_s,
            "tokens_per_s": price.tokens_per_s,
            "memory_bytes": price.memory.total_bytes,
        },
        "gradientCorrectness": {
            "method": "one step of the same samples on one rank and on the layout, in float32",
            "baseline": "one rank, no accumulation",
            "tolerance": "relative 1e-5 on the gradient norm: sums run in another order",
        },
        "troubleshootingGuide": [
            {
                "name": "out of memory in the first step",
                "how": f"--set layout.micro_batch={max(1, plan.layout.micro_batch // 2)}",
                "passes": "the same batch, half the activations",
            },
            {
                "name": "no step is finished",
                "how": "bash debug.sh; logs/ of each rank",
                "passes": f"every rank finishes a step within {format_seconds(silence_s(plan))}",
            },
        ],
    }


def _run(case: Case, change: str) -> str:
    """How to run the job with one value changed."""
    if case.plan.cluster.is_local:
        return f"paceline run job.yaml --set '{change}'"
    return f"bash launch-script.sh, with {change.replace('=', ': ', 1)} in job.yaml"


def _scaling(case: Case) -> dict[str, list[dict[str, Any]]]:
    """Weak: the batch grows with the ranks. Strong: it stays."""
    plan = case.plan
    step_s, batch = plan.estimate.step_s, plan.layout.global_batch
    split = plan.layout.num_ranks // plan.layout.data
    counts = sorted({split, max(split, plan.layout.num_ranks // 2), plan.layout.num_ranks})
    limit = "" if step_s is None else f" ({format_seconds(step_s / 0.8)} a step)"
    weak: list[dict[str, Any]] = []
    strong: list[dict[str, Any]] = []
    for count in counts:
        share = batch * count // plan.layout.num_ranks
        weak.append(
            {
                "name": f"{count} ranks, {share} samples a step",
                "how": "step_s over 50 steps",
                "passes": f"at most 1.25 times that of {counts[0]} ranks{limit}",
            }
        )
        strong.append(
            {
                "name": f"{count} ranks, {batch} samples a step",
                "how": "tokens_per_s over 50 steps",
                "passes": f"at least {0.8 * count / counts[0]:.3g} times that of {counts[0]} ranks",
            }
        )
    return {"weak": weak, "strong": strong}
