"""What a layout that is chosen must obey, given the sizes of what it splits.

The runtime reads the sizes off a model and asks here before it changes anything, so that a layout
from wherever (a plan, a test, your own program) is refused with the numbers that clash.
`laws` asks the same of a job whose layout is still open, and proposes what would work.

Leaves out: what depends on modules and not on sizes, as whether a class can be split (`L020`).
"""

from collections.abc import Iterator
from math import gcd

from paceline.choices.pipeline_schedules import SCHEDULE_FACTS, SPLIT_BACKWARD
from paceline.choices.recomputes import ONE_BACKWARD
from paceline.errors import Problem
from paceline.parallel.layout import Layout
from paceline.parallel.stages import is_v_shaped, num_chunks, num_stages
from paceline.profile.adapter import NF4_BLOCK


def token_step(context: int, *, is_ring: bool) -> int:
    """What the tokens of a sample must be a multiple of: a ring gives each rank two equal parts.

    >>> token_step(4, is_ring=True), token_step(4, is_ring=False), token_step(1, is_ring=True)
    (8, 4, 1)
    """
    return 2 * context if is_ring and context > 1 else context


def check_shared(layout: Layout, name: str, count: int, has: str) -> Iterator[Problem]:
    """Every tensor rank has as many heads, columns or experts of a module as every other.

    Args:
        name: The module's.
        count: How many the ranks share.
        has: What the module has, with the number.
    """
    if count % layout.tensor:
        yield _uneven(f"{name} has {has}, tensor is {layout.tensor}")


def check_blocks(layout: Layout, name: str, inputs: int) -> Iterator[Problem]:
    """Every tensor rank has whole blocks of a row in NF4."""
    if inputs % (NF4_BLOCK * layout.tensor):
        has = f"{name} has {inputs} inputs in blocks of {NF4_BLOCK} (NF4)"
        yield _uneven(f"{has}, tensor is {layout.tensor}")


def check_vocabulary(layout: Layout, name: str, rows: int) -> Iterator[Problem]:
    """Every tensor rank has some rows of the vocabulary; the last may have fewer."""
    if (layout.tensor - 1) * -(-rows // layout.tensor) >= rows:
        what = f"{name} has {rows} rows of the vocabulary, tensor is {layout.tensor}"
        yield _uneven(f"{what}, which leaves a rank without")


def _uneven(what: str) -> Problem:
    return Problem(
        code="L005",
        what=what,
        where="layout.tensor",
        fix="choose a tensor degree that divides it",
    )


def check_token_shares(tokens: int, ranks: int) -> Iterator[Problem]:
    """With sequence parallelism the tensor ranks have equal shares of a context rank's tokens."""
    if tokens % ranks:
        yield Problem(
            code="L021",
            what=f"a sample has {tokens} tokens on its context rank, which {ranks} tensor ranks "
            "cannot share evenly",
            where="data.seq_len, with sequence parallelism",
            fix=f"use a multiple of {ranks}, or set layout.sequence_parallel = false",
        )


def check_schedule(layout: Layout, num_blocks: int) -> Iterator[Problem]:
    """Whether a schedule has the stages, blocks and micro-batches that it needs.

    A stage without a block hangs some of torch's schedules (2.13: ZB-V), and helps none.
    """
    if layout.pipeline == 1:
        return
    word, ranks, chunks = layout.schedule, layout.pipeline, layout.chunks
    kind = SCHEDULE_FACTS[word].chunks
    several = kind == "several"
    if not {"one": chunks == 1, "two": chunks <= 2, "several": chunks >= 2, "any": True}[kind]:
        needed = {"one": "1", "two": "2", "several": "2 or more"}[kind]
        yield Problem(
            code="L008",
            what=f"layout.chunks is {chunks}, and schedule {word} has {needed} on each stage",
            where="layout.chunks",
            fix="leave layout.chunks out" if not several else "set layout.chunks to 2 or more",
        )
        return
    stages = num_stages(layout)
    if num_blocks < stages:
        yield Problem(
            code="L006",
            what=f"pipeline {ranks} x {num_chunks(layout)} virtual stages is {stages} stages, and "
            f"the model has {num_blocks} blocks: a stage needs one at least",
            where="layout.pipeline",
            fix=f"set layout.pipeline to {max(num_blocks // num_chunks(layout), 1)} or less"
            + (", or layout.chunks to fewer" if chunks > 2 else ""),
        )
    yield from check_one_backward(word, layout.recompute, where="layout.recompute")
    yield from check_micro_batches(layout, layout.accumulation)


def check_micro_batches(layout: Layout, count: int) -> Iterator[Problem]:
    """Whether a schedule can order so many micro-batches."""
    ranks, word = layout.pipeline, layout.schedule
    least = max(1, SCHEDULE_FACTS[word].least_rounds * ranks)
    if count < least:
        yield Problem(
            code="L007",
            what=f"schedule {word} on {ranks} pipeline ranks needs at least {least} "
            f"micro-batches, and there are {count}",
            where="layout.accumulation",
            fix=f"set layout.accumulation to {least} or more, or layout.schedule to gpipe",
        )
    in_rounds = SCHEDULE_FACTS[word].in_rounds and not is_v_shaped(layout)
    rounds = max(1, count // ranks)
    if in_rounds and count % rounds:
        yield Problem(
            code="L007",
            what=f"schedule {word} on {ranks} pipeline ranks takes {count} micro-batches in "
            f"{rounds} equal rounds, which do not divide them",
            where="layout.accumulation",
            fix=f"set layout.accumulation to {count // ranks * ranks} or "
            f"{-(-count // ranks) * ranks}",
        )


def check_one_backward(schedule: str, recompute: str, *, where: str) -> Iterator[Problem]:
    """Some recompute policies need a schedule that goes backward through a block once."""
    if schedule in SPLIT_BACKWARD and recompute in ONE_BACKWARD:
        yield Problem(
            code="L022",
            what=f"schedule {schedule} goes backward through each block twice, for inputs and for "
            f"weights, and torch's {recompute} recompute allows it once",
            where=where,
            fix="set layout.recompute to full or none, or layout.schedule to 1f1b or interleaved",
        )


def check_sample(
    seq_len: int | None, heads: int | None, kv_heads: int | None, layout: Layout
) -> Iterator[Problem]:
    """Context ranks divide the samples and, with Ulysses, each tensor rank's heads.

    Args:
        seq_len: Tokens in a sample, the inputs only; None is not checked.
        heads: Query heads of the whole model; None is not checked.
        kv_heads: Key and value heads of the whole model; None is not checked. Ulysses repeats them
            where the ranks do not divide them, so they need only divide the query heads.
    """
    context, is_ring = layout.context, layout.context_kind == "ring"
    if context == 1:
        return
    step = token_step(context, is_ring=is_ring)
    if seq_len is not None and (seq_len % step or seq_len < step):
        chunks = f"2 x context {context}" if is_ring else f"context {context}"
        yield Problem(
            code="L009",
            what=f"{chunks} does not divide the {seq_len} tokens of a sample",
            where="layout.context",
            fix=f"set data.seq_len to {-(-seq_len // step) * step}, or another layout.context",
        )
    if heads is None:
        return
    if not is_ring and heads % (layout.tensor * context):
        yield Problem(
            code="L009",
            what=f"ulysses divides heads: tensor {layout.tensor} x context {context} does not "
            f"divide {heads} heads",
            where="layout.context_kind",
            fix="set layout.context_kind to ring, or another layout.context",
        )
    if kv_heads is not None and heads % kv_heads:
        yield Problem(
            code="L009",
            what=f"{kv_heads} key and value heads do not divide {heads} query heads",
            where="model",
            fix="give the model a number of key and value heads that divides its query heads",
        )


def nests(layout: Layout) -> bool:
    """Whether shards and expert ranks divide the data and context ranks one inside the other."""
    small, large = sorted((layout.shard_degree, layout.expert))
    return large % small == 0 and (layout.data * layout.context) % large == 0


def check_nesting(layout: Layout) -> Iterator[Problem]:
    """Shards and experts are split over the data and context ranks, one inside the other."""
    if nests(layout):
        return
    yield Problem(
        code="L010",
        what=f"{layout.shard_degree} shards and {layout.expert} expert ranks do not nest "
        f"in {layout.data * layout.context} data and context ranks: the larger must divide them, "
        "and the smaller the larger",
        where="layout.expert",
        fix=f"set layout.expert to {gcd(layout.expert, layout.shard_degree)}, or another "
        "layout.shard",
    )


def check_expert_ranks(layout: Layout) -> Iterator[Problem]:
    """The ranks that share the experts are some of the data and context ranks, all alike."""
    num_dp_cp = layout.data * layout.context
    if num_dp_cp % layout.expert:
        yield Problem(
            code="L010",
            what=f"experts are shared by {layout.expert} ranks, which does not divide the "
            f"{num_dp_cp} data x context ranks",
            where="layout.expert",
            fix=f"set layout.expert to a divisor of {num_dp_cp}",
        )


def check_experts(layout: Layout, name: str, num_experts: int) -> Iterator[Problem]:
    """Every rank of the group holds as many experts of a module as every other."""
    if num_experts % layout.expert:
        yield Problem(
            code="L010",
            what=f"layout.expert {layout.expert} does not divide the {num_experts} "
            f"experts of `{name}`",
            where="layout.expert",
            fix=f"set layout.expert to a divisor of {num_experts}",
        )


def check_offload_of(layout: Layout) -> Iterator[Problem]:
    """Where optimizer state can be kept."""
    if layout.offload == "nvme":
        yield Problem(
            code="L024",
            what="optimizer state cannot be kept on the disk: Paceline's own runtime keeps it on "
            "the accelerator or in the host's memory",
            where="layout.offload",
            fix="set layout.offload to cpu, or render the job for an engine that has nvme",
        )
    if layout.offload == "cpu" and not layout.keeps_shards:
        yield Problem(
            code="L024",
            what="parameters and optimizer state are kept in the host's memory by FSDP2, and "
            "layout.sharding is none",
            where="layout.offload",
            fix="set layout.sharding to full, zero1 or zero2, or leave layout.offload out",
        )


def check_compression(
    layout: Layout, kind: str, precision: str = "fp32", *, is_plain: bool = True
) -> Iterator[Problem]:
    """Where gradients can be compressed on their way.

    Args:
        kind: `none`, `bf16`, `fp16` or `powersgd`.
        is_plain: Whether every rank holds whole matrices.
    """
    if kind == "none":
        return
    if layout.keeps_shards:
        yield Problem(
            code="L024",
            what=f"gradients are compressed ({kind}) in an all-reduce, and sharding "
            f"{layout.sharding} reduce-scatters them, in float32",
            where="train.gradient_compression",
            fix="set layout.sharding to none, or leave train.gradient_compression out",
        )
    elif kind == "powersgd" and not is_plain:
        yield Problem(
            code="L024",
            what="PowerSGD needs whole matrices, and tensor, expert or pipeline ranks hold parts",
            where="train.gradient_compression",
            fix="set it to bf16, or split the work over data ranks alone",
        )
    elif kind == "powersgd" and precision == "fp16":
        yield Problem(
            code="L024",
            what="PowerSGD carries errors from step to step, and in fp16 the loss scale that they "
            "are multiplied by changes between steps",
            where="train.gradient_compression",
            fix="set it to bf16, or train.precision to bf16",
        )


def check_all_reduce(
    layout: Layout,
    *,
    is_plain: bool = True,
    bucket_bytes: int | None = None,
    static_graph: bool = False,
) -> Iterator[Problem]:
    """What is asked of the all-reduce of whole gradients, where the layout has no such thing. On
    one rank nothing is reduced, and nothing refused."""
    if layout.num_ranks == 1:
        return
    if bucket_bytes is not None and layout.keeps_shards:
        yield Problem(
            code="L024",
            what=f"gradients go in buckets of a given size only in an all-reduce, and sharding "
            f"{layout.sharding} reduce-scatters them block by block",
            where="train.bucket",
            fix="set layout.sharding to none, or leave train.bucket out",
        )
    if static_graph and (layout.keeps_shards or not is_plain):
        has = f"sharding {layout.sharding}" if layout.keeps_shards else layout.name
        yield Problem(
            code="L024",
            what=f"a static graph is promised to DDP, and {has} does without DDP",
            where="train.static_graph",
            fix="leave train.static_graph out, or split the work over data ranks alone, unsharded",
        )
    elif static_graph and layout.accumulation > 1:
        yield Problem(
            code="L024",
            what=f"a static graph is learnt by DDP in its first backward pass, which must reduce, "
            f"and with {layout.accumulation} micro-batches in a step only the last one reduces "
            "(torch 2.13: `expect_autograd_hooks_` INTERNAL ASSERT)",
            where="train.static_graph",
            fix="leave train.static_graph out, or make accumulation 1 with a larger micro-batch",
        )
