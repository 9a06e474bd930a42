import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.render.plans import planned, rendered

from paceline.catalog.configs import load_published_configs
from paceline.errors import JobError, PlanError
from paceline.plan.plan import fastest_layouts
from paceline.render import RenderError
from paceline.render.torchtitan import MODULE, stages

LLAMA = {
    "model": {"decoder": None, "preset": "llama-3-8b"},
    "data": {"seq_len": 4096},
    "cluster": {"nodes": 4, "per_node": 8},
    "train": {"global_batch": 64, "steps": 1000, "warmup_steps": 20},
}
THREE_WAYS = {
    "tensor": 4,
    "pipeline": 4,
    "schedule": "interleaved",
    "chunks": 2,
    "sharding": "full",
    "recompute": "selective",
}
FULL = {"sharding": "full", "data": 32, "recompute": "full", "recompute_every": 1}


def titan(**changes):
    merged = {
        name: LLAMA.get(name, {}) | changes.get(name, {})
        for name in LLAMA | changes
        if name != "engine"
    }
    return merged | {"engine": changes.get("engine", "torchtitan")}


def what(found) -> set[str]:
    return {gap.what for gap in found.gaps} - {
        "the job's data (data.path, data.corpus, data.sources)",
        "the tokenizer",
    }


def settings_of(files) -> dict[str, object]:
    """Keyword -> its value, of every call in the config that has plain values."""
    found: dict[str, object] = {}
    for node in ast.walk(ast.parse(files[f"{MODULE}.py"])):
        if isinstance(node, ast.Call):
            for word in node.keywords:
                try:
                    found[word.arg or ""] = ast.literal_eval(word.value)
                except ValueError:
                    found.setdefault(word.arg or "", ast.unparse(word.value))
    return found


def test_three_ways_to_split(check_golden):
    found = rendered("torchtitan", **titan(layout=THREE_WAYS))
    assert what(found) == set()
    check_golden("torchtitan/three-ways", found)


def test_full_sharding_of_the_whole_cluster(check_golden):
    found = rendered("torchtitan", **titan(layout=FULL))
    assert what(found) == set()
    check_golden("torchtitan/fsdp", found)


def test_experts_are_those_of_qwen3_and_have_their_ranks(check_golden):
    qwen = {"preset": "qwen3-30b-a3b"}
    layout = {"expert": 8, "sharding": "full", "data": 32, "recompute": "full"}
    found = rendered("torchtitan", **titan(model=qwen, layout=layout))
    assert what(found) == set()
    named = settings_of(found.files)
    assert (named["expert_parallel_degree"], named["num_experts"]) == (8, 128)
    assert named["disable_cuda_graphs"] is True
    assert (named["theta"], named["head_dim"], named["top_k"]) == (1e6, 128, 8)
    check_golden("torchtitan/experts", found)


@pytest.mark.parametrize("size", ["20b", "120b"])
def test_gpt_oss_is_the_one_of_torchtitans_registry(size):
    changes = {"model": {"preset": f"gpt-oss-{size}"}, "cluster": {"nodes": 8}}
    found = rendered("torchtitan", **titan(**changes, engine="torchtitan"))
    text = found.files[f"{MODULE}.py"]
    ast.parse(text)
    assert "from torchtitan.models import gpt_oss as family\n" in text
    registered = (
        f'family.model_registry("{size}", moe_comm_backend="standard", attn_backend="flex")'
    )
    assert registered in text
    assert "VOCABULARY = 201088\n" in text


def test_a_gpt_oss_of_other_sizes_or_in_fp8_is_refused(tmp_path):
    config = dict(load_published_configs()["gpt-oss-20b"].config)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 12}))
    small = {"preset": None, "hf_config": str(tmp_path / "config.json")}
    with pytest.raises(RenderError, match="of Qwen3's, and gpt-oss"):
        rendered("torchtitan", **titan(model=small))
    fp8 = {"model": {"preset": "gpt-oss-20b"}, "train": {"precision": "fp8"}}
    with pytest.raises(RenderError, match=r"fix: .*train\.precision: bf16"):
        rendered("torchtitan", **titan(**fp8, cluster={"nodes": 8}))


def test_the_planner_proposes_expert_ranks_for_torchtitan():
    _, job = planned(**titan(model={"preset": "qwen3-30b-a3b"}))
    found = [layout for layout, _ in fastest_layouts(job, None, 2000) if layout.expert > 1]
    assert {layout.sharding for layout in found} == {"zero2", "full"}


@pytest.mark.parametrize("sharding", ["none", "hybrid"])
def test_expert_ranks_without_ranks_that_shard_are_refused(sharding):
    layout = {"expert": 8, "sharding": sharding}
    with pytest.raises(PlanError, match="takes expert ranks from those that shard"):
        planned(**titan(model={"preset": "qwen3-30b-a3b"}, layout=layout))


def test_a_qwen_with_another_router_is_not_torchtitans(tmp_path):
    config = load_published_configs()["qwen3-30b-a3b"].config
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(config) | {"norm_topk_prob": False}))
    with pytest.raises(RenderError, match="the model"):
        rendered("torchtitan", **titan(model={"preset": None, "hf_config": str(path)}))


def test_float8_converts_the_linears_and_the_experts():
    fp8 = {"precision": "fp8"}
    found = rendered("torchtitan", **titan(layout=FULL, train=fp8))
    assert what(found) == set()
    text = found.files[f"{MODULE}.py"]
    assert "Float8GroupedExperts" not in text
    named = settings_of(found.files)
    assert named["recipe_name"] == "rowwise"
    assert named["filter_fqns"] == ["lm_head", "router.gate"]
    assert named["mixed_precision_param"] == "bfloat16"
    assert "# Needs torchao" in text
    mx = {"train": fp8 | {"fp8_recipe": "mxfp8"}, "cluster": {"accelerator": "B200"}}
    assert "quantization.MXFP8Linear" in rendered("torchtitan", **titan(**mx)).files[f"{MODULE}.py"]
    qwen = rendered("torchtitan", **titan(model={"preset": "qwen3-30b-a3b"}, train=fp8))
    assert "quantization.Float8GroupedExpertsConverter.Config(" in qwen.files[f"{MODULE}.py"]


def test_groups_of_hybrid_sharding_are_replicated():
    found = settings_of(
        rendered("torchtitan", **titan(layout={"sharding": "hybrid", "shard": 8, "data": 32})).files
    )
    assert found["data_parallel_replicate_degree"] == 4
    assert found["data_parallel_shard_degree"] == 8
    assert found["fsdp_reshard_after_forward"] == "always"


def test_zero2_keeps_parameters_gathered():
    found = settings_of(
        rendered("torchtitan", **titan(layout={"sharding": "zero2", "data": 32})).files
    )
    assert found["fsdp_reshard_after_forward"] == "never"


def test_a_constant_rate_stays_where_it_is():
    changes = {"train": {"schedule": "constant"}, "layout": FULL}
    found = settings_of(rendered("torchtitan", **titan(**changes)).files)
    assert (found["decay_ratio"], found["min_lr_factor"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "gap"),
    [
        ({"layout": {"context": 2, "sharding": "full"}}, "context 2 as ring"),
        (
            {"layout": FULL | {"recompute_every": 2}, "engine": "paceline"},
            "one block in 2 recomputed",
        ),
        ({"layout": {"sharding": "zero1", "data": 32}, "engine": "paceline"}, "ZeRO-1"),
        (
            {"layout": FULL, "train": {"optimizer": "muon"}, "engine": "paceline"},
            "the optimizer muon",
        ),
    ],
)
def test_what_torchtitan_lacks_is_said_with_the_nearest(changes, gap):
    found = rendered("torchtitan", **titan(**changes))
    (named,) = [each for each in found.gaps if each.what == gap]
    assert named.nearest


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"model": {"preset": "mixtral-8x7b"}}, "with any model"),
        ({"train": {"precision": "fp16"}, "engine": "paceline"}, "bf16"),
        ({"train": {"adapter": {"kind": "lora"}}, "engine": "paceline"}, "paceline run"),
    ],
)
def test_what_has_nothing_near_is_refused(changes, fix):
    with pytest.raises(RenderError) as refused:
        rendered("torchtitan", **titan(**changes))
    assert any(fix in problem.fix for problem in refused.value.problems)


@settings(max_examples=20, deadline=None)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    accumulation=st.sampled_from([4, 8]),
    micro=st.integers(1, 2),
    sharding=st.sampled_from(["none", "full"]),
)
def test_any_layout_keeps_its_batch_its_ranks_and_its_blocks(
    tensor, pipeline, accumulation, micro, sharding
):
    data = 32 // (tensor * pipeline)
    layout = {
        "data": data,
        "tensor": tensor,
        "pipeline": pipeline,
        "micro_batch": micro,
        "sharding": sharding,
        "recompute": "full",
    }
    tiny = {"decoder": {"layers": 16, "hidden": 256, "heads": 8, "kv_heads": 4}, "preset": None}
    batch = {"global_batch": data * micro * accumulation}
    plan, _ = planned(**titan(layout=layout, model=tiny, data={"seq_len": 128}, train=batch))
    found = settings_of(
        rendered(
            "torchtitan", **titan(layout=layout, model=tiny, data={"seq_len": 128}, train=batch)
        ).files
    )
    ranks = 1
    for name in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel"):
        ranks *= int(str(found[f"{name}_degree"]))
    assert ranks * int(str(found["pipeline_parallel_degree"])) == 32
    steps = 1 if pipeline > 1 else accumulation
    assert found["local_batch_size"] * data * steps == found["global_batch_size"]
    if pipeline > 1:
        names = [name for part in found["module_fqns_per_model_part"] for name in part]
        blocks = [f"layers.{block}" for block in range(16)]
        assert names == ["tok_embeddings", *blocks, "norm", "lm_head"]
        assert len(stages(plan)) == len(found["module_fqns_per_model_part"])


def test_rows_and_tokenizer_of_the_job_are_torchtitans_own_where_it_is_the_jobs_engine():
    model = {"preset": "llama-3-8b", "tokenizer": "/shared/llama-3/tokenizer.json"}
    asked = titan(layout=FULL, model=model, data={"path": "/shared/rows", "corpus": None})
    found = rendered("torchtitan", **asked)
    text = found.files[f"{MODULE}.py"]
    assert 'os.environ.get("HF_ASSETS", "/shared/llama-3")' in text.replace("'", '"')
    assert 'dataset=os.environ.get("DATASET", "c4_test")' in text.replace("'", '"')
    assert 'os.environ.get("DATASET_PATH", "/shared/rows")' in text.replace("'", '"')
    assert not {gap.where for gap in found.gaps} & {"data", "model.tokenizer"}


def test_a_version_after_the_name_keeps_the_jobs_data_and_another_one_is_refused():
    data = {"path": "/shared/rows", "corpus": None}
    newest = rendered("torchtitan", **titan(engine="torchtitan 0.3", data=data))
    assert "data" not in {gap.where for gap in newest.gaps}
    with pytest.raises(JobError, match="Paceline estimates torchtitan"):
        rendered("torchtitan", **titan(engine="torchtitan 0.2"))


def test_blocks_that_are_to_stay_uncompiled_are_a_gap():
    wanted = {"train": {"global_batch": 64, "steps": 100, "compile": False}}
    found = what(rendered("torchtitan", **titan(engine="torchtitan", **wanted)))
    assert "blocks that are not compiled (train.compile: false)" in found
