"""What a plan means for its whole run: hours, failures, checkpoints, dollars.

Everything follows from the plan, the job and a few assumptions, which are named and can be
replaced. None is unknown, and stays so. Leaves out: evaluation, and reading the data.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from paceline.catalog import Price, find_prices, offers_of_nodes
from paceline.estimate.cost import (
    PROCESS_BYTES,
    Failures,
    Keeping,
    Needs,
    RunCost,
    accelerator_hours,
    cheapest_costs,
    run_costs,
)
from paceline.estimate.goodput import DEFAULT_RANK_MTBF_S, Copies, Goodput
from paceline.estimate.recovery import StatePlan
from paceline.job import Job
from paceline.parallel.abilities import abilities_of
from paceline.plan.advice.checkpoints import CheckpointAdvice, advise_checkpoints
from paceline.plan.decision import Plan
from paceline.plan.recover import plan_state

WEIGHT_BYTES = 2
"""Bytes of the finished model for each parameter, in bf16: what is sent out once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no job says and every forecast needs. Guesses where no source is named."""

    storage_bytes_per_s: float = 2e9
    """At which a node writes to and reads from the shared storage: a guess, a tenth of a 200 Gb/s
    network card. Measure it: `dd if=/dev/zero of=FILE bs=16M count=1024 oflag=direct`."""

    restart_s: float = 300.0
    """From a failure to new processes that have met, before the checkpoint is read: a guess. Ours
    on one machine is seconds; thousands of ranks take minutes."""

    rank_mtbf_s: float = DEFAULT_RANK_MTBF_S
    """Between failures of one accelerator: Llama 3's training, arXiv:2407.21783."""

    most_storage_bytes_per_s: float = 2e12
    """That all nodes together reach, whatever one of them could: Llama 3's storage sustains 2 TB/s
    (arXiv:2407.21783, section 3.3.1)."""

    def storage_of(self, num_nodes: int) -> float:
        """Bytes a second between so many nodes and the shared storage."""
        return min(num_nodes * self.storage_bytes_per_s, self.most_storage_bytes_per_s)


DEFAULTS = Assumptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The run that a plan leads to."""

    num_steps: int
    step_s: float | None
    train_s: float | None
    """Seconds of all steps when nothing fails."""

    wall_s: float | None
    """Seconds of all steps with checkpoints and failures."""

    num_tokens: int | None
    """Trained on in the whole run; None where a sample is not a row of tokens."""

    accelerator_hours: float | None
    """Hours of the wall time over all accelerators."""

    num_checkpoints: int
    """Written in the run, the last state among them."""

    save_s: float
    """Training stands still for one checkpoint: the state's copy to the host, and what is written
    where the engine does not write in the background."""

    write_s: float
    """A checkpoint is written, or read."""

    background_s: float
    """A checkpoint is written on while training goes on."""

    restart_s: float
    """From a failure to the first step after it, reading the checkpoint included."""

    checkpoints: CheckpointAdvice | None
    """The interval that loses the least; None when a step's time is unknown."""

    goodput: Goodput | None
    """With the plan's own interval, from the state that it recovers from."""

    best_goodput: Goodput | None
    """With the advised interval in its place."""

    from_checkpoints: Goodput | None
    """With the plan's own interval, if every failure resumed from a checkpoint."""

    failures: Failures
    """What they cost with the plan's own interval and copies."""

    state: StatePlan | None
    """Where a lost rank's state comes from; None when a step's time is unknown."""

    costs: tuple[RunCost, ...]
    """The best of each provider, on demand and spot: machines that are known to run the plan first,
    then the cheapest. Empty where no machine that can run it has a price."""

    assumptions: Assumptions


def outlook(
    plan: Plan,
    job: Job,
    *,
    prices: Iterable[Price] | None = None,
    assumptions: Assumptions = DEFAULTS,
    keeping: Keeping | None = None,
) -> Outlook:
    """The run that a plan leads to.

    Args:
        plan: As `plan_job` made it.
        job: Of which it is the plan.
        prices: Of the accelerator; left out, the catalog's.
        assumptions: In place of the defaults.
        keeping: What the run stores and sends out; left out, `keeping_of` the plan.
    """
    cluster, price, train = plan.cluster, plan.estimate, job.spec.train
    num_bytes = price.num_checkpoint_bytes
    copy_s = num_bytes / cluster.num_ranks / cluster.copy_bytes_per_s
    write_s = num_bytes / assumptions.storage_of(cluster.num_nodes)
    background_s = write_s if abilities_of(plan.engine).saves_in_background else 0.0
    save_s = copy_s + write_s - background_s
    restart_s = assumptions.restart_s + write_s
    step_s = price.step_s
    train_s = None if step_s is None else step_s * train.steps
    failures = Failures(
        save_s=save_s,
        restart_s=restart_s,
        rank_mtbf_s=assumptions.rank_mtbf_s,
        interval_s=None if step_s is None else plan.checkpoint_every * step_s,
        is_fixed=job.spec.checkpoint.every != "auto",
        background_s=background_s,
    )
    good = best = from_checkpoints = advice = None
    state = plan_state(plan, job, failures, write_s)
    if step_s is not None:
        advice = advise_checkpoints(
            save_s=save_s,
            restart_s=restart_s,
            ranks=cluster.num_ranks,
            rank_mtbf_s=assumptions.rank_mtbf_s,
            step_s=step_s,
            background_s=background_s,
            num_steps=train.steps,
        )
        from_checkpoints = failures.goodput(cluster.num_ranks)
        failures = replace(failures, copies=_copies(state, step_s))
        good = best = failures.goodput(cluster.num_ranks)
        if advice.every_steps:
            advised = replace(failures, interval_s=advice.every_steps * step_s)
            best = advised.goodput(cluster.num_ranks)
    wall_s = None if train_s is None or not good or not good.useful else train_s / good.useful
    seq_len = plan.profile.seq_len
    rows = find_prices(cluster.accelerator) if prices is None else tuple(prices)
    rows = offers_of_nodes(rows, cluster.ranks_per_node)
    return Outlook(
        num_steps=train.steps,
        step_s=step_s,
        train_s=train_s,
        wall_s=wall_s,
        num_tokens=None if seq_len is None else train.steps * plan.layout.global_batch * seq_len,
        accelerator_hours=(
            None if wall_s is None else accelerator_hours(cluster.num_ranks, wall_s)
        ),
        num_checkpoints=-(-train.steps // plan.checkpoint_every),
        save_s=save_s,
        write_s=write_s,
        background_s=background_s,
        restart_s=restart_s,
        checkpoints=advice,
        goodput=good,
        best_goodput=best,
        from_checkpoints=from_checkpoints,
        failures=failures,
        state=state,
        costs=_costs(
            train_s,
            rows,
            failures,
            keeping or keeping_of(plan, job),
            needs_of(plan, state),
            epochs=None if job.length is None else job.length.epochs,
        ),
        assumptions=assumptions,
    )


def keeping_of(plan: Plan, job: Job) -> Keeping:
    """The checkpoints that a job keeps, all where the engine deletes none, and its finished model
    sent out once."""
    written = -(-job.spec.train.steps // plan.checkpoint_every)
    deletes = abilities_of(plan.engine).deletes_checkpoints
    kept = min(written, job.spec.checkpoint.keep_last) if deletes else written
    return Keeping(
        stored_bytes=plan.estimate.num_checkpoint_bytes * kept,
        sent_bytes=plan.profile.num_parameters * WEIGHT_BYTES,
    )


def needs_of(plan: Plan, state: StatePlan | None) -> Needs:
    """What a rented machine must have: whole nodes, host memory for offloaded state, for the copy
    of the state that a checkpoint is written from and for the copies in memory that failures
    recover from, and the network that the plan's time counts on."""
    cluster = plan.cluster
    copies = 0 if state is None else state.tier(state.chosen).host_bytes
    parts = {
        "offloaded": plan.host_bytes if plan.layout.offload == "cpu" else 0,
        "a checkpoint's copy": plan.estimate.num_checkpoint_bytes / cluster.num_nodes,
        "copies in memory": copies,
        "processes": cluster.ranks_per_node * PROCESS_BYTES,
    }
    return Needs(
        num_nodes=cluster.num_nodes,
        accelerators_per_node=cluster.ranks_per_node,
        host_memory_bytes=sum(parts.values()),
        host_parts=parts,
        network_bytes_per_s=cluster.network_bytes_per_s if cluster.num_nodes > 1 else None,
        is_rdma=cluster.uses_rdma,
    )


def _copies(state: StatePlan | None, step_s: float) -> Copies | None:
    """What the chosen place covers and costs; None where that is the checkpoint alone."""
    if state is None or state.chosen == "checkpoint":
        return None
    tier = state.tier(state.chosen)
    return Copies(
        covered=tier.covered,
        recover_s=tier.recover_s,
        lost_s=tier.lost_s,
        slower=tier.step_s / step_s,
    )


def _costs(
    train_s: float | None,
    prices: Iterable[Price],
    failures: Failures,
    keeping: Keeping,
    needs: Needs,
    *,
    epochs: float | None,
) -> tuple[RunCost, ...]:
    if train_s is None:
        return ()
    return cheapest_costs(
        run_costs(
            num_accelerators=needs.num_nodes * needs.accelerators_per_node,
            train_s=train_s,
            prices=prices,
            failures=failures,
            epochs=epochs,
            needs=needs,
            keeping=keeping,
        )
    )
