"""What every layout must obey, as generators of problems with the nearest numbers that work.

Only what the person fixed can break a law: `candidates` makes nothing else. Each problem says the
numbers that clash and the change that fixes it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

from paceline.choices.pipeline_schedules import SCHEDULE_FACTS
from paceline.choices.recomputes import WHOLE_BLOCKS
from paceline.errors import Problem
from paceline.job import Job
from paceline.parallel.batch_laws import (
    check_global_batch,
    check_micro_batch,
    data_of,
    nothing_possible,
)
from paceline.parallel.candidates import Space, chunked_schedules, grids
from paceline.parallel.degrees import (
    asks_for_pipeline,
    divides_model,
    divisors,
    num_experts,
    num_fixed_ranks,
    with_implied,
)
from paceline.parallel.engine_laws import check_engine
from paceline.parallel.layout_laws import check_one_backward, token_step
from paceline.profile.adapter import NF4_BLOCK, unquantisable
from paceline.units import counted

_DEGREES = ("data", "tensor", "pipeline", "context")


def check_layout_choices(job: Job, space: Space) -> Iterator[Problem]:
    """What the job fixed must go together, with the model and with the number of ranks."""
    found = [
        *check_engine(job, space),
        *check_degrees(job, space),
        *check_tensor(job, space),
        *check_pipeline(job, space),
        *check_chunks(job, space),
        *check_context(job, space),
        *check_expert(job, space),
        *check_shard(job, space),
        *check_recompute(job, space),
        *check_offload(job, space),
    ]
    if not found:
        found = [*check_global_batch(job, space), *check_micro_batch(job, space)]
    if not found and not any(grid.is_possible.any() for grid in grids(space)):
        found = [nothing_possible(job, space)]
    yield from found


def check_degrees(job: Job, space: Space) -> Iterator[Problem]:
    """The degrees multiply to the number of ranks, so what is fixed divides it."""
    fixed, ranks = job.spec.layout, space.num_ranks
    given = {name: getattr(fixed, name) for name in _DEGREES if getattr(fixed, name) != "auto"}
    product = num_fixed_ranks(fixed)
    is_whole = product == ranks if len(given) == len(_DEGREES) else ranks % product == 0
    if not given or is_whole:
        return
    spelled = " x ".join(f"{name} {degree}" for name, degree in given.items())
    times = f"{spelled} is {product}" if len(given) > 1 else f"{spelled}"
    name, degree = max(given.items(), key=lambda each: each[1])
    others = product // degree
    good = [n for n in divisors(ranks) if ranks % (n * others) == 0]
    if len(given) == len(_DEGREES):
        good = [ranks // others] if ranks % others == 0 else []
    out = "leave one of them out" if len(given) > 1 else "leave it out"
    nearest = _by_nearness(degree, good)
    works = next((n for n in nearest if _goes_with_model(job, space, name, n)), None)
    fix = (
        f"set layout.{name} to {works or _nearest(degree, good)}, or {out}"
        if good
        else f"leave them out, or choose from the divisors of {ranks}: {_listed(divisors(ranks))}"
    )
    yield Problem(
        code="L004",
        what=f"{times}, which does not divide the {counted(ranks, 'rank')}"
        if product <= ranks and len(given) < len(_DEGREES)
        else f"{times}, and there are {counted(ranks, 'rank')}",
        where=job.where(f"layout.{name}"),
        fix=fix,
    )


def _goes_with_model(job: Job, space: Space, name: str, degree: int) -> bool:
    """Whether the checks of the model take a degree in the place of the one that the job has."""
    changed: Any = {name: degree}
    fixed = replace(job.spec.layout, **changed)
    job = replace(job, spec=replace(job.spec, layout=fixed))
    space = replace(space, fixed=fixed)
    checks = (check_tensor, check_pipeline, check_chunks, check_context, check_expert)
    return not any(True for check in checks for _ in check(job, space))


def check_tensor(job: Job, space: Space) -> Iterator[Problem]:
    """Every rank of a tensor group has as many heads and columns as every other."""
    fixed, profile = job.spec.layout, space.profile
    tensor, copies = fixed.tensor, space.abilities.copies_kv_head
    if tensor == "auto" or tensor == 1:
        return
    if divides_model(profile, tensor, copies_kv_head=copies):
        yield from _check_shares(job, space, tensor)
        return
    clashes: list[str] = []
    for block in space.profile.blocks:
        sizes = {
            "heads": block.heads,
            "key and value heads": 0 if copies and block.kv_heads == 1 else block.kv_heads,
            "feed-forward columns": block.ffn,
        }
        clashes += [f"{size} {name}" for name, size in sizes.items() if size % tensor]
    clashes += [f"blocks of {NF4_BLOCK} (NF4): {each}" for each in unquantisable(profile, tensor)]
    good = [
        n
        for n in divisors(space.num_ranks)[::-1]
        if divides_model(profile, n, copies_kv_head=copies)
    ]
    yield Problem(
        code="L005",
        what=f"layout.tensor {tensor} does not divide {' and '.join(dict.fromkeys(clashes))}",
        where=job.where("layout.tensor"),
        fix=f"set layout.tensor to {_nearest(tensor, good)}; on "
        f"{counted(space.num_ranks, 'rank')} {_listed(good)} are possible",
    )


def _check_shares(job: Job, space: Space, tensor: int) -> Iterator[Problem]:
    """With sequence parallelism the tensor ranks have equal shares of a context rank's tokens; and
    routed experts that no expert ranks share are divided among them."""
    fixed, seq_len = job.spec.layout, space.profile.seq_len
    context = 1 if fixed.context == "auto" else fixed.context
    shares = fixed.sequence_parallel is not False
    if shares and seq_len is not None and seq_len % (tensor * context):
        ranks = f"layout.tensor {tensor}" + (f" x context {context}" if context > 1 else "")
        step = tensor * context
        yield Problem(
            code="L021",
            what=f"{ranks} does not divide the {seq_len} tokens of a sample, which the tensor "
            "ranks share",
            where=job.where("layout.tensor"),
            fix=f"set data.seq_len to {max(seq_len // step, 1) * step}, or "
            "layout.sequence_parallel to false",
        )
    experts = num_experts(space.profile)
    by_tensor = space.abilities.experts_by_tensor and fixed.expert == 1
    if by_tensor and experts > 1 and experts % tensor:
        yield Problem(
            code="L005",
            what=f"layout.tensor {tensor} does not divide {experts} experts, which the tensor "
            "ranks share where no expert ranks do",
            where=job.where("layout.tensor"),
            fix=f"set layout.tensor to {_nearest(tensor, divisors(experts))}, or leave "
            "layout.expert out",
        )


def check_pipeline(job: Job, space: Space) -> Iterator[Problem]:
    """A stage has a block at least, and a pipeline is filled with micro-batches."""
    fixed, profile = job.spec.layout, space.profile
    pipeline = fixed.pipeline
    if pipeline == "auto" or pipeline == 1:
        if asks_for_pipeline(fixed) and (pipeline == 1 or space.num_ranks == 1):
            name = "chunks" if fixed.schedule == "auto" else "schedule"
            one = "layout.pipeline is 1" if pipeline == 1 else "there is one rank"
            yield Problem(
                code="L006",
                what=f"layout.{name} is {getattr(fixed, name)}, and {one}",
                where=job.where(f"layout.{name}"),
                fix=f"leave layout.{name} out, or set layout.pipeline to 2 or more",
            )
        return
    if pipeline > profile.num_blocks:
        good = [n for n in divisors(space.num_ranks) if n <= profile.num_blocks]
        yield Problem(
            code="L006",
            what=f"layout.pipeline is {pipeline} stages, and the model has "
            f"{profile.num_blocks} blocks",
            where=job.where("layout.pipeline"),
            fix=_pipeline_that_works(job, space, _by_nearness(pipeline, good)),
        )
        return
    data = data_of(job, space)
    if not data:  # open, or the degrees are more than the ranks, which `check_degrees` says
        return
    micro_batch = 1 if fixed.micro_batch == "auto" else fixed.micro_batch
    accumulation = space.global_batch // (data * micro_batch)
    if 0 < accumulation < pipeline:
        needed = pipeline * data * micro_batch
        fewer = [n for n in divisors(pipeline) if n <= accumulation]
        yield Problem(
            code="L007",
            what=f"a pipeline of {pipeline} stages needs at least {pipeline} micro-batches, and "
            f"train.global_batch {space.global_batch} / (data {data} x micro-batch {micro_batch}) "
            f"is {accumulation}",
            where=job.where("layout.pipeline"),
            fix=f"set train.global_batch to {needed} or more; or "
            + _pipeline_that_works(job, space, _by_nearness(accumulation, fewer)),
        )


def _by_nearness(number: int, good: Sequence[int]) -> list[int]:
    return sorted(good, key=lambda n: (abs(n - number), n))


def _pipeline_that_works(job: Job, space: Space, degrees: Sequence[int]) -> str:
    """The first of the degrees with which some layout is possible, by the search's own rules."""
    fixed = job.spec.layout
    for degree in degrees:
        tried = replace(space, fixed=replace(fixed, pipeline=degree))
        if any(grid.is_possible.any() for grid in grids(tried)):
            return f"set layout.pipeline to {degree}"
    freed = replace(space, fixed=replace(fixed, pipeline="auto"))
    if any(grid.is_possible.any() for grid in grids(freed)):
        return "leave layout.pipeline out"
    batch = -(-space.global_batch // space.num_ranks) * space.num_ranks
    freed = replace(freed, global_batch=batch)
    if any(grid.is_possible.any() for grid in grids(freed)):
        return f"leave layout.pipeline out and set train.global_batch to {batch}"
    return "leave layout.pipeline out and change cluster.nodes: on these ranks none works"


def check_chunks(job: Job, space: Space) -> Iterator[Problem]:
    """Chunks are whole blocks, and only some schedules have more than one."""
    fixed = job.spec.layout
    chunks, pipeline = fixed.chunks, fixed.pipeline
    if chunks == "auto" or chunks == 1:
        return
    known = chunked_schedules(space.abilities)
    if fixed.schedule != "auto" and fixed.schedule not in known:
        yield Problem(
            code="L008",
            what=f"layout.chunks is {chunks}, and schedule {fixed.schedule} has "
            + ("two, always" if SCHEDULE_FACTS[fixed.schedule].chunks == "two" else "one"),
            where=job.where("layout.chunks"),
            fix=f"leave layout.chunks out, or set layout.schedule to {' or '.join(known)}",
        )
    if pipeline == "auto":
        return
    count = space.profile.num_blocks
    on_stage = -(-count // pipeline)
    takes_any = fixed.schedule != "auto" and SCHEDULE_FACTS[fixed.schedule].chunks == "any"
    is_too_many = pipeline * chunks > count
    if is_too_many or (on_stage % chunks and not takes_any):
        good = [n for n in divisors(on_stage) if n > 1 and pipeline * n <= count]
        blocks = f"{count} blocks / pipeline {pipeline}"
        yield Problem(
            code="L008",
            what=f"pipeline {pipeline} x {chunks} virtual stages is {pipeline * chunks} stages, "
            f"and the model has {count} blocks: a stage needs one at least"
            if is_too_many
            else f"layout.chunks {chunks} does not divide the {on_stage} blocks of a stage "
            f"({blocks})",
            where=job.where("layout.chunks"),
            fix=f"set layout.chunks to {_nearest(chunks, good)}"
            if good
            else f"leave layout.chunks out: no other number goes with {blocks}",
        )


def check_context(job: Job, space: Space) -> Iterator[Problem]:
    """Ring: every rank has two equal parts of a sample. Ulysses: as many heads as every other."""
    fixed, seq_len = job.spec.layout, space.profile.seq_len
    context = fixed.context
    if context == "auto" or context == 1:
        return
    is_ring = fixed.context_kind != "ulysses"
    step = token_step(context, is_ring=is_ring)
    if seq_len is None or seq_len % step:
        length = "unknown" if seq_len is None else str(seq_len)
        fix = "leave layout.context out"
        if seq_len is not None:
            good = [
                n
                for n in divisors(space.num_ranks)
                if seq_len % token_step(n, is_ring=is_ring) == 0
            ]
            fix = f"set data.seq_len to {-(-seq_len // step) * step}, or layout.context to " + str(
                _nearest(context, good or [1])
            )
        yield Problem(
            code="L009",
            what=f"layout.context {context}{' x 2' if is_ring else ''} does not divide "
            f"data.seq_len {length}: each rank takes "
            + ("a part from the front and one from the back" if is_ring else "an equal part"),
            where=job.where("layout.context"),
            fix=fix,
        )
    if is_ring:
        return
    tensor = 1 if fixed.tensor == "auto" else fixed.tensor
    heads = gcd(*(block.heads for block in space.profile.blocks))
    if heads % (tensor * context):
        yield Problem(
            code="L009",
            what=f"ulysses divides heads: {heads} heads / tensor {tensor} / context {context} is "
            "not a whole number",
            where=job.where("layout.context"),
            fix="set layout.context to "
            f"{_nearest(context, [n for n in divisors(heads) if heads % (n * tensor) == 0])}, or "
            "layout.context_kind to ring",
        )


def check_expert(job: Job, space: Space) -> Iterator[Problem]:
    """Experts are divided among the data and context ranks."""
    expert = job.spec.layout.expert
    if expert == "auto" or expert == 1:
        return
    has = any(block.experts for block in space.profile.blocks)
    experts = num_experts(space.profile)
    where = job.where("layout.expert")
    if not has:
        yield Problem(
            code="L010",
            what=f"layout.expert is {expert}, and the model has no routed experts",
            where=where,
            fix="leave layout.expert out",
        )
    elif experts % expert:
        yield Problem(
            code="L010",
            what=f"layout.expert {expert} does not divide {experts} experts",
            where=where,
            fix=f"set layout.expert to {_nearest(expert, divisors(experts))}",
        )
    elif (group := _data_and_context_ranks(job, space)) % expert:
        unasked = space.abilities.unasked.get("layout.expert")
        yield Problem(
            code="L010",
            what=f"layout.expert {expert} does not divide the {counted(group, 'rank')} of data and "
            "context, which hold the experts" + (f"; {unasked}" if unasked else ""),
            where=where,
            fix=f"set layout.expert to {_nearest(expert, divisors(gcd(experts, group)))}"
            + ", or layout.tensor or layout.pipeline lower" * (group < space.num_ranks),
        )


def _data_and_context_ranks(job: Job, space: Space) -> int:
    """Ranks that the fixed tensor and pipeline degrees leave, where they divide them."""
    fixed = job.spec.layout
    held = prod(each for each in (fixed.tensor, fixed.pipeline) if each != "auto")
    return space.num_ranks if space.num_ranks % held else space.num_ranks // held


def check_shard(job: Job, space: Space) -> Iterator[Problem]:
    """Groups of hybrid sharding are equal, and there are several of them."""
    fixed = job.spec.layout
    if fixed.shard == "auto":
        return
    where = job.where("layout.shard")
    if fixed.sharding not in ("auto", "hybrid"):
        yield Problem(
            code="L011",
            what=f"layout.shard is {fixed.shard}, and sharding {fixed.sharding} has no groups",
            where=where,
            fix="leave layout.shard out, or set layout.sharding to hybrid",
        )
    elif space.num_ranks % fixed.shard or not 1 < fixed.shard < space.num_ranks:
        good = [n for n in divisors(space.num_ranks) if 1 < n < space.num_ranks]
        yield Problem(
            code="L011",
            what=f"layout.shard {fixed.shard} does not divide "
            f"{counted(space.num_ranks, 'rank')} into two or "
            "more groups",
            where=where,
            fix=f"set layout.shard to {_nearest(fixed.shard, good)}"
            if good
            else "set layout.sharding to full",
        )


def check_recompute(job: Job, space: Space) -> Iterator[Problem]:
    """Every how many blocks one is recomputed is a question of whole blocks alone."""
    fixed, blocks = job.spec.layout, space.profile.num_blocks
    if fixed.recompute_every != "auto" and fixed.recompute_every > max(blocks, 1):
        yield Problem(
            code="L013",
            what=f"layout.recompute_every is {fixed.recompute_every}, and the model has {blocks} "
            f"block{'' if blocks == 1 else 's'}",
            where=job.where("layout.recompute_every"),
            fix=f"set layout.recompute_every to {max(blocks, 1)} or less",
        )
    pipeline = 1 if fixed.pipeline == "auto" else fixed.pipeline
    every = 1 if fixed.recompute_every == "auto" else fixed.recompute_every
    chunks = 1 if fixed.chunks == "auto" else fixed.chunks
    if pipeline > 1 and max(every, pipeline * chunks) <= blocks:
        on_stage = -(-blocks // (pipeline * chunks))
        if on_stage % every:
            yield Problem(
                code="L013",
                what=f"layout.recompute_every is {every}, and each of {pipeline * chunks} stages "
                f"has {counted(on_stage, 'block')}, which do not divide into groups of {every}",
                where=job.where("layout.recompute_every"),
                fix=f"set layout.recompute_every to {' or '.join(map(str, divisors(on_stage)))}",
            )
    if not space.abilities.selective_split_backward:
        where = job.where("layout.recompute")
        yield from check_one_backward(fixed.schedule, fixed.recompute, where=where)
    if fixed.recompute_every in ("auto", 1) or fixed.recompute in ("auto", *WHOLE_BLOCKS):
        return
    yield Problem(
        code="L013",
        what=f"layout.recompute_every is {fixed.recompute_every}, and recompute is "
        f"{fixed.recompute}",
        where=job.where("layout.recompute_every"),
        fix=f"leave it out, or set layout.recompute to {WHOLE_BLOCKS[0]}",
    )


def check_offload(job: Job, space: Space) -> Iterator[Problem]:
    """Some engines offload only the optimizer state that is sharded."""
    fixed, able = with_implied(job.spec.layout), space.abilities
    if fixed.offload in ("auto", "none") or able.offloads_whole:
        return
    may_be_alone = able.offloads_alone and fixed.sharding in ("auto", *able.offloads_alone)
    is_whole = fixed.sharding == "none" or (space.num_ranks == 1 and not may_be_alone)
    if not is_whole or fixed.offload not in able.offloads:
        return
    ways = able.offloads_alone if space.num_ranks == 1 else set(able.shardings) - {"none"}
    asked = job.spec.layout
    field = "offload_parameters" if asked.offload == "auto" else "offload"
    yield Problem(
        code="L024",
        what=f"layout.{field} is {getattr(asked, field)}, which {job.spec.engine} does only with "
        "what is sharded, and "
        + ("there is one rank" if space.num_ranks == 1 and not ways else "sharding is ")
        + (fixed.sharding if ways else ""),
        where=job.where(f"layout.{field}"),
        fix=f"leave layout.{field} out"
        + (f", or set layout.sharding to {' or '.join(sorted(ways))}" if ways else ""),
    )


def _nearest(number: int, good: Sequence[int]) -> int:
    return min(good, key=lambda n: (abs(n - number), n))


def _listed(numbers: Sequence[int]) -> str:
    shown = [str(n) for n in sorted(numbers)[:12]]
    return ", ".join(shown) + (", .." if len(numbers) > 12 else "")
