"""Which layouts are possible, and what clashes."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from paceline.catalog.engines import load_engines
from paceline.errors import JobError, Problem
from paceline.estimate import Case, case_of, price, price_one
from paceline.estimate.step import slow_end
from paceline.job import LayoutSpec, parse_job
from paceline.parallel import (
    Layout,
    Space,
    abilities_of,
    check_layout_choices,
    grids,
    reasons_ours_cannot,
)
from paceline.parallel.abilities import Abilities
from paceline.parallel.candidates import candidates
from paceline.parallel.degrees import divides_model, divisors
from paceline.parallel.stages import num_stages
from paceline.plan.search import estimates_of, fastest, grid_bytes, grid_seconds, search
from paceline.plan.search_inputs import space_of
from paceline.profile import resolve_profile
from paceline.topology import Machine, find_cluster

JOB = """\
model: {decoder: {layers: 6, hidden: 64, heads: 4, kv_heads: 2}}
data: {path: x, seq_len: 64}
cluster: {accelerator: H100-SXM, per_node: 8}
train: {global_batch: 64, steps: 100}
"""
HERE = Machine(
    num_cores=2,
    clock_hz=2.6e9,
    simd_bytes=64,
    has_bf16=True,
    memory_bytes=2**34,
    available_bytes=2**34,
    gpus=(),
)

ONLY_DATA = Abilities(
    shardings=("none", "full"),
    schedules=(),
    context_kinds=(),
    recomputes=("none",),
    offloads=("none",),
    tensor=False,
    expert=False,
)


def space(num_ranks: int, *overrides: str, text: str = JOB) -> Space:
    job = parse_job(text, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)
    cluster = find_cluster(job.spec.cluster, job, HERE)
    return replace(space_of(job, cluster, resolve_profile(job)), num_ranks=num_ranks)


def problems(num_ranks: int, *overrides: str, text: str = JOB) -> list[Problem]:
    job = parse_job(text, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)
    return list(check_layout_choices(job, space(num_ranks, *overrides, text=text)))


def only(num_ranks: int, *overrides: str, text: str = JOB) -> Problem:
    (problem,) = problems(num_ranks, *overrides, text=text)
    return problem


def rows(asked: Space) -> list[Layout]:
    table = candidates(asked)
    return [table.row(index) for index in range(len(table))]


def local(num_ranks: int, global_batch: int, fixed: LayoutSpec | None = None) -> list[Layout]:
    asked = space(num_ranks)
    return rows(
        replace(asked, global_batch=global_batch, fixed=fixed or LayoutSpec(), abilities=ONLY_DATA)
    )


def test_every_candidate_computes_the_whole_batch():
    layouts = local(4, 48)
    assert all(layout.global_batch == 48 for layout in layouts)
    assert {layout.micro_batch for layout in layouts} == {12, 6, 4, 3, 2, 1}
    assert len(layouts) == len(set(layouts)) == 6 + 6 + 5


def test_one_rank_is_not_sharded():
    assert {layout.sharding for layout in local(1, 8)} == {"none"}


def test_what_the_job_fixed_stays_fixed():
    (layout,) = local(2, 16, LayoutSpec(sharding="none", micro_batch=4))
    assert layout == Layout(data=2, sharding="none", micro_batch=4, accumulation=2)


def test_reducing_each_time_is_only_tried_where_it_differs():
    for layout in rows(space(8)):
        if layout.reduce_every_micro_batch:
            assert layout.sharding in ("full", "hybrid")
            assert layout.accumulation > 1


def test_a_batch_that_does_not_divide_has_no_candidates():
    assert local(2, 7) == []


def brute_force(asked: Space) -> set[Layout]:
    """Every combination of every field that obeys the laws, one object at a time."""
    ranks, batch, blocks = asked.num_ranks, asked.global_batch, asked.profile.num_blocks
    seq_len = asked.profile.seq_len or 1
    small = divisors(ranks)
    found = set()
    orders = [("1f1b", 1), ("zero-bubble", 1), ("zero-bubble", 2), ("dualpipe-v", 1)]
    orders += [("interleaved", chunks) for chunks in range(2, blocks + 1)]
    orders += [("zero-bubble", chunks) for chunks in range(3, blocks + 1)]
    again = [("none", 1), ("selective", 1), ("full", 1), ("full", 2), ("full", 4)]
    for tensor, pipeline, context, kind in product(small, small, small, ("ring", "ulysses")):
        data, rest = divmod(ranks, tensor * pipeline * context)
        if rest or batch % data or pipeline > blocks or not divides_model(asked.profile, tensor):
            continue
        if context == 1 and kind == "ulysses":
            continue
        if kind == "ring" and context > 1 and seq_len % (2 * context):
            continue
        if kind == "ulysses" and 4 % (tensor * context):
            continue
        group = data * context
        shares = [("none", None, False)]
        if group > 1:
            shares += [("zero1", None, False), ("zero2", None, False)]
            shares += [("full", None, each) for each in (False, True)]
            shares += [
                ("hybrid", n, each)
                for n in divisors(group)
                if 1 < n < group
                for each in (False, True)
            ]
        for micro, (order, chunks), share, recompute in product(
            divisors(batch // data), orders, shares, again
        ):
            steps = batch // data // micro
            if pipeline == 1 and (order, chunks) != ("1f1b", 1):
                continue
            if pipeline > 1 and steps < pipeline * (2 if order == "dualpipe-v" else 1):
                continue
            is_looped = order in ("interleaved", "zero-bubble") and (order, chunks) != (
                "zero-bubble",
                2,
            )
            if is_looped and pipeline > 1 and steps % max(1, steps // pipeline):
                continue
            if (order, chunks) != ("zero-bubble", 2) and -(-blocks // pipeline) % chunks:
                continue
            if pipeline > 1 and pipeline * (2 if order == "dualpipe-v" else chunks) > blocks:
                continue
            if pipeline > 1 and (share[0] == "zero2" or share[2]):
                continue
            if order in ("zero-bubble", "dualpipe-v") and recompute[0] == "selective":
                continue
            if share[2] and steps == 1:
                continue
            stages = pipeline * (2 if order == "dualpipe-v" else chunks)
            if pipeline > 1 and -(-blocks // stages) % recompute[1]:
                continue
            found.add(
                Layout(
                    data=data,
                    sharding=share[0],  # type: ignore[arg-type]
                    shard=share[1],
                    reduce_every_micro_batch=share[2],
                    micro_batch=micro,
                    accumulation=steps,
                    tensor=tensor,
                    pipeline=pipeline,
                    schedule=order,  # type: ignore[arg-type]
                    chunks=chunks,
                    context=context,
                    context_kind=kind,  # type: ignore[arg-type]
                    recompute=recompute[0],  # type: ignore[arg-type]
                    recompute_every=recompute[1],
                )
            )
    return found


@pytest.mark.parametrize(("num_ranks", "batch"), [(1, 4), (4, 8), (6, 12), (8, 16), (12, 24)])
def test_the_table_has_every_layout_that_obeys_the_laws_once(num_ranks: int, batch: int):
    asked = replace(space(num_ranks), global_batch=batch)
    layouts = rows(asked)
    assert len(layouts) == len(set(layouts))
    assert set(layouts) == brute_force(asked)


def case(asked: Space, engine: str = "paceline") -> Case:
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"))
    cluster = find_cluster(job.spec.cluster, job, HERE)
    return case_of(asked.profile, cluster, precision="bf16", engine=load_engines()[engine])


def test_a_grid_is_priced_as_its_layouts_are_one_by_one():
    asked = replace(space(8), global_batch=16)
    asked_case = case(asked)
    for grid in grids(asked, max_cells=3000):
        memory = grid_bytes(grid.layouts, asked_case)
        step = grid_seconds(grid.layouts, asked_case)
        table = grid.layouts.take(grid.is_possible)
        prices = price(table, asked_case)
        assert np.allclose(memory[grid.is_possible], prices.memory_bytes, rtol=1e-9)
        assert np.allclose(step[grid.is_possible], slow_end(prices.terms), rtol=1e-9)


def test_no_seconds_are_priced_where_nothing_fits(monkeypatch: pytest.MonkeyPatch):
    def not_needed(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("paceline.plan.search.grid_seconds", not_needed)
    asked = replace(space(8), global_batch=16)
    found = search(asked, case(asked), limit_bytes=1.0, margin=0.05)
    assert found.num_layouts > 0 == found.num_fitting
    assert found.leanest.memory_bytes.size


@pytest.mark.parametrize("engine", ["paceline", "megatron", "torchtitan", "deepspeed"])
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_the_search_finds_what_pricing_each_layout_alone_finds(engine: str, share: float):
    asked = replace(space(8), global_batch=16, abilities=abilities_of(engine))
    asked_case = case(asked, engine)
    every = list(estimates_of(candidates(asked), asked_case))
    for layout, estimate in every[::97]:
        assert price_one(layout, asked_case) == estimate
    sizes = [estimate.memory.known_bytes for _, estimate in every]
    # Bytes are rounded in an estimate, so the limit is a little off any of them.
    limit = min(sizes) + share * (max(sizes) - min(sizes)) + 16
    found = search(asked, asked_case, limit_bytes=limit, margin=0.05)
    fitting = [e for _, e in every if e.memory.known_bytes <= limit]
    best = min(e.step_high_s or 0.0 for e in fitting)
    assert found.num_layouts == len(every)
    assert found.num_fitting == len(fitting)
    assert found.near is not None
    assert float(found.near.step_s.min()) == pytest.approx(best)
    assert len(found.near) == sum((e.step_high_s or 0.0) <= best * 1.05 for e in fitting)
    (fast, price_of_fast), *_ = fastest(asked, asked_case, limit_bytes=limit, count=3)
    assert price_of_fast.step_high_s == pytest.approx(best)
    assert fast in {layout for layout, _ in every}


def test_s1_8_64_gpus_can_be_tensor_8_pipeline_4_data_2():
    asked = space(64, "model={preset: llama-3-70b}", "data.seq_len=8192")
    degrees = {(each.tensor, each.pipeline, each.data) for each in _few(asked)}
    assert (8, 4, 2) in degrees


def _few(asked: Space) -> list[Layout]:
    return [
        grid.layouts.row(int(np.flatnonzero(grid.is_possible)[n]))
        for grid in grids(asked)
        if grid.is_possible.any()
        for n in range(0, int(grid.is_possible.sum()), 97)
    ]


def test_degrees_need_not_be_powers_of_two():
    asked = space(
        24,
        "model.decoder.heads=12",
        "model.decoder.hidden=96",
        "model.decoder.kv_heads=12",
        "model.decoder.ffn=96",
        "train.global_batch=24",
        "data.seq_len=96",
    )
    asked = replace(asked, domain=24)
    layouts = _few(asked)
    assert {3, 6, 12} <= {each.tensor for each in layouts}
    assert 3 in {each.pipeline for each in layouts}


def test_experts_are_shared_by_data_and_context_ranks():
    asked = space(16, "model={preset: mixtral-8x7b}", "data.seq_len=4096")
    layouts = _few(asked)
    assert {each.expert for each in layouts} == {1, 2, 4, 8}
    assert all(each.data * each.context % each.expert == 0 for each in layouts)


def test_a_batch_that_does_not_divide_names_the_nearest_that_do():
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"))
    (problem,) = check_layout_choices(job, replace(space(6), abilities=ONLY_DATA))
    assert problem.code == "L001"
    assert "64 does not divide over 6 ranks" in problem.what
    assert problem.fix == "set train.global_batch to 60 or 66, or cluster.per_node to 4"


def test_a_batch_smaller_than_the_ranks_names_only_the_larger():
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"))
    (problem,) = check_layout_choices(job, replace(space(100), abilities=ONLY_DATA))
    assert problem.fix.startswith("set train.global_batch to 100, or cluster.per_node to 64")


DATA = ("layout.tensor=1", "layout.pipeline=1", "layout.context=1")


def test_a_micro_batch_that_does_not_divide_names_the_nearest():
    problem = only(8, "layout.micro_batch=3", *DATA)
    assert problem.code == "L002"
    assert "3 does not divide the 8 samples of a rank" in problem.what
    assert problem.fix == "set layout.micro_batch to 2 or 4, or train.global_batch to 48 or 72"


def test_choices_that_go_together_are_no_problem():
    assert problems(8, "layout.micro_batch=4") == []
    assert problems(8, "layout.tensor=2", "layout.pipeline=2", "layout.chunks=3") == []


def test_a_tensor_degree_advised_for_the_ranks_divides_the_model_too():
    """8 divides the ranks; `L005` would refuse it for the 2 key and value heads."""
    of_ranks, of_model = problems(8, "layout.tensor=16")
    assert (of_ranks.code, of_model.code) == ("L004", "L005")
    assert of_ranks.fix == "set layout.tensor to 2, or leave it out"
    assert of_model.fix.startswith("set layout.tensor to 2;")


@pytest.mark.parametrize(
    ("field", "degree", "overrides"),
    [
        ("pipeline", 4, ("layout.pipeline=16",)),  # 8 divides the ranks; the model has 6 blocks
        ("context", 2, ("layout.context=16", "data.seq_len=36")),  # 4 x 2 does not divide 36
    ],
)
def test_s1_6_a_degree_advised_for_the_ranks_goes_with_the_model_as_well(field, degree, overrides):
    of_ranks = problems(8, *overrides)[0]
    assert of_ranks.code == "L004"
    assert of_ranks.fix == f"set layout.{field} to {degree}, or leave it out"
    assert problems(8, *overrides, f"layout.{field}={degree}") == []


@pytest.mark.parametrize(
    ("code", "what", "fix", "overrides"),
    [
        (
            "L004",
            "tensor 2 x pipeline 3 is 6, which does not divide the 8 ranks",
            "set layout.pipeline to 2",
            ("layout.tensor=2", "layout.pipeline=3"),
        ),
        (
            "L004",
            "data 3, which does not divide the 8 ranks",
            "set layout.data to 2",
            ("layout.data=3",),
        ),
        (
            "L004",
            "data 2 x tensor 2 x pipeline 1 x context 1 is 4, and there are 8 ranks",
            "or leave one of them out",
            ("layout.data=2", "layout.tensor=2", "layout.pipeline=1", "layout.context=1"),
        ),
        (
            "L005",
            "tensor 4 does not divide 2 key and value heads",
            "set layout.tensor to 2",
            ("layout.tensor=4",),
        ),
        (
            "L006",
            "8 stages, and the model has 6 blocks",
            "set layout.pipeline to 4",
            ("layout.pipeline=8",),
        ),
        (
            "L006",
            "schedule is gpipe, and layout.pipeline is 1",
            "2 or more",
            ("layout.pipeline=1", "layout.schedule=gpipe"),
        ),
        (
            "L007",
            "needs at least 4 micro-batches",
            "set train.global_batch to 128",
            ("layout.pipeline=4", "layout.tensor=1", "layout.context=1", "layout.micro_batch=16"),
        ),
        (
            "L008",
            "pipeline 2 x 4 virtual stages is 8 stages, and the model has",
            "set layout.chunks to 3",
            ("layout.pipeline=2", "layout.chunks=4"),
        ),
        (
            "L008",
            "schedule 1f1b has one",
            "interleaved",
            ("layout.schedule=1f1b", "layout.chunks=3"),
        ),
        (
            "L009",
            "context 8 x 2 does not divide data.seq_len 72",
            "set data.seq_len to 80",
            ("layout.context=8", "data.seq_len=72"),
        ),
        (
            "L009",
            "4 heads / tensor 1 / context 8 is not a whole number",
            "set layout.context to 4",
            ("layout.context=8", "layout.context_kind=ulysses"),
        ),
        (
            "L010",
            "the model has no routed experts",
            "leave layout.expert out",
            ("layout.expert=2",),
        ),
        (
            "L010",
            "expert 3 does not divide 8 experts",
            "set layout.expert to 2",
            ("layout.expert=3", "model={preset: mixtral-8x7b}"),
        ),
        (
            "L010",
            "which hold the experts; Megatron's parallel folding (--expert-tensor-parallel-size, ",
            "set layout.expert to 2, or layout.tensor or layout.pipeline lower",
            (
                "layout.expert=8",
                "layout.tensor=4",
                "model={preset: mixtral-8x7b}",
                "engine=megatron",
            ),
        ),
        (
            "L011",
            "sharding full has no groups",
            "hybrid",
            ("layout.sharding=full", "layout.shard=4"),
        ),
        (
            "L011",
            "shard 3 does not divide 8 ranks",
            "set layout.shard to 2",
            ("layout.sharding=hybrid", "layout.shard=3"),
        ),
        (
            "L012",
            "does not write for megatron: its files have none, zero1",
            "torchtitan",
            ("engine=megatron", "layout.sharding=full"),
        ),
        (
            "L012",
            "does not write for fsdp1: its files have no tensor parallelism",
            "torchtitan",
            ("engine=fsdp1", "layout.tensor=2"),
        ),
        (
            "L013",
            "recompute is none",
            "set layout.recompute to full",
            ("layout.recompute=none", "layout.recompute_every=2"),
        ),
    ],
)
def test_choices_that_clash_say_their_numbers_and_the_fix(
    code: str, what: str, fix: str, overrides: tuple[str, ...]
):
    problem = only(8, *overrides)
    assert problem.code == code
    assert what in problem.what
    assert fix in problem.fix
    assert len(str(problem)) < 700


def test_nothing_left_possible_is_said_with_all_that_was_fixed():
    problem = only(
        8,
        "layout.schedule=dualpipe-v",
        "layout.pipeline=4",
        "layout.micro_batch=8",
        "layout.sharding=hybrid",
        "train.global_batch=32",
    )
    assert problem.code in ("L007", "L014")
    wanted = "leave layout.sharding or layout.pipeline", "set train.global_batch"
    assert problem.fix.startswith(wanted)
    assert "None" not in problem.what


def test_what_our_runtime_lacks_is_named():
    layout = Layout(
        data=4, sharding="hybrid", shard=2, expert=3, micro_batch=1, accumulation=4, offload="nvme"
    )
    assert list(reasons_ours_cannot(layout)) == [
        "offload nvme",
        "2 shards with 3 expert ranks: neither divides",
    ]


def test_our_runtime_has_every_axis():
    layout = Layout(
        data=4,
        sharding="hybrid",
        shard=2,
        expert=2,
        micro_batch=1,
        accumulation=4,
        tensor=2,
        context=2,
        pipeline=4,
        recompute="full",
    )
    assert not list(reasons_ours_cannot(layout))


@pytest.mark.parametrize(
    ("override", "field", "values"),
    [
        ("layout.schedule=interleaved", "schedule", {"interleaved"}),
        ("layout.schedule=dualpipe-v", "schedule", {"dualpipe-v"}),
        ("layout.schedule=gpipe", "schedule", {"gpipe"}),
        ("layout.chunks=3", "chunks", {3}),
        ("layout.recompute_every=4", "recompute_every", {4}),
        ("layout.shard=2", "shard", {2}),
    ],
)
def test_a_choice_that_asks_for_another_one_is_obeyed(override: str, field: str, values: set[int]):
    found = rows(space(8, override))
    assert {getattr(layout, field) for layout in found} == values
    assert problems(8, override) == []
    if field in ("schedule", "chunks"):
        assert all(layout.pipeline >= 2 for layout in found)
    if field == "recompute_every":
        assert {layout.recompute for layout in found} == {"full"}
    if field == "shard":
        assert {layout.sharding for layout in found} == {"hybrid"}


def test_a_choice_that_asks_for_what_the_engine_lacks_is_refused_by_its_own_name():
    problem = only(8, "layout.chunks=3", "engine=deepspeed")
    assert problem.code == "L012"
    assert problem.what.startswith("layout.chunks is 3")
    assert "of schedule interleaved" in problem.what
    assert only(8, "layout.shard=2", "engine=megatron").what.startswith("layout.shard is 2")


def test_chunks_without_a_pipeline_are_a_contradiction():
    assert only(8, "layout.chunks=3", "layout.pipeline=1").code == "L006"


def test_more_blocks_between_recomputed_ones_than_there_are_is_refused():
    assert only(8, "layout.recompute_every=7").fix == "set layout.recompute_every to 6 or less"


def test_one_block_in_so_many_is_one_of_each_stage():
    """Engines recompute it of each virtual stage: of one block, or of three, not one in two."""
    whole = [each for each in rows(space(8)) if each.recompute_every > 1 and each.pipeline > 1]
    assert whole
    for each in whole:
        on_stage = -(-6 // num_stages(each))
        assert on_stage % each.recompute_every == 0, each
    problem = only(8, "layout.pipeline=2", "layout.recompute_every=2")
    assert (problem.code, problem.fix) == ("L013", "set layout.recompute_every to 3 or 1")
    assert "each of 2 stages has 3 blocks, which do not divide into groups of 2" in problem.what


def test_a_number_of_chunks_that_was_refused_is_not_suggested():
    """Of 5 blocks on 2 stages, 3 chunks did not divide 3, and were to be set to 3."""
    problem = only(8, "model.decoder.layers=5", "layout.pipeline=2", "layout.chunks=3")
    assert "6 stages, and the model has 5 blocks" in problem.what
    assert problem.fix.startswith("leave layout.chunks out")


def test_a_number_of_stages_that_is_suggested_works():
    fix = only(16, "layout.pipeline=8", "train.global_batch=16").fix
    degree = fix.removeprefix("set layout.pipeline to ")
    assert degree.isdigit()
    assert problems(16, f"layout.pipeline={degree}", "train.global_batch=16") == []


def test_divisors_of_an_absurd_number_are_refused_at_once():
    with pytest.raises(ValueError, match="not looked for"):
        divisors(10**20)


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("train.global_batch=100000000000000000000", "1e+20 samples"),
        ("train.global_batch=1000000000000", "1e+12 samples"),
        ("cluster.nodes=1000000000", "1e+09 ranks"),
        ("cluster.per_node=2000000", "2e+06 ranks on all nodes"),
    ],
)
def test_s4_21_absurd_numbers_are_refused_with_the_most_there_are(override: str, what: str):
    with pytest.raises(JobError, match="J010") as raised:
        space(8, override)
    (problem,) = raised.value.problems
    assert what in problem.what
    assert "at most" in problem.fix


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "full"])
def test_a_sharding_that_is_asked_for_is_over_several_ranks(sharding: str):
    asked = space(4, f"layout.sharding={sharding}")
    assert {each.shard_degree for each in _few(asked)} >= {2, 4}
    assert all(each.shard_degree > 1 for each in _few(asked))
    alone = space(1, f"layout.sharding={sharding}")
    assert {each.shard_degree for each in _few(alone)} == {1}
