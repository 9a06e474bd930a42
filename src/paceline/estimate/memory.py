"""How many bytes each rank needs at its fullest, by part and by pipeline stage.

A step has four moments at which a rank may be fullest; the parts are those of the worst one:

    loss    everything is saved for the backward pass, the gradients of the logits exist
    block   one block goes backward: its temporaries, what it computes again, gathered parameters
    root    all activations are gone, the root unit's gradients are whole before they are reduced
    step    the optimizer's temporaries

Stages of a pipeline differ: the first holds the most micro-batches and the embedding, the last the
logits. Totals are *allocated* bytes; `slack` is what the allocator reserves beyond them, `overhead`
what the driver shows besides (`nvidia-smi`): the context and the libraries' buffers.

Arithmetic on columns: one row a layout, or one row a published run.

Leaves out: the training data a rank holds, and the whole model that our own runtime builds on the
host before it is sharded.

Source: states: ZeRO, arXiv:1910.02054, section 3.1; FSDP2: torch/distributed/fsdp/_fully_shard,
read at 2.13; activations: `profile/saved.py`.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from paceline.estimate.inputs import Holdings, Model
from paceline.estimate.on_rank import (
    EveryRank,
    OnRank,
    on_every_rank,
    on_rank,
    routed_shard,
    whole_share,
)
from paceline.estimate.on_stage import chunk_blocks, head_in_blocks, may_be_bare
from paceline.estimate.schedule import (
    deferred_micro_batches,
    held_in_loop,
    held_micro_batches,
)
from paceline.estimate.step import total_of
from paceline.parallel.stages import blocks_of_slowest
from paceline.parallel.table import Layouts, code_of
from paceline.parallel.word_columns import (
    forwards_first,
    loops,
    recomputes_whole,
    share_untouched,
    splits_backward,
    stages_each,
)
from paceline.profile.block import Column, Value
from paceline.profile.saved import outside_bytes

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "master copy",
    "activations",
    "gathered",
    "buffers",
    "checkpoint",
    "slack",
    "overhead",
)

_ZERO2, _FULL, _HYBRID = (code_of("sharding", word) for word in ("zero2", "full", "hybrid"))


def memory_parts(
    model: Model, layouts: Layouts, holdings: Holdings, stages: Iterable[Value]
) -> list[dict[str, Column]]:
    """Bytes by part of one rank of each of the stages, in the order of `PARTS`.

    Args:
        model: Its sizes.
        layouts: Rows to price.
        holdings: Of the software that runs it.
        stages: Ranks of the pipeline, 0 is the first; each one number, or one for each row.
    """
    everywhere = on_every_rank(model, layouts, holdings)
    return [_parts_of(model, layouts, holdings, everywhere, stage) for stage in stages]


def _parts_of(
    model: Model, t: Layouts, h: Holdings, everywhere: EveryRank, stage: Value
) -> dict[str, Column]:
    here = on_rank(model, t, h, everywhere, stage)
    dense, routed = here.dense, here.routed
    states = _states(model, t, h, here)
    stepping = _stepping_bytes(here, model, t, h)
    then, cached = _fullest_moment(model, t, h, everywhere, here, (states["gradients"], stepping))
    parts = states | then._asdict()
    activations, gathered = then.activations, then.gathered
    parts["buffers"] = everywhere.dummies + h.buffer_bytes
    saved = (h.sharded_bytes + h.moment_bytes) * (dense + routed) * t.tensor * t.pipeline
    saved = saved * here.trained_share
    parts["checkpoint"] = np.asarray(h.saving_share * saved / t.num_ranks())
    slack = (h.reserved_share - 1) * (activations + gathered)
    parts["slack"] = np.asarray(slack + (cached + _on_side_streams(t, h, here, then.gradients)))
    parts["overhead"] = np.broadcast_to(np.asarray(h.overhead_bytes, float), np.shape(dense))
    return {name: np.asarray(parts[name]) for name in PARTS}


def fullest_stages(t: Layouts) -> list[Column]:
    """The stages of which one is the fullest: the first, second or last one.

    Stages between the second and the last hold fewer micro-batches of as many blocks than the
    second, so one of the three is the fullest.
    """
    last = np.asarray(t.pipeline) - 1
    return [np.asarray(0), np.minimum(1, last), last][: 1 + min(int(last.max(initial=0)), 2)]


def fullest(model: Model, layouts: Layouts, holdings: Holdings) -> dict[str, Column]:
    """Bytes by part on the fullest rank."""
    tables = memory_parts(model, layouts, holdings, fullest_stages(layouts))
    totals = np.stack([np.broadcast_to(total_of(each.values()), len(layouts)) for each in tables])
    worst = np.argmax(totals, axis=0)
    return {
        name: np.choose(worst, [np.broadcast_to(parts[name], len(layouts)) for parts in tables])
        for name in PARTS
    }


def allocated_bytes(parts: dict[str, Column]) -> Column:
    """What the framework itself has allocated: neither slack nor overhead."""
    return np.asarray(sum(parts[name] for name in PARTS if name not in ("slack", "overhead")))


class _Moment(NamedTuple):
    """Parts that come and go within a step, at one instant of it."""

    activations: Column
    gathered: Column
    gradients: Column


def _states(model: Model, t: Layouts, h: Holdings, here: OnRank) -> dict[str, Column]:
    s, dense, routed, shared = t.sharding, here.dense, here.routed, here.shared
    is_full = (s == _FULL) | (s == _HYBRID)
    shard = np.maximum(t.shard, 1)
    whole, split = dense + routed, dense / shard + routed / routed_shard(t, here)
    # What is gathered beside a shard is counted by `_gathered`.
    frozen, trained = np.asarray(h.is_frozen) > 0, here.trained_share
    # A tied matrix's second place is another parameter, but its state is there once.
    places, all_places = split, whole
    if np.any(here.twin):
        places, all_places = split + here.twin / shard, whole + here.twin
    weights = np.where(shared.shards_weights, h.sharded_bytes * places, h.weight_bytes * whole)
    is_split = is_full | (np.asarray(shared.shards_weights) > 0)
    root = np.where(is_split, here.root / shard, here.root)
    frozen_weights = h.frozen_block_bytes * (np.where(is_split, split, whole) - root)
    frozen_weights = frozen_weights + h.frozen_bytes * root + weights * trained
    gradients = np.where(shared.whole_gradients, all_places, places) * h.gradient_bytes
    gradients = gradients * np.where(shared.has_buckets, 2, 1)
    # ZeRO-2 adds each to its shard as it comes.
    passing = np.where(s >= _ZERO2, 0.0, h.passing_bytes * whole)
    held = np.where(s == 0, whole, split)
    outside = np.where(s == 0, here.root, here.root / shard)
    moments = h.moment_bytes * held + (h.root_moment_bytes - h.moment_bytes) * outside
    on_device, stays = _on_device(t, h), _on_device(t, h) | np.logical_not(t.offload_parameters)
    goes = t.offload_parameters | ((s == _FULL) & (np.asarray(h.ways.hosts_gradients) > 0))
    goes = goes | ((s == _ZERO2) & (np.asarray(h.ways.hosts_sums) > 0))
    keeps = on_device | np.logical_not(goes) | (np.asarray(shared.whole_gradients) > 0)
    gradients = gradients * keeps
    return {
        "parameters": stays * np.where(frozen, frozen_weights, weights),
        "gradients": (gradients + passing) * trained,
        "optimizer": on_device * moments * trained,
        "master copy": on_device * h.master_bytes * held * trained,
    }


def _on_device(t: Layouts, h: Holdings) -> Column:
    """Where optimizer state takes the rank's own memory: also offloaded, on a CPU."""
    return (t.offload == 0) | (np.asarray(h.has_host) == 0)


def _stepping_bytes(here: OnRank, model: Model, t: Layouts, h: Holdings) -> Column:
    """Temporaries of the optimizer's step, where its state is on the device."""
    dense, routed = here.dense, here.routed
    split = dense / t.shard + routed / routed_shard(t, here)
    split = np.where(t.sharding == 0, dense + routed, split)
    split = np.where(t.sharding >= _FULL, np.minimum(split, h.step_unit), split)
    return np.asarray(h.step_bytes * split * here.trained_share * _on_device(t, h))


def _fullest_moment(
    model: Model,
    t: Layouts,
    h: Holdings,
    everywhere: EveryRank,
    here: OnRank,
    at_end: tuple[Column, Column],
) -> tuple[_Moment, Column]:
    """The fullest of the moments, and what the allocator keeps besides for the optimizer's step.

    CUDA's allocator asks the driver for every tensor that no block freed before is large enough
    for, and never joins what it got for two (torch 2.13, c10/cuda/CUDACachingAllocator.cpp: above
    10 MB each is a segment of its size, until memory runs out). What activations have left is no
    place for one flat tensor of a shard, and it is too large to be shared by them after.

    Args:
        model: Its sizes.
        t: Layouts.
        h: Of the software that runs it.
        everywhere: What each stage has.
        here: What is on this rank.
        at_end: All gradients, and the temporaries of the optimizer's step.
    """
    gradients, stepping = at_end
    tokens, stream, is_staged = everywhere.tokens, everywhere.stream, everywhere.is_staged
    kept = working = peak = later = np.asarray(0.0)
    for each in everywhere.blocks:
        mine = here.block_share * each.block.count
        kept = kept + mine * each.kept
        later = later + mine * each.deferred
        working = np.maximum(working, each.again * (mine > 0))
        peak = np.maximum(peak, each.peak * (mine > 0))
    mine = here.block_share * sum(np.asarray(each.count, float) for each in model.blocks)
    outside = outside_bytes(model.head_inputs, model.head_outputs, h.kernels)
    held: Column = np.asarray(1.0)
    held_head: Column = np.asarray(1.0)
    blocks = tokens * kept
    if is_staged:
        order = (here.stage, t.pipeline, t.chunks, t.accumulation, t.schedule)
        held = held_micro_batches(*order)
        # Where blocks are recomputed, our own runtime goes backward through a stage at once.
        put_off: Column = deferred_micro_batches(*order) * ~recomputes_whole(t.recompute)
        in_v = here.has_head & here.is_v
        if np.any(in_v):
            held = np.where(in_v, _held_at_head_of_v(model, t, here), held)
        stages = stages_each(t.schedule, t.chunks)
        given = np.where(here.has_head & (stages == 1), 0.0, held * stages + 1) * (t.pipeline > 1)
        in_loop = loops(t.schedule) & (t.chunks > 1)
        if np.any(in_loop):
            of_stages = chunk_blocks(model, t, mine, here.has_head)
            most = held_in_loop(*order[:-1], of_stages)
            held = np.where(in_loop, most / np.maximum(mine, 1), held)
        whole = h.kernels.stream_bytes * whole_share(h, stream) * model.head_inputs
        blocks = tokens * (held * kept + put_off * later + given * whole)
        # A looped zero-bubble's last rank puts off the head's second half as well.
        held_head = np.where(t.chunks == 2, 1.0, np.maximum(put_off * t.chunks, 1.0))
        # The loss of every micro-batch is there before the first goes backward.
        held_head = np.where(forwards_first(t.schedule), t.accumulation, held_head)
    # Where the head's input is gathered, a pipeline's stage holds what it gave until its backward
    # pass, and a loss over split logits makes its gradient in one more copy.
    narrow = h.ways.gathers_head * h.kernels.compute_bytes
    kept_outside = outside.kept / stream + narrow * model.head_inputs * (1 - 1 / stream)
    logits = outside.logits + narrow * model.head_outputs * (t.pipeline > 1)
    copies = h.kernels.written * model.caps_logits
    copies = copies + h.ways.keeps_outputs * is_staged * (t.accumulation - 1)
    logits = logits + copies * h.kernels.compute_bytes * model.head_outputs
    loss_peak = outside.loss_peak + h.ways.splits_loss * 4 * model.head_outputs * (t.tensor > 1)
    # A backward pass whose second half is put off keeps the gradient of its logits, not the logits.
    narrow_logits = h.kernels.compute_bytes * model.head_outputs
    one_head = np.where(forwards_first(t.schedule), logits, narrow_logits)
    logits = logits + (held_head - 1) * one_head
    head = tokens * (held_head * kept_outside + logits / t.tensor)
    at_head = head + tokens * loss_peak / t.tensor
    if np.any(h.loss_chunk):
        at_head = tokens * kept_outside + _chunked_loss_bytes(model, t, h, tokens)
    at_loss = blocks + here.has_head * at_head if np.any(here.has_head) else blocks
    at_block = blocks + (tokens * (working + peak) + everywhere.restored)
    gathered_loss, gathered_head, gathered_block, gathered_root = _gathered(
        model, t, h, here, (held, held_head)
    )
    none = np.asarray(0.0)
    # With all micro-batches held none comes after the first backward pass.
    is_first = forwards_first(t.schedule)
    waits = h.ways.frees_gradients * (held >= t.accumulation) * (t.pipeline > 1)
    waits = waits * ~splits_backward(t.schedule)
    appear = here.shared.gradients_appear | (waits > 0)
    early, first, at_last = gradients, gradients, []
    if np.any(appear):
        # The first block to go backward is the last one: there are gradients of it and of the head.
        # The second micro-batch finds those of its stage; at a rank's first stage, which comes
        # last, those of all its stages.
        count = np.maximum(mine, 1)
        inside, v = here.dense + here.routed - here.root, stages_each(t.schedule, t.chunks)
        head = here.root * (here.has_head | (t.pipeline == 1))
        share, of_stage = ((head + inside / n) / (here.root + inside) for n in (count, v))
        early, first = np.where(appear, 0.0, gradients), np.where(appear, share, 1.0) * gradients
        if is_staged and np.any(in_loop & here.has_head):
            # Its last stage has gone backward when the second loss is there.
            begun = head + inside * of_stages.last / count
            early = np.where(
                appear & in_loop & here.has_head, begun / (here.root + inside) * gradients, early
            )
        once = tokens * (working + peak) + everywhere.restored
        second = tokens * kept * np.maximum((t.accumulation - 1) / v, 1 / count) + once
        before = tokens * kept * (t.accumulation - 1 / v) + once
        at_last = [
            _Moment(appear * held_then, gathered_block, theirs * gradients)
            for held_then, theirs in ((second, 1.0), (before, of_stage))[: 1 + is_staged]
        ]
        if np.any(is_first & here.has_head):
            one = tokens * (kept + kept_outside + one_head / t.tensor)
            next_loss = np.where(appear & is_first & here.has_head, at_loss - one, 0.0)
            at_last.append(_Moment(next_loss, gathered_loss, gradients))
    moments = [
        _Moment(at_block, gathered_block, first),
        *at_last,
        _Moment(none, np.maximum(gathered_root, stepping), _with_sums(gradients, t, h)),
    ]
    if np.any(here.has_head):
        apart = [_Moment(blocks, gathered_head, early)] if np.any(h.ways.wraps_ends) else []
        moments = [_Moment(at_loss, gathered_loss, early), *apart, *moments]
    fullest_of, most, cached = moments[0], total_of(moments[0]), none
    for then in moments[1:]:
        held_then = total_of(then)
        if then.activations is none and np.any(h.ways.flat_step):
            cached = h.ways.flat_step * (stepping + most - np.maximum(most, held_then))
        is_more = held_then > most
        if not is_more.any():
            continue
        most = np.maximum(most, held_then)
        pairs = zip(then, fullest_of, strict=True)
        fullest_of = _Moment(
            *(less if more is less else np.where(is_more, more, less) for more, less in pairs)
        )
    return fullest_of, cached


def _with_sums(gradients: Column, t: Layouts, h: Holdings) -> Column:
    """Gradients at the end. Our own runtime's replicas beside tensor, pipeline or expert ranks have
    a second copy until they are summed (`runtime/strategy/data/replica.py`)."""
    if not np.any(h.ways.bucket_copies):
        return gradients
    is_alone = t.tensor * t.pipeline * t.expert == 1
    return np.where((t.sharding == 0) & (t.data * t.context > 1) & ~is_alone, 2, 1) * gradients


def _chunked_loss_bytes(model: Model, t: Layouts, h: Holdings, tokens: Column) -> Column:
    """While `runtime/strategy/chunked.py` is at its last chunk: the gradients of hidden states and
    weight, a chunk's logits in float32, and beside them what is multiplied in a narrow type. FSDP2
    hands the hidden states on in float32."""
    compute, wide = h.kernels.compute_bytes, 4
    narrow = compute * (compute < wide)
    weight = model.head_inputs * model.head_outputs / t.tensor * (1 - np.asarray(h.is_frozen))
    chunk = np.minimum(h.loss_chunk, tokens) * model.head_outputs / t.tensor
    hidden = tokens * model.head_inputs * (compute + wide * (narrow > 0) * (t.sharding > 0))
    logits = np.maximum(chunk * (wide + narrow), chunk * narrow + weight * narrow)
    return np.asarray(hidden + wide * weight + logits)


def _held_at_head_of_v(model: Model, t: Layouts, here: OnRank) -> Column:
    """Micro-batches held by the first rank of a v, as a share of its blocks: many of its first
    stage, and one of its last, which has fewer blocks for its head.

    Counted in torch 2.13's orders while its loss goes backward: 2 p - 1 of the first stage in ZB-V,
    2 p in DualPipe-V.
    """
    total = sum(np.asarray(each.count, float) for each in model.blocks)
    mine = here.block_share * total
    head = head_in_blocks(model)
    least = 1 - may_be_bare(model)
    front, back = blocks_of_slowest(mine, 2, head, is_balanced=model.is_balanced, least=least)
    early = 2 * t.pipeline - (t.chunks == 2)
    return (np.minimum(t.accumulation, early) * front + back) / np.maximum(mine, 1)


def gathered_in_blocks(h: Holdings) -> Column:
    """Bytes of a gathered parameter of a block: our own runtime gathers quantised ones in 4 bits,
    and what is frozen in the type of the multiplication."""
    is_packed = (np.asarray(h.ways.fsdp_throughout) > 0) & (np.asarray(h.is_frozen) > 0)
    return np.where(is_packed, h.frozen_block_bytes, h.gathered_bytes)


def _gathered(
    model: Model, t: Layouts, h: Holdings, here: OnRank, held: tuple[Column, Column]
) -> tuple[Column, Column, Column, Column]:
    """Copies of parameters in the type they are multiplied in: at the loss, when the gradient of an
    output matrix that is a unit by itself is reduced, in a block, and when the root's are.

    Full sharding: the root stays gathered; of the blocks, the current and the prefetched one are,
    which with our own runtime begins after the loss. Embedding and output matrix are the root's, or
    units by themselves: the output matrix is gathered around the loss, the embedding at the end.
    A unit's gradients exist whole in the type of the multiplication, and once more as the input of
    the reduce-scatter. Otherwise: what autocast keeps, or what is gathered for the whole step.
    Autocast forgets its copies when a micro-batch is through, so each one that waits for its
    backward pass (`held`, of blocks and of the head) keeps its own.
    """
    shared = here.shared
    own = np.asarray(h.ways.fsdp_throughout) > 0
    block, root = here.unit, here.root
    count = sum(np.asarray(each.count, float) for each in model.blocks)
    is_apart = (np.asarray(h.ways.wraps_ends) > 0) & (np.asarray(model.num_tied_parameters) == 0)
    embedding = (np.asarray(here.stage) == 0) * model.num_embedding_parameters / t.tensor
    head = root - embedding
    narrow = h.gathered_bytes
    trained = here.trained_share
    inside = gathered_in_blocks(h)
    reduced = (narrow + h.reduce_bytes) * trained
    prefetched = inside * np.where(own, 0.0, block * (count > 0))
    at_loss = narrow * np.where(is_apart, head, root) + prefetched
    at_head = np.where(is_apart, (narrow + reduced) * head + prefetched, 0.0)
    at_block = narrow * np.where(is_apart, 0.0, root) + inside * np.minimum(2, count) * block
    at_block = at_block + reduced * block
    at_root = (narrow + reduced) * np.where(is_apart, np.maximum(embedding, head), root)
    mine = here.dense + here.routed - root
    once = np.where(shared.keeps_gathered, inside * mine + narrow * (root + here.twin), 0.0)
    casts = (t.sharding < _ZERO2) & np.logical_not(shared.shards_weights | shared.gathers_blocks)
    copies = zip(held, _cast_parameters(model, t, here), strict=True)
    kept = np.where(own, sum(times * each for times, each in copies), mine)
    cast = casts * h.cast_bytes * trained * kept
    # Our own runtime reduces a unit while all others are still gathered; in a pipeline, at the end.
    passing = np.where(own & shared.keeps_gathered, reduced, 0.0)
    at_once = np.where(shared.reduces_late, 0.0, passing)
    return (
        np.where(shared.gathers_blocks, at_loss, once) + cast,
        np.where(shared.gathers_blocks, at_head, 0.0),
        np.where(shared.gathers_blocks, at_block, once + at_once * block) + cast,
        np.where(shared.gathers_blocks, at_root, once + passing * root),
    )


def _cast_parameters(model: Model, t: Layouts, here: OnRank) -> tuple[Column, Column]:
    """Parameters of blocks and head that autocast keeps copies of until the backward pass, with our
    own runtime: not those that are recomputed, nor the embedding, which is looked up as it is."""
    is_tied = np.asarray(model.num_tied_parameters) > 0
    embedding = (np.asarray(here.stage) == 0) * model.num_embedding_parameters / t.tensor
    head = here.root - np.where(is_tied, 0.0, embedding)
    share = share_untouched(t.recompute, t.recompute_every, model.num_blocks)
    return share * (here.dense + here.routed - here.root), head


def _on_side_streams(t: Layouts, h: Holdings, here: OnRank, gradients: Column) -> Column:
    """What FSDP2's collectives have reserved besides. CUDA's allocator gives memory that was freed
    on one stream to that stream alone, and these run on their own: shards of gradients come from
    the reduce-scatters', and buffers to gather two units in a row from the gathers'.

    Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp (pools of blocks are sorted by stream),
    fsdp/_fully_shard/_fsdp_collectives.py (`foreach_all_gather`, `foreach_reduce`).
    """
    if not np.any(h.ways.side_streams):
        return np.asarray(0.0)
    split = here.dense / np.maximum(t.shard, 1) + here.routed / routed_shard(t, here)
    # Those of offloaded parameters go on to the host, unit by unit.
    unit = np.maximum(here.root, here.unit) / np.maximum(t.shard, 1)
    goes_on = t.offload_parameters & np.logical_not(_on_device(t, h))
    split = np.where(goes_on, np.minimum(unit, split), split)
    shards = h.gradient_bytes * split * here.trained_share
    counted = np.where(here.shared.whole_gradients, 0.0, np.minimum(gradients, shards))
    gathers = h.gathered_bytes * (np.maximum(here.root, here.unit) + here.unit)
    used = h.ways.side_streams * here.shared.shards_weights
    return np.asarray(used * (shards - counted + gathers))
