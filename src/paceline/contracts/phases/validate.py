"""Phase 15: how it is seen that the run does what the plan says."""

from typing import Any

from paceline.contracts.operate import health_checks
from paceline.contracts.phases.case import Case
from paceline.launch.default_alerts import silence_s
from paceline.parallel import Layout
from paceline.parallel.degrees import divisors
from paceline.plan.case import case_of_plan
from paceline.plan.lost_node import fewest_ranks
from paceline.plan.refit import leaner_settings
from paceline.units import counted, format_bytes, format_seconds, significant


def plan_validation(case: Case) -> dict[str, Any]:
    """Checks before, during and beside the run, each with the number it must meet."""
    plan, job = case.plan, case.job.spec
    price, ranks = plan.estimate, plan.layout.num_ranks
    memory = "memory_bytes" if case.seen.shows("memory_bytes") else "the allocator's peak"
    same = "samples_digest" if case.seen.shows("samples_digest") else "loss"
    on_cpu = "--set cluster.accelerator=cpu --set cluster.nodes=1 --set cluster.per_node=2"
    kill = (ranks - 1, min(job.train.steps, plan.checkpoint_every + 1))
    killed = f"kill -9 of rank {kill[0]}'s process at step {kill[1]}"
    if plan.cluster.is_local:
        killed = _run(case, f"drill.kill=[rank={kill[0]}@step={kill[1]}]")
    return {
        "preTrainingValidations": _checks(
            *((each.name, each.command, f"prints {each.expect}") for each in health_checks(plan))
        ),
        "runtimeValidations": _checks(
            *(
                (rule.name, rule.condition, f"never ({rule.severity})")
                for rule in case.seen.rules or ()
            )
        ),
        "smokeTests": _checks(
            (
                "three steps",
                _run(case, "train.steps=3"),
                "exit code 0, three finite losses, one checkpoint",
            ),
            (
                "memory",
                f"{memory} of the third step",
                f"at most {format_bytes(price.memory.known_bytes)} plus 10 %",
            ),
        ),
        "reproducibilityTests": _checks(
            (
                "same samples",
                f"two runs of 10 steps from seed {job.train.seed}",
                f"equal {same} in every step",
            ),
            (
                "same bits after a resume",
                f"on two CPU ranks: paceline run job.yaml {on_cpu}, killed and resumed",
                "equal state digest at the end",
            ),
        ),
        "scalingTests": _scaling(case),
        "faultInjectionTests": _checks(
            (
                f"kill rank {kill[0]}",
                killed,
                f"training goes on, at most {plan.checkpoint_every} steps repeated",
            )
        ),
        "baselines": {
            "step_s": price.step_s,
            "tokens_per_s": price.tokens_per_s,
            "memory_bytes": price.memory.total_bytes,
        },
        "gradientCorrectness": {
            "method": "one step of the same samples on one rank and on the layout, in float32"
            + (": paceline verify job.yaml" if plan.engine == "paceline" else ""),
            "baseline": "one rank, no accumulation",
            "tolerance": "relative 1e-5 on the gradient norm: sums run in another order",
        },
        "troubleshootingGuide": _checks(
            ("out of memory in the first step", *_leaner(plan.layout)),
            (
                "no step is finished",
                "bash debug.sh; logs/ of each rank",
                f"every rank finishes a step within {format_seconds(silence_s(plan))}",
            ),
        ),
    }


def _checks(*rows: tuple[str, str, str]) -> list[dict[str, str]]:
    return [{"name": name, "how": how, "passes": passes} for name, how, passes in rows]


def _run(case: Case, change: str) -> str:
    """How to run the job with one value changed."""
    if case.plan.cluster.is_local:
        return f"paceline run job.yaml --set '{change}'"
    return f"bash launch-script.sh, with {change.replace('=', ': ', 1)} in job.yaml"


def _leaner(layout: Layout) -> tuple[str, str]:
    """The fastest change of the layout that needs less memory."""
    settings = leaner_settings(layout)
    if settings is None:
        return "more ranks: cluster.nodes", "a smaller share for each rank"
    return settings, "the same batch in less memory"


def _scaling(case: Case) -> dict[str, list[dict[str, str]]]:
    """Weak: the batch grows with the ranks. Strong: it stays."""
    plan = case.plan
    step_s, batch = plan.estimate.step_s, plan.layout.global_batch
    data, split = plan.layout.data, plan.layout.num_ranks // plan.layout.data
    least = fewest_ranks(case.job.spec, plan.layout, case_of_plan(plan), plan.limit_bytes)
    fitting = [each * split for each in divisors(data) if each * split >= least]
    counts = sorted({fitting[0], fitting[-2:][0], fitting[-1]})
    limit = "" if step_s is None else f"; {format_seconds(step_s)} is estimated for {fitting[-1]}"
    if len(counts) == 1:
        alone = _checks(
            (
                f"none: this layout is not possible on fewer than {counted(least, 'rank')}",
                "paceline bench job.yaml, with a smaller model",
                "at least 0.8 times the rate of one rank for each rank",
            )
        )
        return {"weak": alone, "strong": alone}
    is_here = plan.cluster.is_local and plan.engine == "paceline"
    bench = f"paceline bench job.yaml --ranks {','.join(map(str, counts))} --steps 50"
    fewest = batch * counts[0] // plan.layout.num_ranks
    first = counted(counts[0], "rank")
    ranks = [(count, counted(count, "rank")) for count in counts]
    weak = (
        (
            f"{of}, {batch * count // plan.layout.num_ranks} samples a step",
            f"{bench} --weak --set train.global_batch={fewest}"
            if is_here
            else "step_s over 50 steps",
            f"at most 1.25 times that of {first}{limit}",
        )
        for count, of in ranks
    )
    strong = (
        (
            f"{of}, {batch} samples a step",
            bench if is_here else "tokens_per_s over 50 steps",
            f"at least {significant(0.8 * count / counts[0])} times that of {first}",
        )
        for count, of in ranks
    )
    return {"weak": _checks(*weak), "strong": _checks(*strong)}
