"""How long one optimizer step takes: a thin roofline, each term stated.

    compute        3 x forward FLOPs of a rank's samples / (peak x efficiency)
    communication  what of the gradients' reduction and the parameters' gathering is not hidden
                   behind the backward pass
    optimizer      every number of its state read and written once, at memory bandwidth

Rings move (n-1)/n of the bytes through the slowest level: inside a node each rank's link, between
nodes the node's network, which the rings of all its ranks share.

Leaves out: small matrices, latency of collectives, launch overhead, data loading, stragglers.

Source: 3 x forward: backward is two products for each one, Kaplan et al., arXiv:2001.08361, 2.1.
Ring volumes: Patarasuk and Yuan, 2009. Levels: design/planner.md 3.2, Hierarchy.
"""

from paceline.estimate.memory import Optimizer, Precision, num_shard_parameters
from paceline.parallel import Layout
from paceline.profile import ModelProfile
from paceline.topology import Cluster

_BACKWARD_SHARE = 2 / 3
"""Of a micro-batch's compute: backward is twice the forward."""

_DDP_BUCKET_BYTES = 25 * 2**20
"""torch's default `bucket_cap_mb`; the last bucket is reduced after the backward pass has ended."""

_BYTES_TOUCHED = {"adamw": 28, "sgd": 20}
"""For each parameter: gradient read, parameter and each moment read and written, 4 bytes each."""


def step_terms(
    layout: Layout,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    precision: Precision,
    optimizer: Optimizer,
) -> dict[str, float] | None:
    """Seconds by term; None when the model's FLOPs or a rate of the cluster is unknown."""
    compute_s = _compute_s(layout, profile, cluster, precision)
    rate = group_bytes_per_s(cluster)
    if compute_s is None or (rate is None and layout.num_ranks > 1):
        return None
    if layout.num_ranks == 1 or rate is None:
        exposed_s = 0.0
    elif layout.shard_degree > 1:
        exposed_s = _sharded_exposed_s(layout, profile, cluster, precision, rate, compute_s)
    else:
        exposed_s = _replicated_exposed_s(layout, profile, cluster, rate, compute_s)
    terms = {"compute": compute_s, "communication": exposed_s}
    if cluster.memory_bytes_per_s is not None:
        touched = _BYTES_TOUCHED[optimizer] * num_shard_parameters(profile, layout.shard_degree)
        terms["optimizer"] = touched / (cluster.memory_bytes_per_s * cluster.memory_efficiency)
    return terms


def group_bytes_per_s(cluster: Cluster) -> float | None:
    """Bytes a second that a ring over all ranks moves through each of them; None if unknown."""
    link, network = cluster.link_bytes_per_s, cluster.network_bytes_per_s
    inside = link * cluster.link_efficiency if link is not None else None
    if cluster.num_nodes == 1:
        return inside
    between = network * cluster.network_efficiency if network is not None else None
    if cluster.ranks_per_node == 1:
        return between
    return None if inside is None or between is None else min(inside, between)


def _compute_s(
    layout: Layout, profile: ModelProfile, cluster: Cluster, precision: Precision
) -> float | None:
    flops = profile.forward_flops_per_sample
    peak = cluster.peak_flops_per_s.get(precision)
    share = cluster.compute_efficiency.get(precision)
    if flops is None or peak is None or share is None:
        return None
    return 3 * flops * layout.micro_batch * layout.accumulation / (peak * share)


def _hidden_s(cluster: Cluster, compute_s: float) -> float:
    """Compute that communication can hide behind: on a CPU none, as the same cores do both."""
    return 0.0 if cluster.backend == "gloo" else compute_s


def _replicated_exposed_s(
    layout: Layout, profile: ModelProfile, cluster: Cluster, rate: float, compute_s: float
) -> float:
    """DDP: one all-reduce of float32 gradients, behind the last micro-batch's backward pass."""
    ring = 2 * (layout.data - 1) / layout.data / rate
    num_bytes = 4 * profile.num_parameters
    window = _hidden_s(cluster, _BACKWARD_SHARE * compute_s / layout.accumulation)
    return max(ring * num_bytes - window, ring * min(num_bytes, _DDP_BUCKET_BYTES))


def _sharded_exposed_s(
    layout: Layout,
    profile: ModelProfile,
    cluster: Cluster,
    precision: Precision,
    rate: float,
    compute_s: float,
) -> float:
    """FSDP2: blocks gathered for forward and for backward of every micro-batch, the root once;
    gradients reduce-scattered in float32 with the last micro-batch, or with each.

    Never hidden: gathering the root, with which the step begins, and reducing it at the end.
    """
    ring = (layout.data - 1) / layout.data / (rate * cluster.gather_share)
    narrow = 2 if precision == "bf16" else 4
    in_blocks, root = (
        profile.num_parameters - profile.num_root_parameters,
        profile.num_root_parameters,
    )
    gathers = layout.accumulation * narrow * (2 * in_blocks + root)
    num_reductions = layout.accumulation if layout.reduce_every_micro_batch else 1
    total = ring * (gathers + 4 * num_reductions * profile.num_parameters)
    ends = ring * (narrow + 4) * root
    return max(total - _hidden_s(cluster, compute_s), ends)
