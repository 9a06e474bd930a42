"""The simulated step of a proof beside the estimate of the same layout: two counts of one thing."""

import json
import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from tests.prove.cases import MIXTRAL, SHAPE, layout, pipeline, request, tensor

from paceline.estimate import Estimate, case_of, exchanged_bytes, price_one
from paceline.job import parse_job
from paceline.parallel import Layout
from paceline.profile import resolve_decoder, resolve_profile
from paceline.prove.proof import ModelRequest, Proof
from paceline.prove.prove import prove
from paceline.prove.request import host_rates
from paceline.topology import find_cluster

pytestmark = pytest.mark.filterwarnings("ignore")

JOB = """\
name: try
model: {decoder: {layers: 4, hidden: 4096, heads: 32, kv_heads: 8, ffn: 14336, vocab: 32000}}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, per_node: 8}
train: {global_batch: 64, steps: 1000}
"""
ONE = {"micro_batch": 1, "accumulation": 8}
LAYOUTS = {
    "DDP": layout(data=8, sharding="none", **ONE),
    "FSDP2": layout(data=8, **ONE),
    "ZeRO-1": layout(data=8, sharding="zero1", **ONE),
    "FSDP2, recompute": layout(data=8, recompute="full", **ONE),
    "tensor": tensor(8, **ONE),
    "Ulysses": layout(data=1, context=8, context_kind="ulysses", **ONE),
    "1F1B": layout(data=1, sharding="none", pipeline=4, **ONE),
    "interleaved": layout(
        data=1, sharding="none", pipeline=2, schedule="interleaved", chunks=2, **ONE
    ),
}


SMALL = {
    "layers: 4": "layers: 8",
    "hidden: 4096": "hidden: 512",
    "heads: 32, kv_heads: 8": "heads: 8, kv_heads: 8",
    "ffn: 14336, vocab: 32000": "ffn: 1536, vocab: 512",
    "seq_len: 4096": "seq_len: 512",
}
"""Slower launched than computed, even by ten times."""


def small_job() -> str:
    text = JOB
    for large, small in SMALL.items():
        text = text.replace(large, small)
    return text


@cache
def both(text: str, of: Layout) -> tuple[Proof, Estimate]:
    job = parse_job(text, source="job.yaml", folder=Path("/nowhere"))
    cluster = find_cluster(job.spec.cluster, job)
    case = case_of(resolve_profile(job), cluster, precision="bf16")
    model = ModelRequest(decoder=resolve_decoder(job))
    seq_len = job.spec.data.seq_len
    asked = request(of, model=model, seq_len=seq_len, is_cuda=True, rates=case.rates)
    asked = replace(asked, host=host_rates(of, case.traffic))
    return prove(asked), price_one(of, case)


def both_s(text: str, of: Layout) -> tuple[float, float]:
    """Seconds of a step: simulated and estimated."""
    proof, estimate = both(text, of)
    # Stragglers are no part of a proof.
    return proof.simulated.step_s, sum(estimate.terms.values()) - estimate.terms["stragglers"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_estimate_and_simulated_step_agree(name):
    """Before, DDP was 29 % and FSDP2 13 % apart: copies of parameters were in one of them only, and
    a proof knew DDP's first bucket, which holds everything."""
    simulated_s, estimated_s = both_s(JOB, LAYOUTS[name])
    # FSDP2's copies were read and written 1.75 times in a proof: 8 % of the step of Ulysses.
    assert simulated_s == pytest.approx(estimated_s, rel=0.03 if name == "Ulysses" else 0.08)


WIDE = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
}
QWEN_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
TRANSFORMERS = {
    "qwen3": ("Qwen3ForCausalLM", WIDE | {"head_dim": 128, "intermediate_size": 3072}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", WIDE | QWEN_EXPERTS | {"head_dim": 64}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 1024, "n_layer": 4, "n_head": 16, "n_positions": 2048, "vocab_size": 8192},
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param("qwen3", marks=pytest.mark.repeat), "qwen3_moe", "gpt2"]
)
def test_kernels_of_transformers_models_take_what_their_proof_has(kind, tmp_path):
    """Norms, positions and routing in several kernels: Qwen3's block was 23 % too fast."""
    architecture, sizes = TRANSFORMERS[kind]
    config = {"model_type": kind, "architectures": [architecture], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = JOB.splitlines()[1]
    text = JOB.replace(model, "model: {hf_config: config.json}").replace("4096", "2048")
    job = parse_job(text, source="job.yaml", folder=tmp_path)
    cluster = find_cluster(job.spec.cluster, job)
    case = case_of(resolve_profile(job), cluster, precision="bf16")
    case = replace(case, rates=replace(case.rates, host_s=0.0))
    of = layout(data=8, micro_batch=4)
    asked = ModelRequest(config=config)
    proof = prove(request(of, model=asked, seq_len=2048, is_cuda=True, rates=case.rates))
    terms = price_one(of, case).terms
    assert proof.simulated.compute_s == pytest.approx(
        terms["compute"] + terms["optimizer"], rel=0.06
    )


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.repeat), 4])
def test_a_backward_pass_in_two_saves_what_it_saves_in_the_simulated_step(ranks):
    """The estimate had the head's gradients, and autocast's casts of gradients, among what cannot
    be put off: it saved three fifths of this."""
    plain, split = (
        replace(pipeline(ranks, each), micro_batch=1) for each in ("1f1b", "zero-bubble")
    )
    (simulated_s, estimated_s), (later_s, its_s) = both_s(JOB, split), both_s(JOB, plain)
    assert simulated_s == pytest.approx(estimated_s, rel=0.03)
    assert its_s - estimated_s == pytest.approx(later_s - simulated_s, rel=0.2)


@pytest.mark.parametrize(
    "of",
    [
        pipeline(4),
        pipeline(4, "gpipe"),
        pytest.param(pipeline(2, "interleaved", 2), marks=pytest.mark.repeat),
        pipeline(4, "interleaved", 2),
    ],
    ids=lambda of: f"{of.schedule} {of.pipeline}",
)
def test_hosts_of_later_stages_launch_while_they_wait_for_input(of):
    """The estimate had the host's time in the bubble: 1F1B of 8 micro-batches on 4 ranks took 16 %
    longer than simulated."""
    simulated_s, estimated_s = both_s(small_job(), replace(of, micro_batch=1))
    assert simulated_s == pytest.approx(estimated_s, rel=0.08)


@pytest.mark.parametrize(
    "of",
    [
        tensor(4, data=1, sharding="none", **ONE),
        pipeline(2, data=1, accumulation=16),
        layout(data=2, sharding="none", expert=2, **ONE),
    ],
    ids=lambda of: of.name,
)
def test_the_host_adds_gradients_and_crosses_between_ranks_in_both(of, tmp_path):
    """Tensor ranks of small models were up to 26 % too fast, ranks of experts 22 %: operations of
    the layout itself were not counted."""
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **WIDE}
    config |= QWEN_EXPERTS | {"head_dim": 64, "hidden_size": 256, "moe_intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = re.sub("model: .*", "model: {hf_config: config.json}", JOB).replace("4096", "512")
    job = parse_job(text, source="job.yaml", folder=tmp_path)
    case = case_of(resolve_profile(job), find_cluster(job.spec.cluster, job), precision="bf16")
    asked = request(of, model=ModelRequest(config=config), seq_len=512, is_cuda=True)
    simulated = prove(replace(asked, rates=case.rates)).simulated
    terms = price_one(of, case).terms
    estimated_s = sum(terms.values()) - terms["stragglers"]
    assert estimated_s == pytest.approx(simulated.step_s, rel=0.12)


@pytest.mark.parametrize(
    "of",
    [
        LAYOUTS["FSDP2"],
        LAYOUTS["FSDP2, recompute"],
        LAYOUTS["ZeRO-1"],
        pipeline(2, data=4, sharding="full", **ONE),
    ],
    ids=lambda of: f"{of.sharding} {of.recompute} {of.pipeline}",
)
def test_the_hosts_work_for_fsdp2s_units_is_in_estimate_and_simulated_step(of):
    """A simulated step had none of it, and the estimate that of a unit that gathers in every pass:
    Llama 3.2 1B on 16 ranks was estimated 43 to 59 % slower than simulated."""
    text = JOB.replace("hidden: 4096", "hidden: 1024").replace("seq_len: 4096", "seq_len: 1024")
    simulated_s, estimated_s = both_s(text, of)
    assert simulated_s == pytest.approx(estimated_s, rel=0.12)


@pytest.mark.parametrize(
    ("ranks", "chunks"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.repeat)]
)
def test_stages_in_a_loop_wait_for_a_head_that_takes_as_long_as_several_blocks(ranks, chunks):
    """Llama 3.2 1B was estimated 17 to 31 % too fast: the rank with the head has few blocks for its
    sake, and at its other stages waited for the others as they do for its head."""
    text = JOB.replace("layers: 4", "layers: 16").replace("vocab: 32000", "vocab: 500000")
    of = pipeline(ranks, "interleaved", chunks, accumulation=16, micro_batch=1)
    simulated_s, estimated_s = both_s(text, of)
    assert simulated_s == pytest.approx(estimated_s, rel=0.08)


@pytest.mark.parametrize("data", [1, 2])
def test_two_stages_with_one_matrix_swap_its_gradient(data):
    """Gemma 2 2B on four stages was estimated 30 % too fast on a slow network: nothing was counted.

    What tying adds is compared, which is a fifth of this step.
    """
    text = JOB.replace("vocab: 32000", "vocab: 256000").replace("hidden: 4096", "hidden: 1024")
    text = text.replace("seq_len: 4096", "seq_len: 256").replace("heads: 32", "heads: 8")
    text = text.replace("per_node: 8", f"nodes: 2, per_node: {data}")
    tied = text.replace("vocab: 256000", "vocab: 256000, tied_embeddings: true")
    of = pipeline(2, data=data, sharding="full", micro_batch=1)
    (tied_s, its_s), (simulated_s, estimated_s) = both_s(tied, of), both_s(text, of)
    assert its_s - estimated_s == pytest.approx(tied_s - simulated_s, rel=0.15)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_ring_goes_round_again_where_blocks_are_recomputed(recompute):
    """Estimated 23 % too fast: without the second time, without the float32 in which this ring adds
    up and sends its gradients, and without the host that launches it all."""
    text = JOB.replace("hidden: 4096", "hidden: 2048").replace("ffn: 14336", "ffn: 8192")
    of = layout(data=2, context=4, recompute=recompute, micro_batch=1, accumulation=2)
    simulated_s, estimated_s = both_s(text, of)
    assert simulated_s == pytest.approx(estimated_s, rel=0.1)


def test_stages_in_a_loop_hold_more_of_the_stage_with_more_blocks():
    """Interleaved with tensor ranks was estimated up to 12 % below its proof: half of what a rank
    holds was taken to be of either stage, when it is nearly all of the first."""
    text = JOB.replace("layers: 4", "layers: 16").replace("hidden: 4096", "hidden: 1024")
    text = text.replace("heads: 32", "heads: 8").replace("ffn: 14336", "ffn: 4096")
    text = text.replace("vocab: 32000", "vocab: 64000")
    of = pipeline(4, "interleaved", 2, tensor=2, micro_batch=1, accumulation=8)
    proof, estimate = both(text, of)
    assert {stage.num_blocks for stage in proof.stages} == {5, 1}
    parts = estimate.memory.parts
    living = sum(parts.values()) - parts["slack"] - parts["overhead"]
    assert proof.fullest.peak_bytes == pytest.approx(living, rel=0.03)


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_gpipe_has_no_gradients_when_all_of_its_logits_are_there(sharding):
    """Its last stage was estimated up to 14 % above its proof."""
    text = JOB.replace("vocab: 32000", "vocab: 128256").replace("hidden: 4096", "hidden: 1024")
    text = text.replace("heads: 32", "heads: 8").replace("4096}", "1024}")
    of = pipeline(2, "gpipe", data=2, sharding=sharding, micro_batch=1)
    proof, estimate = both(text, of)
    parts = estimate.memory.parts
    living = sum(parts.values()) - parts["slack"] - parts["overhead"]
    assert proof.fullest.peak_bytes == pytest.approx(living, rel=0.03)


@pytest.mark.parametrize(
    "of",
    [
        pipeline(2, "zero-bubble", data=2, recompute="full"),
        pipeline(4, "zero-bubble", data=2, sharding="full", recompute="full"),
        tensor(2, data=2, accumulation=1, sharding="none", recompute="full"),
    ],
    ids=lambda of: of.name,
)
def test_sums_of_replicas_and_a_backward_pass_at_once_have_the_proofs_bytes(of):
    """Replicas sum a copy of all gradients, which was counted nowhere: 15 % of a peak. A stage that
    is recomputed goes backward at once, and keeps no gradients of logits for later: 21 % too much.
    """
    text = JOB.replace("4096}", "1024}").replace("hidden: 4096", "hidden: 1024")
    proof, estimate = both(text.replace("heads: 32", "heads: 8"), replace(of, micro_batch=1))
    parts = estimate.memory.parts
    living = sum(parts.values()) - parts["slack"] - parts["overhead"]
    assert proof.fullest.peak_bytes == pytest.approx(living, rel=0.03)


def test_capped_scores_take_the_time_of_scores_that_are_written(tmp_path):
    """Gemma 2 was priced with a flash kernel, which cannot cap scores: a fifth of this."""
    config = {**WRITTEN["gemma2"], "attn_logit_softcapping": 50.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = re.sub("model: .*", "model: {hf_config: config.json}", JOB)
    job = parse_job(text, source="job.yaml", folder=tmp_path)
    case = case_of(resolve_profile(job), find_cluster(job.spec.cluster, job), precision="bf16")
    of = layout(data=8, sharding="none", micro_batch=8)
    asked = request(of, model=ModelRequest(config=config), seq_len=4096, rates=case.rates)
    simulated_s = prove(asked).simulated.compute_s
    assert price_one(of, case).terms["compute"] == pytest.approx(simulated_s, rel=0.25)


@pytest.mark.parametrize(
    "of",
    [
        pipeline(4, "gpipe"),
        pipeline(4),
        pipeline(4, "zero-bubble"),
        pipeline(2, "interleaved", 2, accumulation=8),
    ],
    ids=lambda of: f"{of.schedule} {of.pipeline}",
)
def test_micro_batches_that_wait_keep_logits_and_autocasts_copies(of):
    """GPipe's last stage was estimated at half of this: with the logits of one micro-batch and one
    copy of the matrices for all."""
    text = JOB.replace("vocab: 32000", "vocab: 128256")
    proof, estimate = both(text, replace(of, micro_batch=1))
    parts = estimate.memory.parts
    living = sum(parts.values()) - parts["slack"] - parts["overhead"]
    assert proof.fullest.peak_bytes == pytest.approx(living, rel=0.08)


@pytest.mark.parametrize(
    ("of", "apart"),
    [
        (pipeline(4, "interleaved", 2, accumulation=4), 0.04),
        (pipeline(2, "interleaved", 4, accumulation=2, data=8, sharding="full"), 0.12),
    ],
    ids=["DDP", "FSDP2"],
)
def test_a_loops_last_rank_has_the_gradients_of_its_head_at_the_second_loss(of, apart):
    """It was 10 % below its proof with a large vocabulary; with shards it had all gradients."""
    text = JOB.replace("layers: 4", "layers: 8").replace("hidden: 4096", "hidden: 2048")
    if of.sharding == "none":
        text = text.replace("vocab: 32000", "vocab: 128256")
    text = text.replace("ffn: 14336", "ffn: 8192").replace("heads: 32", "heads: 16")
    proof, estimate = both(text, replace(of, micro_batch=1, recompute="full"))
    parts = estimate.memory.parts
    living = sum(parts.values()) - parts["slack"] - parts["overhead"]
    assert proof.fullest.peak_bytes == pytest.approx(living, rel=apart)


def test_a_pipeline_of_few_micro_batches_is_fullest_before_all_gradients_are_there():
    """With as many micro-batches as stages none is held beside the gradients of all blocks: this
    was estimated 17 % above its proof."""
    text = JOB.replace("layers: 4", "layers: 16").replace("vocab: 32000", "vocab: 128256")
    of = pipeline(4, "interleaved", 2, micro_batch=1, accumulation=4)
    proof, estimate = both(text.replace("4096}", "1024}"), of)
    parts = estimate.memory.parts
    living = sum(parts.values()) - parts["slack"] - parts["overhead"]
    assert proof.fullest.peak_bytes <= living <= 1.11 * proof.fullest.peak_bytes


def config(kind: str, architecture: str, **sizes) -> dict:
    return {"model_type": kind, "architectures": [architecture], "vocab_size": 16384, **sizes}


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
GROUPED = {**HEADS, "hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1536}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WRITTEN = {
    "gpt2": config("gpt2", "GPT2LMHeadModel", n_embd=512, n_layer=4, n_head=8, n_positions=1024),
    "qwen3": config("qwen3", "Qwen3ForCausalLM", **GROUPED, head_dim=64),
    "gemma2": config("gemma2", "Gemma2ForCausalLM", **GROUPED, head_dim=64),
    "mixtral": config("mixtral", "MixtralForCausalLM", **GROUPED, **EXPERTS),
}
"""Models that transformers builds."""


@pytest.mark.parametrize(
    ("kind", "of"),
    [
        *((kind, layout(data=4, sharding="none")) for kind in WRITTEN),
        *(("gpt2", of) for of in (layout(data=4), tensor(2))),
        ("mixtral", tensor(2)),
        *(
            pytest.param(*each, marks=pytest.mark.repeat)
            for each in (
                ("mixtral", layout(data=4)),
                *product(("qwen3", "gemma2"), (layout(data=4), tensor(2))),
            )
        ),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_memory_of_a_model_that_transformers_builds_is_the_proofs(kind, of, tmp_path):
    """GPT-2 was 11 % short with DDP, Qwen3 13 %, Gemma 2 58 %: all were taken for our decoder."""
    (tmp_path / "config.json").write_text(json.dumps(WRITTEN[kind]))
    text = re.sub("model: .*", "model: {hf_config: config.json}", JOB).replace("4096}", "1024}")
    job = parse_job(text, source="job.yaml", folder=tmp_path)
    case = case_of(resolve_profile(job), find_cluster(job.spec.cluster, job), precision="bf16")
    asked = request(of, model=ModelRequest(config=WRITTEN[kind]), seq_len=1024, is_cuda=True)
    estimated = price_one(of, case).memory.allocated_bytes
    assert estimated == pytest.approx(prove(asked).fullest.peak_bytes, rel=0.03)


def test_tensor_ranks_under_autocast_enter_their_matrices_in_16_bits():
    of = tensor(2, accumulation=1)
    (stage,) = prove(request(of)).stages
    gathers = [
        each for each in stage.collectives if each.kind == "all-gather" and each.where == "blocks"
    ]
    tokens, blocks = of.micro_batch * 64, SHAPE.layers
    narrow, wide = 2 * tokens * SHAPE.hidden, 4 * tokens * SHAPE.hidden
    # Two entries of a block, and in the backward pass what left it twice; before the first block
    # the stream is float32.
    assert sum(each.num_bytes for each in gathers) == 4 * blocks * narrow + wide


def test_attention_with_dropout_keeps_no_scores_on_cuda():
    """On a CPU torch has no flash kernel with dropout, and wrote all scores."""
    gpt2 = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 1024,
    }

    def peak(dropout: float) -> int:
        model = ModelRequest(config={**gpt2, "attn_pdrop": dropout})
        asked = request(layout(data=2), model=model, seq_len=1024, is_cuda=True)
        return prove(asked).stages[0].peak_bytes

    assert peak(0.1) == peak(0.0)


def test_ddp_reduces_bucket_by_bucket_as_real_ranks_do():
    wide = replace(SHAPE, layers=4, hidden=512, head_dim=128, ffn=1024, vocab=2048)
    asked = request(layout(sharding="none"), model=ModelRequest(decoder=wide))
    (stage,) = prove(asked).stages
    sums = [each for each in stage.collectives if each.kind == "all-reduce"]
    assert sum(each.count for each in sums if each.phase == "backward") > 1


def test_tensor_ranks_that_share_the_experts_multiply_each_with_its_own_rows():
    """A proof multiplied all rows on every rank: those of other ranks' experts too."""

    def flops(of: int) -> float:
        asked = request(layout(tensor=of), model=ModelRequest(config=MIXTRAL))
        return sum(prove(asked).stages[0].flops.values())

    assert flops(2) == pytest.approx(flops(1) / 2, rel=0.02)  # routers are whole on both


@pytest.mark.parametrize("sharding", ["full", "zero1"])
def test_one_rank_that_offloads_gathers_as_much_as_each_of_two(sharding):
    """It gathers nothing from others, and its whole parameters were counted as activations."""
    gathered = []
    for data in (1, 2):
        there = layout(data=data, sharding=sharding, **ONE)
        proof, _ = both(JOB, replace(there, offload="cpu", offload_parameters=True))
        gathered.append(proof.stages[0].parts["gathered"])
    assert gathered[0] == gathered[1] > 0


@pytest.mark.parametrize("sharding", ["full", "zero1"])
def test_offloading_frees_in_a_proof_what_the_estimate_says(sharding):
    here = layout(data=8, sharding=sharding, **ONE)
    there = replace(here, offload="cpu", offload_parameters=True)
    (before, estimate), (after, left) = both(JOB, here), both(JOB, there)
    freed = before.stages[0].peak_bytes - after.stages[0].peak_bytes
    parts = ("parameters", "gradients", "optimizer")
    estimated = sum((estimate.memory.parts[p] or 0) - (left.memory.parts[p] or 0) for p in parts)
    assert freed == pytest.approx(estimated, rel=0.01)


@pytest.mark.parametrize(
    ("name", "offload"),
    [("FSDP2", "cpu"), ("FSDP2", "nvme"), ("FSDP2", "parameters"), ("1F1B", "cpu")],
)
def test_a_step_that_offloads_is_simulated_with_its_copies_and_the_optimizer_on_the_host(
    name, offload
):
    """It had no simulated step. The estimate hides no copy behind another."""
    of = {"offload": "cpu", "offload_parameters": True}
    of = of if offload == "parameters" else {"offload": offload}
    here_s, _ = both_s(JOB, LAYOUTS[name])
    simulated_s, estimated_s = both_s(JOB, replace(LAYOUTS[name], **of))
    assert simulated_s > 1.3 * here_s
    assert 0.75 * estimated_s < simulated_s < 1.02 * estimated_s


def test_selective_recompute_keeps_of_routed_experts_their_products_alone(tmp_path):
    """What comes and goes between their ranks was counted as kept: 57 % above a proof."""
    experts = {**WRITTEN["mixtral"], "num_local_experts": 8, "num_experts_per_tok": 4}
    (tmp_path / "config.json").write_text(json.dumps(experts))
    text = re.sub("model: .*", "model: {hf_config: config.json}", JOB).replace("4096}", "2048}")
    job = parse_job(text, source="job.yaml", folder=tmp_path)
    case = case_of(resolve_profile(job), find_cluster(job.spec.cluster, job), precision="bf16")
    of = layout(data=8, expert=8, sharding="zero1", recompute="selective", micro_batch=2)
    asked = request(of, model=ModelRequest(config=experts), seq_len=2048, is_cuda=True)
    estimated = price_one(of, case).memory.allocated_bytes
    assert estimated == pytest.approx(prove(asked).fullest.peak_bytes, rel=0.05)


@pytest.mark.parametrize(
    "schedule", [pytest.param("zero-bubble", marks=pytest.mark.repeat), "dualpipe-v"]
)
def test_a_tied_matrix_at_both_ends_of_a_v_is_gathered_and_differentiated_twice(schedule):
    """Llama 3.2 1B in a v was estimated 15 to 18 % below its proof: FSDP2 takes the two places on
    the first rank for two parameters."""
    text = JOB.replace("hidden: 4096", "hidden: 1024").replace("ffn: 14336", "ffn: 2048")
    text = text.replace("layers: 4", "layers: 8").replace("heads: 32", "heads: 8")
    text = text.replace("vocab: 32000", "vocab: 128256, tied_embeddings: true")
    of = pipeline(2, schedule, 2, data=4, sharding="zero1", micro_batch=1, accumulation=8)
    proof, estimate = both(text.replace("4096}", "1024}"), of)
    parts = estimate.memory.parts
    living = sum(parts.values()) - parts["slack"] - parts["overhead"]
    assert living == pytest.approx(proof.fullest.peak_bytes, rel=0.07)


@pytest.mark.parametrize("each", [False, True])
def test_the_root_is_gathered_for_every_micro_batch(each):
    """It was gathered and reduced once a step."""
    text = small_job().replace("vocab: 512", "vocab: 8192")
    job = parse_job(text, source="job.yaml", folder=Path("/nowhere"))
    case = case_of(resolve_profile(job), find_cluster(job.spec.cluster, job), precision="bf16")
    of = layout(data=8, reduce_every_micro_batch=each, **ONE)
    sent = sum(
        found.num_bytes * (found.group_size - 1) / found.group_size
        for found in both(text, of)[0].fullest.collectives
        if found.kind in ("all-gather", "reduce-scatter")
    )
    assert exchanged_bytes(of, case) == pytest.approx(sent, rel=1e-3)
