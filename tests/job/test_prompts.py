"""The file of `evaluate.prompts`."""

import json

import pytest

from paceline.errors import JobError, Problem
from paceline.job import Job, parse_job
from paceline.job.prompts import read_prompts

TEXT = """\
model: {decoder: {layers: 2, hidden: 32, heads: 2}}
data: {path: x}
train: {global_batch: 8, steps: 100}
"""


def job(folder, *overrides: str) -> Job:
    return parse_job(TEXT, source="job.yaml", folder=folder, overrides=overrides)


def of(folder, name: str, content: str) -> Job:
    (folder / name).write_text(content)
    return job(folder, f"evaluate.prompts={name}")


def problems(asked: Job) -> list[Problem]:
    with pytest.raises(JobError) as caught:
        read_prompts(asked)
    return list(caught.value.problems)


def test_rows_are_texts_and_conversations(tmp_path):
    rows = [
        {"prompt": "Once upon"},
        {"messages": [{"role": "user", "content": "Who are you?", "name": "x"}]},
    ]
    text = "\n\n".join(json.dumps(row) for row in rows)
    prompts = read_prompts(of(tmp_path, "p.jsonl", text))
    assert [prompt.shown for prompt in prompts] == ["Once upon", "user: Who are you?"]
    assert prompts[1].messages == [{"role": "user", "content": "Who are you?"}]


def test_of_a_text_file_each_line_is_a_prompt(tmp_path):
    prompts = read_prompts(of(tmp_path, "p.txt", "Once upon\n\n  def f(x):\n"))
    assert [prompt.text for prompt in prompts] == ["Once upon", "  def f(x):"]


def test_every_bad_line_is_named(tmp_path):
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = ["{", '{"text": "x"}', json.dumps({"messages": answered}), '{"prompt": "fine"}']
    found = problems(of(tmp_path, "p.jsonl", "\n".join(rows)))
    assert [problem.code for problem in found] == ["J014"] * 3
    lines = [problem.where.partition(" (")[0] for problem in found]
    assert lines == [f"{tmp_path / 'p.jsonl'} line {number}" for number in (1, 2, 3)]
    assert "neither `prompt` nor `messages`" in found[1].what
    assert "the last message is the assistant's" in found[2].what


def test_a_file_that_is_not_there_or_empty_is_refused(tmp_path):
    (missing,) = problems(job(tmp_path, "evaluate.prompts=no.txt"))
    assert "cannot be read: No such file" in missing.what
    (empty,) = problems(of(tmp_path, "p.txt", "\n"))
    assert "has 0 prompts" in empty.what


def test_a_program_of_its_own_has_no_prompts(tmp_path):
    with pytest.raises(JobError, match="program own:train builds its own"):
        job(tmp_path, "data.path=null", "program=own:train", "evaluate.prompts=p.txt")


def test_prompt_tokens_without_prompts_are_refused(tmp_path):
    with pytest.raises(JobError, match="given without prompts"):
        job(tmp_path, "evaluate.prompt_tokens=5")
