"""`paceline advise`: small answers from a few numbers."""

from collections.abc import Callable
from dataclasses import asdict
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import click

from paceline import units
from paceline.cli.advise_batch import POSITIVE, batch, print_json, print_rows
from paceline.cli.options import FiniteRange, json_option
from paceline.cli.screen import show
from paceline.units import significant

if TYPE_CHECKING:
    _FloatType = click.ParamType[float]
else:
    _FloatType = click.ParamType  # click before 8.2 cannot be subscripted

_T = TypeVar("_T")


_ABOVE_ZERO = FiniteRange(min=0, min_open=True)


class _Unit(_FloatType):
    """A number with its unit, read by `units`."""

    def __init__(self, name: str, parse: Callable[[str], float], *, zero: bool = False) -> None:
        self.name, self._parse, self._zero = name, parse, zero

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> float:
        if not isinstance(value, str):
            return float(value)
        try:
            number = self._parse(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)
        except OverflowError:
            number = inf
        if number == inf:
            self.fail(f"{value!r} is too large", parameter, context)
        if not number > 0 and not (self._zero and number == 0):
            self.fail(f"{value!r} is not above zero", parameter, context)
        return number


_BYTES = _Unit("SIZE", units.parse_bytes)
_RATE = _Unit("RATE", units.parse_bytes_per_s)
_SECONDS = _Unit("TIME", units.parse_seconds)
_SECONDS_OR_NONE = _Unit("TIME", units.parse_seconds, zero=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Suggest batch size, learning rate, buckets, checkpoint interval from a few numbers.

    Each prints the rule that it follows, its source, and its limitations. Nothing is started.

    \b
    Examples:
      paceline advise accumulate --batch 64 --data-ranks 2 --max-micro-batch 8
      paceline advise rate --rate 0.001 --base-batch 64 --batch 512
      paceline advise batch job.yaml
      paceline advise buckets --gradients 28GB --backward 900ms --ranks 64 \\
        --bandwidth 50GB/s
      paceline advise checkpoint --save 30s --restart 10m --ranks 1024
      paceline advise critical-batch --small 8 5.0 --big 64 1.5
    """


command.add_command(batch)


@command.command()
@click.option("--batch", type=POSITIVE, required=True, help="Samples in one optimizer step.")
@click.option(
    "--data-ranks",
    type=POSITIVE,
    required=True,
    help="Ranks that read different samples: all ranks / (tensor x pipeline x context).",
)
@click.option(
    "--max-micro-batch", type=POSITIVE, required=True, help="Most samples that fit at once."
)
@json_option
def accumulate(batch: int, data_ranks: int, max_micro_batch: int, as_json: bool) -> None:
    """Split a global batch into micro-batches and accumulation.

    \b
    Examples:
      paceline advise accumulate --batch 64 --data-ranks 2 --max-micro-batch 8
    """
    from paceline.plan.advice import solve_batch

    split = solve_batch(batch, data_ranks=data_ranks, max_micro_batch=max_micro_batch)
    if as_json:
        print_json({**asdict(split), "rounding_error": split.rounding_error})
        return
    print_rows(
        ("micro-batch", str(split.micro_batch)),
        ("accumulate", str(split.accumulation)),
        (
            "batch",
            f"{split.achieved_batch}, {split.rounding_error:+.2%} of what was asked"
            if split.rounding_error
            else f"{split.achieved_batch}, as asked",
        ),
        ("because", split.explanation),
        *(
            [("nearest", f"{' or '.join(map(str, split.nearest))}: no rounding")]
            * bool(split.nearest)
        ),
    )


@command.command()
@click.option("--rate", type=_ABOVE_ZERO, required=True, help="A learning rate that trains well.")
@click.option("--base-batch", type=POSITIVE, required=True, help="Samples in a step at that rate.")
@click.option("--batch", type=POSITIVE, required=True, help="Samples in a step now.")
@click.option(
    "--optimizer",
    type=click.Choice(["sgd", "adam", "adamw", "adamw-8bit", "adafactor", "muon"]),
    default="adamw",
    show_default=True,
)
@click.option(
    "--rule", type=click.Choice(["linear", "sqrt"]), help="[default: linear for SGD, else sqrt]"
)
@click.option("--steps", type=POSITIVE, help="Steps of the whole run, to suggest a warm-up.")
@click.option("--samples", type=POSITIVE, help="Samples in one epoch, to suggest a warm-up.")
@json_option
def rate(
    rate: float,
    base_batch: int,
    batch: int,
    optimizer: str,
    rule: Any,
    steps: int | None,
    samples: int | None,
    as_json: bool,
) -> None:
    """Scale a learning rate to another batch size.

    \b
    Examples:
      paceline advise rate --rate 0.001 --base-batch 64 --batch 512 --steps 5000
    """
    from paceline.plan.advice import scale_learning_rate

    found = scale_learning_rate(
        rate,
        base_batch=base_batch,
        batch=batch,
        optimizer=optimizer,
        rule=rule,
        samples=samples,
        steps=steps,
    )
    if not isfinite(max(found.learning_rate, found.linear_rate, found.sqrt_rate)):
        raise click.UsageError("the scaled rate is beyond any number; give a smaller --rate.")
    if as_json:
        print_json({**asdict(found), "learning_rate": found.learning_rate})
        return
    warmup = "unknown" if found.warmup_steps is None else f"{found.warmup_steps} steps"
    print_rows(
        ("rate", f"{found.learning_rate:.4g}, by the {found.rule} rule"),
        ("because", found.reason),
        ("linear", f"{found.linear_rate:.4g}"),
        ("square root", f"{found.sqrt_rate:.4g}"),
        ("warm-up", f"{warmup}: {found.warmup_reason}"),
    )


@command.command()
@click.option("--gradients", type=_BYTES, required=True, help="Bytes of one rank's gradients.")
@click.option("--backward", type=_SECONDS, required=True, help="Time of one backward pass.")
@click.option("--ranks", type=POSITIVE, required=True, help="Data ranks.")
@click.option(
    "--bandwidth",
    type=_RATE,
    required=True,
    help="Rate of the slowest link in one direction: 400Gb/s.",
)
@click.option(
    "--latency",
    type=_SECONDS_OR_NONE,
    default="20e-3ms",
    show_default=True,
    help="Latency of one hop of the ring, launch included; the default is a guess.",
)
@click.option(
    "--changing", is_flag=True, help="Which parameters are used changes from step to step."
)
@json_option
def buckets(
    gradients: float,
    backward: float,
    ranks: int,
    bandwidth: float,
    latency: float,
    changing: bool,
    as_json: bool,
) -> None:
    """Find DDP's bucket size that hides most of the reduction.

    \b
    Examples:
      paceline advise buckets --gradients 28GB --backward 900ms --ranks 64 \\
        --bandwidth 50GB/s
    """
    from paceline.plan.advice import advise_buckets

    advice = advise_buckets(
        gradient_bytes=round(gradients),
        backward_s=backward,
        ranks=ranks,
        bytes_per_s=bandwidth,
        latency_s=latency,
        static=not changing,
    )
    if as_json:
        print_json(asdict(advice))
        return
    size = advice.bucket_cap_mb
    print_rows(
        ("bucket", "leave bucket_cap_mb out" if size is None else f"bucket_cap_mb={size}"),
        ("because", advice.reason),
        ("exposed", units.format_seconds(advice.exposed_s)),
        ("default", f"{units.format_seconds(advice.default_exposed_s)} exposed with 25 MiB"),
        ("one bucket", f"{units.format_seconds(advice.whole_exposed_s)} exposed"),
        ("first bucket", "1 MiB only when bucket_cap_mb is left out; else as large as the others"),
        *advice.flags.items(),
    )


@command.command()
@click.option(
    "--save", type=_SECONDS, required=True, help="Time training stands still for a checkpoint."
)
@click.option(
    "--restart", type=_SECONDS, required=True, help="Time from a failure to the next step."
)
@click.option("--ranks", type=POSITIVE, required=True, help="Accelerators in the job.")
@click.option(
    "--rank-mtbf",
    type=_SECONDS,
    help="Time between failures of one accelerator. Left out, that of Llama 3's training.",
)
@click.option("--step", type=_SECONDS, help="Time of one step, for an interval in steps.")
@click.option(
    "--background",
    type=_SECONDS_OR_NONE,
    default="0s",
    help="Time a checkpoint is written on while training continues.",
)
@json_option
def checkpoint(
    save: float,
    restart: float,
    ranks: int,
    rank_mtbf: float | None,
    step: float | None,
    background: float,
    as_json: bool,
) -> None:
    """Find the checkpoint interval that loses the least time.

    \b
    Examples:
      paceline advise checkpoint --save 30s --restart 10m --ranks 1024 --step 5s
      paceline advise checkpoint --save 1s --restart 5m --ranks 64
    """
    from paceline.plan.advice import advise_checkpoints
    from paceline.report.plan_text import losses

    advice = advise_checkpoints(
        save_s=save,
        restart_s=restart,
        ranks=ranks,
        rank_mtbf_s=rank_mtbf,
        step_s=step,
        background_s=background,
    )
    if as_json:
        print_json(asdict(advice))
        return
    good, terms = advice.goodput, advice.goodput.terms
    steps = "" if advice.every_steps is None else f", {advice.every_steps} steps"
    half, hour = advice.rule_of_thumb
    print_rows(
        ("every", f"{units.format_seconds(advice.interval_s)}{steps}"),
        *([("warning", advice.warning)] if advice.warning else []),
        ("because", advice.reason),
        ("goodput", f"{good.useful:.2%} of the time{losses(terms, 2)}"),
        (
            "at 4x failures",
            f"goodput {advice.pessimistic.useful:.2%}, when failures come four times as often",
        ),
        (
            "a failure",
            f"repeats {units.format_seconds(good.lost_s_per_failure)} of work on average",
        ),
        ("Young", units.format_seconds(advice.young_s)),
        ("Daly", units.format_seconds(advice.daly_s)),
        ("every 30 min", f"goodput {half.useful:.2%}"),
        ("every 60 min", f"goodput {hour.useful:.2%}"),
        ("failures", f"{units.format_seconds(advice.mtbf_s)} apart, {advice.mtbf_source}"),
    )


@command.command(name="critical-batch")
@click.option(
    "--small",
    type=(POSITIVE, _ABOVE_ZERO),
    required=True,
    metavar="BATCH SQUARE",
    help="A batch, and the mean squared norm of its gradient: one rank's, before the all-reduce.",
)
@click.option(
    "--big",
    type=(POSITIVE, _ABOVE_ZERO),
    required=True,
    metavar="BATCH SQUARE",
    help="A larger batch, and its gradient's mean squared norm: all ranks', after the all-reduce.",
)
@json_option
def critical(small: tuple[int, float], big: tuple[int, float], as_json: bool) -> None:
    """Find the batch beyond which more samples save few steps.

    It is computed from two measured gradient norms, holds for the moment they were measured at, and
    grows during training.

    \b
    Examples:
      paceline advise critical-batch --small 8 5.0 --big 64 1.5
    """
    from paceline.plan.advice import critical_batch

    found = _refused_as_usage(
        lambda: critical_batch(
            small_batch=small[0], small_square=small[1], big_batch=big[0], big_square=big[1]
        )
    )
    if as_json:
        print_json(None if found is None else asdict(found))
        return
    if found is None:
        show("unknown: the norms are too noisy to tell; average them over more steps")
        return
    print_rows(
        ("critical", f"{found.samples:.4g} samples a step (measured norms, arXiv:1812.06162)"),
        *(
            (
                f"at {size}",
                (
                    f"{significant(found.steps_ratio(size))}x the least steps, "
                    f"{significant(found.samples_ratio(size))}x the least samples"
                ),
            )
            for size in (small[0], big[0])
        ),
    )


def _refused_as_usage(ask: Callable[[], _T]) -> _T:
    try:
        return ask()
    except ValueError as error:
        raise click.UsageError(str(error)) from None
