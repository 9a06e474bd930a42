"""`paceline data prepare` and `show`."""

import json
import re

import pytest
from click.testing import CliRunner
from tests.prepare.conftest import a_chat, write_rows

from paceline.cli.data import command
from paceline.errors import JobError

JOB = """
model:
  decoder: {layers: 1, hidden: 8, heads: 1, vocab: 512}
  tokenizer: %s
train: {global_batch: 2, steps: 3}
data: {path: %s, seq_len: 64, held_out: 0}
"""


@pytest.fixture
def job_file(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [a_chat(), a_chat("Hello?", "I am fine.")])
    path = tmp_path / "job.yaml"
    path.write_text(JOB % (tokenizer_folder, "a.jsonl"))
    return str(path)


def answer(*arguments: str) -> str:
    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_prepare_shows_what_was_made_and_its_padding(job_file):
    text = answer("prepare", job_file)
    assert "a as chat (messages: messages)" in text
    assert "PADDING" in text
    assert re.search(r"\d\.\d\d% of a batch is padding", text)
    data = json.loads(answer("prepare", job_file, "--json"))
    assert data["train"][0]["documents"] == 2
    assert data["pack"] == "documents"


def test_show_prints_the_documents_of_a_sample_and_marks_what_is_trained_on(job_file):
    answer("prepare", job_file)
    text = answer("show", job_file, "--sample", "0")
    assert "[[It is three.<|im_end|>]]" in text
    shown = json.loads(answer("show", job_file, "--sample", "0", "--json"))
    trained = [
        text for document in shown["documents"] for is_on, text in document["parts"] if is_on
    ]
    assert sorted(trained) == ["I am fine.<|im_end|>", "It is three.<|im_end|>"]


def test_show_of_windows_has_each_document_and_the_shared_last_token(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "defgh"}])
    path = tmp_path / "job.yaml"
    text = JOB % ("bytes", "null, sources: [{path: a.jsonl}]")
    path.write_text(text.replace("seq_len: 64", "seq_len: 4"))
    answer("prepare", str(path))
    shown = json.loads(answer("show", str(path), "--sample", "1", "--json"))
    texts = ["".join(text for _, text in document["parts"]) for document in shown["documents"]]
    assert texts == ["defgh"]
    shown = json.loads(answer("show", str(path), "--sample", "0", "--json"))
    texts = ["".join(text for _, text in document["parts"]) for document in shown["documents"]]
    assert texts == ["abc\n", "d"]
    assert [document["num_trained"] for document in shown["documents"]] == [3, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sample", "99"], r"D021.*\n.*\n.*0 to 0"),
        (["--sample", "0", "--held-out"], "nothing is held out"),
    ],
)
def test_a_sample_that_is_not_there_is_refused(job_file, arguments, words):
    answer("prepare", job_file)
    with pytest.raises(JobError, match=words):
        answer("show", job_file, *arguments)


def test_show_before_prepare_is_refused(job_file):
    with pytest.raises(JobError, match="not prepared yet"):
        answer("show", job_file, "--sample", "0")
