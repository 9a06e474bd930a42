"""What a run does after the loss of one node: ranks, their shares of the batch, learning rate."""

from paceline.job import JobSpec
from paceline.parallel import Layout
from paceline.parallel.shrink import shrunk
from paceline.plan.advice import scale_learning_rate
from paceline.topology import Cluster


def after_a_lost_node(spec: JobSpec, layout: Layout, cluster: Cluster) -> str:
    """How many ranks go on without one node, with which batch and learning rate, in a sentence, of
    a run that may shrink."""
    recovery, train = spec.recovery, spec.train
    left = (cluster.num_nodes - 1) * cluster.ranks_per_node
    small = shrunk(layout, left, recovery.batch) if left else None
    if small is None:
        return "too few ranks are left after a lost node: the run waits for it, and ends"
    shares = {sum(small.micro_batches_of(rank)) for rank in range(small.data)}
    samples = " or ".join(str(share) for share in sorted(shares, reverse=True))
    ranks = (
        f"after a lost node {small.num_ranks} of the {left} ranks that are left go on, with "
        f"{samples} samples for each data rank: "
    )
    if recovery.batch == "keep":
        return f"{ranks}the same global batch of {small.global_batch}"
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
        "fewer samples"
    )
