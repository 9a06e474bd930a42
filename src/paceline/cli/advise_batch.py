"""`paceline advise batch`: the largest micro-batch that fits."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.choices.pipeline_schedules import PLAIN
from paceline.cli.options import FiniteRange, PathName, json_option, set_option
from paceline.cli.screen import show

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.plan import Plan

POSITIVE = click.IntRange(min=1)

_FIXED = ("data", "sharding", "tensor", "pipeline", "context", "expert", "recompute", "offload")
_USUAL = {
    "shard": None,
    "schedule": PLAIN,
    "chunks": 1,
    "context_kind": "ring",
    "recompute_every": 1,
}
"""Shown only where they differ: a layout without a pipeline has no schedule to fix."""


@click.command()
@click.argument("job_file", metavar="JOB", type=PathName(path_type=Path))
@click.option(
    "--margin",
    type=FiniteRange(min=0, max=1, max_open=True),
    help="Share of the largest to leave free. [default: 0 by estimate, since a plan leaves memory "
    "free already; 0.1 measured]",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Run a step of the built-in model for each try, in a process with a memory limit.",
)
@click.option("--limit", type=POSITIVE, default=4096, show_default=True, help="Largest to try.")
@set_option
@json_option
def batch(
    job_file: Path,
    margin: float | None,
    measure: bool,
    limit: int,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Find the largest micro-batch that fits.

    It is estimated, or with --measure measured. The layout is the one that `paceline plan` chooses;
    only the micro-batch changes, by doubling and then halving the gap. --measure is for this
    machine and a rank that holds the whole model. A try cannot make the machine swap: what is over
    the limit is refused by the kernel.

    \b
    Examples:
      paceline advise batch job.yaml
      paceline advise batch job.yaml --set cluster.accelerator=A100-80 --json
      paceline advise batch job.yaml --measure --limit 256
    """
    from paceline.cli.job_input import read_job
    from paceline.errors import JobError
    from paceline.launch.factory import measure_factory
    from paceline.launch.plannable import planned
    from paceline.plan.advice import find_batch, scale_learning_rate

    job = read_job(job_file, overrides)
    facts = measure_factory(job)
    plan = planned(job, facts)
    ask: Callable[[int], bool] = lambda size: _fits(job, plan, facts, size)  # noqa: E731
    if measure:
        from paceline.launch.try_batch import check_measurable, try_batch

        check_measurable(job, plan)
        allowed = plan.cluster.usable_bytes

        def ask(size: int) -> bool:
            peak = try_batch(job, plan, size, limit_bytes=allowed)
            return peak is not None and peak <= allowed

    elif plan.estimate.memory.total_bytes is None:
        raise JobError.of(
            code="J024",
            what=f"what a micro-batch takes is unknown: {plan.profile.name} is not counted",
            where=job.where("model"),
            fix="train a few steps: `paceline run` prints the memory of the fullest rank",
        )
    if margin is None:
        margin = 0.1 if measure else 0.0
    found = find_batch(ask, start=1, limit=limit, margin=margin)
    known = "measured" if measure else "estimated"
    train = job.spec.train
    # A pipeline's ranks wait for each other without several micro-batches, and a schedule may
    # refuse fewer: those of the plan are kept.
    parts = plan.layout.accumulation if plan.layout.pipeline > 1 else 1
    whole = max(1, found.chosen) * plan.layout.data * parts
    through = f"in {parts} micro-batches a pipeline" if parts > 1 else "without accumulation"
    scaled = scale_learning_rate(
        train.learning_rate,
        base_batch=train.global_batch,
        batch=whole,
        optimizer=train.optimizer,
        steps=train.steps,
    )
    if as_json:
        print_json(
            {
                **asdict(found),
                "layout": plan.layout_name,
                "known": known,
                "global_batch": whole,
                "linear_learning_rate": scaled.linear_rate,
                "sqrt_learning_rate": scaled.sqrt_rate,
                "warmup_steps": scaled.warmup_steps,
            }
        )
        return
    tried = ", ".join(f"{size} {'fits' if good else 'does not'}" for size, good in found.tried)
    more = f"; stopped at --limit {limit}, more may fit" if found.at_limit else ""
    print_rows(
        ("micro-batch", f"{found.chosen} of at most {found.largest}, {known}{more}"),
        ("layout", f"{plan.layout_name} on {plan.cluster.name}"),
        ("tried", tried),
        ("batch", f"{whole} samples a step {through}"),
        (
            "rate",
            (
                f"{train.learning_rate:g} at {train.global_batch} becomes {scaled.linear_rate:.4g} "
                f"(linear) or {scaled.sqrt_rate:.4g} (square root): {scaled.rule} fits "
                f"{train.optimizer}"
            ),
        ),
        ("warm-up", f"{scaled.warmup_steps} steps: {scaled.warmup_reason}"),
    )


def _fits(job: "Job", plan: "Plan", facts: Any, micro_batch: int) -> bool:
    """Whether the plan's layout fits with another micro-batch, whatever the job's batch."""
    from paceline.errors import PlanError
    from paceline.plan import plan_job

    layout = plan.layout
    taken: dict[str, Any] = {name: getattr(layout, name) for name in _FIXED}
    taken |= {
        name: getattr(layout, name)
        for name, usual in _USUAL.items()
        if getattr(layout, name) != usual
    }
    spec = replace(
        job.spec,
        layout=replace(job.spec.layout, **{**taken, "micro_batch": micro_batch}),
        train=replace(
            job.spec.train,
            global_batch=micro_batch * plan.layout.data * plan.layout.accumulation,
        ),
    )
    try:
        plan_job(replace(job, spec=spec), facts, advise=False)
    except PlanError as error:
        if all(problem.code == "P001" for problem in error.problems):
            return False
        raise
    return True


def print_rows(*rows: tuple[str, str]) -> None:
    """Print lines of a label and its text, the texts below each other."""
    width = max(len(label) for label, _ in rows) + 2
    for label, text in rows:
        show(f"{label:<{width}}{text}")


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    click.echo(json.dumps(value, indent=2))
