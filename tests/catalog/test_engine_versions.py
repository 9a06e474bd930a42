"""Facts of an engine by its version, and what its types and optimizer make of memory."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.catalog.engines import as_asked, compiled, find_engine, load_engines
from paceline.estimate import Case, case_of, price_one, stage_memory
from paceline.job import parse_job
from paceline.parallel import Layout
from paceline.profile import resolve_profile
from paceline.profile.block import matrices, second_shares
from paceline.topology import find_cluster

JOB = """\
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, nodes: 1, per_node: 8}
train: {global_batch: 64, steps: 100}
"""
DATA = Layout(data=8, sharding="full", micro_batch=1, accumulation=2, reduce_every_micro_batch=True)
"""Shards of gradients add up from the first micro-batch to the second."""
ONCE = replace(DATA, accumulation=1)


def case(engine: str, *, optimizer: str = "adamw", nodes: int = 1, seq_len: int = 4096) -> Case:
    changes = (f"cluster.nodes={nodes}", f"data.seq_len={seq_len}")
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=changes)
    return case_of(
        resolve_profile(job),
        find_cluster(job.spec.cluster, job),
        precision="bf16",
        optimizer=optimizer,
        engine=find_engine(*engine.split()),
    )


@pytest.mark.parametrize(
    ("name", "year", "kernel"),
    [
        ("fsdp1", None, "flash2"),
        ("fsdp1 0.21", None, "flash2"),
        ("fsdp1 0.6.0", None, "flash1"),
        ("fsdp1 0.6.0", 2025, "flash1"),
        ("fsdp1", 2023, "flash1"),
        ("fsdp1", 2024, "flash2"),
    ],
)
def test_a_version_or_else_the_year_says_which_kernel_ran(name, year, kernel):
    found = find_engine(*name.split(), year=year)
    assert (found.name, found.attention) == ("fsdp1", kernel)


def test_an_older_bound_is_laid_over_a_newer_one():
    kept = [find_engine("torchtune", v).loss_peak_bytes for v in ("0.2", "0.6", "0.7")]
    assert kept == [8, 2.5, 1]


def test_every_fact_of_an_older_version_is_a_field_of_the_engine():
    for name, engine in load_engines().items():
        oldest = find_engine(name, year=2000)
        assert replace(oldest, version="").name == engine.name


def test_torchtune_trains_16_bit_parameters_and_torchtitan_float32_ones():
    n = case("torchtune").profile.num_parameters
    tune, titan = (price_one(DATA, case(name)).memory.parts for name in ("torchtune", "torchtitan"))
    states = ("parameters", "gradients", "optimizer", "master copy")
    assert sum(tune[part] or 0 for part in states) == pytest.approx((2 + 2 + 4) * n / 8, rel=1e-6)
    assert sum(titan[part] or 0 for part in states) == pytest.approx((4 + 4 + 8) * n / 8, rel=1e-6)


@pytest.mark.parametrize("engine", ["torchtune", "paceline"])
def test_moments_of_8_bits_are_not_halved_with_16_bit_weights(engine: str):
    each = case(engine, optimizer="adamw-8bit")
    held = price_one(DATA, each).memory.parts["optimizer"]
    assert held == pytest.approx(2.03 * each.profile.num_parameters / 8, rel=1e-6)


def test_accelerates_fsdp_trains_float32_shards_of_16_bit_weights_since_0_30():
    n = case("accelerate").profile.num_parameters
    states = ("parameters", "gradients", "optimizer")

    def held(engine: str, layout: Layout) -> float:
        parts = price_one(layout, case(engine)).memory.parts
        return sum(parts[part] or 0 for part in states)

    replicas = replace(DATA, sharding="none")
    assert held("accelerate", DATA) == pytest.approx(16 * n / 8, rel=1e-6)
    assert held("accelerate 0.29", DATA) == pytest.approx(8 * n / 8, rel=1e-6)
    assert held("accelerate", replicas) == pytest.approx(8 * n, rel=1e-6)


def test_hugging_faces_trainer_keeps_the_embeddings_moments_in_float32():
    each = case("accelerate", optimizer="adamw-8bit")
    embedding = each.profile.num_embedding_parameters
    rest = each.profile.num_parameters - embedding
    held = price_one(DATA, each).memory.parts["optimizer"]
    assert held == pytest.approx((8 * embedding + 2.03 * rest) / 8, rel=1e-4)


def test_torchtitans_selective_recompute_keeps_every_second_product():
    layout = replace(DATA, recompute="selective")
    (block,) = case("torchtitan").profile.blocks
    shares = dict(zip((m.name for m in matrices(block)), second_shares(block), strict=True))
    assert {name: share for name, share in shares.items() if share} == {
        "key_value": 0.5,
        "attention_output": 1,
        "up": 0.5,
    }
    half, every = (
        price_one(layout, case(name)).memory.parts["activations"] or 0
        for name in ("torchtitan 0.2.2", "automodel")
    )
    tokens, blocks = 4096, 32
    dropped = 1024 + 4096 + 14336  # key, attention's output matrix, up
    assert every - half == pytest.approx(2 * dropped * tokens * blocks, rel=0.03)


def test_second_products_cost_their_own_flops_and_not_half_of_all():
    layout = replace(DATA, recompute="selective", micro_batch=8)
    each = case("torchtitan")
    assert each.rates is not None
    without = replace(each, rates=replace(each.rates, second_products=0.0))
    again = (
        price_one(layout, each).terms["recompute"] - price_one(layout, without).terms["recompute"]
    )
    whole = price_one(replace(layout, recompute="full"), each).terms["recompute"]
    assert 0.25 * whole < again < 0.37 * whole


def test_megatrons_selective_recompute_does_attention_again_with_a_flash_kernel():
    layout = Layout(data=8, sharding="zero1", micro_batch=1, accumulation=1, recompute="selective")
    none = replace(layout, recompute="none")
    terms = [price_one(each, case("megatron")).terms["recompute"] for each in (layout, none)]
    assert terms[0] > 0 == terms[1]


def test_a_compiled_model_passes_less_over_memory():
    each = case("paceline")
    quick = case_of(
        each.profile,
        each.cluster,
        precision="bf16",
        engine=compiled(load_engines()["paceline"]),
    )
    slow, fast = (price_one(DATA, c).terms["compute"] for c in (each, quick))
    assert fast < slow


def of_modules(*names: str, recompute: str = "selective") -> tuple[float, float]:
    """Bytes of activations and seconds of recomputing of DeepSeek-V2-Lite with Megatron."""
    job = parse_job(
        JOB.replace("llama-3-8b", "deepseek-v2-lite"), source="job.yaml", folder=Path("/nowhere")
    )
    each = case_of(
        resolve_profile(job),
        find_cluster(job.spec.cluster, job),
        precision="bf16",
        engine=replace(find_engine("megatron"), recompute_modules=names),
    )
    layout = Layout(
        data=8, sharding="zero1", micro_batch=4, accumulation=1, expert=8, recompute=recompute
    )  # type: ignore[arg-type]
    estimate = price_one(layout, each)
    return estimate.memory.parts["activations"] or 0, estimate.terms["recompute"]


def test_more_modules_done_again_keep_less_and_take_longer():
    names = ("layernorm", "moe_act", "mla_up_proj", "shared_experts", "moe")
    one_by_one = [of_modules(*names[:count]) for count in range(len(names) + 1)]
    kept, seconds = zip(*one_by_one, strict=True)
    assert list(kept) == sorted(kept, reverse=True)
    assert list(seconds) == sorted(seconds)
    assert of_modules(recompute="full")[0] < kept[-1] < kept[0] / 2
    assert seconds[-1] < of_modules(recompute="full")[1]


def test_torchtitans_loss_is_in_chunks_since_0_3_and_its_ends_are_units_since_0_2():
    layout = replace(DATA, micro_batch=4)
    parts = {v: price_one(layout, case(f"torchtitan {v}")).memory.parts for v in ("0.3", "0.2.2")}
    logits = 4 * 4096 * 128256
    dropped = (parts["0.2.2"]["activations"] or 0) - (parts["0.3"]["activations"] or 0)
    assert dropped > 4 * logits * 7 / 8
    together = case("torchtitan 0.1.0")
    ends = together.profile.num_root_parameters
    small = replace(DATA, data=8, recompute="full")
    root = [
        price_one(small, each).memory.parts["gathered"] or 0
        for each in (together, case("torchtitan 0.2.2"))
    ]
    # Around the loss only the output matrix is gathered, not the embedding with it.
    assert root[0] - root[1] == pytest.approx(2 * ends / 2, rel=0.01)


def test_torchtitans_pipeline_gathers_and_reduces_once_a_step_as_torchs_schedules_do():
    layout = Layout(data=4, sharding="full", micro_batch=1, accumulation=8, pipeline=2)
    now = case("torchtitan 0.2.2")
    each_time = replace(now, engine=replace(now.engine, ways=()))
    once, often = (price_one(layout, c) for c in (now, each_time))
    stage = now.profile.num_parameters / 2
    more = (once.memory.parts["gathered"] or 0) - (often.memory.parts["gathered"] or 0)
    assert 0.6 * 2 * stage < more < 2 * stage
    assert (once.memory.parts["gradients"] or 0) > 3.9 * stage
    assert once.terms["data"] != often.terms["data"]


def test_torchtitans_oldest_loss_is_not_compiled_and_copies_split_logits_once_more():
    """Its peaks were all estimated too low."""
    wide = replace(ONCE, data=1, sharding="none", tensor=8, sequence_parallel=True, micro_batch=16)
    old, new = (
        price_one(wide, case(f"torchtitan {v}")).memory.parts["activations"] or 0
        for v in ("0.0.2", "0.1.0")
    )
    assert old - new == pytest.approx((2 + 4) * 16 * 4096 * 128256 / 8, rel=0.01)


def test_what_fsdps_streams_have_reserved_is_not_the_compute_streams():
    """Shards of gradients are reserved though they are not there at the loss; so are the buffers
    that two units are gathered in."""
    each = case("torchtitan 0.1.0")
    without = replace(each, engine=replace(each.engine, ways=("frees_gradients",)))
    more, less = (price_one(ONCE, c).memory.parts["slack"] or 0 for c in (each, without))
    profile = each.profile
    gathered = 2 * (profile.num_root_parameters + profile.num_block_parameters)
    assert more - less == pytest.approx(4 * profile.num_parameters / 8 + gathered, rel=1e-3)


def test_torchtitan_gathers_keys_and_values_where_a_ring_passes_them_round():
    layout = replace(DATA, data=1, sharding="none", context=64, micro_batch=1)
    each = case("torchtitan", nodes=8, seq_len=131072)
    ring = replace(each, engine=replace(each.engine, gathers_context=False))
    gathered, passed = (price_one(layout, c) for c in (each, ring))
    assert gathered.terms["context"] > passed.terms["context"] > 0
    assert gathered.terms["compute"] == passed.terms["compute"]


def test_nanotron_fills_its_stages_from_the_first_and_our_own_runtime_does_not():
    layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=8, pipeline=6)
    held = {
        name: [stage.parts["parameters"] or 0 for stage in stage_memory(layout, case(name))]
        for name in ("nanotron", "paceline")
    }
    embedding = case("nanotron").profile.num_embedding_parameters
    first, second, *_ = held["nanotron"]
    assert first - 2 * embedding == pytest.approx(second, rel=1e-6)
    first, second, *_ = held["paceline"]
    assert first - 4 * embedding < 0.9 * second


def test_one_scale_for_each_row_is_cast_twice_and_one_for_each_tensor_once():
    each = case("megatron")
    seconds = []
    for recipe in ("auto", "tensorwise", "rowwise"):
        engine = as_asked(find_engine("megatron"), fp8_recipe=recipe)
        priced = case_of(each.profile, each.cluster, precision="fp8", engine=engine)
        seconds.append(price_one(replace(DATA, sharding="zero1"), priced).terms["compute"])
    assert seconds[0] == seconds[1] < seconds[2]


def test_async_tensor_parallelism_hides_part_of_its_collectives():
    each = case("torchtitan")
    engine = as_asked(each.engine, async_tensor=True)
    asked = case_of(each.profile, each.cluster, precision="bf16", engine=engine)
    layout = replace(DATA, data=1, tensor=8, sharding="none", sequence_parallel=True)
    plain, hidden = (price_one(layout, c).terms["tensor"] for c in (each, asked))
    assert 0.5 * plain < hidden < 0.8 * plain


def test_expert_exchange_is_hidden_but_for_the_ends_of_a_step():
    text = JOB.replace("llama-3-8b", "mixtral-8x7b")
    job = parse_job(text, source="job.yaml", folder=Path("/nowhere"))
    profile, cluster = resolve_profile(job), find_cluster(job.spec.cluster, job)
    seconds = {}
    for hidden in (False, True):
        engine = as_asked(find_engine("megatron"), async_expert=hidden)
        asked = case_of(profile, cluster, precision="bf16", engine=engine)
        for steps in (1, 4):
            layout = replace(DATA, sharding="zero1", expert=8, accumulation=steps)
            seconds[hidden, steps] = price_one(layout, asked).terms["expert"]
    assert seconds[True, 1] == pytest.approx(seconds[False, 1])
    assert seconds[True, 4] == pytest.approx(seconds[False, 4] / 4)


def test_an_exchange_is_hidden_for_no_longer_than_another_micro_batch_computes():
    text = JOB.replace("llama-3-8b", "mixtral-8x7b")
    text = text.replace("nodes: 1", "nodes: 8, network: 1 Gb/s")
    job = parse_job(text, source="job.yaml", folder=Path("/nowhere"))
    profile, cluster = resolve_profile(job), find_cluster(job.spec.cluster, job)
    terms = {}
    for hidden in (False, True):
        engine = as_asked(find_engine("megatron"), async_expert=hidden)
        asked = case_of(profile, cluster, precision="bf16", engine=engine)
        layout = replace(DATA, sharding="zero1", expert=8, tensor=8, sequence_parallel=False)
        terms[hidden] = price_one(layout, asked).terms
    sent, computed = terms[False]["expert"], terms[False]["compute"]
    assert sent > 2 * computed
    assert terms[True]["expert"] > sent - computed


def test_hfu_counts_what_selective_recompute_multiplies_again():
    """torchtitan repeats every second product: key or value, output, and up or gate."""
    layout = replace(DATA, recompute="selective")
    found = price_one(layout, case("torchtitan"))
    hidden, ffn, narrow = 4096, 14336, 1024
    again = hidden * narrow + hidden * hidden + hidden * ffn
    block = 2 * hidden * narrow + 2 * hidden * hidden + 3 * hidden * ffn
    attention = 4 * hidden * 4097 / 2 / 2  # products of a token, of two FLOPs each
    forward = 32 * (block + attention) + 128_256 * hidden
    assert found.hfu / found.mfu == pytest.approx(1 + 32 * again / (3 * forward), rel=1e-3)
    every = price_one(replace(layout, recompute="none"), case("torchtitan"))
    assert every.hfu == every.mfu
