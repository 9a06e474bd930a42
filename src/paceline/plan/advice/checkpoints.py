"""How often to write a checkpoint: where the cost of saving and the work lost balance."""

from dataclasses import dataclass
from math import exp

from paceline.estimate.goodput import (
    DEFAULT_RANK_MTBF_S,
    RATE_SPREAD,
    Goodput,
    best_interval_s,
    daly_interval_s,
    goodput,
    job_mtbf_s,
    young_interval_s,
)
from paceline.units import format_interval, format_seconds

RULE_OF_THUMB_S = (1800.0, 3600.0)
"""`Every 30 to 60 minutes`, as often told, whatever the size of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAdvice:
    """An interval, what it costs, and what other intervals would cost."""

    interval_s: float
    """Daly's, in seconds of training between checkpoints."""

    every_steps: int | None
    """Steps between checkpoints, from `interval_s`; None when a step's time is not known."""

    young_s: float
    daly_s: float
    goodput: Goodput
    """With this interval."""

    pessimistic: Goodput
    """With this interval, when failures come four times as often: see
    `estimate.goodput.RATE_SPREAD`."""

    rule_of_thumb: tuple[Goodput, Goodput]
    """With a checkpoint every 30 and every 60 minutes."""

    mtbf_s: float
    """Mean seconds between failures of the whole job."""

    mtbf_source: str
    reason: str
    warning: str | None
    """Where a save or a restart lasts as long as failures are apart; None where neither does."""


def advise_checkpoints(
    *,
    save_s: float,
    restart_s: float,
    ranks: int,
    rank_mtbf_s: float | None = None,
    step_s: float | None = None,
    background_s: float = 0.0,
    num_steps: int | None = None,
) -> CheckpointAdvice:
    """When to write checkpoints, by Young and by Daly, against the rule of 30 to 60 minutes.

    Args:
        save_s: Seconds that training stands still for a checkpoint.
        restart_s: Seconds from a failure to the first step after it.
        ranks: All ranks of the job; or its nodes, with `rank_mtbf_s` of a node.
        rank_mtbf_s: Mean seconds between failures of one of them; left out, that of an
            accelerator in Llama 3's training.
        step_s: Seconds of one step, to give the interval in steps.
        background_s: Seconds that a checkpoint is written on while training goes on.
        num_steps: Of the whole run, which saves at its end; None where it is not known.

    Source: Young 1974 and Daly 2006, as in `paceline.estimate.goodput`.

    >>> advice = advise_checkpoints(save_s=30, restart_s=600, ranks=16_384)
    >>> round(advice.interval_s), round(advice.goodput.useful, 3)
    (797, 0.88)
    """
    cited = rank_mtbf_s is None
    mtbf_s = job_mtbf_s(ranks, rank_mtbf_s or DEFAULT_RANK_MTBF_S)
    daly = daly_interval_s(save_s, mtbf_s)
    interval = best_interval_s(save_s, mtbf_s, background_s=background_s, step_s=step_s)
    every = None
    if step_s:
        every = round(interval / step_s)
        every = every if num_steps is None else min(every, num_steps)
        interval = every * step_s

    def at(interval_s: float, mtbf_s: float = mtbf_s) -> Goodput:
        return goodput(
            mtbf_s=mtbf_s,
            interval_s=interval_s,
            save_s=save_s,
            restart_s=restart_s,
            background_s=background_s,
        )

    ours, half_hour, hour = at(interval), at(RULE_OF_THUMB_S[0]), at(RULE_OF_THUMB_S[1])
    return CheckpointAdvice(
        interval_s=interval,
        every_steps=every,
        young_s=young_interval_s(save_s, mtbf_s),
        daly_s=daly,
        goodput=ours,
        pessimistic=at(interval, mtbf_s / RATE_SPREAD),
        rule_of_thumb=(half_hour, hour),
        mtbf_s=mtbf_s,
        mtbf_source=(
            "published: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv:2407.21783)"
            if cited
            else "declared"
        ),
        reason=(
            f"a failure every {format_interval(mtbf_s)} and {format_seconds(save_s)} for a save"
            f"{_written(background_s, daly)}"
        ),
        warning=_never_done(save_s + background_s, restart_s, mtbf_s),
    )


def _never_done(write_s: float, restart_s: float, mtbf_s: float) -> str | None:
    """What a failure mostly comes before the end of, and what to change."""
    durations = {"a checkpoint": write_s, "a restart": restart_s}
    longer = {what: takes_s for what, takes_s in durations.items() if takes_s >= mtbf_s}
    if not longer:
        return None
    takes = " and ".join(f"{what} takes {format_seconds(s)}" for what, s in longer.items())
    return (
        f"{takes}, failures are {format_seconds(mtbf_s)} apart: at most "
        f"{exp(-min(longer.values()) / mtbf_s):.2%} end before the next failure, whatever the "
        "interval. Write shards from every rank, use faster storage, recover from replicas in "
        "memory, or use fewer ranks"
    )


def _written(background_s: float, daly_s: float) -> str:
    """How long a checkpoint is written on, and whether that is what bounds the interval."""
    if not background_s:
        return ""
    bound = ", which bounds the interval" if background_s > daly_s else ""
    return f" (the copy to the host), then {format_seconds(background_s)} of writing{bound}"
