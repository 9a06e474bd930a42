"""What ranks send and hold by precision, engine and optimizer, against arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.catalog.engines import load_engines
from paceline.estimate import Case, case_of, price_one
from paceline.estimate.newton_schulz import muon_s
from paceline.estimate.sharding import Ways, routed_split
from paceline.job import parse_job
from paceline.parallel import Layout, table_of
from paceline.profile import resolve_profile
from paceline.profile.block import expert_parameters, matrices
from paceline.topology import find_cluster

JOB = """\
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, nodes: 8, per_node: 8}
train: {global_batch: 64, steps: 100}
"""


def case(
    preset: str = "llama-3-8b",
    *,
    engine: str = "paceline",
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> Case:
    overrides = (f"model.preset={preset}",)
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)
    return case_of(
        resolve_profile(job),
        find_cluster(job.spec.cluster, job),
        precision=precision,
        optimizer=optimizer,
        engine=load_engines()[engine],
    )


WIDE = Layout(data=64, sharding="none", micro_batch=64, accumulation=1)


@pytest.mark.parametrize(
    ("term", "preset", "changes"),
    [
        ("tensor", "llama-3-8b", {"data": 8, "tensor": 8, "sharding": "zero1"}),
        ("context", "llama-3-8b", {"data": 16, "context": 4, "context_kind": "ulysses"}),
        ("expert", "mixtral-8x7b", {"expert": 8, "sharding": "full"}),
    ],
)
def test_ranks_send_twice_the_bytes_in_float32(term: str, preset: str, changes: dict[str, object]):
    layout = replace(WIDE, **changes)  # type: ignore[arg-type]
    narrow, wide = (
        price_one(layout, case(preset, precision=precision)).terms[term]
        for precision in ("bf16", "fp32")
    )
    assert wide == pytest.approx(2 * narrow, rel=0.02)


def test_stages_send_twice_the_bytes_in_float32():
    staged = replace(WIDE, data=8, pipeline=8, accumulation=1)
    hops = []
    for precision in ("bf16", "fp32"):
        each = case(precision=precision)
        shown, hidden = (
            replace(each, rates=replace(each.rates, pipeline_overlap=overlap))  # type: ignore[type-var]
            for overlap in (0.0, 1.0)
        )
        terms = [price_one(staged, priced).terms["pipeline"] for priced in (shown, hidden)]
        hops.append(terms[0] - terms[1])
    assert hops[1] == pytest.approx(2 * hops[0], rel=0.02)


def mixtral(engine: str, **degrees: int) -> tuple[dict[str, int | None], float, float]:
    """Parts of memory, and parameters that are dense and routed."""
    tensor = degrees.get("tensor", 1)
    layout = Layout(data=64 // tensor, sharding="zero1", micro_batch=1, accumulation=1, **degrees)
    each = case("mixtral-8x7b", engine=engine)
    routed = sum(block.count * expert_parameters(block) for block in each.profile.blocks)
    parts = dict(price_one(layout, each).memory.parts)
    return parts, each.profile.num_parameters - routed, routed


def test_megatron_shards_the_experts_state_over_tensor_ranks_too():
    parts, dense, routed = mixtral("megatron", tensor=4, expert=8)
    assert parts["parameters"] == pytest.approx(2 * (dense / 4 + routed / 8), rel=1e-3)
    state = (parts["optimizer"] or 0) + (parts["master copy"] or 0)
    assert state == pytest.approx(12 * (dense / 64 + routed / 64), rel=1e-3)


def test_megatron_splits_experts_by_width_where_no_expert_ranks_share_them():
    parts, dense, routed = mixtral("megatron", tensor=8, expert=1)
    assert parts["parameters"] == pytest.approx(2 * (dense + routed) / 8, rel=1e-3)


def test_our_own_tensor_ranks_hold_whole_experts_where_expert_ranks_share_them():
    parts, dense, routed = mixtral("paceline", tensor=4, expert=8)
    state = 12 * (dense / 64 + routed / 8 / 2)  # float32 parameters in shards, and two moments
    assert (parts["optimizer"] or 0) + (parts["parameters"] or 0) == pytest.approx(state, rel=1e-3)


@pytest.mark.parametrize(
    ("how", "expert", "holders", "replicas"),
    [("width", 1, 4, 1), ("width", 8, 8, 4), ("always width", 8, 32, 1), ("expert", 1, 4, 1)],
)
def test_each_way_to_split_experts_has_its_holders_and_replicas(how, expert, holders, replicas):
    from paceline.catalog.engines import ROUTED_SPLITS

    layout = Layout(
        data=16, sharding="none", micro_batch=1, accumulation=1, tensor=4, expert=expert
    )
    split = routed_split(
        table_of([layout]), Ways(routed_split=ROUTED_SPLITS.index(how), folds_experts=1.0)
    )
    assert split.holders.item() == holders
    assert split.replicas.item() == replicas


def test_a_layer_of_experts_needs_no_tokens_of_other_tensor_ranks_where_they_have_whole_experts():
    alone, shared = (
        price_one(
            replace(WIDE, data=16, tensor=4, expert=expert),
            case("mixtral-8x7b", engine="megatron"),
        ).terms["tensor"]
        for expert in (1, 8)
    )
    assert shared == pytest.approx(alone / 2, rel=1e-6)


def test_cross_attention_adds_one_all_reduce():
    each = case(engine="megatron")
    layout = replace(WIDE, data=8, tensor=8)
    block = each.profile.blocks[0]
    crossed = replace(block, cross_heads=block.heads)
    model = replace(each.model, blocks=(crossed,))
    plain, both = (price_one(layout, c).terms["tensor"] for c in (each, replace(each, model=model)))
    assert both == pytest.approx(1.5 * plain, rel=1e-6)


def sent_to_experts(engine: str, recompute: str = "none", sharding: str = "full") -> float:
    """Seconds of Qwen3 30B's exchange, 16 ranks with different experts on two nodes of eight."""
    layout = replace(WIDE, micro_batch=2, expert=16, recompute=recompute, sharding=sharding)
    return float(price_one(layout, case("qwen3-30b-a3b", engine=engine)).terms["expert"])


@pytest.mark.parametrize("engine", ["paceline", "megatron", "megatron-bridge", "torchtitan"])
def test_each_of_a_tokens_experts_is_sent_a_copy_between_nodes(engine: str):
    """Dispatch was estimated as DeepSeek-V3's own for every engine, at a quarter of this: Paceline
    writes `--moe-token-dispatcher-type alltoall` and `moe_comm_backend="standard"`."""
    copies = 2 * 4096 * 8 * 2048 * 2  # tokens x experts of a token x width x bytes
    once = copies / 2 / 50e9  # half of them leave the node, each rank's over its own card
    assert 48 * 4 * once <= sent_to_experts(engine) <= 1.3 * 48 * 4 * once


def test_tokens_go_to_their_experts_in_float32_under_autocast():
    """Without shards our own residual stream is float32: `paceline prove` counts 16 MiB for each
    exchange of Mixtral's 2 x 2,048 tokens of 1,024, and 8 MiB with FSDP2. It was 8 for both."""
    ratios = {
        engine: sent_to_experts(engine, sharding="none") / sent_to_experts(engine)
        for engine in ("paceline", "megatron")
    }
    assert ratios == pytest.approx({"paceline": 2.0, "megatron": 1.0}, rel=0.02)


def test_deepep_sends_a_token_once_to_each_node():
    assert sent_to_experts("automodel") < 0.4 * sent_to_experts("torchtitan")


@pytest.mark.parametrize(
    ("engine", "recompute", "times"),
    [
        ("paceline", "full", 1.5),
        ("paceline", "selective", 1.5),  # keeps products and attention
        ("torchtitan", "selective", 1.0),  # keeps what all-to-alls gave
        ("megatron", "full", 1.5),
        ("megatron", "selective", 1.0),  # attention alone is done again
    ],
)
def test_an_exchange_that_recompute_repeats_counts_again(engine: str, recompute: str, times: float):
    """A proof counts 240 of 384 exchanges in the backward pass, where 96 are its own; half of a
    repeated one was estimated, and with selective recompute none."""
    again = sent_to_experts(engine, recompute)
    assert again == pytest.approx(times * sent_to_experts(engine), rel=1e-6)


def test_muon_takes_the_products_of_all_matrices_on_every_rank():
    each = case(optimizer="muon")
    rates = each.rates
    assert rates is not None
    layout = table_of([Layout(data=64, sharding="none", micro_batch=1, accumulation=1)])
    seconds = muon_s(each.model.blocks, layout, rates, routed_split(layout, Ways())).item()
    (block,) = each.profile.blocks
    flops = 0.0
    for matrix in matrices(block):
        parts = 2 if matrix.name in ("key_value", "up") else 1
        m, n = sorted((matrix.inputs, matrix.outputs // parts))
        flops += block.count * parts * 5 * (4 * m * m * n + 2 * m**3)
    assert flops == pytest.approx(666e12, rel=0.01)
    assert flops / 989e12 < seconds < 2.5 * flops / 989e12


def test_muon_counts_more_in_a_step_than_adamw_and_gathers_what_is_sharded():
    layout = Layout(data=64, sharding="full", micro_batch=1, accumulation=1)
    adamw, muon = (
        price_one(layout, case(optimizer=name)).terms["optimizer"] for name in ("adamw", "muon")
    )
    whole = price_one(replace(layout, sharding="none"), case(optimizer="muon")).terms["optimizer"]
    assert muon > 50 * adamw
    assert muon > whole


def test_muon_leaves_embedding_and_head_to_adamw():
    each = case(optimizer="muon")
    layout = Layout(data=64, sharding="none", micro_batch=1, accumulation=1)
    estimate = price_one(layout, each)
    outside = each.profile.num_root_parameters
    moments = 4 * (each.profile.num_parameters - outside) + 8 * outside
    assert estimate.memory.parts["optimizer"] == pytest.approx(moments, rel=1e-6)
    kept = 4 * each.profile.num_parameters + moments
    assert estimate.num_checkpoint_bytes == pytest.approx(kept, rel=1e-6)
