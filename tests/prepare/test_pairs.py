"""Pairs of a chosen and a rejected answer become samples of two documents."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests.prepare.conftest import a_job, problem_of, write_rows
from tokenizers import Tokenizer

from paceline.cli.data import command
from paceline.prepare import open_index, prepared
from paceline.prepare.pairs import chat_pair, text_pair
from paceline.prepare.show import show_sample

USER = {"role": "user", "content": "What is one plus two?"}
GOOD = {"role": "assistant", "content": "It is three."}
BAD = {"role": "assistant", "content": "Hello, how are you?"}


def a_pair(number: int = 0) -> dict:
    return {"prompt": f"What is {number}?", "chosen": " It is fine.", "rejected": " I am a fox."}


def shown(folder: Path, tokenizer: Path, sample: int) -> list[tuple[str, str]]:
    """Side and trained text of each document of a sample."""
    found = show_sample(folder, sample, tokenizer / "tokenizer.json").documents
    return [
        (document.side, "".join(text for is_trained, text in document.parts if is_trained))
        for document in found
    ]


def test_a_pair_is_one_sample_and_its_answers_are_trained_on(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [a_pair(number) for number in range(3)])
    data = "kind: preference, path: a.jsonl, seq_len: 64, held_out: 0"
    folder = prepared(a_job(tmp_path, tokenizer_folder, data))
    index = open_index(folder)
    (source,) = index.train
    assert (index.pack, source.documents, source.samples) == ("pairs", 6, 3)
    answers = [(" It is fine.<|endoftext|>"), (" I am a fox.<|endoftext|>")]
    for sample in range(3):
        sides = shown(folder, tokenizer_folder, sample)
        assert sides == list(zip(("chosen", "rejected"), answers, strict=True))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": USER["content"], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": USER["content"], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
    ids=["prompt", "implicit", "text prompt", "both"],
)
def test_conversations_in_each_of_trls_forms_are_the_same_pair(tmp_path, tokenizer_folder, row):
    write_rows(tmp_path / "a.jsonl", [row])
    data = "kind: preference, path: a.jsonl, seq_len: 128, held_out: 0"
    folder = prepared(a_job(tmp_path, tokenizer_folder, data))
    assert open_index(folder).settings["sources"]["a"]["kind"] == "chat preference"
    assert shown(folder, tokenizer_folder, 0) == [
        ("chosen", "It is three.<|im_end|>"),
        ("rejected", "Hello, how are you?<|im_end|>"),
    ]


def test_a_system_prompt_in_its_own_column_begins_both_conversations(tmp_path, tokenizer_folder):
    pair = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "system": "Be rude."}
    write_rows(tmp_path / "a.jsonl", [pair])
    data = "kind: preference, path: a.jsonl, seq_len: 256, held_out: 0"
    folder = prepared(a_job(tmp_path, tokenizer_folder, data))
    documents = show_sample(folder, 0, tokenizer_folder / "tokenizer.json").documents
    begins = [document.parts[0] for document in documents]
    assert all(not trained and "system\nBe rude.<|im_end|>" in text for trained, text in begins)
    write_rows(tmp_path / "a.jsonl", [a_pair() | {"system": "Be rude."}])
    told = problem_of(a_job(tmp_path, tokenizer_folder, data))
    assert "line 1: a pair of texts has no place for its system: give prompt" in told


def test_earlier_turns_of_the_assistant_are_the_prompt():
    before = [USER, GOOD, USER]
    sides = chat_pair(None, [*before, GOOD], [*before, BAD])
    assert [message.get("train", True) for message in sides[1]] == [False, False, False, True]


def test_a_text_without_a_prompt_is_cut_at_a_word():
    assert text_pair(None, "Q: a? A: four", "Q: a? A: five") == ("Q: a? A: ", "four", "five")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "it has no rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "its rejected is NoneType, not text"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "its chosen answer is empty"),
        ({"chosen": "yes", "rejected": "no"}, "it has no prompt"),
    ],
)
def test_a_broken_pair_is_named_with_file_and_line(tmp_path, tokenizer_folder, row, reason):
    write_rows(tmp_path / "a.jsonl", [a_pair(), row])
    job = a_job(tmp_path, tokenizer_folder, "kind: preference, path: a.jsonl, held_out: 0")
    told = problem_of(job)
    assert told.startswith("D013: 1 of 2 rows of a are broken")
    assert f"a.jsonl line 2: {reason}" in told


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        ([USER, GOOD], [USER], "its rejected answer is empty"),
        ([GOOD], [BAD], "chosen and rejected do not begin with the same prompt"),
        ([USER, GOOD], [], "its rejected: it has no list of messages"),
        ([USER, GOOD], "no", "its rejected: it has no list of messages"),
    ],
)
def test_a_conversation_that_is_no_pair_says_why(chosen, rejected, reason):
    with pytest.raises(ValueError, match=reason):
        chat_pair(None, chosen, rejected)


def long_pairs(folder: Path) -> None:
    long = {"prompt": "one", "chosen": " two", "rejected": " fox" * 100}
    write_rows(folder / "a.jsonl", [a_pair(), long])


def test_a_pair_longer_than_a_sample_is_refused_and_counted(tmp_path, tokenizer_folder):
    long_pairs(tmp_path)
    data = "kind: preference, path: a.jsonl, seq_len: 64, held_out: 0"
    told = problem_of(a_job(tmp_path, tokenizer_folder, data))
    assert told.startswith("D017: 1 of 2 pairs of a are longer than data.seq_len 64")


def test_a_pair_longer_than_a_sample_is_dropped_or_cut_whole(tmp_path, tokenizer_folder):
    long_pairs(tmp_path)
    data = "kind: preference, path: a.jsonl, seq_len: 64, held_out: 0, too_long: "
    dropped = open_index(prepared(a_job(tmp_path, tokenizer_folder, f"{data}drop"))).train[0]
    assert (dropped.samples, dropped.documents) == (1, 2)
    folder = prepared(a_job(tmp_path, tokenizer_folder, f"{data}cut"))
    (cut,) = open_index(folder).train
    lengths = np.diff(np.load(folder / cut.folder / "ends.npy"), prepend=0)
    assert cut.samples == 2
    assert sum(lengths[2:] - 1) == 64  # the short answer keeps its length, the long one the rest
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert lengths[2] == len(tokenizer.encode("one two").ids) + 1


def test_pairs_of_one_prompt_are_held_out_together(tmp_path, tokenizer_folder):
    rows = [a_pair(number // 2) | {"chosen": f" It is {number}."} for number in range(40)]
    write_rows(tmp_path / "a.jsonl", rows)
    data = "kind: preference, path: a.jsonl, seq_len: 64, held_out: 0.3"
    folder = prepared(a_job(tmp_path, tokenizer_folder, data))
    index = open_index(folder)
    prompts = []
    for held_out, source in ((False, index.train[0]), (True, index.held_out[0])):
        file = tokenizer_folder / "tokenizer.json"
        samples = [show_sample(folder, n, file, held_out=held_out) for n in range(source.samples)]
        prompts.append({sample.documents[0].parts[0][1] for sample in samples})
    assert prompts[0] & prompts[1] == set()
    assert len(prompts[0] | prompts[1]) == 20


def test_pairs_are_not_taken_without_being_asked_for(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [a_pair()])
    told = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl, held_out: 0"))
    assert told.startswith("D016: the rows of a are pairs")
    assert "set data.kind: preference" in told


def test_data_show_names_both_sides(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [a_pair(), a_pair(1)])
    data = "kind: preference, path: a.jsonl, seq_len: 64, held_out: 0"
    job = a_job(tmp_path, tokenizer_folder, data)
    prepared(job)
    text = f"""
model: {{decoder: {{layers: 1, hidden: 8, heads: 1, vocab: 512}}, tokenizer: {tokenizer_folder}}}
train: {{global_batch: 2, steps: 3}}
data: {{{data}}}
"""
    (tmp_path / "job.yaml").write_text(text)
    asked = ["show", str(tmp_path / "job.yaml"), "--sample", "1"]
    done = CliRunner().invoke(command, asked)
    assert done.exit_code == 0, done.output
    assert "--- chosen 1: " in done.output
    assert "--- rejected 1: " in done.output
    assert "[[ It is fine.<|endoftext|>]]" in done.output
    as_json = CliRunner().invoke(command, [*asked, "--json"])
    sides = [document["side"] for document in json.loads(as_json.output)["documents"]]
    assert sides == ["chosen", "rejected"]
