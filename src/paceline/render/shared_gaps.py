"""Parts of a plan that several engines lack, each for a reason of its own."""

from collections.abc import Iterator, Mapping

from paceline.choices.pipeline_schedules import SCHEDULE_FACTS
from paceline.job import Job
from paceline.parallel.abilities import abilities_of
from paceline.plan import Plan
from paceline.render.device import wider_precision
from paceline.render.engine import Gap


def split_gaps(
    plan: Plan, why: str | Mapping[str, str], nearest: str | None = None
) -> Iterator[Gap]:
    """Ways to split the model that the engine lacks: all of them, or those with a reason."""
    for way, degree in plan.layout.degrees.items():
        known = {} if way in ("data", "shard") else why
        reason = known if isinstance(known, str) else known.get(way)
        if reason:
            yield Gap(
                what=f"{way} {degree}",
                where=f"layout.{way}",
                why=reason,
                nearest=nearest,
                fix=f"layout.{way}: 1",
            )


def schedule_gaps(plan: Plan, engine: str, why: str, nearest: str | None = "1F1B") -> Iterator[Gap]:
    """A pipeline's schedule that is not among the engine's, in `abilities.toml`."""
    layout, known = plan.layout, abilities_of(engine).schedules
    if layout.pipeline == 1 or layout.schedule in known:
        return
    is_larger = SCHEDULE_FACTS[layout.schedule].forwards_first
    then = "the same idle time, less memory" if is_larger else "more idle time"
    yield Gap(
        what=f"the pipeline's schedule {layout.schedule}",
        where="layout.schedule",
        why=why,
        nearest=nearest and f"{nearest}: {then}",
        fix=f"layout.schedule: {' or '.join(reversed(known))}",
    )


def every_block_gaps(plan: Plan, who: str) -> Iterator[Gap]:
    """Full recompute of one block in several."""
    layout = plan.layout
    if layout.recompute == "full" and layout.recompute_every > 1:
        yield Gap(
            what=f"one block in {layout.recompute_every} recomputed",
            where="layout.recompute_every",
            why=f"{who} recomputes every block or none",
            nearest="every block: less memory, more time",
            fix="layout.recompute_every: 1",
        )


def offload_gaps(plan: Plan, why: str, nearest: str | None = None) -> Iterator[Gap]:
    """Offloading, of whichever kind."""
    if plan.layout.offload != "none":
        yield Gap(
            what=f"optimizer state on {plan.layout.offload}",
            where="layout.offload",
            why=why,
            nearest=nearest,
            fix="layout.offload: none",
        )


def precision_gaps(plan: Plan, lacks: Mapping[str, tuple[str, str | None]]) -> Iterator[Gap]:
    """The plan's precision, where it has a row: why it is not there, and what comes nearest."""
    if plan.precision in lacks:
        why, nearest = lacks[plan.precision]
        yield Gap(
            what=f"precision {plan.precision}",
            where="train.precision",
            why=why,
            nearest=nearest,
            fix=wider_precision(plan),
        )


def loop_gaps(
    job: Job,
    loop: str,
    *,
    adapters: str,
    optimizers: tuple[str, ...],
    why_optimizers: str,
    wires: tuple[str, ...],
    why_wires: str,
) -> Iterator[Gap]:
    """What a training loop of the engine's own lacks of a job.

    Args:
        job: Its section `train`, and its program.
        loop: Whose it is.
        adapters: Who trains adapters instead.
        optimizers: Those that it has, AdamW among them.
        why_optimizers: Why it has no others.
        wires: Forms of gradients that it sends.
        why_wires: Why it sends no others.
    """
    train = job.spec.train
    if train.optimizer not in optimizers:
        yield Gap(
            what=f"the optimizer {train.optimizer}",
            where="train.optimizer",
            why=why_optimizers,
            nearest="AdamW, with float32 moments",
            fix="train.optimizer: adamw",
        )
    if train.adapter is not None:
        yield Gap(
            what=f"adapters ({train.adapter.kind})",
            where="train.adapter",
            why="these files train every weight",
            nearest=None,
            fix=adapters,
        )
    if train.gradient_compression not in wires:
        yield Gap(
            what=f"gradients sent as {train.gradient_compression}",
            where="train.gradient_compression",
            why=why_wires,
            nearest="float32",
            fix=f"train.gradient_compression: {' or '.join(wires)}",
        )
    if job.spec.program is not None:
        yield Gap(
            what=f"your program {job.spec.program}",
            where="program",
            why=f"{loop} has its own training loop",
            nearest=None,
            fix="`paceline run`, or `paceline render --for torchrun`",
        )
