"""The job's model, said in any of its ways."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import JobError, Problem
from paceline.job import Job, parse_job
from paceline.profile import (
    BlockFacts,
    ModelProfile,
    ModuleFacts,
    check_runnable,
    left_out_of,
    needs_transformers,
    profile_decoder,
    resolve_config,
    resolve_decoder,
    resolve_profile,
)
from paceline.profile.runnable import last_position
from paceline.profile.size import LEAST, shape_of_size

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


def job(model: str, *overrides: str, folder: Path = Path("/nowhere")) -> Job:
    text = f"model: {model}\ndata: {{path: x, seq_len: 64}}\ntrain: {{global_batch: 8, steps: 9}}\n"
    return parse_job(text, source="job.yaml", folder=folder, overrides=overrides)


def config_job(folder: Path, config: dict[str, Any], *overrides: str) -> Job:
    (folder / "config.json").write_text(json.dumps(config))
    return job("{hf_config: config.json}", *overrides, folder=folder)


def problems(asked: Job) -> list[Problem]:
    with pytest.raises(JobError) as caught:
        resolve_profile(asked)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("model", "name", "parameters"),
    [
        ("{preset: llama-3-8b}", "llama-3-8b", 8_030_261_248),
        ("{preset: mixtral-8x7b}", "mixtral-8x7b", 46_702_792_704),
        ("{hf_config: llama-3-8b}", "llama-3-8b", 8_030_261_248),
        ("{hf_config: deepseek-v3}", "deepseek-v3", 671_026_404_352),
        ("{decoder: {layers: 2, hidden: 64, heads: 4}}", "decoder", 139_584),
    ],
)
def test_every_way_to_say_a_model_gives_its_profile(model: str, name: str, parameters: int):
    profile = resolve_profile(job(model))
    assert (profile.name, profile.num_parameters) == (name, parameters)


def test_a_llama_config_is_the_built_in_decoder_and_a_gpt2_one_is_built_by_transformers(
    tmp_path: Path,
):
    llama = config_job(tmp_path, LLAMA)
    shape = resolve_decoder(llama)
    assert shape is not None
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (32, 8, 128)
    assert (shape.rope_theta, shape.norm_eps) == (500_000.0, 1e-5)
    own, found = profile_decoder(shape, 64, name="llama"), resolve_profile(llama)
    # How transformers' class writes a block counts where an engine builds that class.
    written = tuple(replace(block, written=own.blocks[0].written) for block in found.blocks)
    assert replace(found, blocks=written) == own
    assert not needs_transformers(llama)
    assert not list(check_runnable(llama))

    gpt2 = config_job(tmp_path, GPT2)
    assert resolve_decoder(gpt2) is None
    asked = resolve_config(gpt2)
    assert asked is not None
    assert asked.config == GPT2
    assert resolve_profile(gpt2).num_parameters == 124_439_808
    assert needs_transformers(gpt2)
    assert not list(check_runnable(gpt2))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "gpt2", "deepseek-v3", "gemma-2-9b", "bloom-3b"])
def test_every_published_causal_language_model_can_be_run(name: str):
    asked = job(f"{{preset: {name}}}")
    assert resolve_decoder(asked) is None
    assert not list(check_runnable(asked))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("bert-base", "bert computes MaskedLM, and the built-in trainer predicts the next token"),
        ("t5-small", "t5 computes ConditionalGeneration"),
        ("vit-base", "vit computes ImageClassification"),
    ],
)
def test_a_model_that_does_not_predict_the_next_token_is_planned_and_not_run(model: str, says: str):
    asked = job(f"{{preset: {model}}}")
    (problem,) = check_runnable(asked)
    assert problem.code == "R013"
    assert f"cannot train {model}: {says}" in problem.what
    assert problem.where == "model.preset, job.yaml line 1"
    assert not list(check_runnable(job(f"{{preset: {model}}}", "program=m:t")))


def test_published_llamas_can_be_run_whether_by_sizes_or_by_config():
    for name in ("llama-3-8b", "llama-3.2-1b", "qwen2.5-7b"):
        asked = job(f"{{preset: {name}}}")
        shape = resolve_decoder(asked)
        assert shape is not None
        parameters = profile_decoder(shape, 64).num_parameters
        assert resolve_profile(asked).num_parameters == parameters


@pytest.mark.parametrize(
    ("field", "value"), [("mlp_bias", True), ("attention_bias", True), ("hidden_act", "gelu")]
)
def test_what_the_built_in_decoder_cannot_be_is_built_by_transformers(
    tmp_path: Path, field: str, value: object
):
    asked = config_job(tmp_path, LLAMA | {field: value, "rope_scaling": {"type": "linear"}})
    assert resolve_decoder(asked) is None
    assert resolve_profile(asked).num_parameters > 7e9
    assert needs_transformers(asked)
    assert not list(check_runnable(asked))
    assert left_out_of(asked) == ()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        (LLAMA | {"head_dim": 127}, "a head is 127 wide"),
        (LLAMA | {"vocab_size": 128}, "vocab_size is 128, and the built-in trainer reads bytes"),
    ],
)
def test_what_neither_can_be_is_planned_and_not_run(
    tmp_path: Path, config: dict[str, Any], says: str
):
    asked = config_job(tmp_path, config)
    assert resolve_decoder(asked) is None or config["vocab_size"] < 256
    assert resolve_profile(asked).num_parameters > 1e8
    (problem,) = check_runnable(asked)
    assert problem.code == "R013"
    assert says in problem.what


def test_samples_beyond_the_last_position_are_repaired_by_their_length(tmp_path: Path):
    (problem,) = check_runnable(config_job(tmp_path, GPT2 | {"n_positions": 32}))
    assert (problem.code, problem.fix.partition(" or less")[0]) == (
        "M014",
        "set data.seq_len to 32",
    )
    assert problem.where.startswith("data.seq_len")
    assert last_position({"model_type": "roberta", "max_position_embeddings": 514}) == 512


def test_fields_that_hugging_face_leaves_out_take_its_defaults(tmp_path: Path):
    short = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
    shape = resolve_decoder(config_job(tmp_path, short))
    assert shape is not None
    assert (shape.kv_heads, shape.norm_eps) == (32, 1e-6)


def test_transformers_5_writes_rotary_parameters_in_a_section(tmp_path: Path):
    values = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    values["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "default"}
    asked = config_job(tmp_path, values)
    shape = resolve_decoder(asked)
    assert shape is not None
    assert shape.rope_theta == 1e6
    assert left_out_of(asked) == ()


def test_what_the_decoder_does_not_do_is_said_and_not_dropped(tmp_path: Path):
    def said(**changes: Any) -> tuple[str, ...]:
        return left_out_of(config_job(tmp_path, LLAMA | changes))

    scaling = {"rope_type": "llama3", "factor": 8.0}
    assert said(rope_scaling=scaling) == ("scaling of rotary positions (llama3)",)
    window = "sliding window of 4096 tokens"
    assert said(model_type="mistral", sliding_window=4096) == (window,)
    assert said(model_type="qwen2", sliding_window=4096, use_sliding_window=False) == ()


def test_a_name_near_a_published_one_is_offered():
    (problem,) = problems(job("{hf_config: llama3-8b}"))
    assert problem.code == "M001"
    assert "`llama-3-8b`" in problem.fix
    assert problem.where == "model.hf_config, job.yaml line 1"
    (problem,) = problems(job("{preset: mixtral}"))
    assert "mixtral-8x7b" in problem.fix


def test_a_path_that_is_not_there_is_no_name():
    (problem,) = problems(job("{hf_config: models/config.json}"))
    assert problem.code == "M002"
    assert "No such file" in problem.what


@pytest.mark.parametrize("size", ["10M", "70M", "350M", "1B", "1.3B", "3B", "7B", "8B", "13B"])
@pytest.mark.parametrize("times", [1, 10, 25, 130])
def test_a_size_alone_is_met_within_2_percent(size: str, times: int):
    profile = resolve_profile(job(f"{{size: {size}}}"))
    asked = parse_job_size(size) * times
    shape = shape_of_size(asked, where="here")
    assert profile_decoder(shape, 64).num_parameters == pytest.approx(asked, rel=0.02)
    assert profile.num_parameters == pytest.approx(asked / times, rel=0.02)
    assert shape.heads % shape.kv_heads == 0


def parse_job_size(size: str) -> int:
    found = job(f"{{size: {size}}}").spec.model.size
    assert found is not None
    return found


def test_a_size_says_what_it_assumed_and_can_be_run():
    asked = job("{size: 7B}")
    profile = resolve_profile(asked)
    assert profile.name == "7B"
    assert profile.assumed[0].startswith("built like Llama 2")
    assert any("32 layers of width 4096" in phrase for phrase in profile.assumed)
    assert resolve_decoder(asked) is not None


@pytest.mark.parametrize("size", ["7", str(LEAST - 1), "900T"])
def test_a_size_that_nobody_trains_is_asked_for_its_unit(size: str):
    (problem,) = problems(job(f"{{size: {size}}}"))
    assert problem.code == "M008"
    assert "7B" in problem.fix


def test_two_ways_to_say_the_model_are_refused():
    with pytest.raises(JobError, match="model is said 2 ways: preset and size"):
        job("{size: 7B, preset: tiny}")


def facts_of(**changes: Any) -> ModuleFacts:
    blocks = (BlockFacts(name="Layer", count=2, num_parameters=30),)
    return ModuleFacts(num_parameters=100, blocks=blocks, **changes)


def factory(facts: ModuleFacts) -> ModelProfile:
    return resolve_profile(job("{factory: 'm:f'}", "program=m:t"), facts)


def test_a_hugging_face_module_is_its_family_when_the_parameters_agree():
    facts = ModuleFacts(num_parameters=124_439_808, config=GPT2)
    profile = factory(facts)
    assert profile.num_blocks == 12
    assert profile.blocks[0].hidden == 768


def test_a_changed_hugging_face_module_is_its_own_and_says_so():
    profile = factory(facts_of(config=GPT2))
    assert profile.num_parameters == 100
    assert "would have 124,439,808 parameters, the module has 100" in profile.assumed[0]


def test_a_module_that_ran_has_measured_flops():
    blocks = (
        BlockFacts(name="A", count=2, num_parameters=30, forward_flops=5.0, saved_bytes=8),
        BlockFacts(name="B", count=1, num_parameters=10, forward_flops=7.0, saved_bytes=8),
    )
    facts = ModuleFacts(num_parameters=100, blocks=blocks, outside_flops=3.0)
    profile = factory(facts)
    assert profile.forward_flops_per_sample == 20.0
    assert profile.assumed == ()


def test_a_module_that_could_not_run_says_why():
    profile = factory(facts_of(unknown_because="forward takes 3 arguments"))
    assert profile.forward_flops_per_sample is None
    assert profile.assumed == ("FLOPs and activations are not known: forward takes 3 arguments",)
