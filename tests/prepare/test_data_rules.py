"""What a job says of its data: what is unused, clashes, or would be read as something else."""

import json

import pytest

from paceline.errors import JobError
from paceline.job import parse_job
from paceline.job.corpus import find_corpus
from paceline.job.data_rules import is_prepared, objective_of

JOB = """
model: {%s}
train: {global_batch: 2, steps: 3}
data: {%s}
"""
DECODER = "decoder: {layers: 1, hidden: 8, heads: 1}"


def a_job(data, folder=None, model=""):
    text = JOB % (DECODER + (f", {model}" if model else ""), data)
    return parse_job(text, source="job.yaml", folder=folder)


def problem_of(data, **options) -> str:
    with pytest.raises(JobError) as caught:
        a_job(data, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "model", "words"),
    [
        ("path: a, sources: [{path: b}]", "", "data.path and data.sources are both given"),
        ("path: a, kind: chat", "", "needs a tokenizer"),
        ("path: a, pack: documents", "", "data.pack would be unused"),
        ("path: a", "chat_template: x.jinja", "model.chat_template would be unused"),
        ("path: a, cache: b", "", "data.cache would be unused"),
        ("sources: []", "", "an empty list"),
        ("sources: [{path: a, weight: 2}, {path: b}]", "", "1 of 2 sources have a weight"),
        ("sources: [{path: a, columns: {body: x}}]", "", "columns has body"),
        ("path: a, kind: chat, pack: windows", "tokenizer: t", "cuts through data.kind chat"),
        ("path: a, kind: chat, too_long: split", "tokenizer: t", "use cut, or drop"),
        ("path: a, kind: text, train_on: all", "tokenizer: t", "every token is trained on"),
        ("path: a, pack: windows, too_long: cut", "tokenizer: t", "join documents of any length"),
        ("path: a, held_out: 0.2, held_out_path: b", "tokenizer: t", "are both given"),
        ("path: a, kind: preference", "", "needs a tokenizer"),
        ("path: a, kind: preference, pack: documents", "tokenizer: t", "a sample is a pair"),
        ("path: a, kind: preference, train_on: all", "tokenizer: t", "answers are compared"),
        ("path: a, kind: preference, too_long: split", "tokenizer: t", "use cut, or drop"),
    ],
)
def test_what_clashes_or_would_be_unused_is_an_error(data, model, words):
    text = problem_of(data, model=model)
    assert "J007" in text
    assert words in text


def test_a_program_of_ones_own_reads_its_own_data():
    with pytest.raises(JobError, match=r"data.sources would be unused"):
        parse_job(
            JOB % (DECODER, "sources: [{path: a}]") + "program: a:b",
            source="job.yaml",
            folder=None,
        )


@pytest.mark.parametrize(
    ("data", "model", "expected"),
    [
        ("path: a", "", False),
        ("corpus: python-stdlib", "", False),
        ("path: a, kind: text", "tokenizer: bytes", False),
        ("path: a", "tokenizer: t", True),
        ("corpus: python-stdlib", "tokenizer: t", True),
        ("sources: [{path: a}]", "", True),
    ],
)
def test_which_jobs_are_prepared(data, model, expected):
    assert is_prepared(a_job(data, model=model)) is expected


ROWS = '{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", ROWS),
        ("a.csv", "text\none\n"),
        ("a.parquet", "PAR1\0\0"),
        ("a.txt", ROWS),
        ("a.json", json.dumps([{"text": "one"}, {"text": "two"}])),
    ],
)
def test_rows_are_not_trained_on_as_raw_bytes_in_silence(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(JobError, match=rf"D006: 1 of 1 files hold rows.*{name}"):
        find_corpus(a_job(f"path: {name}, seq_len: 2", tmp_path))


def test_rows_are_trained_on_as_raw_bytes_where_that_is_asked(tmp_path):
    (tmp_path / "a.jsonl").write_text(ROWS)
    job = a_job("path: a.jsonl, seq_len: 2, held_out: 0, kind: text", tmp_path, "tokenizer: bytes")
    assert find_corpus(job).num_train_bytes == len(ROWS)


@pytest.mark.parametrize("text", ['{"name": "x",\n "version": 1}\n', "{% a %}\n{% b %}\n", "[1]\n"])
def test_other_text_is_no_rows(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert find_corpus(a_job("path: a.json, seq_len: 2, held_out: 0", tmp_path)).train


OBJECTIVE = """
model: {decoder: {layers: 1, hidden: 8, heads: 1}, tokenizer: t}
train: {global_batch: 2, steps: 3, objective: {%s}}
data: {path: a, kind: %s}
layout: {%s}
"""


@pytest.mark.parametrize(
    ("objective", "kind", "layout", "words"),
    [
        ("kind: dpo", "chat", "", "dpo does not go with data.kind chat"),
        ("kind: next_token", "preference", "", "to train on the chosen answers alone"),
        ("beta: 0.2", "chat", "", "beta 0.2 is of dpo alone"),
        ("", "preference", "context: 2", "layout.context 2 splits answers"),
    ],
)
def test_an_objective_goes_with_its_data_and_layout(objective, kind, layout, words):
    with pytest.raises(JobError) as caught:
        parse_job(OBJECTIVE % (objective, kind, layout), source="job.yaml", folder=None)
    assert "J007" in str(caught.value)
    assert words in str(caught.value)


def test_pairs_are_trained_with_dpo_without_being_asked():
    asked = ("", "preference", "")
    job = parse_job(OBJECTIVE % asked, source="job.yaml", folder=None)
    assert objective_of(job.spec) == "dpo"
    job = parse_job(OBJECTIVE % ("", "chat", ""), source="job.yaml", folder=None)
    assert objective_of(job.spec) == "next_token"


CLASSES = """
model: {hf_config: c.json, tokenizer: t}
train: {global_batch: 2, steps: 3%s}
data: {path: a, kind: %s}
"""


@pytest.mark.parametrize(
    ("train", "data", "words"),
    [
        ("", "classification", "data.labels is None"),
        ("", "classification, labels: [a]", "needs two classes or more"),
        ("", "classification, labels: [a, a]", "each named once"),
        ("", "chat, labels: [a, b]", "rows of data.kind chat have none"),
        (", adapter: {rank: 4}", "classification, labels: [a, b]", "trains no new head"),
        (", objective: {kind: dpo}", "classification, labels: [a, b]", "set data.kind: preference"),
    ],
)
def test_classes_are_named_and_have_a_head_that_is_trained(train, data, words):
    with pytest.raises(JobError) as caught:
        parse_job(CLASSES % (train, data), source="job.yaml", folder=None)
    assert "J007" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "data", "words"),
    [
        ("[1, 1.5]", "classification, labels: [a, b, c]", "fix: give one for each of a, b, c, in"),
        ("[1, 1.5]", "chat", "of train.objective.kind next_token there are no classes"),
        ("[1, 0]", "classification, labels: [a, b]", "class_weights[1]"),
        ("[1, .inf]", "classification, labels: [a, b]", "class_weights[1]"),
    ],
)
def test_s0_24_weights_of_classes_are_refused_where_they_are_not_one_positive_number_for_each(
    weights, data, words
):
    train = f", objective: {{class_weights: {weights}}}"
    with pytest.raises(JobError) as caught:
        parse_job(CLASSES % (train, data), source="job.yaml", folder=None)
    assert words in str(caught.value)
