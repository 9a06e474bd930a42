"""Columns beside a conversation, and how many rows may be left out."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.prepare.conftest import CHATML, a_chat, a_job, make_tokenizer, problem_of, write_rows

from paceline.cli.data import command
from paceline.prepare import open_index, prepared
from paceline.prepare.show import show_sample

USER = {"role": "user", "content": "What is one?"}
GOOD = {"role": "assistant", "content": "It is one."}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Oh"}]}
ALPACA = {"instruction": "Add", "input": "1 2", "output": "3"}


def shown(folder: Path, tokenizer: Path, row: dict, data: str = "") -> str:
    """The only sample of a row, with what is trained on in [[ ]]."""
    write_rows(folder / "a.jsonl", [row])
    job = a_job(folder, tokenizer, f"path: a.jsonl, seq_len: 128, held_out: 0{data}")
    (document,) = show_sample(prepared(job), 0, tokenizer / "tokenizer.json").documents
    return "".join(f"[[{text}]]" if is_trained else text for is_trained, text in document.parts)


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize("row", [SHAREGPT, ALPACA, {"messages": [USER, GOOD]}])
def test_a_system_prompt_in_its_own_column_is_the_first_message(
    tmp_path, tokenizer_folder, row, column
):
    begin = "<|im_start|>system\nBe rude.<|im_end|>\n<|im_start|>user\n"
    assert shown(tmp_path, tokenizer_folder, {**row, column: "Be rude."}).startswith(begin)


@pytest.mark.parametrize("system", [None, "", " "])
def test_an_empty_system_prompt_is_none(tmp_path, tokenizer_folder, system):
    text = shown(tmp_path, tokenizer_folder, {**SHAREGPT, "system": system})
    assert text.startswith("<|im_start|>user\nHi")


def test_a_system_prompt_that_the_messages_have_too_is_written_once(tmp_path, tokenizer_folder):
    own = {"role": "system", "content": "Be rude."}
    row = {"messages": [own, USER, GOOD], "system": "Be rude."}
    assert shown(tmp_path, tokenizer_folder, row).count("Be rude.") == 1


def test_a_column_that_is_mapped_elsewhere_is_not_read(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [{**SHAREGPT, "system": "Be rude."}])
    data = "sources: [{path: a.jsonl, columns: {system: none}}], seq_len: 64, held_out: 0"
    folder = prepared(a_job(tmp_path, tokenizer_folder, data))
    assert open_index(folder).settings["sources"]["a"]["not_read"] == ["system"]


def test_alpacas_history_is_turns(tmp_path, tokenizer_folder):
    row = {**ALPACA, "history": [["Hi", "Oh"]]}
    assert shown(tmp_path, tokenizer_folder, row) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Oh<|im_end|>]]\n"
        "<|im_start|>user\nAdd\n\n1 2<|im_end|>\n<|im_start|>assistant\n[[3<|im_end|>]]\n"
    )


@pytest.mark.parametrize("prompt", [[USER, GOOD, USER], USER["content"]])
def test_messages_of_a_completion_are_trained_on_and_those_of_its_prompt_are_not(
    tmp_path, tokenizer_folder, prompt
):
    text = shown(tmp_path, tokenizer_folder, {"prompt": prompt, "completion": [GOOD]})
    assert text.endswith("[[It is one.<|im_end|>]]\n")
    assert text.count("[[") == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**SHAREGPT, "system": ["x"]}, "its system prompt is list, not text"),
        (
            {"messages": [{"role": "system", "content": "A"}, USER, GOOD], "system": "B"},
            "its messages begin with another system prompt",
        ),
        ({**ALPACA, "history": [["Hi"]]}, "its history is no list of questions"),
        ({**ALPACA, "history": "Hi"}, "its history is no list of questions"),
        ({"prompt": [USER], "completion": [USER]}, "1 x no turn of the assistant in the complet"),
        ({"prompt": [], "completion": [GOOD]}, "its prompt: it has no list of messages"),
        (
            {"prompt": "a", "completion": "b", "system": "c"},
            "a completion has no place for its system: set data.kind: chat",
        ),
    ],
)
def test_what_is_beside_a_conversation_and_cannot_be_read_is_named(
    tmp_path, tokenizer_folder, row, reason
):
    write_rows(tmp_path / "a.jsonl", [row])
    text = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl, held_out: 0"))
    assert text.startswith("D013: 1 of 1 rows of a are broken")
    assert reason in text
    assert "a.jsonl line 1" in text


def test_messages_of_a_completion_need_a_template(tmp_path):
    folder = make_tokenizer(tmp_path / "plain", template=None)
    write_rows(tmp_path / "a.jsonl", [{"prompt": [USER], "completion": [GOOD]}])
    assert problem_of(a_job(tmp_path, folder, "path: a.jsonl")).startswith("D012")


def test_columns_that_are_not_read_are_printed(tmp_path, tokenizer_folder):
    rows = [{**a_chat(f"What is {n}?"), "weight": 0.5, "source": "x"} for n in range(3)]
    write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "job.yaml").write_text(f"""
model: {{decoder: {{layers: 1, hidden: 8, heads: 1, vocab: 512}}, tokenizer: {tokenizer_folder}}}
train: {{global_batch: 2, steps: 3}}
data: {{path: a.jsonl, seq_len: 64, held_out: 0}}
""")
    done = CliRunner().invoke(command, ["prepare", str(tmp_path / "job.yaml")])
    assert done.exit_code == 0, done.output
    assert "read        a as chat (messages: messages); not read: weight, source" in done.output


def test_rows_that_are_left_out_count_against_the_limit(tmp_path, tokenizer_folder):
    rows = [a_chat(question="")] * 18 + [a_chat()] * 3 + [{"messages": 5}]
    write_rows(tmp_path / "a.jsonl", rows)
    data = "path: a.jsonl, seq_len: 64, held_out: 0, broken_rows: "
    text = problem_of(a_job(tmp_path, tokenizer_folder, f"{data}0.8"))
    assert text.startswith("D013: 19 of 22 rows of a are broken or left out, above")
    assert "18 x an empty turn of the user, first " in text
    assert "a.jsonl line 1; " in text
    assert "a.jsonl line 22: it has no list of messages" in text
    index = open_index(prepared(a_job(tmp_path, tokenizer_folder, f"{data}0.9")))
    assert index.train[0].documents == 3


@pytest.mark.parametrize(("empty", "is_refused"), [(5, False), (6, True)])
def test_empty_texts_count_where_they_are_most_rows(tmp_path, tokenizer_folder, empty, is_refused):
    for name, count in (("a", empty), ("b", 0)):  # all of the first file is empty
        rows = [{"text": ""}] * count + [{"text": "The quick fox"}] * 5 * (name == "b")
        write_rows(tmp_path / "d" / f"{name}.jsonl", rows)
    job = a_job(tmp_path, tokenizer_folder, "path: d, seq_len: 4, held_out: 0")
    if is_refused:
        assert problem_of(job).startswith("D013: 6 of 11 rows of d are broken or left out")
    else:
        assert open_index(prepared(job)).train[0].documents == 5


def test_what_is_dropped_because_it_is_long_does_not_count(tmp_path, tokenizer_folder):
    rows = [a_chat(answer="fox " * 200)] * 5 + [a_chat()] * 5
    write_rows(tmp_path / "a.jsonl", rows)
    data = "path: a.jsonl, seq_len: 64, held_out: 0, too_long: drop"
    assert open_index(prepared(a_job(tmp_path, tokenizer_folder, data))).train[0].documents == 5


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (b'{"text": NaN}\n' * 5, "JSON is malformed"),
        ("\ufeff".encode() + json.dumps([1]).encode(), "the line holds list"),
    ],
)
def test_a_source_without_a_readable_row_names_the_first_ones(
    tmp_path, tokenizer_folder, lines, reason
):
    (tmp_path / "a.jsonl").write_bytes(lines)
    text = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl"))
    assert text.startswith("D013: no row of a can be read: ")
    assert f"a.jsonl line 1: {reason}" in text


def test_a_source_in_another_encoding_is_named_with_it(tmp_path, tokenizer_folder):
    (tmp_path / "a.jsonl").write_bytes('{"messages"'.encode("utf-16"))
    text = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl"))
    assert text.startswith("D002: ")
    assert "a.jsonl is UTF-16 text" in text
    assert "line 4" not in text


def test_a_template_that_knows_no_system_prompt_breaks_the_row(tmp_path):
    folder = make_tokenizer(
        tmp_path / "tokenizer",
        template="{% set messages = messages | rejectattr('role', 'eq', 'system') %}" + CHATML,
    )
    write_rows(tmp_path / "a.jsonl", [{**SHAREGPT, "system": "Be rude."}])
    text = problem_of(a_job(tmp_path, folder, "path: a.jsonl"))
    assert "does not write message 1, which is of the role system" in text
