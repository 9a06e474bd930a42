"""LoRA and QLoRA: parameters as peft and LitGPT count them, bytes of what is frozen."""

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.catalog.configs import load_published_configs
from paceline.errors import JobError
from paceline.job import Job, parse_job
from paceline.profile import ModelProfile, ModuleFacts, check_runnable, resolve_profile
from paceline.profile.adapter import adaptation_of


def job(preset: str, adapter: str) -> Job:
    text = f"model: {{preset: {preset}}}\ndata: {{path: x, seq_len: 64}}\n"
    text += f"train: {{global_batch: 8, steps: 9, adapter: {adapter}}}\n"
    return parse_job(text, source="job.yaml", folder=Path("/nowhere"))


def profile_of(preset: str, adapter: str) -> ModelProfile:
    return resolve_profile(job(preset, adapter))


def trained(preset: str, adapter: str) -> int:
    return profile_of(preset, adapter).num_trained_parameters


@pytest.mark.parametrize(
    ("preset", "adapter", "count"),
    [
        # peft's own table for query and value; the tables of LitGPT have the same at r = 8.
        ("llama-2-7b", "{rank: 8, targets: [q_proj, v_proj]}", 4_194_304),
        ("llama-2-13b", "{rank: 8, targets: [q_proj, v_proj]}", 6_553_600),
        ("llama-3-8b", "{rank: 8, targets: [query, value]}", 3_407_872),
        # print_trainable_parameters of peft for all linears of Llama-2-7B and Llama-3-8B.
        ("llama-2-7b", "{rank: 16, targets: all}", 39_976_960),
        ("llama-3-8b", "{rank: 16, targets: all}", 41_943_040),
        ("gpt2", "{rank: 8, targets: [c_attn]}", 294_912),
        ("bloom-7b1", "{rank: 8, targets: [query_key_value]}", 3_932_160),
    ],
)
def test_adapters_have_the_published_parameters(preset: str, adapter: str, count: int):
    assert trained(preset, adapter) == count


def test_attention_means_its_four_linears():
    names = "[q_proj, k_proj, v_proj, o_proj]"
    assert trained("llama-3-8b", "{rank: 4}") == trained(
        "llama-3-8b", f"{{rank: 4, targets: {names}}}"
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("llama-3.2-1b", "[query, value]", ["q_proj", "v_proj"]),
        ("llama-3.2-1b", "all", "all-linear"),
        ("mistral-nemo-12b", "attention", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("qwen3-0.6b", "all", "all-linear"),
        ("gemma-2-2b", "all", "all-linear"),
        ("gpt-neox-20b", "all", "all-linear"),
        ("gpt2", "all", "all-linear"),
        ("mpt-7b", "all", "all-linear"),
        ("phi-3-mini", "all", "all-linear"),
        ("phi-2", "all", "all-linear"),
        ("opt-1.3b", "all", "all-linear"),
        ("falcon-7b", "all", "all-linear"),
        ("mixtral-8x7b", "attention", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        (
            "deepseek-v2-lite",
            "attention",
            ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        ),
    ],
)
def test_adapters_equal_those_of_peft(name: str, ours: str, theirs: Any):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = dict(load_published_configs()[name].config)
    kind = config.pop("model_type")
    if config.get("q_lora_rank") == 0:
        config["q_lora_rank"] = None
    with torch.device("meta"):
        made = transformers.CONFIG_MAPPING[kind](**config)
        model = transformers.AutoModelForCausalLM.from_config(made)
        wrapped = peft.get_peft_model(
            model, peft.LoraConfig(r=8, target_modules=theirs, task_type="CAUSAL_LM")
        )
    real = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert trained(name, f"{{rank: 8, targets: {ours}}}") == real


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b", "gpt2", "phi-3-mini", "phi-2"])
def test_magnitudes_equal_those_of_peft_and_quantised_matrices_those_of_the_model(name: str):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = dict(load_published_configs()[name].config)
    with torch.device("meta"):
        made = transformers.CONFIG_MAPPING[config.pop("model_type")](**config)
        model = transformers.AutoModelForCausalLM.from_config(made)
        blocks = max(
            (each for each in model.modules() if isinstance(each, torch.nn.ModuleList)),
            key=lambda each: sum(p.numel() for p in each.parameters()),
        )
        inside = sum(each.numel() for each in blocks.parameters() if each.dim() == 2)
        wanted = peft.LoraConfig(r=8, target_modules="all-linear", use_dora=True)
        wrapped = peft.get_peft_model(model, wanted)
    real = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert trained(name, "{kind: dora, rank: 8, targets: all}") == real
    adapter = profile_of(name, "{kind: qlora, rank: 8}").adapter
    assert adapter is not None
    assert adapter.num_quantised_parameters == inside


def test_every_expert_has_adapters_of_its_own():
    a_layer = 8 * (2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + (4096 + 8))
    a_layer += 8 * 8 * 3 * (4096 + 14336)
    assert trained("mixtral-8x7b", "{rank: 8, targets: all}") == 32 * a_layer


def test_lora_keeps_the_model_in_bf16():
    profile = profile_of("llama-2-7b", "{rank: 8}")
    assert profile.frozen_block_bytes(2.0, 0.5) == 2.0
    assert profile.num_parameters == 6_738_415_616


def test_qlora_keeps_the_matrices_of_the_blocks_in_4_bits():
    profile = profile_of("llama-2-7b", "{kind: qlora, rank: 8}")
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    inside = 6_738_415_616 - 2 * 32_000 * 4096 - 4096
    booked = profile.frozen_block_bytes(2.0, 0.5625) * inside
    assert booked == pytest.approx(matrices * 0.5625 + 2 * (inside - matrices), rel=1e-9)


def test_adapters_of_each_kind_of_block_add_up():
    profile = profile_of("deepseek-v2-lite", "{rank: 8, targets: all}")
    adapter = profile.adapter
    assert adapter is not None
    pairs = zip(profile.blocks, adapter.num_block_parameters, strict=True)
    assert sum(block.count * each for block, each in pairs) == adapter.num_parameters


def test_a_linear_that_the_model_lacks_names_the_nearest():
    with pytest.raises(JobError) as caught:
        profile_of("llama-3-8b", "{targets: [querry, c_attn]}")
    first, second = caught.value.problems
    assert first.code == "M009"
    assert first.fix.startswith("did you mean `query`? Choose from query, key, value")
    assert "'c_attn'" in second.what


def test_an_empty_list_of_targets_is_refused():
    with pytest.raises(JobError, match="M009"):
        profile_of("llama-3-8b", "{targets: []}")


def test_adapters_beside_an_unknown_module_are_refused():
    asked = parse_job(
        "model: {factory: 'm:f'}\nprogram: m:t\n"
        "train: {global_batch: 1, steps: 1, adapter: {rank: 4}}\n",
        source="job.yaml",
        folder=Path("/nowhere"),
    )
    with pytest.raises(JobError, match="M009"):
        resolve_profile(asked, ModuleFacts(num_parameters=10))


@pytest.mark.parametrize("kind", ["lora", "dora", "qlora"])
def test_the_built_in_trainer_trains(kind: str):
    asked = job("llama-3-8b", f"{{kind: {kind}, rank: 4, targets: all}}")
    assert list(check_runnable(asked)) == []


@pytest.mark.parametrize(
    ("preset", "adapter", "where", "what"),
    [
        ("mixtral-8x7b", "{kind: qlora}", "train.adapter.kind", "routed experts are no linears"),
        ("llama-3-8b", "{kind: dora, dropout: 0.1}", "train.adapter.kind", "a second product"),
        ("gpt2", "{kind: qlora}", "train.adapter.kind", "inputs x outputs"),
        ("llama-3-8b", "{rank: 4}, precision: fp8", "train.precision", "float8"),
        ("mixtral-8x7b", "{targets: all}", "train.adapter.targets", "expert_gate, expert_up"),
        ("mixtral-8x7b", "{rank: 4, targets: [router]}", "train.adapter.targets", r"\(router\)"),
    ],
)
def test_what_the_built_in_trainer_cannot_train_is_named(
    preset: str, adapter: str, where: str, what: str
):
    (problem,) = check_runnable(job(preset, adapter))
    assert problem.code == "R013"
    assert problem.where.startswith(where)
    assert re.search(what, problem.what)


def test_the_rank_may_not_be_above_the_widest_matrix():
    with pytest.raises(JobError, match="M009") as caught:
        profile_of("gpt2", "{rank: 1000}")
    assert "set train.adapter.rank to 768 or less" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("adapter", "scale"),
    [
        ("{rank: 16}", 2.0),
        ("{rank: 16, alpha: 8}", 0.5),
        ("{rank: 16, alpha: 8, scaling: rslora}", 2.0),
    ],
)
def test_what_an_adapter_adds_is_scaled(adapter: str, scale: float):
    asked = job("gpt2", adapter)
    counted = resolve_profile(asked).adapter
    assert counted is not None
    assert asked.spec.train.adapter is not None
    made = adaptation_of(counted, asked.spec.train.adapter, precision="fp32", seed=0)
    assert made.scale == scale
