"""A Hugging Face config.json as its fields."""

import json
from pathlib import Path

import pytest

from paceline.errors import JobError
from paceline.job import Job, parse_job
from paceline.job.hf_config import has_hf_config, load_hf_config, parse_hf_config


def job(name: str, folder: Path) -> Job:
    text = (
        f"model: {{hf_config: {name}}}\ndata: {{path: x}}\ntrain: {{global_batch: 1, steps: 1}}\n"
    )
    return parse_job(text, source="job.yaml", folder=folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1 column 2"),
        ("[1]", "it holds a list"),
        ("null", "it holds a NoneType"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_text_that_is_no_json_object_is_refused(text: str, reason: str):
    with pytest.raises(JobError, match=reason):
        parse_hf_config(text, source="config.json", where="here")


def test_the_path_starts_from_the_job_file(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("config.json", "."):
        found = load_hf_config(job(name, tmp_path))
        assert found.values == {"model_type": "llama"}
        assert found.where == "model.hf_config, job.yaml line 1"
    with pytest.raises(JobError, match="No such file"):
        load_hf_config(job("missing.json", tmp_path))


def test_a_name_of_a_model_is_no_file(tmp_path: Path):
    assert not has_hf_config(job("llama-3-8b", tmp_path))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError, match="not UTF-8"):
        load_hf_config(job("config.json", tmp_path))
