"""What data ranks send that nothing hides: reduction of gradients and gathering of parameters,
block by block in full sharding, once a step or a micro-batch elsewhere.

Arithmetic on columns: one row a layout, or one row a published run.
"""

from collections.abc import Callable

import numpy as np

from paceline.estimate.collectives import all_gather_s, all_reduce_s
from paceline.estimate.copies import host_copies
from paceline.estimate.inputs import Model, Traffic
from paceline.estimate.on_stage import stage_parameters
from paceline.estimate.rates import Rates
from paceline.estimate.sharding import routed_split, shared_of
from paceline.parallel.table import Layouts, code_of
from paceline.profile.adapter import OWN_NF4_BYTES
from paceline.profile.block import Block, Column, Value, dense_parameters, expert_parameters

_ZERO1, _ZERO2, _HYBRID = (code_of("sharding", word) for word in ("zero1", "zero2", "hybrid"))


def gathered_s(
    block: Block,
    model: Model,
    passes: tuple[Column, Column],
    t: Layouts,
    rates: Rates,
    traffic: Traffic,
) -> tuple[Column, Column]:
    """Full sharding, one block and micro-batch: seconds that its passes, forward and backward, do
    not hide, and seconds that they do. Quantised parameters are sent in 4 bits, and what is not
    trained is not reduced."""
    gathers = shared_of(t, traffic.ways, 0.0).gathers_blocks
    experts = routed_split(t, traffic.ways)
    dense = dense_parameters(block) / t.tensor
    routed = expert_parameters(block) / experts.holders
    routed_shard = np.maximum(t.shard * experts.replicas // t.expert, 1)
    routed_stride = t.tensor * t.expert // experts.replicas

    def over(num_bytes: Value) -> Column:
        seconds = all_gather_s(num_bytes * dense, t.shard, t.tensor, rates)
        if not np.any(routed):
            return seconds
        apart = all_gather_s(num_bytes * routed, routed_shard, routed_stride, rates)
        return seconds + np.where(np.asarray(routed) > 0, apart, 0.0)

    moved = host_copies(model, dense / t.shard + routed / routed_shard, t, traffic)
    packed = model.quantised_share * traffic.ways.restores_frozen
    sent_bytes = traffic.weight_bytes + (OWN_NF4_BYTES - traffic.weight_bytes) * packed
    gather = over(sent_bytes) + moved.to_device_s
    reduce = over(traffic.reduce_bytes * model.trained_share) + moved.to_host_s
    reduces = np.where(t.reduce_every_micro_batch, 1.0, 1.0 / t.accumulation)
    back = gather + reduce * reduces
    exposed = np.asarray(0.0)
    hidden = np.asarray(0.0)
    for needed, window in zip((gather, back), passes, strict=True):
        behind = np.minimum(needed, window) * rates.gather_overlap
        exposed, hidden = exposed + needed - behind, hidden + behind
    return np.where(gathers, exposed, 0.0), np.where(gathers, hidden, 0.0)


def data_s(
    model: Model,
    mean: dict[str, Column],
    t: Layouts,
    rates: Rates,
    traffic: Traffic,
    on_stage: Column,
) -> Column:
    """Gradients and parameters between data ranks that nothing hides."""
    dense, routed = stage_parameters(model, t, traffic)
    experts = routed_split(t, traffic.ways)
    shared = shared_of(t, traffic.ways, 0.0)
    trained = model.trained_share
    group = t.data * t.context
    in_group = np.where(t.sharding == _HYBRID, t.shard, group)
    routed_group = np.maximum(in_group * experts.replicas // t.expert, 1)
    routed_stride = t.tensor * t.expert // experts.replicas

    def over(collective: Callable[..., Column], num_bytes: Value) -> Column:
        seconds = collective(num_bytes * dense, in_group, t.tensor, rates)
        if not np.any(routed):
            return seconds
        apart = collective(num_bytes * routed, routed_group, routed_stride, rates)
        return seconds + np.where(np.asarray(routed) > 0, apart, 0.0)

    mine = dense / t.shard + routed / np.maximum(t.shard * experts.replicas // t.expert, 1)
    moved = host_copies(model, mine, t, traffic)
    reduces_each = (t.sharding == _ZERO2) | (t.reduce_every_micro_batch > 0)
    reductions = np.where(reduces_each & ~np.asarray(shared.reduces_late), t.accumulation, 1)
    sent_bytes = traffic.reduce_bytes * trained
    replicas = over(all_reduce_s, sent_bytes)
    is_whole = np.asarray(traffic.ways.all_reduces) > 0
    reduce = np.where(is_whole, replicas, over(all_gather_s, sent_bytes)) + moved.to_host_s
    gather = over(all_gather_s, traffic.weight_bytes * trained) + moved.to_device_s
    overlap = np.where(shared.reduces_late, 0.0, rates.gradient_overlap)
    back_window = on_stage * mean["backward"] * overlap
    hides_gather = 1 - traffic.ways.gathers_at_end
    ahead = rates.gradient_overlap * hides_gather
    forward_window = on_stage * mean["forward"] * ahead
    tail = 1 - overlap
    scattered = np.maximum(reduce - back_window, tail * reduce)
    gathered = np.maximum(gather - forward_window, (1 - ahead) * gather)
    all_reduce = replicas * traffic.replica_share
    replicated = np.maximum(all_reduce - back_window, tail * all_reduce)
    # Full sharding: blocks were counted one by one; the root begins and ends a micro-batch. Torch
    # 2.13 keeps it from forward to backward (`FSDPState._lazy_init`) and waits for its
    # gradients (`finalize_backward`). Between groups of a hybrid, shards are reduced once more.
    root = (model.num_embedding_parameters + model.num_head_parameters) / t.tensor
    gathers = np.where(shared.keeps_gathered, 1, t.accumulation)
    moved_root = host_copies(model, root / t.shard, t, traffic)
    root_bytes = traffic.weight_bytes * root, traffic.reduce_bytes * root * trained
    root_s = [all_gather_s(sent, t.shard, t.tensor, rates) for sent in root_bytes]
    ends = gathers * (root_s[0] + moved_root.to_device_s)
    ends = ends + reductions * (root_s[1] + moved_root.to_host_s)
    copies = np.maximum(group // np.maximum(t.shard, 1), 1)
    between = all_reduce_s(
        traffic.reduce_bytes * trained * (dense + routed) / t.shard,
        copies,
        t.tensor * t.shard,
        rates,
    )
    between = np.where(
        t.sharding == _HYBRID, np.maximum(between - back_window, tail * between), 0.0
    )
    full = t.accumulation * on_stage * mean["gathered"] + ends + between
    s = t.sharding
    zero2 = _zero2_s(reduce, gather, t, mean, on_stage, rates, hides_gather)
    sharded = np.where(s == _ZERO2, zero2, full)
    # A pipeline of our own runtime gathers and reduces once, whatever the sharding.
    sharded = np.where(shared.reduces_late, scattered + gathered + between, sharded)
    seconds = np.where(s == _ZERO1, scattered + gathered, np.where(s == 0, replicated, sharded))
    seconds = seconds + (reductions - 1) * moved.added_s
    # One rank sends nothing, but parameters in host memory are copied for every pass.
    return np.where((group > 1) | t.offload_parameters, seconds, 0.0)


def _zero2_s(
    reduce: Column,
    gather: Column,
    t: Layouts,
    mean: dict[str, Column],
    on_stage: Column,
    rates: Rates,
    hides_gather: Value,
) -> Column:
    """Gradients reduced after every micro-batch, parameters gathered once a step."""
    back = on_stage * mean["backward"] * rates.gather_overlap
    share = rates.gather_overlap * hides_gather
    ahead = on_stage * mean["forward"] * share
    tail = 1 - rates.gather_overlap
    each = np.maximum(reduce - back, tail * reduce)
    return t.accumulation * each + np.maximum(gather - ahead, (1 - share) * gather)
