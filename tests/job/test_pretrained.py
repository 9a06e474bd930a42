"""Where `model.pretrained` finds trained weights, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import JobError
from paceline.job import Job, parse_job
from paceline.job.pretrained import find_pretrained
from paceline.profile import (
    check_runnable,
    left_out_of,
    needs_transformers,
    resolve_config,
    resolve_decoder,
    resolve_profile,
)
from paceline.record.run import training_digest

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}


def job(model: str, folder: Path) -> Job:
    text = f"model: {model}\ndata: {{path: x, seq_len: 64}}\ntrain: {{global_batch: 8, steps: 9}}\n"
    return parse_job(text, source="job.yaml", folder=folder)


def write(folder: Path, *names: str, config: dict[str, Any] | None = LLAMA) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(asked: Job) -> tuple[str, str]:
    with pytest.raises(JobError) as caught:
        find_pretrained(asked)
    (problem,) = caught.value.problems
    return problem.code, problem.what + " / " + problem.fix


def test_a_folder_gives_its_weights_config_and_tokenizer(tmp_path: Path):
    folder = write(tmp_path / "tiny", "model.safetensors", "tokenizer.json")
    found = find_pretrained(job("{pretrained: tiny}", tmp_path))
    assert found is not None
    assert (found.folder, found.tokenizer, found.commit) == (folder, folder, None)
    assert [path.name for path in found.weights] == ["model.safetensors"]
    assert found.config["hidden_size"] == 32


def test_a_job_with_pretrained_weights_has_their_config(tmp_path: Path):
    write(tmp_path / "tiny", "model.safetensors")
    asked = job("{pretrained: tiny}", tmp_path)
    config, shape = resolve_config(asked), resolve_decoder(asked)
    assert config is not None
    assert config.where == "model.pretrained, job.yaml line 1"
    assert shape is not None
    assert shape.hidden == 32
    assert resolve_profile(asked).num_parameters > 0
    assert list(check_runnable(asked)) == []


@pytest.mark.parametrize(
    ("fields", "built_in"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, False),
        ({"model_type": "mistral", "sliding_window": 32}, False),
        ({"model_type": "mistral", "sliding_window": 64}, True),  # as long as a sample
    ],
)
def test_weights_that_the_built_in_decoder_would_run_otherwise_go_through_transformers(
    tmp_path: Path, fields: dict[str, Any], built_in: bool
):
    write(tmp_path / "tiny", "model.safetensors", config=LLAMA | fields)
    asked = job("{pretrained: tiny}", tmp_path)
    assert (resolve_decoder(asked) is not None) is built_in
    assert needs_transformers(asked) is not built_in
    assert left_out_of(asked) == ()
    drawn = job("{pretrained: tiny, weights: drawn}", tmp_path)
    assert resolve_decoder(drawn) is not None
    assert left_out_of(drawn) != ()


def test_samples_beyond_the_known_positions_and_tokens_that_are_not_bytes_are_refused(
    tmp_path: Path,
):
    config = LLAMA | {"max_position_embeddings": 32, "vocab_size": 49152}
    write(tmp_path / "tiny", "model.safetensors", config=config)
    asked = job("{pretrained: tiny, tokenizer: bytes}", tmp_path)
    found = list(check_runnable(asked))
    assert [each.code for each in found] == ["M014", "R013"]
    assert found[0].what.endswith("config.json has 32 positions")
    assert "49152 tokens" in found[1].what
    assert len(list(check_runnable(job("{pretrained: tiny}", tmp_path)))) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json"])
def test_what_lies_unused_beside_a_config_is_an_error_that_shows_both_ways_out(
    tmp_path: Path, name: str
):
    write(tmp_path / "tiny", name)
    for path in ("tiny", "tiny/config.json"):
        (problem,) = check_runnable(job(f"{{hf_config: {path}}}", tmp_path))
        assert problem.code == "M016"
        assert name in problem.what
        assert "model.pretrained: tiny;" in problem.fix
        assert "model.weights: drawn" in problem.fix
        assert not list(check_runnable(job(f"{{hf_config: {path}, weights: drawn}}", tmp_path)))


def test_the_digest_of_weights_is_of_their_bytes_and_of_their_config(tmp_path: Path):
    folder = write(tmp_path / "tiny", "model.safetensors")
    asked = job("{pretrained: tiny}", tmp_path)
    digests = set()
    for name, content in (("model.safetensors", b"ab"), ("model.safetensors", b"ba")):
        (folder / name).write_bytes(content)
        found = find_pretrained(asked)
        assert found is not None
        digests |= {found.digest(), found.digest()}
    write(folder, config=LLAMA | {"rope_theta": 1.0})
    found = find_pretrained(asked)
    assert found is not None
    assert len(digests | {found.digest()}) == 3
    (folder / "model.safetensors").unlink()
    with pytest.raises(JobError, match="cannot be read"):
        found.digest()


def test_a_hub_name_is_found_in_the_cache_by_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub/models--org--tiny"
    write(model / "snapshots/abc123", "model.safetensors")
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc123")
    for revision in ("null", "main", "abc123"):
        found = find_pretrained(job(f"{{pretrained: org/tiny, revision: {revision}}}", tmp_path))
        assert found is not None
        assert (found.commit, found.tokenizer) == ("abc123", None)
    code, said = refusal(job("{pretrained: org/tiny, revision: v2}", tmp_path))
    assert code == "M011"
    assert "hf download org/tiny --revision v2" in said
    assert "abc123" in said
    code, said = refusal(job("{pretrained: org/other}", tmp_path))
    assert (code, "hf download org/other" in said) == ("M011", True)


def test_files_that_the_index_names_and_are_missing_are_named(tmp_path: Path):
    folder = write(tmp_path / "tiny", "model-00001-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    code, said = refusal(job("{pretrained: tiny}", tmp_path))
    assert code == "M012"
    assert "1 of 2 weight files" in said
    assert "model-00002-of-00002.safetensors" in said
    for broken in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'):
        index.write_text(broken)
        assert refusal(job("{pretrained: tiny}", tmp_path))[0] == "M012"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "no .safetensors files"),
        (("pytorch_model.bin",), "--from torch --to safetensors"),
        (("adapter_model.safetensors",), "only adapters"),
    ],
)
def test_weights_in_another_form_are_refused(tmp_path: Path, files: tuple[str, ...], words: str):
    write(tmp_path / "tiny", *files)
    code, said = refusal(job("{pretrained: tiny}", tmp_path))
    assert code == "M012"
    assert words in said


def test_what_is_no_model_is_refused(tmp_path: Path):
    write(tmp_path / "tiny", "model.safetensors", config=None)
    assert refusal(job("{pretrained: tiny}", tmp_path))[0] == "M002"
    assert refusal(job("{pretrained: ./nothing}", tmp_path))[0] == "M011"
    assert refusal(job("{pretrained: tiny/model.safetensors}", tmp_path))[0] == "M011"
    assert refusal(job("{pretrained: tiny, revision: main}", tmp_path))[0] == "J007"
    with pytest.raises(JobError, match="is given without"):
        job("{preset: llama-3-8b, revision: main}", tmp_path)
    with pytest.raises(JobError, match="hf_config and pretrained"):
        job("{pretrained: tiny, hf_config: tiny}", tmp_path)


def test_a_job_without_pretrained_weights_has_the_digest_of_earlier_versions(tmp_path: Path):
    digests = {
        training_digest(job(model, tmp_path))
        for model in ("{preset: llama-3-8b}", "{preset: llama-3-8b, pretrained: null}")
    }
    assert digests == {"60bdbc1c1af8bec18b9c57e8ffb7c6ce515f6776672ad82af86ee4ceb77ec89a"}
