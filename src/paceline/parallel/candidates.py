"""Every layout that a job leaves possible, as tables.

A search has millions of rows and few of anything else, so they are made as grids, one for each
tensor and pipeline degree: what the ranks are divided into and the micro-batch in the first dim,
the pipeline's schedule in the second, recomputation in the third, what is shared in the fourth.

Left out because another row is never worse (design: same seconds or fewer, same bytes or fewer):
GPipe where 1F1B is possible, which keeps fewer micro-batches and idles as long; norms that are not
split over the tensor ranks. Offloaded rows are there where the job or `Space.offloads` has them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import numpy as np

from paceline.catalog.accelerator import Backend
from paceline.choices import Offload, Recompute, Schedule
from paceline.choices.pipeline_schedules import PLAIN, SCHEDULE_FACTS, ScheduleFacts
from paceline.choices.recomputes import WHOLE_BLOCKS
from paceline.job import LayoutSpec
from paceline.parallel.abilities import Abilities
from paceline.parallel.degrees import (
    asks_for_pipeline,
    divides_model,
    divisors,
    num_experts,
    with_implied,
)
from paceline.parallel.table import Layouts, code_of, join
from paceline.parallel.word_columns import (
    goes_backward_once,
    least_rounds,
    loops,
    splits_backward,
    stages_each,
    takes_rounds,
)
from paceline.profile import ModelProfile
from paceline.profile.block import Column

MAX_CELLS = 65_536
"""Rows of one grid: their columns stay in a core's cache."""

RECOMPUTE_EVERY = (1, 2, 4)
"""Every how many blocks one is recomputed, where the job leaves it open."""

Mask = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What layouts are looked for in."""

    num_ranks: int
    global_batch: int
    profile: ModelProfile
    domain: int
    """Ranks that share a fast link: a node's or a rack's. Tensor degrees stay inside."""

    fixed: LayoutSpec = field(default_factory=LayoutSpec)
    abilities: Abilities = field(default_factory=Abilities)
    ranks_per_node: int = 1
    offloads: tuple[Offload, ...] = ("none",)
    """Where optimizer state may be, where the job leaves it open."""

    accumulates: bool = True
    """Whether a step may have several micro-batches."""

    backend: Backend | None = "nccl"
    """The cluster's collectives, for engines that are named instead; None names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Layouts of one tensor and one pipeline degree."""

    layouts: Layouts
    """A grid with four dims."""

    is_possible: Mask
    """Whether a cell is a layout at all, in the grid's shape."""


def candidates(space: Space) -> Layouts:
    """Every possible layout, one row each.

    >>> from paceline.profile import DecoderShape, profile_decoder
    >>> shape = DecoderShape(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128,
    ...     vocab=256, tied_embeddings=False)
    >>> fixed = LayoutSpec(sharding="none", tensor=1, context=1, pipeline=1, recompute="none")
    >>> space = Space(num_ranks=2, global_batch=8, profile=profile_decoder(shape, 64), domain=8,
    ...     fixed=fixed)
    >>> candidates(space).micro_batch.tolist()
    [4, 2, 1]
    """
    tables = [grid.layouts.take(grid.is_possible) for grid in grids(space)]
    return join(tables) if tables else _empty()


def grids(space: Space, max_cells: int = MAX_CELLS) -> Iterator[Grid]:
    """Every possible layout, as grids of at most `max_cells` cells."""
    space = replace(space, fixed=with_implied(space.fixed))
    for pipeline in pipelines(space):
        orders = _orders(space, pipeline)
        for tensor in tensors(space, pipeline):
            group, rest = divmod(space.num_ranks, tensor * pipeline)
            if rest or not orders:
                continue
            splits = _splits(space, tensor, pipeline, group)
            recomputes, shares = _recomputes(space), _shares(space, group, pipeline)
            width = len(orders) * len(recomputes) * len(shares)
            if not width:
                continue
            step = max(1, max_cells // width)
            for start in range(0, len(splits[0]), step):
                part = [column[start : start + step] for column in splits]
                yield _grid(space, tensor, pipeline, part, orders, recomputes, shares)


def pipelines(space: Space) -> list[int]:
    """Numbers of stages that are possible: no more than the model has blocks."""
    fixed = space.fixed.pipeline
    if fixed != "auto":
        return [fixed] if space.num_ranks % fixed == 0 else []
    blocks = space.profile.num_blocks
    most = blocks if space.abilities.schedules and _is_open(space) else 1
    least = 2 if asks_for_pipeline(space.fixed) else 1
    step = 1 if not space.abilities.equal_stages else max(blocks, 1)
    return [
        each
        for each in divisors(space.num_ranks)[::-1]
        if least <= each <= max(most, 1) and (step == 1 or step % each == 0)
    ]


def tensors(space: Space, pipeline: int = 1) -> list[int]:
    """Tensor degrees that are possible: they divide heads, keys and values, and widths."""
    fixed = space.fixed.tensor
    if fixed != "auto":
        return [fixed] if space.num_ranks % (fixed * pipeline) == 0 else []
    able = space.abilities
    most = space.domain if able.tensor and _is_open(space) else 1
    if "tensor" in able.asked_only:
        most = 1
    return [
        each
        for each in divisors(space.num_ranks // pipeline)[::-1]
        if each == 1
        or (
            each <= most
            and most % each == 0
            and divides_model(space.profile, each, copies_kv_head=space.abilities.copies_kv_head)
        )
    ]


def _is_open(space: Space) -> bool:
    """Whether the model's inside is known, so that it can be split."""
    blocks = space.profile.blocks
    return bool(blocks) and all(block.measured is None and block.heads for block in blocks)


def _splits(space: Space, tensor: int, pipeline: int, group: int) -> list[np.ndarray]:
    """Context, kind, expert, data, micro-batch and accumulation: one entry each for every way."""
    fixed = space.fixed
    micro_batches = (
        divisors(space.global_batch) if fixed.micro_batch == "auto" else [fixed.micro_batch]
    )
    ways = _contexts(space, tensor, group)
    experts = _experts(space, group)
    way, expert, micro_batch = (
        each.ravel()
        for each in np.meshgrid(np.arange(len(ways)), experts, micro_batches, indexing="ij")
    )
    context = np.array([each for each, _ in ways], dtype=np.int64)[way]
    kind = np.array([each for _, each in ways], dtype=np.int64)[way]
    data = group // context
    each_rank = space.global_batch // data
    keep = (space.global_batch % data == 0) & (each_rank % micro_batch == 0)
    if fixed.data != "auto":
        keep &= data == fixed.data
    accumulation = each_rank // micro_batch
    if pipeline > 1:
        keep &= accumulation >= pipeline
    if not space.accumulates:
        keep &= accumulation == 1
    return [each[keep] for each in (context, kind, expert, data, micro_batch, accumulation)]


def _contexts(space: Space, tensor: int, group: int) -> list[tuple[int, int]]:
    """Context degrees with their kind: ring halves each rank's tokens, Ulysses divides heads."""
    fixed, seq_len = space.fixed, space.profile.seq_len
    shares = tensor if fixed.sequence_parallel != False else 1  # noqa: E712  # "auto" is yes
    kinds = {kind: code_of("context_kind", kind) for kind in space.abilities.context_kinds}
    if fixed.context_kind != "auto":
        kinds = {fixed.context_kind: code_of("context_kind", fixed.context_kind)}
    degrees = [n for n in divisors(group)[::-1] if fixed.context in ("auto", n)]
    is_shared = seq_len is None or seq_len % shares == 0
    found = [(1, next(iter(kinds.values()), 0))] if 1 in degrees and is_shared else []
    if seq_len is None or not (fixed.context != "auto" or _is_open(space)):
        return found
    if fixed.context == "auto" and "context" in space.abilities.asked_only:
        return found
    for degree in degrees:
        if degree == 1:
            continue
        for name, code in kinds.items():
            divides = seq_len % (2 * degree) == 0
            if name == "ulysses":
                parts = 2 if space.abilities.halves_samples else 1
                divides = seq_len % (parts * degree) == 0 and all(
                    block.heads % (tensor * degree) == 0 for block in space.profile.blocks
                )
            if divides and seq_len // degree % shares == 0:
                found.append((degree, code))
    return found


def _experts(space: Space, group: int) -> list[int]:
    fixed = space.fixed.expert
    if fixed != "auto":
        return [fixed] if group % fixed == 0 else []
    if not space.abilities.expert:
        return [1]
    return divisors(gcd(num_experts(space.profile), group))[::-1]


def _orders(space: Space, pipeline: int) -> list[tuple[int, int]]:
    """Schedules with the chunks that make sense in them."""
    fixed = space.fixed
    if pipeline == 1:
        return [(code_of("schedule", PLAIN), 1)]
    kinds: Sequence[Schedule] = space.abilities.schedules or (PLAIN,)
    if fixed.schedule != "auto":
        kinds = (fixed.schedule,)
    elif PLAIN in kinds:
        kinds = [kind for kind in kinds if not _is_dominated(SCHEDULE_FACTS[kind])]
    found: list[tuple[int, int]] = []
    for kind in kinds:
        # Each stage has a block: a rank may have two stages though its chunks are 1.
        stages = 2 if SCHEDULE_FACTS[kind].chunks == "two" else 1
        found += [
            (code_of("schedule", kind), chunks)
            for chunks in _chunks(space, pipeline, kind)
            if pipeline * chunks * stages <= max(space.profile.num_blocks, pipeline)
        ]
    return found


def _is_dominated(facts: ScheduleFacts) -> bool:
    """By 1F1B, which idles as long and holds fewer micro-batches."""
    return facts.forwards_first and facts.chunks == "one"


def _chunks(space: Space, pipeline: int, kind: Schedule) -> list[int]:
    """Stages of each rank that make sense in a schedule, fewest first."""
    if kind not in chunked_schedules(space.abilities):
        return [1]
    if space.fixed.chunks != "auto":
        return [space.fixed.chunks]
    on_stage = -(-space.profile.num_blocks // pipeline)
    several = {n for n in divisors(on_stage) if n > 1}
    return sorted(several if SCHEDULE_FACTS[kind].chunks == "several" else several | {1, 2})


def chunked_schedules(able: Abilities) -> tuple[Schedule, ...]:
    """Schedules in which an engine may give each rank several stages."""
    kinds = ("several", "any") if able.chunked_zero_bubble else ("several",)
    return tuple(word for word, facts in SCHEDULE_FACTS.items() if facts.chunks in kinds)


def _recomputes(space: Space) -> list[tuple[int, int]]:
    fixed = space.fixed
    able = space.abilities
    kinds: Sequence[Recompute] = able.recomputes if _is_open(space) else ("none",)
    if fixed.recompute != "auto":
        kinds = (fixed.recompute,)
    most = max(space.profile.num_blocks, 1)
    every = [n for n in RECOMPUTE_EVERY if n <= most and (n == 1 or able.recomputes_some)]
    if fixed.recompute_every != "auto":
        every = [fixed.recompute_every]
    elif fixed.recompute != "auto":
        every = [1]  # whole blocks that are asked for are all of them
    return [
        (code_of("recompute", kind), n)
        for kind in kinds
        for n in (every if kind in WHOLE_BLOCKS else [1])
    ]


@dataclass(frozen=True, slots=True)
class _Share:
    """What the data ranks share."""

    sharding: int
    shard: int
    reduces_each: bool
    offload: int
    offload_parameters: bool


def _shares(space: Space, group: int, pipeline: int) -> list[_Share]:
    fixed, able = space.fixed, space.abilities
    allowed = able.shardings
    if group == 1:
        kinds = able.offloads_alone
        staged = able.pipeline_shardings
        allowed = ("none", *(each for each in kinds if pipeline == 1 or each in staged))
    if fixed.sharding != "auto":
        allowed = (fixed.sharding,)
        is_alone = fixed.offload in able.offloads[1:] and fixed.sharding in able.offloads_alone
        if group == 1 and fixed.sharding != "none" and _may_share(space) and not is_alone:
            return []  # what is asked for would be over one rank: nothing at all
    if pipeline > 1 and group > 1:
        allowed = tuple(each for each in allowed if each in able.pipeline_shardings)
    offloads = space.offloads if fixed.offload == "auto" else (fixed.offload,)
    offloads = tuple(each for each in offloads if each in able.offloads or fixed.offload == each)
    found: list[_Share] = []
    for kind in allowed:
        shards = [1] if kind == "none" else [group]
        if kind == "hybrid":
            shards = [n for n in divisors(group) if 1 < n < group]
            if able.hybrid_in_node:
                shards = [n for n in shards if n == space.ranks_per_node]
            if fixed.shard != "auto":
                shards = [n for n in shards if n == fixed.shard]
        is_full = kind in ("full", "hybrid") and (group > 1 or kind in able.offloads_alone)
        is_choice = is_full and (pipeline == 1 or able.reduces_each_in_pipeline)
        found += [
            _Share(code_of("sharding", kind), shard, each, code_of("offload", offload), moves)
            for shard in shards
            for each in ((False, True) if is_choice else (False,))
            for offload in offloads
            for moves in (_moves(space) if offload != "none" else (False,))
            if shard > 1 or offload == "none" or able.offloads_whole or kind in able.offloads_alone
        ]
    if group == 1 and fixed.sharding == "auto":  # shared with nobody, to be offloaded alone
        kept = code_of("sharding", "none"), code_of("offload", "none")
        found = [each for each in found if kept[0] == each.sharding or kept[1] != each.offload]
    return found


def _moves(space: Space) -> tuple[bool, ...]:
    """Whether parameters go with offloaded optimizer state."""
    asked = space.fixed.offload_parameters
    return space.abilities.offloads_parameters if asked == "auto" else (asked,)


def _may_share(space: Space) -> bool:
    """Whether several ranks may share a state: the job leaves it open how many there are."""
    fixed = space.fixed
    is_free = "auto" in (fixed.tensor, fixed.pipeline)
    return space.num_ranks > 1 and is_free and fixed.data != 1


def _grid(
    space: Space,
    tensor: int,
    pipeline: int,
    splits: list[np.ndarray],
    orders: Sequence[tuple[int, int]],
    recomputes: Sequence[tuple[int, int]],
    shares: Sequence[_Share],
) -> Grid:
    context, kind, expert, data, micro_batch, accumulation = (_along(0, each) for each in splits)
    schedule, chunks = (_along(1, [order[n] for order in orders]) for n in (0, 1))
    recompute, every = (_along(2, [each[n] for each in recomputes]) for n in (0, 1))
    shard = _along(3, [each.shard for each in shares])
    each = _along(3, [share.reduces_each for share in shares])
    sharding = _along(3, [share.sharding for share in shares])
    together = space.fixed.sequence_parallel != False  # noqa: E712  # "auto" is yes
    layouts = Layouts(
        data=data,
        sharding=sharding,
        shard=shard,
        micro_batch=micro_batch,
        accumulation=accumulation,
        reduce_every_micro_batch=each,
        tensor=_along(0, [tensor]),
        sequence_parallel=_along(0, [together]),
        pipeline=_along(0, [pipeline]),
        schedule=schedule,
        chunks=chunks,
        context=context,
        context_kind=kind,
        expert=expert,
        recompute=recompute,
        recompute_every=every,
        offload=_along(3, [share.offload for share in shares]),
        offload_parameters=_along(3, [share.offload_parameters for share in shares]),
    )
    possible = _is_in_order(space, schedule, chunks, pipeline, accumulation) & _reduces(
        space, pipeline, sharding, each, accumulation
    )
    if not space.abilities.selective_split_backward:
        possible = possible & ~(splits_backward(schedule) & goes_backward_once(recompute))
    if pipeline > 1:  # one block in so many of each stage, which has whole such groups
        on_stage = -(-space.profile.num_blocks // (pipeline * stages_each(schedule, chunks)))
        possible = possible & (on_stage % every == 0)
    if space.abilities.experts_by_tensor and num_experts(space.profile) % tensor:
        possible = possible & ((expert > 1) | (num_experts(space.profile) == 1))
    if space.abilities.shards_over_context:
        possible = possible & ((sharding != code_of("sharding", "hybrid")) | (shard % context == 0))
    for excluded in space.abilities.excluded:
        possible = possible & ~excluded.mask(layouts)
    is_full = sharding >= code_of("sharding", "full")
    # A rank's experts are whole: their group and the shards' divide each other.
    possible = possible & (np.where(is_full, shard % expert, 0) * (expert % shard) == 0)
    return Grid(layouts=layouts, is_possible=np.broadcast_to(possible, layouts.shape))


def _along(dim: int, values: Any) -> np.ndarray:
    """A column that lies along one of the four dims."""
    shape = [1, 1, 1, 1]
    shape[dim] = len(values)
    return np.asarray(values).reshape(shape)


def _is_in_order(
    space: Space, schedule: Column, chunks: Column, pipeline: int, accumulation: Column
) -> Column:
    """Whether a schedule has the micro-batches it needs."""
    if pipeline == 1:
        return np.ones((1, 1, 1, 1), dtype=bool)
    in_turns, rounds = loops(schedule), accumulation // pipeline
    takes = accumulation % pipeline == 0
    if space.abilities.equal_rounds:
        in_turns = takes_rounds(schedule, chunks)
        takes = accumulation % np.maximum(rounds, 1) == 0
    # One round is less than 1F1B likes, and no engine but torch's refuses it.
    enough = rounds >= np.where(least_rounds(schedule) > 1, least_rounds(schedule), 0)
    return np.asarray((~in_turns | takes) & enough)


def _reduces(
    space: Space, pipeline: int, sharding: Column, each: Column, accumulation: Column
) -> Column:
    """One micro-batch is reduced once anyway, so there it is not a choice."""
    able = space.abilities
    always = able.reduces_each if pipeline == 1 or able.reduces_each_in_pipeline else False
    several = accumulation > 1
    if always is None:
        return np.asarray(~each | several)
    if not always:
        return np.asarray(~each)
    return np.asarray(each == (several & (sharding >= code_of("sharding", "full"))))


def _empty() -> Layouts:
    columns = {name: np.zeros(0, dtype=np.int64) for name in Layouts.__slots__}
    return Layouts(**columns)
