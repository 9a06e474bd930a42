"""What a run costs at every provider side by side: of a plan, or of a model's size alone.

Computing, idle accelerators, checkpoints, failures, storage and traffic out are counted where
their prices are known; what is not known is named, and machines that cannot run it are listed with
the reason.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from paceline.catalog import Accelerator, Link, Price, load_links, offers_of_nodes
from paceline.estimate.cost import (
    DEFAULT_SPOT_MTBF_S,
    PROCESS_BYTES,
    Failures,
    Keeping,
    Needs,
    RunCost,
    cheapest_costs,
    run_costs,
    training_flops,
    why_no_cost,
    why_none,
)
from paceline.estimate.recovery import StatePlan
from paceline.job import Job
from paceline.parallel.abilities import abilities_of
from paceline.plan.decision import Plan
from paceline.plan.outlook import DEFAULTS, WEIGHT_BYTES, Outlook, keeping_of, needs_of, outlook
from paceline.topology import Cluster
from paceline.topology.levels import copied_bytes_per_s, host_bytes_per_s
from paceline.units import counted, format_bytes, format_count, format_interval, format_seconds

ASSUMED_MFU = 0.4
"""Assumed MFU of a large dense model on a network with RDMA: Llama 3 405B reached 38 to 43 % on
8,192 to 16,384 H100 (arXiv:2407.21783, table 4). Small models, long samples and slow networks reach
less."""

STATE_BYTES = 12
"""Bytes of a checkpoint for each parameter: fp32 weights and AdamW's two moments."""

TRAINED_BYTES = 16
"""Bytes of memory for each parameter, over all ranks and with everything sharded: weights and
gradients in bf16, fp32 weights and AdamW's two moments (ZeRO, arXiv:1910.02054, section 3.1)."""

NETWORK_SHARE = 0.25
"""A run that is known by its size counts on this share of the accelerator's usual network: a guess.
Data parallelism over whole nodes hides its traffic at that rate; a plan knows its own need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A run that is known by its size alone."""

    num_parameters: float
    tokens: float
    num_ranks: int
    num_active: float | None = None
    """Parameters that one token passes, in a mixture of experts; None is all."""

    mfu: float | None = None
    """Share of the peak that trains, recomputed work not counted; None is assumed."""

    tokens_per_s: float | None = None
    """Measured tokens a second of all ranks together; it takes the place of `mfu`."""

    recompute: Literal["none", "full"] = "none"

    @property
    def num_computed(self) -> float:
        """Parameters that each token is computed with."""
        return self.num_parameters if self.num_active is None else self.num_active


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """A run, and what it costs where."""

    name: str
    accelerator: str
    num_accelerators: int
    train_s: float | None
    """When nothing fails; None is unknown, and nothing has a cost then."""

    basis: tuple[str, ...]
    """How the time was found, and what is assumed."""

    costs: tuple[RunCost, ...]
    """The best of each provider, on demand and spot: machines that are known to run it first, then
    the cheapest."""

    why_no_cost: str | None
    """None where there is a cost."""

    refused: tuple[tuple[str, str], ...]
    """Provider -> why none of its machines that have a price can run it."""

    keeping: Keeping
    spot_taken: tuple[str, ...]
    """Providers whose spot machines are taken away more often than the run can restart."""

    spot_unpriced: tuple[str, ...]
    """Providers whose lists have no spot price of it."""

    size: Size | None = None
    """What was asked; None of a job."""


def bill_of_plan(
    plan: Plan,
    job: Job,
    prices: Iterable[Price],
    *,
    keeping: Keeping | None = None,
) -> Bill:
    """What a planned run costs.

    Args:
        plan: As `plan_job` made it.
        job: Of which it is the plan.
        prices: Of the plan's accelerator.
        keeping: What is stored and sent out; left out, `keeping_of` the plan.
    """
    rows, state = tuple(prices), plan.estimate.num_checkpoint_bytes
    kept, keeping = "" if keeping else "; {:.0f} stored", keeping or keeping_of(plan, job)
    kept = kept.format(keeping.stored_bytes / state)
    view = outlook(plan, job, prices=rows, keeping=keeping)
    cluster = plan.cluster
    basis = [
        f"{view.num_steps} steps of {_seconds(view.step_s)} each, as planned: {plan.layout_name}",
        f"a checkpoint every {counted(plan.checkpoint_every, 'step')}{_on_spot(view, cluster)}",
        f"one has {format_bytes(state)} and stops training for {format_seconds(view.save_s)}{kept}",
        *_all_kept(plan, view.num_checkpoints),
        *_assumed(cluster.num_ranks, view.restart_s),
        *_recovers(view.state),
    ]
    return _bill(
        name=job.spec.name,
        accelerator=cluster.accelerator,
        ranks=cluster.num_ranks,
        train_s=view.train_s,
        basis=basis,
        costs=view.costs,
        rows=rows,
        needs=needs_of(plan, view.state),
        keeping=keeping,
    )


def _recovers(state: StatePlan | None) -> Iterator[str]:
    """What a failure costs where it does not resume from a checkpoint."""
    if state is not None and state.chosen != "checkpoint":
        tier = state.tier(state.chosen)
        yield (
            f"{tier.covered:.1%} of failures recover from {state.chosen} in "
            f"{format_seconds(tier.recover_s)}; a spot instance that is taken resumes from the "
            "checkpoint"
        )


def _all_kept(plan: Plan, count: int) -> Iterator[str]:
    if not abilities_of(plan.engine).deletes_checkpoints:
        yield (
            f"{plan.engine} deletes no checkpoint: all {count} are counted as stored for the whole "
            "run (an upper bound)"
        )


def bill_of_size(
    size: Size,
    accelerator: Accelerator,
    prices: Iterable[Price],
    *,
    links: Mapping[str, Link] | None = None,
    keeping: Keeping | None = None,
) -> Bill:
    """What a run of so many parameters and tokens costs.

    Seconds are FLOPs / (ranks x peak x utilisation), or tokens / measured tokens a second.

    Args:
        size: The run.
        accelerator: Of every rank.
        prices: Of the accelerator.
        links: A catalog's own; the shipped ones when left out.
        keeping: What is stored and sent out; left out, three checkpoints and the weights once.

    Raises:
        ValueError: The accelerator's peak is unknown and no tokens a second are given; or the
            tokens a second are more than the peak allows; or the model does not fit; or more
            parameters are active than there are.
    """
    if not 0 < size.num_computed <= size.num_parameters:
        raise ValueError(
            f"{format_count(size.num_computed)} active parameters are more than the model's "
            f"{format_count(size.num_parameters)}: --params are all of them, --active-params those "
            "that one token passes"
        )
    _check_fits(size, accelerator)
    rows = tuple(prices)
    ranks, per_node = size.num_ranks, min(size.num_ranks, accelerator.num_per_node)
    nodes = ceil(ranks / per_node)
    train_s, how = _train_s(size, accelerator)
    state = STATE_BYTES * size.num_parameters
    host_link = host_bytes_per_s(accelerator, load_links() if links is None else links)
    write_s = state / DEFAULTS.storage_of(nodes)
    restart_s = DEFAULTS.restart_s + write_s
    failures = Failures(
        save_s=state / ranks / copied_bytes_per_s(host_link),
        restart_s=restart_s,
        rank_mtbf_s=DEFAULTS.rank_mtbf_s,
        background_s=write_s,
    )
    parts = {"a checkpoint's copy": state / nodes, "processes": per_node * PROCESS_BYTES}
    needs = Needs(
        num_nodes=nodes,
        accelerators_per_node=per_node,
        host_memory_bytes=sum(parts.values()),
        host_parts=parts,
        network_bytes_per_s=(
            NETWORK_SHARE * accelerator.network_node_bytes_per_s if nodes > 1 else None
        ),
    )
    keeping = keeping or Keeping(
        stored_bytes=3 * state, sent_bytes=WEIGHT_BYTES * size.num_parameters
    )
    costs = run_costs(
        num_accelerators=ranks,
        train_s=train_s,
        prices=offers_of_nodes(rows, per_node),
        failures=failures,
        needs=needs,
        keeping=keeping,
    )
    bill = _bill(
        name=f"{format_count(size.num_parameters)} parameters{_active(size)}, "
        f"{format_count(size.tokens)} tokens",
        accelerator=accelerator.name,
        ranks=ranks,
        train_s=train_s,
        basis=[
            *how,
            f"a checkpoint is {STATE_BYTES} bytes per parameter, {format_bytes(state)}",
            "checkpoints are saved at the interval that costs least",
            *_assumed(ranks, restart_s),
        ],
        costs=cheapest_costs(costs),
        rows=rows,
        needs=needs,
        keeping=keeping,
    )
    return replace(bill, size=size)


def _active(size: Size) -> str:
    return "" if size.num_active is None else f" ({format_count(size.num_active)} active)"


def _train_s(size: Size, accelerator: Accelerator) -> tuple[float, list[str]]:
    """Seconds of the run, and how they were found."""
    peaks = accelerator.peak_flops_per_s
    kind = next((each for each in ("bf16", "fp16", "fp32") if each in peaks), None)
    peak = None if kind is None else size.num_ranks * peaks[kind]
    model_flops = training_flops(size.num_computed, size.tokens)
    done = training_flops(size.num_computed, size.tokens, recompute=size.recompute != "none")
    each, active = (
        "a parameter and token",
        "; every parameter counts as active (fewer: --active-params)",
    )
    if size.num_active is not None:
        each, active = "an active parameter and token", ""
    work = f"6 FLOPs {each}, {model_flops:.3g} in all, attention not counted"
    if size.recompute != "none":
        work += f"; full recomputation makes it 8, {done:.3g}"
    work += active
    if size.tokens_per_s is not None:
        rate = f"{format_count(size.tokens_per_s)} tokens a second, as given"
        if kind is not None and peak is not None:
            fastest = max(peaks, key=peaks.__getitem__)
            computed = done / size.tokens * size.tokens_per_s
            most = peaks[fastest] * size.num_ranks
            if computed > most:
                raise ValueError(
                    f"{rate}, is more than {size.num_ranks} x {accelerator.name} can compute: "
                    f"{format_count(most * size.tokens / done)} at their peak"
                )
            rate += f": MFU {model_flops / size.tokens * size.tokens_per_s / peak:.0%} in {kind}"
            if computed > peak:
                rate += (
                    f"; computed is {computed / peak:.0%} of the {kind} peak, "
                    f"{computed / most:.0%} of the {fastest} peak: only {fastest} is so fast"
                )
        return size.tokens / size.tokens_per_s, [rate, work]
    if kind is None or peak is None:
        raise ValueError(f"the peak of {accelerator.name} is not known; give --tokens-per-s")
    again = done / model_flops
    if size.mfu is not None and size.mfu * again > 1:
        raise ValueError(
            f"an MFU of {size.mfu:.0%} with full recomputation computes {size.mfu * again:.0%} of "
            f"the peak: 8 FLOPs where 6 count; give --mfu of {1 / again:g} at most, or "
            "--recompute none"
        )
    mfu = size.mfu if size.mfu is not None else ASSUMED_MFU / again
    said = (
        f"MFU {mfu:.0%}, as given"
        + (
            f": {mfu * again:.0%} of the peak computes, a quarter of that repeats"
            if again > 1
            else ""
        )
        if size.mfu is not None
        else f"MFU {mfu:.0%}, assumed"
        + (f": {ASSUMED_MFU:.0%} of the peak computes, a quarter of that repeats" * (again > 1))
        + " (Llama 3 405B: 38 to 43 %, arXiv:2407.21783)"
    )
    return model_flops / (peak * mfu), [
        work,
        f"{said}; {kind} peak {peaks[kind] / 1e12:.4g} TFLOP/s",
    ]


def _check_fits(size: Size, accelerator: Accelerator) -> None:
    """Refuse what no sharding fits; measured tokens a second show that it does."""
    memory, state = accelerator.memory_bytes, TRAINED_BYTES * size.num_parameters
    if size.tokens_per_s is not None or memory is None or state <= size.num_ranks * memory:
        return
    raise ValueError(
        f"{format_count(size.num_parameters)} parameters take {format_bytes(state)} to train "
        f"({TRAINED_BYTES} B each), {size.num_ranks} x {accelerator.name} have "
        f"{format_bytes(size.num_ranks * memory)}: take {ceil(state / memory)} or more, or give "
        "--tokens-per-s where it was measured with offloading or smaller states"
    )


def _bill(
    *,
    name: str,
    accelerator: str,
    ranks: int,
    train_s: float | None,
    basis: Iterable[str],
    costs: tuple[RunCost, ...],
    rows: tuple[Price, ...],
    needs: Needs,
    keeping: Keeping,
) -> Bill:
    have = {cost.provider for cost in costs}
    on_spot = {cost.provider for cost in costs if cost.way == "spot"}
    has_price = {row.provider for row in rows if row.spot_per_hour_usd is not None}
    return Bill(
        name=name,
        accelerator=accelerator,
        num_accelerators=ranks,
        train_s=train_s,
        basis=tuple(basis),
        costs=costs,
        why_no_cost=None if costs else why_no_cost(accelerator, rows, train_s),
        refused=tuple(
            (provider, why)
            for provider in sorted({row.provider for row in rows} - have)
            if train_s is not None
            if (why := why_none(provider, rows, needs)) is not None
        ),
        keeping=keeping,
        spot_taken=tuple(sorted(have & has_price - on_spot)),
        spot_unpriced=tuple(sorted(have - has_price)),
    )


def _on_spot(view: Outlook, cluster: Cluster) -> str:
    """The interval on the cheapest spot machines, where it is another."""
    taken = next((each.num_instances for each in view.costs if each.way == "spot"), 0)
    if view.failures.is_fixed or not taken:
        return ""
    good = view.failures.goodput(cluster.num_ranks, taken)
    return f" on demand, every {format_seconds(good.interval_s)} on the cheapest spot machines"


def _assumed(ranks: int, restart_s: float) -> list[str]:
    often = format_interval(DEFAULTS.rank_mtbf_s / ranks)
    return [
        f"assumed: a failure every {often} (the rate of Llama 3's training, arXiv:2407.21783)",
        f"assumed: {format_seconds(restart_s)} to restart",
        f"assumed: a spot instance lasts {format_seconds(DEFAULT_SPOT_MTBF_S)} on average",
    ]


def _seconds(seconds: float | None) -> str:
    return "unknown seconds" if seconds is None else format_seconds(seconds)
