"""Seconds of one optimizer step, term by term.

    compute       blocks and head of every micro-batch on the slowest stage
    recompute     what is computed again in the backward pass
    tensor        tensor parallelism's gathers and scatters that nothing hides
    context       exchange of keys and values, or of heads
    expert        tokens sent to their experts and back
    pipeline      idle stages, and sending between them
    data          reduction of gradients and gathering of parameters that nothing hides
    optimizer     its state read and written once; over the host's bus when offloaded
    fixed         of each step, whatever its size
    stragglers    waiting for the slowest of many

Every function takes columns: one row a layout, or one row a published run.

Leaves out: reading the data, evaluation and checkpoints, which `goodput.py` counts.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from paceline.estimate.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    dispatch_s,
    p2p_s,
)
from paceline.estimate.compute import (
    AUTOCAST_OPS,
    BlockTimes,
    Work,
    block_times,
    head_times,
    launch_times,
    unit_times,
)
from paceline.estimate.copies import autocasts, copied_parameters_s, own_loss_s
from paceline.estimate.data_ranks import data_s, gathered_s
from paceline.estimate.inputs import Model, Traffic
from paceline.estimate.newton_schulz import muon_s
from paceline.estimate.on_stage import blocks_before_head, stage_blocks, stage_parameters
from paceline.estimate.rates import Rates
from paceline.estimate.recompute import Pass, done_again
from paceline.estimate.schedule import Launches, bubble_s, idle_share
from paceline.estimate.sharding import Ways, routed_split
from paceline.estimate.tensor_collectives import crossing_of
from paceline.parallel.table import Layouts, code_of, distinct
from paceline.parallel.word_columns import is_in_v, stages_each
from paceline.profile.block import Block, dense_parameters, expert_parameters

Column = Any
"""An array with one entry a row, as it broadcasts; numpy's types cannot express it."""

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
"""How much more a term may take than its estimate. Together they hold 88 % of a source's published
runs, mean over sources (benchmarks/planner_accuracy.py): nearly all where compute is nearly all of
a step (llmfoundry, mcore08), 76 to 92 % where links and routing are (mbridge, internevo, dgxc); the
split among the terms is a guess."""

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

_ZERO1, _ZERO2, _FULL, _HYBRID = (
    code_of("sharding", word) for word in ("zero1", "zero2", "full", "hybrid")
)
_ULYSSES = code_of("context_kind", "ulysses")

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
    head, head_weight = _head_s(model, alike, t, rates, traffic)
    num_blocks = sum(np.asarray(block.count, float) for block in model.blocks)
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
    terms["compute"] = terms["compute"] + m * np.where(has_head, head, 0.0)
    average = (num_blocks * whole_block + head) / t.pipeline
    share = (num_blocks * mean["weight_gradient"] + head_weight) / (average * t.pipeline)
    ahead = traffic.ways.launches_ahead
    launches = Launches(
        stage=ahead * on_stage * mean["launch"],
        average=ahead * num_blocks * mean["launch"] / t.pipeline,
        first=ahead * slow / chunks * mean["launch_forward"],
    )
    turns = idle_share(t.pipeline, t.chunks, t.schedule, share)
    idle = bubble_s(turns, average, m, mean["forward_share"], launches)
    if np.any(chunks > 1):
        idle = idle + m * _uneven_s(model, t, (slow * whole_block, last, whole_block, head))
    sent = work.element_bytes * work.tokens * model.head_inputs / work.stream
    hop = p2p_s(sent, t.num_ranks(), rates, crossing=t.num_ranks() / t.pipeline)
    hop = hop * (t.pipeline > 1)
    hops = 2 * m * chunks * hop * (1 - rates.pipeline_overlap) + 2 * (t.pipeline - 1) * hop
    terms["pipeline"] = idle + hops
    terms["data"] = data_s(model, mean, t, rates, traffic, on_stage)
    terms["optimizer"] = _optimizer_s(model, t, rates, traffic)
    terms["fixed"] = np.broadcast_to(np.asarray(rates.step_s, float), np.shape(idle))
    total = sum(terms.values())
    domains = np.maximum(t.num_ranks() / rates.domain, 1)
    terms["stragglers"] = rates.straggler * np.log2(domains) * total
    return {name: np.asarray(terms[name]) for name in TERMS}


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
    )


def _head_s(
    model: Model, alike: "_Alike", t: Layouts, rates: Rates, traffic: Traffic
) -> tuple[Column, Column]:
    """Output matrix and loss, forward and backward, of one micro-batch; and of that the gradients
    of the matrix."""
    own = model.num_head_parameters / t.tensor
    ahead, gradients = copied_parameters_s(own, model, t, rates, traffic)
    forward, back, weight = head_times(model.head_inputs, model.head_outputs, alike.work, rates)
    whole = forward + back + weight + own_loss_s(model, alike.work, rates, traffic)
    return alike.each(whole) + ahead + gradients, alike.each(weight) + gradients


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
    unit, unit_back = unit_times(t, rates, traffic.ways)
    usual = launch_times(block, rates, written=model.written)
    launch, back = launch_times(block, rates, more, model.written)
    times = times._replace(
        forward=np.maximum(np.maximum(times.forward, usual[0]), launch + unit - waits),
        backward=np.maximum(np.maximum(times.backward, usual[1]), back + unit_back - waits),
    )
    exchange = _expert_s(block, work, t, rates, traffic.ways)
    repeated = np.maximum(rates.modules.experts, traffic.ways.repeats_exchange) * exchange
    summed = _expert_sums_s(block, t, rates, traffic)
    forward = Pass(
        compute=times.forward,
        tensor=crossing.each_pass,
        exchange=exchange,
        restored=restored,
        tensor_of_part=crossing.selective,
        exchange_of_part=repeated,
    )
    again = done_again(forward, times, t, rates)
    context = _context_s(block, work, t, rates, times, traffic.ways)
    compute = times.forward + times.backward + crossing.forward_copies + crossing.backward_copies
    copied_again = np.where(t.recompute > 0, crossing.forward_copies / t.recompute_every, 0.0)
    backward = times.backward + again.compute
    device = forward._replace(compute=times.device_forward)
    device_backward = times.device_backward + done_again(device, times, t, rates).compute
    exposed, hidden = gathered_s(block, model, (times.forward, backward), t, rates, traffic)
    return {
        "compute": compute + rates.contention * hidden + 2 * restored,
        "recompute": again.compute + again.restored + copied_again,
        "tensor": (2 * crossing.each_pass + again.tensor) * (1 - rates.tensor_overlap),
        "context": context,
        "expert": 2 * exchange + again.exchange + summed,
        "gathered": exposed,
        "weight_gradient": times.weight_gradient + crossing.gradient_copies,
        "forward": times.forward,
        "backward": backward,
        "launch": times.forward - times.device_forward + backward - device_backward,
        "launch_forward": times.forward - times.device_forward,
        "forward_share": times.device_forward / (times.device_forward + device_backward),
    }


def _restore_s(block: Block, model: Model, t: Layouts, rates: Rates, traffic: Traffic) -> Column:
    """Every quantised matrix is restored for each product with it, where the engine does that."""
    values = model.quantised_share * dense_parameters(block) / t.tensor
    return traffic.ways.restores_frozen * _RESTORE_BYTES * values / rates.memory_bytes_per_s


def _context_s(
    block: Block, work: Work, t: Layouts, rates: Rates, times: BlockTimes, ways: Ways
) -> Column:
    """Ring: keys and values pass every rank once forward and, with their gradients, twice backward,
    each pass behind the attention of the keys that are there, as far as that lasts (or all keys and
    values are gathered); then partial results are merged. Ulysses: four exchanges forward and four
    backward."""
    if not np.any(np.asarray(t.context) > 1):
        return np.asarray(0.0)
    key_value = block.kv_heads * (block.head_dim + block.value_dim) + (
        np.asarray(block.kv_rank) > 0
    ) * (block.kv_rank + block.rope_dim)
    query = block.heads * block.head_dim
    local = work.element_bytes * work.tokens / t.tensor
    steps = t.context - 1
    span = t.tensor * t.context
    once = steps * p2p_s(local * key_value, span, rates, crossing=t.tensor)
    # The first of as many steps as there are ranks needs no other rank's keys, and hides a pass.
    behind = steps / t.context
    exposed = np.maximum(once - behind * times.attention, 0.0) + np.maximum(
        2 * once - behind * times.attention_backward, 0.0
    )
    if np.any(ways.gathers_context):
        gathered = _gathered_context_s(local * key_value, once, t, rates, times)
        exposed = np.where(np.asarray(ways.gathers_context) > 0, gathered, exposed)
    merged = _MERGE_PASSES * local * steps * (2 * query + key_value)
    ring = exposed + merged / rates.memory_bytes_per_s
    swapped = local * (2 * query + key_value)
    ulysses = 2 * all_to_all_s(swapped, t.context, t.tensor, rates)
    seconds = np.where(t.context_kind == _ULYSSES, ulysses, ring)
    return np.where(t.context > 1, seconds, 0.0)


def _gathered_context_s(
    key_value: Column, ring: Column, t: Layouts, rates: Rates, times: BlockTimes
) -> Column:
    """All keys and values are gathered at once in either pass, behind the attention of those that
    are there; their gradients travel round."""
    gather = all_gather_s(key_value * t.context, t.context, t.tensor, rates)
    back = times.attention_backward
    return (
        np.maximum(gather - times.attention / t.context, 0.0)
        + np.maximum(gather - back / t.context, 0.0)
        + np.maximum(ring - (t.context - 1) / t.context * back, 0.0)
    )


_MERGE_PASSES = 3.0
"""Times that a ring step goes through the output (forward), the gradient of the queries and those
of keys and values (backward): a partial result is read and added to what is there. Source:
NVIDIA/TransformerEngine, attention/dot_product_attention/context_parallel.py,
flash_attn_fwd_out_correction and the sums of dq and dkv in the backward pass."""


def _expert_s(block: Block, work: Work, t: Layouts, rates: Rates, ways: Ways) -> Column:
    """Tokens to their experts and back, in one pass: one copy for each expert of a token, or for
    each node that has some of them."""
    tokens = work.element_bytes * work.tokens / work.stream * block.hidden
    stride = np.where(t.sequence_parallel, 1, t.tensor)
    copies = block.experts_per_token
    once = all_to_all_s(tokens * copies, t.expert, stride, rates)
    if np.any(ways.one_copy_a_node):
        by_node = dispatch_s(tokens, copies, t.expert, stride, rates)
        once = np.where(np.asarray(ways.one_copy_a_node) > 0, by_node, once)
    seconds = 2 * once * (1 - np.asarray(ways.hides_exchange))
    return np.where((t.expert > 1) & (np.asarray(block.experts) > 0), seconds, 0.0)


def _expert_sums_s(block: Block, t: Layouts, rates: Rates, traffic: Traffic) -> Column:
    """Our own runtime's tensor ranks hold the same experts and send them other tokens: gradients
    are summed over them in every backward pass (`runtime/strategy/expert/split.py`)."""
    is_summed = np.logical_and(t.expert > 1, t.sequence_parallel) & (t.tensor > 1)
    if not np.any(traffic.ways.sums_experts) or not np.any(is_summed):
        return np.asarray(0.0)
    routed = expert_parameters(block) / t.expert
    seconds = all_reduce_s(traffic.weight_bytes * routed, t.tensor, 1, rates)
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
