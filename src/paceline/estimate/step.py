"""Seconds of one optimizer step, term by term.

    compute       blocks and head of every micro-batch on the slowest stage
    recompute     what is computed again in the backward pass
    tensor        tensor parallelism's gathers and scatters that nothing hides
    context       exchange of keys and values, or of heads
    expert        tokens sent to their experts and back
    pipeline      idle stages, sending between them, and the gradient of a matrix on two of them
    data          reduction of gradients and gathering of parameters that nothing hides
    optimizer     its state read and written once; over the host's bus when offloaded
    fixed         of each step, whatever its size
    stragglers    waiting for the slowest of many

Every function takes columns: one row a layout, or one row a published run.

Leaves out: reading the data, evaluation and checkpoints, which `goodput.py` counts.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from paceline.estimate.collectives import (
    all_reduce_s,
    all_to_all_s,
    dispatch_s,
    p2p_s,
    ranks_within,
)
from paceline.estimate.compute import (
    AUTOCAST_OPS,
    BlockTimes,
    Work,
    block_times,
    head_times,
    launch_times,
    layout_ops,
    part_launch_s,
    unit_times,
)
from paceline.estimate.context_exchange import context_of, context_ops
from paceline.estimate.copies import autocasts, copied_parameters_s, own_loss_s, stream_bytes
from paceline.estimate.data_ranks import data_s, gathered_s
from paceline.estimate.inputs import Model, Traffic
from paceline.estimate.newton_schulz import muon_s
from paceline.estimate.on_stage import (
    blocks_before_head,
    chunk_blocks,
    stage_blocks,
    stage_parameters,
)
from paceline.estimate.rates import Rates
from paceline.estimate.recompute import Pass, done_again
from paceline.estimate.schedule import Launches, Messages, bubble_s, idle_share, messages_of
from paceline.estimate.sharding import Ways, routed_split, shared_of
from paceline.estimate.tensor_collectives import crossing_of
from paceline.parallel.stages import rank_of_head
from paceline.parallel.table import Layouts, code_of, distinct
from paceline.parallel.word_columns import is_in_v, loops, recomputes_whole, stages_each
from paceline.profile.block import Block, Column, dense_parameters, expert_parameters

SPREAD = {
    "compute": 0.15,
    "recompute": 0.15,
    "tensor": 0.5,
    "context": 0.6,
    "expert": 0.6,
    "pipeline": 0.5,
    "data": 0.6,
    "optimizer": 0.6,
    "fixed": 0.5,
    "stragglers": 0.6,
}
"""How much more a term may take than its estimate. Together they hold 81 % of a source's published
runs, mean over sources (benchmarks/planner_accuracy.py): most where compute is nearly all of a
step (llmfoundry 89 %), 72 to 92 % where links and routing are (mbridge, internevo, dgxc); the split
among the terms is a guess."""

TERMS = (
    "compute",
    "recompute",
    "tensor",
    "context",
    "expert",
    "pipeline",
    "data",
    "optimizer",
    "fixed",
    "stragglers",
)

TERM_NAMES = {
    "tensor": "tensor comm",
    "context": "context comm",
    "expert": "expert comm",
    "pipeline": "pipeline bubble",
    "data": "data-parallel comm",
    "fixed": "fixed overhead",
}
"""Term -> what screens call it where its own name says too little: `data` reads no data."""

PART_NAMES = {"checkpoint": "while saving", "slack": "unused cache", "overhead": "libraries"}
"""Part of memory -> what screens call it, where the plan's file has another word."""

_ZERO1, _ZERO2, _FULL, _HYBRID = (
    code_of("sharding", word) for word in ("zero1", "zero2", "full", "hybrid")
)
_ULYSSES = code_of("context_kind", "ulysses")

_HEAD_OPS, _SPLIT_HEAD_OPS = 14, 25
"""Operations of our own runtime outside the blocks in one micro-batch, and more where tensor ranks
split the logits. Counted by `paceline prove` of our decoder: 13.5 and 39."""

_RESTORE_BYTES = 22.5
"""Read and written for a value that is restored from NF4: its code as it is and in int32, its level
found, scaled and rounded. Counted in `runtime/strategy/adapter/nf4.py`, not measured: caches make
it less, and a CPU takes longer."""


def step_terms(model: Model, layouts: Layouts, rates: Rates, traffic: Traffic) -> dict[str, Column]:
    """Seconds by term, in the order of `TERMS`."""
    t = layouts
    work, alike = _work(model, t, traffic), _alike(model, t, traffic)
    parts = [
        _block_seconds(block, model, (work, alike), t, rates, traffic) for block in model.blocks
    ]
    head, head_weight, head_launch = _head_s(model, alike, t, rates, traffic)
    num_blocks = model.num_blocks
    mean = {
        name: sum(block.count * part[name] for block, part in zip(model.blocks, parts, strict=True))
        / num_blocks
        for name in parts[0]
    }
    whole_block = sum(
        mean[name] for name in ("compute", "recompute", "tensor", "context", "expert")
    )
    slow, last = stage_blocks(model, t)
    has_head = last * whole_block + head >= slow * whole_block
    on_stage = np.where(has_head, last, slow)
    m, chunks = t.accumulation, stages_each(t.schedule, t.chunks)
    passes = m * on_stage
    terms = {
        name: passes * mean[name]
        for name in ("compute", "recompute", "tensor", "context", "expert")
    }
    # While the head is computed the host launches on: all but what the first blocks wait for.
    slack = np.minimum(head - head_launch, on_stage * mean["launched_ahead"])
    terms["compute"] = terms["compute"] + m * np.where(has_head, head - slack, 0.0)
    total = num_blocks * whole_block + head
    share = (num_blocks * mean["weight_gradient"] + head_weight) / total
    share = np.where(recomputes_whole(t.recompute), 0.0, share)
    ahead = traffic.ways.launches_ahead
    passed, passed_heads = _passed(model, t, slow)
    launches = Launches(
        stage=ahead * passes * mean["launch"],
        passed=ahead * passed * mean["launch"],
        first=ahead * slow / chunks * mean["launch_forward"],
    )
    turns = idle_share(t.pipeline, t.chunks, t.schedule, share)
    passed_s = passed * whole_block + passed_heads * head
    stage_s = passes * whole_block + m * np.where(has_head, head - slack, 0.0)
    count, hop = _messages(model, work, t, rates, traffic, share)
    at_head = np.minimum(m * count.away * hop, stage_s - m * slow * whole_block)
    waits_s = (
        (m * count.each + count.ends) * hop - np.maximum(at_head, 0.0),
        (m * count.link_each + count.link_ends) * hop
        - (1 - count.beside) * (stage_s - launches.stage),
    )
    idle = bubble_s(turns, passed_s, mean["forward_share"], launches, waits_s)
    if np.any(chunks > 1):
        idle = idle + m * _uneven_s(model, t, (slow * whole_block, last, whole_block, head))
    terms["pipeline"] = idle
    if np.any(model.num_tied_parameters) and np.any(t.pipeline > 1):
        terms["pipeline"] = terms["pipeline"] + _tied_s(model, t, rates, traffic)
    terms["data"] = data_s(model, mean, t, rates, traffic, on_stage)
    terms["optimizer"] = _optimizer_s(model, t, rates, traffic)
    terms["fixed"] = np.broadcast_to(np.asarray(rates.step_s, float), np.shape(idle))
    whole = sum(terms.values())
    domains = np.maximum(t.num_ranks() / rates.domain, 1)
    terms["stragglers"] = rates.straggler * np.log2(domains) * whole
    return {name: np.asarray(terms[name]) for name in TERMS}


def _passed(model: Model, t: Layouts, slow: Column) -> tuple[Column, Column]:
    """What a micro-batch passes on each rank while the pipeline fills and drains, as if each of the
    rank's stages had as much: blocks, and heads. In a loop the first stage of the ranks without the
    head; else the mean of all ranks."""
    num_blocks = model.num_blocks
    blocks, heads = num_blocks / t.pipeline, 1 / t.pipeline
    is_loop = loops(t.schedule) & (t.pipeline > 1)
    if np.any(is_loop):
        first = t.chunks * chunk_blocks(model, t, slow, False).each
        blocks, heads = np.where(is_loop, first, blocks), np.where(is_loop, 0.0, heads)
    return blocks, heads


def _tied_s(model: Model, t: Layouts, rates: Rates, traffic: Traffic) -> Column:
    """Two stages with one matrix swap its gradient once a step, when all backward passes are over:
    our own runtime its shards, other engines all of it, in an all-reduce of two ranks.

    Source: Megatron-LM `finalize_model_grads`, DeepSpeed `PipelineEngine._exec_reduce_tied_grads`.
    """
    shared = shared_of(t, traffic.ways, 0.0)
    is_own = np.asarray(traffic.ways.fsdp_throughout) > 0
    shard = np.where(is_own & shared.shards_weights, t.shard, 1)
    each = np.where(is_own, traffic.sharded_bytes, traffic.reduce_bytes) * model.trained_share
    sent = each * model.num_tied_parameters / t.tensor / shard
    seconds = p2p_s(sent, t.num_ranks(), rates, crossing=t.num_ranks() / t.pipeline)
    seconds = seconds + is_own * 3 * sent / rates.memory_bytes_per_s  # added after it came
    # In a v both ends are on the first rank.
    is_apart = rank_of_head(t.pipeline, t.schedule, t.chunks) > 0
    return np.where((np.asarray(model.num_tied_parameters) > 0) & is_apart, seconds, 0.0)


def _messages(
    model: Model, work: Work, t: Layouts, rates: Rates, traffic: Traffic, weight_share: Column
) -> tuple[Messages, Column]:
    """Messages between stages that are waited for, and seconds of one over the slowest link."""
    ranks, chunks = t.num_ranks(), stages_each(t.schedule, t.chunks)
    sent = stream_bytes(model, t, traffic) * work.tokens * model.head_inputs
    sent = sent / np.where(np.asarray(traffic.ways.sends_whole) > 0, 1, work.stream)
    hop = p2p_s(sent, ranks, rates, crossing=ranks / t.pipeline) * (t.pipeline > 1)
    together = ranks_within(ranks, rates) * t.pipeline / ranks
    count = messages_of(t.pipeline, chunks, t.schedule, weight_share, together)
    is_shown = (np.asarray(rates.pipeline_overlap) == 0) & (count.link_each > 0)
    return count._replace(each=np.maximum(count.each, 2 * chunks * is_shown)), hop


def _uneven_s(model: Model, t: Layouts, of: tuple[Column, Column, Column, Column]) -> Column:
    """Seconds of a micro-batch that ranks with several stages in a loop wait where stages differ.

    All ranks are at the same turn of a round, and each turn is as long as on the rank that takes
    longest: while the rank with the head is at it the others wait, and it waits for them at its
    other stages, which have fewer blocks for the head's sake. Of other ranks all turns are alike:
    they go forward through some stages and backward through others.

    Args:
        model: Its sizes.
        t: Layouts.
        of: Seconds of the slowest rank without the head, blocks of the one with it, and seconds of
            a block and of the head.
    """
    slow, last, block, head = of
    stages = stages_each(t.schedule, t.chunks)
    early = blocks_before_head(model, t, last) * block
    at_head = last * block + head - early
    turns = np.maximum(at_head, slow / stages) + np.maximum(early, slow - slow / stages)
    waits = turns - np.maximum(slow, at_head + early)
    return np.where((stages > 1) & ~is_in_v(t.schedule, t.chunks), waits, 0.0)


def total_of(parts: Iterable[Column]) -> Column:
    """Their sum. Small columns come first: each sum then has no more dimensions than it needs."""
    return sum(sorted(parts, key=np.size))


def slow_end(terms: Mapping[str, Column]) -> Column:
    """Seconds that nine runs of ten stay below, by the terms of the estimate."""
    return total_of((1 + SPREAD[name]) * seconds for name, seconds in terms.items())


def fast_end(terms: Mapping[str, Column]) -> Column:
    """Seconds that nine runs of ten stay above."""
    return sum(seconds / (1 + SPREAD[name]) for name, seconds in terms.items())


def _work(model: Model, t: Layouts, traffic: Traffic) -> Work:
    experts = routed_split(t, traffic.ways)
    stream = np.where(t.sequence_parallel, t.tensor, 1)
    return Work(
        tokens=t.micro_batch * model.seq_len / t.context,
        samples=t.micro_batch,
        seq_len=model.seq_len,
        tensor=t.tensor,
        stream=stream,
        routed_stream=np.where(experts.width > 1, 1, stream),
        context=t.context,
        expert=experts.ranks,
        weight_gradients=model.trained_share,
        ring=np.where(t.context_kind == _ULYSSES, 1, t.context),
        element_bytes=traffic.element_bytes,
        written=model.written,
    )


def _head_s(
    model: Model, alike: "_Alike", t: Layouts, rates: Rates, traffic: Traffic
) -> tuple[Column, Column, Column]:
    """Output matrix and loss, forward and backward, of one micro-batch; of that the gradients of
    the matrix; and what the host launches it in, where that is known."""
    own = model.num_head_parameters / t.tensor
    ahead, gradients = copied_parameters_s(own, model, t, rates, traffic)
    forward, back, weight = head_times(model.head_inputs, model.head_outputs, alike.work, rates)
    whole = forward + back + weight + own_loss_s(model, alike.work, rates, traffic)
    whole = alike.each(whole) + ahead + gradients
    # The embedding is copied as well; in a pipeline on a stage without this.
    embedding = model.num_embedding_parameters / t.tensor * (t.pipeline == 1)
    embedding = embedding * (np.asarray(model.num_tied_parameters) == 0)
    out, added = copied_parameters_s(embedding, model, t, rates, traffic)
    whole = whole + np.where(t.keeps_shards(), out, 0.0) + added
    launched = rates.host_s * (_HEAD_OPS + _SPLIT_HEAD_OPS * (t.tensor > 1))
    launched = traffic.ways.autocasts * launched
    return np.maximum(whole, launched), alike.each(weight) + gradients, launched


_COMPUTE_COLUMNS = (
    "micro_batch",
    "context",
    "context_kind",
    "tensor",
    "sequence_parallel",
    "expert",
)
"""What a block's compute depends on: a million layouts share a few hundred combinations."""


class _Alike(NamedTuple):
    """Layouts that compute alike, once each."""

    work: Work
    places: Column | None
    """Place in `work` of the like of each layout; None where each row is a model of its own."""

    def each(self, column: Column) -> Column:
        """What every layout has of it."""
        if self.places is None:
            return column
        return np.broadcast_to(column, len(self.work.tokens))[self.places]


def _alike(model: Model, t: Layouts, traffic: Traffic) -> _Alike:
    if np.ndim(model.seq_len) > 0:
        return _Alike(_work(model, t, traffic), None)
    rows, places = distinct(t, _COMPUTE_COLUMNS)
    return _Alike(_work(model, t.take(rows), traffic), places)


def _block_seconds(
    block: Block,
    model: Model,
    works: tuple[Work, _Alike],
    t: Layouts,
    rates: Rates,
    traffic: Traffic,
) -> dict[str, Column]:
    """Seconds by term of one block and one micro-batch, forward and backward."""
    work, alike = works
    times = BlockTimes(*(alike.each(each) for each in block_times(block, alike.work, rates)))
    restored = _restore_s(block, model, t, rates, traffic)
    crossing = crossing_of(block, model, work, t, rates, traffic)
    # While ranks wait for each other's tokens the host launches on.
    waits = crossing.each_pass * (1 - rates.tensor_overlap)
    more = AUTOCAST_OPS * autocasts(model, t, traffic)
    unit, unit_back, unit_again = unit_times(block, t, rates, traffic.ways)
    usual = launch_times(block, rates, written=model.written)
    launch, back = launch_times(block, rates, more, model.written)
    again_s = part_launch_s(block, rates, launch)
    ops, ops_back = context_ops(t, traffic.ways)
    more_ops, more_back = layout_ops(block, t, traffic.ways)
    context = context_of(block, work, t, rates, times, traffic.ways)
    launch = launch + rates.host_s * (ops + more_ops) - waits - context.forward
    back = back + rates.host_s * (ops_back + more_back) - waits - context.backward
    # Copies are kernels as others are: where the host is the slower one, the device makes them
    # meanwhile.
    device_forward = times.device_forward + crossing.forward_copies
    device_backward = times.device_backward + crossing.backward_copies
    times = times._replace(selective=times.selective + crossing.forward_copies)
    token_bytes = stream_bytes(model, t, traffic) * block.hidden
    exchange = _expert_s(block, token_bytes, work, t, rates, traffic.ways)
    repeated = np.maximum(rates.modules.experts, traffic.ways.repeats_exchange) * exchange
    summed = _expert_sums_s(block, model, t, rates, traffic)
    device = Pass(
        compute=device_forward,
        tensor=crossing.each_pass,
        exchange=exchange,
        restored=restored,
        context=context.forward,
        tensor_of_part=crossing.selective,
        exchange_of_part=repeated,
        context_of_part=context.selective,
    )
    again = done_again(device, times, t, rates)
    of_host = device._replace(compute=np.maximum(usual[0], launch) + unit_again)
    its_part = times._replace(selective=again_s + unit_again)
    host_again = done_again(of_host, its_part, t, rates).compute
    reads = (t.expert > 1) & (np.asarray(block.experts) > 0)
    forward, backward = _with_host(
        (device_forward, np.maximum(usual[0], launch + unit)),
        (device_backward, np.maximum(usual[1], back + unit_back)),
        (again.compute, host_again),
        firsts := np.where(reads, 0.0, traffic.ways.runs_ahead / t.accumulation),
    )
    device_backward = device_backward + again.compute
    launched = forward - device_forward + backward - device_backward
    compute = forward + backward - again.compute
    exposed, hidden = gathered_s(block, model, (forward, backward), t, rates, traffic)
    sent = 2 * exchange + again.exchange
    if np.any(traffic.ways.hides_exchange):
        # Behind what another micro-batch computes; the first forward pass and the last backward
        # pass have none beside them.
        beside = traffic.ways.hides_exchange * (1 - 1 / t.accumulation)
        sent = sent - beside * np.minimum(sent, compute)
    return {
        "compute": compute + rates.contention * hidden + 2 * restored,
        "recompute": again.compute + again.restored,
        "tensor": (2 * crossing.each_pass + again.tensor) * (1 - rates.tensor_overlap),
        "context": context.forward + context.backward + again.context,
        "expert": sent + summed,
        "gathered": exposed,
        "weight_gradient": times.weight_gradient + crossing.gradient_copies,
        "forward": forward,
        "backward": backward,
        "launched_ahead": np.maximum(launched - (forward - device_forward) * firsts, 0.0)
        * (firsts > 0),
        "launch": launched,
        "launch_forward": forward - device_forward,
        "forward_share": device_forward / (device_forward + device_backward),
    }


def _with_host(
    forward: tuple[Column, Column],
    backward: tuple[Column, Column],
    again: tuple[Column, Column],
    firsts: Column,
) -> tuple[Column, Column]:
    """Seconds of a micro-batch's two passes, with what is repeated in the second.

    Where the host launches ahead of the device, from the backward pass into the next micro-batch,
    the slower of both sets the pace, and the device waits for the host in the step's first forward
    pass; elsewhere it may wait in each.

    Args:
        forward: Of the device and of the host.
        backward: The same, and so is `again`.
        again: What is recomputed.
        firsts: Micro-batches of a step that are its first, as a share; 0 where the host does not
            get ahead.
    """
    ahead = np.maximum(*forward)
    apart = np.maximum(*backward) + np.maximum(*again)
    device, host = (sum(each) for each in zip(backward, again, strict=True))
    pace = np.maximum(forward[0] + device, forward[1] + host) - ahead
    together = pace + firsts * (np.maximum(pace, device) - pace)
    return ahead, np.where(firsts > 0, together, apart)


def _restore_s(block: Block, model: Model, t: Layouts, rates: Rates, traffic: Traffic) -> Column:
    """Every quantised matrix is restored for each product with it, where the engine does that."""
    values = model.quantised_share * dense_parameters(block) / t.tensor
    return traffic.ways.restores_frozen * _RESTORE_BYTES * values / rates.memory_bytes_per_s


def _expert_s(
    block: Block, token_bytes: Column, work: Work, t: Layouts, rates: Rates, ways: Ways
) -> Column:
    """Tokens to their experts and back, in one pass: one copy for each expert of a token, or for
    each node that has some of them."""
    tokens = token_bytes * work.tokens / work.stream
    stride = np.where(t.sequence_parallel, 1, t.tensor)
    copies = block.experts_per_token
    once = all_to_all_s(tokens * copies, t.expert, stride, rates)
    if np.any(ways.one_copy_a_node):
        groups = (block.expert_groups, block.groups_per_token)
        by_node = dispatch_s(tokens, copies, t.expert, stride, rates, groups=groups)
        once = np.where(np.asarray(ways.one_copy_a_node) > 0, by_node, once)
    return np.where((t.expert > 1) & (np.asarray(block.experts) > 0), 2 * once, 0.0)


def _expert_sums_s(
    block: Block, model: Model, t: Layouts, rates: Rates, traffic: Traffic
) -> Column:
    """Our own runtime's tensor ranks hold the same experts and send them other tokens: gradients
    are summed over them in every backward pass (`runtime/strategy/expert/split.py`)."""
    is_summed = np.logical_and(t.expert > 1, t.sequence_parallel) & (t.tensor > 1)
    if not np.any(traffic.ways.sums_experts) or not np.any(is_summed):
        return np.asarray(0.0)
    routed = expert_parameters(block) / t.expert
    gradient_bytes = np.where(autocasts(model, t, traffic), 4.0, traffic.weight_bytes)
    seconds = all_reduce_s(gradient_bytes * routed, t.tensor, 1, rates)
    return np.where(is_summed, traffic.ways.sums_experts * seconds, 0.0)


def _optimizer_s(model: Model, t: Layouts, rates: Rates, traffic: Traffic) -> Column:
    dense, routed = stage_parameters(model, t, traffic)
    experts = routed_split(t, traffic.ways)
    routed_shard = np.maximum(t.shard * experts.replicas // t.expert, 1)
    routed_shard = np.where(t.sharding == 0, 1, routed_shard)
    shard = np.where(t.sharding == 0, 1, t.shard)
    mine = (dense / shard + routed / routed_shard) * model.trained_share
    moved = traffic.optimizer_bytes * mine
    here = moved / rates.memory_bytes_per_s
    # Offloaded parameters and their gradients cross when they are gathered and reduced: `data_s`.
    crosses = np.logical_not(t.offload_parameters) * traffic.crossing_bytes * mine
    crosses = crosses / traffic.host_bytes_per_s
    cpu = crosses + moved / traffic.host_memory_bytes_per_s
    disk = moved / traffic.disk_bytes_per_s
    seconds = np.choose(np.broadcast_to(t.offload, np.shape(here)), (here, cpu, disk))
    if np.any(traffic.is_muon):
        seconds = seconds + traffic.is_muon * muon_s(model.blocks, t, rates, experts)
    return np.asarray(seconds)
