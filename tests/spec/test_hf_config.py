"""A Hugging Face config.json as plain sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import JobError, Problem
from paceline.spec import parse_job
from paceline.spec.hf_config import HfConfig, load_hf_config, parse_hf_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


def read(**changes: Any) -> HfConfig:
    return parse_hf_config(json.dumps(LLAMA | changes), source="config.json", where="here")


def problems(values: dict[str, Any]) -> list[Problem]:
    with pytest.raises(JobError) as caught:
        parse_hf_config(json.dumps(values), source="config.json", where="here")
    return list(caught.value.problems)


def test_a_llama_config_is_read():
    config = read()
    assert (config.layers, config.hidden, config.ffn) == (32, 4096, 14336)
    assert (config.heads, config.kv_heads, config.head_dim) == (32, 8, None)
    assert (config.rope_theta, config.norm_eps) == (500_000.0, 1e-5)
    assert config.left_out == ()


def test_fields_that_hugging_face_leaves_out_take_its_defaults():
    values = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
    config = parse_hf_config(json.dumps(values), source="config.json", where="here")
    assert config.kv_heads == 32
    assert config.norm_eps == 1e-6


def test_qwen2_has_a_bias_on_query_key_and_value():
    assert read(model_type="qwen2").qkv_bias
    assert not read(model_type="mistral").qkv_bias


def test_transformers_5_writes_rotary_parameters_in_a_section():
    values = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    values["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "default"}
    config = parse_hf_config(json.dumps(values), source="config.json", where="here")
    assert config.rope_theta == 1e6
    assert config.left_out == ()


def test_what_the_decoder_does_not_do_is_said_and_not_dropped():
    scaled = read(rope_scaling={"rope_type": "llama3", "factor": 8.0})
    assert scaled.left_out == ("scaling of rotary positions (llama3)",)
    window = read(model_type="mistral", sliding_window=4096)
    assert window.left_out == ("sliding window of 4096 tokens",)
    assert read(model_type="qwen2", sliding_window=4096, use_sliding_window=False).left_out == ()


def test_another_architecture_says_which_fields_it_needs_and_which_are_missing():
    (problem,) = problems({"model_type": "gpt2", "n_embd": 768, "vocab_size": 50257})
    assert problem.code == "M003"
    assert "model_type 'gpt2'; known are llama, mistral, qwen2" in problem.what
    assert "num_hidden_layers, hidden_size, num_attention_heads, intermediate_size is missing" in (
        problem.fix
    )


def test_every_missing_field_is_named_at_once():
    values = {k: v for k, v in LLAMA.items() if k not in ("hidden_size", "vocab_size")}
    assert [problem.what for problem in problems(values)] == [
        "config.json has no hidden_size",
        "config.json has no vocab_size",
    ]


@pytest.mark.parametrize(
    ("field", "value"), [("mlp_bias", True), ("attention_bias", True), ("hidden_act", "gelu")]
)
def test_a_field_that_changes_the_parameters_is_refused(field: str, value: object):
    (problem,) = problems(LLAMA | {field: value})
    assert problem.what.startswith(f"config.json says {field} is {value!r}")


def test_text_that_is_no_json_is_refused_with_its_line():
    with pytest.raises(JobError, match="line 1 column 2"):
        parse_hf_config("{", source="config.json", where="here")


def test_the_path_starts_from_the_job_file(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    text = "model: {hf_config: %s}\ndata: {path: x}\ntrain: {global_batch: 1, steps: 1}\n"
    for name in ("config.json", "."):
        job = parse_job(text % name, source="job.yaml", folder=tmp_path)
        assert load_hf_config(job).layers == 32
    job = parse_job(text % "missing.json", source="job.yaml", folder=tmp_path)
    with pytest.raises(JobError, match="No such file"):
        load_hf_config(job)
