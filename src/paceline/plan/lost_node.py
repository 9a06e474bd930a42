"""What a run does after the loss of one node: ranks, their shares of the batch, learning rate."""

from bisect import bisect
from math import inf

from paceline.estimate import Case, price_one
from paceline.job import JobSpec
from paceline.parallel import Layout
from paceline.parallel.shrink import shrunk
from paceline.plan.advice import scale_learning_rate
from paceline.plan.reasons import too_much
from paceline.topology import Cluster


def fewest_ranks(
    spec: JobSpec, layout: Layout, case: Case, limit_bytes: float | None = None
) -> int:
    """The fewest ranks with which all layouts from there to the plan's exist and a rank's memory is
    at most the limit in bytes; left out, all that a rank has, which is what a run goes on with."""
    each = layout.num_ranks // layout.data
    limit = _all_memory(case.cluster) if limit_bytes is None else limit_bytes

    def is_too_few(data: int) -> bool:
        small = shrunk(layout, data * each, spec.recovery.batch)
        return small is None or price_one(small, case).memory.known_bytes > limit

    # A share of the state grows as ranks go, so those that fit come after those that do not.
    counts = range(1, layout.data)
    return each * (1 + bisect(counts, False, key=lambda data: not is_too_few(data)))


def _all_memory(cluster: Cluster) -> float:
    """Bytes of a rank. Ranks on CPUs share a host's, and those that are left have more."""
    return inf if cluster.accelerator == "cpu" else cluster.usable_bytes


def after_a_lost_node(
    spec: JobSpec, layout: Layout, cluster: Cluster, case: Case, limit_bytes: float
) -> str:
    """How many ranks go on without one node, with which batch and learning rate, in a sentence, of
    a run that may shrink; and whether a rank's memory then exceeds the limit in bytes."""
    recovery, train = spec.recovery, spec.train
    left = (cluster.num_nodes - 1) * cluster.ranks_per_node
    small = shrunk(layout, left, recovery.batch) if left else None
    waits = "the run waits for a new node, then ends"
    if small is None:
        return f"after a lost node too few ranks remain: {waits}"
    needed = price_one(small, case).memory.known_bytes
    most = _all_memory(cluster)
    if needed > most:
        return (
            f"after a lost node the {left} remaining ranks lack the memory: a rank then "
            f"{too_much(needed, most)}: {waits}"
        )
    shares = {sum(small.micro_batches_of(rank)) for rank in range(small.data)}
    samples = " or ".join(str(share) for share in sorted(shares, reverse=True))
    ranks = (
        f"after a lost node {small.num_ranks} of the {left} remaining ranks continue, with "
        f"{samples} sample{'' if shares == {1} else 's'} a data rank: "
    )
    memory = (
        ""
        if needed <= limit_bytes
        else (
            "; they may run out of memory, as each holds more of the state: a rank then "
            f"{too_much(needed, limit_bytes)}"
        )
    )
    if spares := int(left > 0) if recovery.spares == "auto" else recovery.spares:
        memory += f"; a spare process ({spares} kept) first takes a lost rank's place"
    if recovery.batch == "keep":
        return f"{ranks}the same global batch of {small.global_batch}{memory}"
    rate = scale_learning_rate(
        train.learning_rate,
        base_batch=layout.global_batch,
        batch=small.global_batch,
        optimizer=train.optimizer,
    )
    return (
        f"{ranks}the global batch shrinks from {layout.global_batch} to {small.global_batch} and "
        f"the learning rate from {train.learning_rate:.4g} to {rate.learning_rate:.4g} "
        f"({rate.rule} rule, {train.optimizer}); the {train.steps} steps stay, so the run reads "
        f"fewer samples{memory}"
    )
