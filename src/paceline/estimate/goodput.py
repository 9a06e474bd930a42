"""What goodput failures leave: checkpoints cost, failures lose work.

Failures are independent of each other, at a constant rate (exponential gaps), and any of them
stops the whole job. Leaves out: work that goes on without the failed rank, and failures that are
correlated, such as a switch with a rack behind it. Measured rates differ between operators by a
factor of up to four, and at some sizes more than in proportion (see `RATE_SPREAD`), so a person
should look at the range and not at one figure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, expm1, inf, sqrt

_HOUR_S = 3600.0
_LLAMA3_GPUS, _LLAMA3_HOURS, _LLAMA3_UNEXPECTED = 16_384, 54 * 24, 419

DEFAULT_RANK_MTBF_S = _LLAMA3_GPUS * _LLAMA3_HOURS * _HOUR_S / _LLAMA3_UNEXPECTED
"""Seconds between failures of one accelerator with its share of host, network and software:
50,677 hours. From 419 unexpected interruptions in 54 days on 16,384 H100s.

Source: The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4.
"""

RATE_SPREAD = 4.0
"""How many times as often failures may come as the mean rate says. Scaling the per-node rate of
one cluster gives 28.8 h between failures at 1,024 GPUs where 7.9 h were measured.

Source: Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters,
arXiv:2410.21680.
"""


def job_mtbf_s(num_parts: int, part_mtbf_s: float) -> float:
    """Seconds between failures of a job whose every part must work.

    Args:
        num_parts: Ranks, or nodes: whatever `part_mtbf_s` is about.
        part_mtbf_s: Mean seconds between failures of one of them.

    >>> round(job_mtbf_s(16_384, DEFAULT_RANK_MTBF_S) / 3600, 2)
    3.09
    """
    if num_parts < 1 or not part_mtbf_s > 0:
        raise ValueError("a job has at least one part, and a time between failures above 0")
    return part_mtbf_s / num_parts


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between checkpoints that lose the least, to first order.

    Source: Young, A First Order Approximation to the Optimum Checkpoint Interval, CACM 17(9), 1974.

    >>> young_interval_s(50, 10_000)
    1000.0
    """
    return sqrt(2 * save_s * mtbf_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between checkpoints that lose the least, to a higher order than Young's,
    for saves that are not short against the time between failures.

    Source: Daly, A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps,
    Future Generation Computer Systems 22(3), 2006, equation 37.

    >>> round(daly_interval_s(50, 10_000), 1)
    966.9
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = save_s / (2 * mtbf_s)
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(part) / 3 + part / 9) - save_s


_LEAST_INTERVAL_S = 1.0
"""A save that costs nothing would be made all the time; once a second is often enough."""


def best_interval_s(
    save_s: float, mtbf_s: float, *, background_s: float = 0.0, step_s: float | None = None
) -> float:
    """Seconds of training between checkpoints that lose the least: Daly's, in whole steps, and no
    shorter than a checkpoint is written.

    Args:
        save_s: Seconds that training stands still for one.
        mtbf_s: Mean seconds between the failures that need one.
        background_s: Seconds that it is written on while training goes on.
        step_s: Seconds of a step; None where it is not known.

    >>> best_interval_s(50, 10_000, background_s=2000, step_s=300)
    2100
    """
    interval_s = max(_LEAST_INTERVAL_S, daly_interval_s(save_s, mtbf_s), background_s)
    if not step_s:
        return interval_s
    return step_s * max(1, round(interval_s / step_s), ceil(background_s / step_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Where the time goes. The terms and `useful` add up to 1."""

    useful: float
    """Share of the wall time that trains steps which are kept."""

    terms: Mapping[str, float]
    """What takes the rest, as shares of the wall time: `saving` (training waits for a
    checkpoint), `lost` (repeated work after a failure), `restart` (detected, fenced, started
    and loaded again) and, where copies of the state slow the steps down, `copies`."""

    interval_s: float
    """Seconds of training between checkpoints."""

    mtbf_s: float
    """Mean seconds between failures of the whole job."""

    failures_per_hour: float
    """Mean failures of the whole job in an hour of wall time."""

    lost_s_per_failure: float
    """Seconds of repeated work after each failure, on the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies of the state besides the checkpoints, which most failures recover from."""

    covered: float
    """Share of the failures after which a copy is there; the rest go to the checkpoint."""

    recover_s: float
    """From a covered failure to the first step after it."""

    lost_s: float
    """Repeated work after a covered failure, on the mean."""

    slower: float
    """What keeping them adds to a step, as a share of it."""


def goodput_with(copies: Copies, *, mtbf_s: float, interval_s: float, **seconds: float) -> Goodput:
    """The share of the time that is useful where copies cover most failures: that of the
    checkpoints for the failures that need them, less what the others and the copies take.

    Args:
        copies: What they cover and cost.
        mtbf_s: Mean seconds between all failures of the job.
        interval_s: Seconds of training between the starts of two checkpoints.
        **seconds: `save_s`, `restart_s` and `background_s`, as `goodput` takes them.

    >>> copies = Copies(covered=0.9, recover_s=20, lost_s=80, slower=0.0)
    >>> one = goodput_with(copies, mtbf_s=10_000, interval_s=1000, save_s=50, restart_s=300)
    >>> round(one.useful, 3), round(one.useful + sum(one.terms.values()), 6)
    (0.936, 1.0)
    """
    rest = goodput(mtbf_s=mtbf_s / (1 - copies.covered), interval_s=interval_s, **seconds)
    of_failures = copies.covered / mtbf_s
    left = 1 / (1 + (copies.recover_s + copies.lost_s) * of_failures)
    useful = rest.useful * left / (1 + copies.slower)
    slowed = rest.useful * left - useful
    lost = {"lost": copies.lost_s * of_failures, "restart": copies.recover_s * of_failures}
    return Goodput(
        useful=useful,
        terms={name: (share + lost.get(name, 0.0)) * left for name, share in rest.terms.items()}
        | ({"copies": slowed} if slowed else {}),
        interval_s=interval_s,
        mtbf_s=mtbf_s,
        failures_per_hour=_HOUR_S / mtbf_s,
        lost_s_per_failure=copies.covered * copies.lost_s
        + (1 - copies.covered) * rest.lost_s_per_failure,
    )


def goodput(
    *, mtbf_s: float, interval_s: float, save_s: float, restart_s: float, background_s: float = 0.0
) -> Goodput:
    """The share of the time that is useful, with its terms.

    Exact for failures that come at a constant rate, also during saves and restarts.

    Args:
        mtbf_s: Mean seconds between failures of the whole job.
        interval_s: Seconds of training between the starts of two checkpoints.
        save_s: Seconds that training stands still for one checkpoint.
        restart_s: Seconds from a failure to the first step after it: detection included.
        background_s: Seconds that a checkpoint is written on while training goes on. Until it is
            written a failure goes back to the one before, which loses this much more on the mean.

    Source: Daly 2006 (see `daly_interval_s`), equation 20:
    wall = M exp(R/M) (exp((t+C)/M) - 1) for each t of useful time.

    >>> one = goodput(mtbf_s=10_000, interval_s=1000, save_s=50, restart_s=300)
    >>> round(one.useful, 3), {name: round(share, 3) for name, share in one.terms.items()}
    (0.877, {'saving': 0.044, 'lost': 0.05, 'restart': 0.03})
    """
    _check(mtbf_s=mtbf_s, interval_s=interval_s)
    if min(save_s, restart_s, background_s) < 0:
        raise ValueError("seconds of a save, a restart or a background write are not below 0")
    segment = interval_s + save_s
    gap = segment / mtbf_s
    again_s = restart_s + background_s
    if gap + again_s / mtbf_s > 600:  # exp would overflow: nothing is ever finished
        return _nothing_useful(mtbf_s, interval_s, segment)
    tries = expm1(gap)
    in_segments_s = mtbf_s * tries
    in_restarts_s = tries * mtbf_s * expm1(again_s / mtbf_s)
    wall_s = in_segments_s + in_restarts_s
    restart_share = in_restarts_s / wall_s
    rewritten = restart_share * background_s / again_s if again_s else 0.0
    lost_share = (in_segments_s - segment) / wall_s + rewritten
    return Goodput(
        useful=interval_s / wall_s,
        terms={
            "saving": save_s / wall_s,
            "lost": lost_share,
            "restart": restart_share - rewritten,
        },
        interval_s=interval_s,
        mtbf_s=mtbf_s,
        failures_per_hour=_HOUR_S / mtbf_s,
        lost_s_per_failure=(in_segments_s - segment) / tries + background_s,
    )


def _nothing_useful(mtbf_s: float, interval_s: float, segment: float) -> Goodput:
    return Goodput(
        useful=0.0,
        terms={"saving": 0.0, "lost": 1.0, "restart": 0.0},
        interval_s=interval_s,
        mtbf_s=mtbf_s,
        failures_per_hour=_HOUR_S / mtbf_s,
        lost_s_per_failure=mtbf_s,
    )


def _check(*, mtbf_s: float, interval_s: float) -> None:
    if not 0 < mtbf_s < inf:
        raise ValueError("the time between failures is a finite number of seconds above 0")
    if not 0 < interval_s < inf:
        raise ValueError("the interval between checkpoints is a number of seconds above 0")
