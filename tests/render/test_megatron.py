import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.render.plans import planned, rendered

from paceline.catalog.configs import load_published_configs
from paceline.errors import PlanError
from paceline.plan.case import case_of_plan
from paceline.render import RenderError
from paceline.render.megatron import arguments, render
from paceline.render.megatron_words import learned_positions, stage_blocks, virtual

FLAGS = {
    line.split()[0]: tuple(line.split()[1:])
    for line in Path(__file__).with_name("megatron_flags.txt").read_text().splitlines()
    if line.startswith("--")
}
"""Flag -> the first and the last core version that has it."""

LLAMA = {
    "model": {"decoder": None, "preset": "llama-3-8b"},
    "data": {"seq_len": 4096},
    "cluster": {"nodes": 4, "per_node": 8},
    "train": {"global_batch": 64, "steps": 1000, "warmup_steps": 20},
    "engine": "megatron",
}
THREE_WAYS = {
    "tensor": 4,
    "pipeline": 4,
    "schedule": "interleaved",
    "chunks": 2,
    "sharding": "zero1",
    "recompute": "selective",
}
FULL = {"sharding": "full", "data": 32, "recompute": "full", "recompute_every": 1}
ALWAYS = {
    "the job's data (data.path, data.corpus, data.sources)",
    "the newest 3 checkpoints kept",
    "the learning rate of each step",
}
"""Gaps of every plan."""


def llama(**changes):
    engine = LLAMA["engine"]
    sections = {name: section for name, section in LLAMA.items() if name != "engine"}
    merged = {
        name: sections.get(name, {}) | changes.get(name, {})
        for name in (sections | changes)
        if name != "engine"
    }
    return merged | {"engine": changes.get("engine", engine)}


def words(**changes) -> dict[str, str]:
    """Flag -> its value; those without one are `yes`."""
    plan, job = planned(**llama(**changes))
    found: dict[str, str] = {}
    flag = ""
    for word in arguments(plan, job):
        if word.startswith("--"):
            flag = word
            found[flag] = "yes"
        else:
            found[flag] = word
    return found


def what(found) -> set[str]:
    return {gap.what for gap in found.gaps} - ALWAYS


def test_three_ways_to_split_and_the_distributed_optimizer(check_golden):
    found = rendered("megatron", **llama(layout=THREE_WAYS))
    assert what(found) == set()
    check_golden("megatron/three-ways", found)


@pytest.mark.parametrize("engine", ["megatron-2021", "megatron-deepspeed"])
def test_the_files_say_that_an_older_megatrons_memory_and_time_were_planned(engine):
    """They were taken for those of the Megatron that the files start."""
    layout = {"tensor": 4, "pipeline": 4}
    files = rendered("megatron", **llama(engine=engine, layout=layout)).files
    assert f"planned for the engine {engine}" in files["launch.sh"]


def test_full_sharding_is_megatrons_fsdp(check_golden):
    found = rendered("megatron", **llama(layout=FULL, engine="paceline"))
    assert what(found) == set()
    text = found.files["launch.sh"]
    assert "export CUDA_DEVICE_MAX_CONNECTIONS" not in text  # its FSDP refuses 1
    check_golden("megatron/fsdp", found)


def test_experts_have_their_own_sizes_and_ranks(check_golden):
    mixtral = {"decoder": None, "preset": "mixtral-8x7b"}
    layout = {"expert": 8, "tensor": 2, "pipeline": 2, "sharding": "zero1"}
    found = rendered("megatron", **llama(model=mixtral, layout=layout))
    assert what(found) == {"the balancing loss as transformers defines it"}
    check_golden("megatron/experts", found)


def test_a_router_is_the_models_own():
    found = words(model={"decoder": None, "preset": "mixtral-8x7b"})
    assert (found["--rotary-base"], found["--moe-aux-loss-coeff"]) == ("1000000", "0.02")
    assert found["--moe-router-load-balancing-type"] == "aux_loss"
    assert "--moe-router-pre-softmax" not in found
    qwen = {"decoder": None, "preset": "qwen3-30b-a3b"}
    found = words(model=qwen, train={"router_loss": 0.01})
    assert (found["--norm-epsilon"], found["--moe-aux-loss-coeff"]) == ("1e-06", "0.01")
    found = words(model=qwen, train={"router_loss": 0})
    assert "--moe-aux-loss-coeff" not in found


def test_a_router_that_does_not_renorm_takes_the_softmax_first(tmp_path):
    config = dict(load_published_configs()["qwen3-30b-a3b"].config)
    (tmp_path / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    model = {"decoder": None, "preset": None, "hf_config": str(tmp_path / "config.json")}
    assert words(model=model)["--moe-router-pre-softmax"] == "yes"


DEEPSEEK = {"decoder": None, "preset": "deepseek-v3"}
LARGE = {"nodes": 256}


def test_deepseek_v3_is_written_with_latent_attention_its_router_and_dense_first_layers():
    """Flags of Megatron-LM's own examples/megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh."""
    found = words(model=DEEPSEEK, cluster=LARGE, engine="megatron", train={"global_batch": 4096})
    expected = {
        "--multi-latent-attention": "yes",
        "--moe-layer-freq": "([0]*3+[1]*58)",
        "--ffn-hidden-size": "18432",
        "--moe-ffn-hidden-size": "2048",
        "--moe-shared-expert-intermediate-size": "2048",
        "--num-experts": "256",
        "--moe-router-topk": "8",
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": "yes",
        "--moe-router-topk-scaling-factor": "2.5",
        "--moe-router-num-groups": "8",
        "--moe-router-group-topk": "4",
        "--q-lora-rank": "1536",
        "--kv-lora-rank": "512",
        "--qk-head-dim": "128",
        "--qk-pos-emb-head-dim": "64",
        "--v-head-dim": "128",
        "--norm-epsilon": "1e-06",
        "--rope-type": "rope",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "--group-query-attention" not in found


@pytest.mark.parametrize(
    ("changes", "written"),
    [
        (
            {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1, "mscale_all_dim": 1}},
            {"--rope-type": "yarn", "--rotary-scaling-factor": "40", "--mscale-all-dim": "1"},
        ),
        ({"n_group": 1}, {"--moe-router-num-groups": None}),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 16}}, "another YaRN"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "stretched as linear"),
        ({"norm_topk_prob": False}, "experts that do not add up to 1"),
    ],
)
def test_a_deepseek_of_ones_own_is_written_as_it_is_or_refused(tmp_path, changes, written):
    config = dict(load_published_configs()["deepseek-v3"].config) | {"num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    model = {"decoder": None, "preset": None, "hf_config": str(tmp_path / "config.json")}
    asked = {"model": model, "cluster": {"nodes": 32}, "engine": "megatron"}
    if isinstance(written, str):
        with pytest.raises(RenderError, match=written):
            rendered("megatron", **llama(**asked))
        return
    found = words(**asked)
    assert {name: found.get(name) for name in written} == written


def test_bridge_has_a_provider_of_its_own_for_latent_attention():
    asked = {"model": DEEPSEEK, "cluster": LARGE, "train": {"global_batch": 4096}}
    found = rendered("megatron-bridge", **llama(**asked, engine="megatron-bridge"))
    text = found.files["recipe.py"]
    assert "models.mla_provider import MLAModelProvider" in text
    assert "model=MLAModelProvider(" in text
    assert "moe_layer_freq=([0]*3+[1]*58)," in text
    assert "GPTModelProvider" not in text


@pytest.mark.parametrize(
    ("layout", "engine", "oldest"),
    [
        (THREE_WAYS, "megatron", "0.12"),
        (THREE_WAYS, "paceline", "0.13"),
        (FULL, "paceline", "0.14"),
    ],
)
def test_the_versions_that_know_every_flag_are_named(layout, engine, oldest):
    plan, job = planned(**llama(layout=layout, engine=engine))
    used = [word for word in arguments(plan, job) if word.startswith("--")]
    assert max(FLAGS[word][0] for word in used) == oldest
    assert {FLAGS[word][1] for word in used} == {"0.19"}
    about = render(plan, job)["arguments.txt"]
    assert f"core_v{oldest}.0 to core_v0.19.0 have" in about


def test_degrees_are_the_plans():
    found = words(layout=THREE_WAYS)
    assert found["--tensor-model-parallel-size"] == "4"
    assert found["--pipeline-model-parallel-size"] == "4"
    assert found["--num-virtual-stages-per-pipeline-rank"] == "2"
    assert found["--sequence-parallel"] == "yes"
    assert found["--use-distributed-optimizer"] == "yes"
    assert found["--recompute-granularity"] == "selective"
    assert (found["--micro-batch-size"], found["--global-batch-size"]) == ("1", "64")
    assert (found["--lr-warmup-iters"], found["--lr-decay-iters"]) == ("20", "1000")
    assert float(found["--min-lr"]) == pytest.approx(0.1 * float(found["--lr"]))


def test_hybrid_sharding_has_as_many_copies_as_groups():
    found = words(layout={"sharding": "hybrid", "shard": 8, "data": 32}, engine="paceline")
    assert found["--num-distributed-optimizer-instances"] == "4"
    assert found["--ckpt-format"] == "fsdp_dtensor"


def test_plain_replicas_use_no_sharded_optimizer():
    small = {"decoder": {"layers": 4, "hidden": 256, "heads": 8}, "preset": None}
    found = words(model=small, data={"seq_len": 128}, layout={"sharding": "none", "data": 32})
    assert "--use-distributed-optimizer" not in found
    assert "--use-megatron-fsdp" not in found
    assert found["--overlap-grad-reduce"] == "yes"


def test_the_vocabulary_is_the_models_and_not_padded():
    found = words(layout=THREE_WAYS)
    # NullTokenizer adds one for the end of a document.
    assert int(found["--vocab-size"]) + 1 == 128256
    assert found["--make-vocab-size-divisible-by"] == "1"


def test_gpt3_is_written_as_megatrons_own_gpt():
    found = words(model={"preset": "gpt3-175b"}, cluster={"nodes": 128}, data={"seq_len": 1024})
    assert found["--normalization"] == "LayerNorm"
    assert found["--position-embedding-type"] == "learned_absolute"
    assert (found["--seq-length"], found["--max-position-embeddings"]) == ("1024", "2048")
    assert not found.keys() & {"--swiglu", "--disable-bias-linear", "--rotary-base"}
    assert not found.keys() & {"--untie-embeddings-and-output-weights", "--add-qkv-bias"}


@pytest.mark.parametrize("preset", ["opt-6.7b", "bloom-7b1", "pythia-1b", "falcon-7b", "bert-base"])
def test_what_only_looks_like_gpt_is_not_written_as_it(preset):
    plan, _ = planned(**llama(model={"preset": preset}, data={"seq_len": 512}, engine="accelerate"))
    assert learned_positions(plan.profile) == 0


def test_a_window_as_long_as_the_sample_is_none():
    model = {"preset": "mistral-7b-v0.1"}
    rendered("megatron", **llama(model=model))
    with pytest.raises(RenderError, match="windows of 4096 tokens"):
        rendered("megatron", **llama(model=model, data={"seq_len": 8192}))


def test_uneven_stages_are_written_out_block_by_block():
    plan, _ = planned(**llama(layout=THREE_WAYS, engine="paceline"))
    counts = stage_blocks(plan)
    assert len(set(counts)) > 1
    text = words(layout=THREE_WAYS, engine="paceline")["--pipeline-model-parallel-layout"]
    stages = text.split("|")
    assert len(stages) == len(counts) == 8
    assert stages[0].startswith("E")
    assert stages[-1].endswith("L")


def test_the_kernel_of_attention_that_the_job_names_is_written_and_priced():
    def seconds(kernel: str) -> float:
        plan, _ = planned(**llama(layout=THREE_WAYS, train={"attention": kernel}))
        assert case_of_plan(plan).engine.attention == {"fused": "flash3"}.get(kernel, "flash2")
        return float(plan.estimate.step_s)

    found = words(layout=THREE_WAYS, train={"attention": "flash"})
    assert found["--attention-backend"] == "flash"
    assert "--attention-backend" not in words(layout=THREE_WAYS)
    assert seconds("flash") > seconds("fused")


def test_uneven_stages_of_megatrons_own_plan_are_those_that_were_priced():
    tiny = {"decoder": {"layers": 14, "hidden": 256, "heads": 8, "kv_heads": 4}, "preset": None}
    plan, _ = planned(**llama(layout=THREE_WAYS | {"chunks": 1}, model=tiny, engine="megatron"))
    counts = stage_blocks(plan)
    assert list(counts) == list(plan.stage_blocks) == [3, 4, 4, 3]


@pytest.mark.parametrize(
    ("changes", "gap"),
    [
        (
            {"layout": THREE_WAYS | {"schedule": "gpipe", "chunks": 1}, "engine": "paceline"},
            "schedule gpipe",
        ),
        (
            {
                "layout": THREE_WAYS | {"schedule": "zero-bubble", "recompute": "full"},
                "engine": "paceline",
            },
            "schedule zero-bubble",
        ),
        (
            {
                "layout": FULL | {"offload": "nvme", "offload_path": "/disk"},
                "engine": "deepspeed",
            },
            "nvme",
        ),
        ({"layout": FULL | {"recompute_every": 2}, "engine": "paceline"}, "one block in 2"),
        ({"train": {"optimizer": "muon"}, "engine": "paceline"}, "optimizer muon"),
        (
            {
                "train": {"gradient_compression": "powersgd"},
                "layout": {"sharding": "none"},
                "engine": "paceline",
            },
            "powersgd",
        ),
        ({"train": {"compile": True}, "engine": "paceline"}, "compiled"),
        ({"layout": THREE_WAYS, "engine": "paceline"}, "selective recomputation as paceline"),
    ],
)
def test_what_megatron_lacks_is_said_with_the_nearest(changes, gap):
    found = rendered("megatron", **llama(**changes))
    (named,) = [each for each in found.gaps if gap in each.what]
    assert named.nearest


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"model": {"preset": "opt-1.3b"}, "data": {"seq_len": 1024}}, "own family"),
        ({"model": {"preset": "gemma-7b"}}, "own family"),
        ({"train": {"adapter": {"kind": "lora"}}}, "peft"),
        (
            {
                "cluster": {"accelerator": "cpu", "per_node": 2, "nodes": 1},
                "train": {"precision": "fp32"},
                "model": {"preset": None, "decoder": {"layers": 2, "hidden": 64, "heads": 4}},
                "data": {"seq_len": 32},
            },
            "torchrun",
        ),
    ],
)
def test_what_has_nothing_near_is_refused(changes, fix):
    with pytest.raises(RenderError) as refused:
        rendered("megatron", **llama(**changes))
    assert any(fix in problem.fix for problem in refused.value.problems)


@settings(max_examples=20, deadline=None)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
    chunks=st.sampled_from([1, 2]),
    accumulation=st.sampled_from([4, 8]),
    sharding=st.sampled_from(["none", "zero1", "zero2", "full"]),
    engine=st.sampled_from(["megatron", "paceline"]),
)
def test_any_layout_keeps_its_batch_its_ranks_and_its_blocks(
    tensor, pipeline, context, chunks, accumulation, sharding, engine
):
    data = 32 // (tensor * pipeline * context)
    if data == 0:
        return
    loops = chunks if pipeline > 1 else 1
    layout = {
        "data": data,
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "context_kind": "ring",
        "micro_batch": 1,
        "sharding": sharding if data * context > 1 else "none",
        "recompute": "full",
        "schedule": "interleaved" if loops > 1 else "1f1b",
    }
    if loops > 1:
        layout["chunks"] = loops
    tiny = {"decoder": {"layers": 16, "hidden": 256, "heads": 8, "kv_heads": 4}, "preset": None}
    if layout["sharding"] in ("zero2", "full"):  # in the catalog Megatron has none and ZeRO-1
        engine = "torchtitan" if layout["sharding"] == "zero2" else "paceline"
    changes = {"model": tiny, "data": {"seq_len": 128}, "engine": engine}
    batch = {"global_batch": data * accumulation}
    plan, job = planned(**llama(layout=layout, train=batch, **changes))
    used = arguments(plan, job)
    assert {word for word in used if word.startswith("--")} <= set(FLAGS)
    assert len([word for word in used if word.startswith("--")]) == len(
        {word for word in used if word.startswith("--")}
    )
    counts = stage_blocks(plan)
    assert sum(counts) == 16
    assert len(counts) == pipeline * virtual(plan)
    found = words(layout=layout, train=batch, **changes)
    assert 32 // (tensor * pipeline * context) * accumulation == int(found["--global-batch-size"])
    if "--pipeline-model-parallel-layout" not in found:
        assert len(set(counts)) == 1


def test_token_files_of_the_job_are_read_and_text_for_another_engine_is_not():
    files = {"path": ["/shared/a_text_document", "/shared/b_text_document"], "corpus": None}
    found = rendered("megatron", **llama(data=files))
    assert (
        "--data-path /shared/a_text_document /shared/b_text_document --split"
        in (found.files["launch.sh"])
    )
    assert "data" not in {gap.where for gap in found.gaps}
    text = rendered("megatron", **llama(data=files, engine="paceline", layout=FULL))
    assert "\ndata=()\n" in text.files["launch.sh"]
    assert "data" in {gap.where for gap in text.gaps}


def test_a_recipe_of_bridge_makes_samples_up_only_where_the_job_asks():
    found = rendered("megatron-bridge", **llama())
    assert "DATA = []\n" in found.files["recipe.py"]
    asked = rendered("megatron-bridge", **llama(data={"corpus": "mock"}))
    assert "DATA = None\n" in asked.files["recipe.py"]


def test_how_fp8_is_scaled_is_written_priced_and_refused_where_it_cannot_be():
    found = words(layout=THREE_WAYS, train={"precision": "fp8", "fp8_recipe": "tensorwise"})
    assert (found["--fp8-format"], found["--fp8-recipe"]) == ("hybrid", "tensorwise")
    assert "--fp8-recipe" not in words(layout=THREE_WAYS, train={"precision": "fp8"})
    for changes, message in (
        ({"fp8_recipe": "tensorwise"}, "train.fp8_recipe is tensorwise, and train.precision bf16"),
        (
            {"precision": "fp8", "fp8_recipe": "rowwise"},
            "megatron has mxfp8 or tensorwise",
        ),
        ({"precision": "fp8", "fp8_recipe": "mxfp8"}, "mxfp8, which H100-SXM has not"),
        ({"async_tensor": True}, "train.async_tensor is true, and megatron cannot be asked for it"),
    ):
        with pytest.raises(PlanError, match=message):
            planned(**llama(train=changes))


MIXTRAL = {
    "model": {"preset": "mixtral-8x7b", "decoder": None},
    "cluster": {"accelerator": "H100-SXM", "nodes": 4, "per_node": 8},
}
"""32 H100 for routed experts."""


def test_deepep_and_a_hidden_exchange_are_written_where_expert_ranks_are():
    asked = {"token_dispatcher": "deepep", "async_expert": True, "precision": "bf16"}
    layout = {"expert": 8, "pipeline": 2, "schedule": "interleaved", "chunks": 2, "data": 16}
    found = words(layout=layout, train=asked, **MIXTRAL)
    assert found["--moe-token-dispatcher-type"] == "flex"
    assert found["--moe-router-dtype"] == "fp32"
    assert {"--moe-enable-deepep", "--overlap-moe-expert-parallel-comm"} <= set(found)
    plain = words(layout=layout, **MIXTRAL)
    assert plain["--moe-token-dispatcher-type"] == "alltoall"
    assert not {"--moe-enable-deepep", "--overlap-moe-expert-parallel-comm"} & set(plain)


def test_megatron_bridge_takes_deepep_on_b200():
    on_b200 = {"cluster": MIXTRAL["cluster"] | {"accelerator": "B200"}, "layout": {}}
    deepep = {"engine": "megatron-bridge", "train": {"token_dispatcher": "deepep"}}
    plan, _ = planned(**llama(**(MIXTRAL | on_b200 | deepep)))
    assert plan.layout.expert > 1


def test_an_exchange_that_is_asked_for_is_planned_with_expert_ranks():
    """Two nodes of 4 were planned with tensor and pipeline ranks alone: DeepEP was asked for, and
    nothing was exchanged."""
    small = {"model": {"preset": "qwen3-30b-a3b", "decoder": None}}
    small["cluster"] = {"accelerator": "H100-SXM", "nodes": 2, "per_node": 4}
    plain, _ = planned(**llama(**small, layout={}))
    asked, _ = planned(**llama(**small, layout={}, train={"token_dispatcher": "deepep"}))
    assert plain.layout.expert == 1
    assert asked.layout.expert > 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"layout": {"expert": 1}}, "deepep, and layout.expert is 1: no tokens cross to experts"),
        ({"model": {"preset": "llama-3-8b"}}, "llama-3-8b has no routed experts"),
        (
            {"cluster": {"accelerator": "MI300X", "nodes": 4, "per_node": 8}},
            "whose kernels are CUDA's for compute capability 8.0 and up, and MI300X is not NVIDIA",
        ),
        (
            {"cluster": {"accelerator": "V100-32", "nodes": 4, "per_node": 8}},
            "compute capability 8.0 and up, and V100-32 has 7.0",
        ),
        (
            {
                "model": {"preset": "qwen3-30b-a3b"},
                "layout": {"expert": 16},
                "cluster": MIXTRAL["cluster"] | {"accelerator": "A100-80"},
            },
            "cannot do expert 16: DeepEP takes .*compute capability 9.0; at most 8 here",
        ),
        (
            {"layout": {"expert": 8}, "cluster": MIXTRAL["cluster"] | {"nodes": 8, "per_node": 4}},
            "cannot do expert 8: DeepEP takes .*; at most 4 here",
        ),
        (
            {"train": {"async_expert": True}, "layout": {"recompute": "full"}},
            "cannot do recompute full: train.async_expert hides nothing there",
        ),
        (
            {"train": {"async_expert": True, "precision": "fp32"}},
            "takes bf16, fp16 or fp8, and train.precision is fp32",
        ),
        (
            {"engine": "torchtitan"},
            "dispatcher: torchtitan 0.3 has deepep .* Paceline does not count that memory",
        ),
        (
            {"engine": "megatron-bridge", "cluster": MIXTRAL["cluster"] | {"accelerator": "GB200"}},
            "which megatron-bridge takes on compute capability 8.x, .*, B300 alone, .* has GB200",
        ),
    ],
)
def test_an_exchange_that_cannot_be_is_refused(asked, message):
    asked = {"train": {"token_dispatcher": "deepep"}} | asked
    with pytest.raises(PlanError, match=message):
        planned(**llama(**(MIXTRAL | {"layout": {}} | asked)))
