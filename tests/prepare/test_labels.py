"""Texts with labels become documents whose last token is the label."""

from pathlib import Path

import numpy as np
import pytest
from tests.prepare.conftest import a_job, problem_of, write_rows
from tokenizers import Tokenizer

from paceline.prepare import open_index, prepared

DATA = "kind: classification, labels: [bad, good], path: a.jsonl, seq_len: 32, held_out: 0"


def documents_of(folder: Path) -> list[tuple[list[int], list[bool]]]:
    (source,) = open_index(folder).train
    own = folder / source.folder
    ends = np.load(own / "ends.npy")
    tokens = np.fromfile(own / "tokens.bin", "<u2")
    bits = np.unpackbits(np.fromfile(own / "trained.bin", np.uint8), count=len(tokens))
    parts = zip(np.split(tokens, ends[:-1]), np.split(bits, ends[:-1]), strict=True)
    return [(part.tolist(), trained.astype(bool).tolist()) for part, trained in parts]


def test_only_the_label_is_trained_on_whether_it_is_a_name_or_a_number(tmp_path, tokenizer_folder):
    labels = ["good", 0, "1", "bad", 1.0]
    write_rows(tmp_path / "a.jsonl", [{"text": "The fox", "label": label} for label in labels])
    documents = documents_of(prepared(a_job(tmp_path, tokenizer_folder, DATA)))
    ids = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).encode("The fox").ids
    assert [tokens for tokens, _ in documents] == [[*ids, number] for number in (1, 0, 1, 0, 1)]
    assert all(trained == [False] * len(ids) + [True] for _, trained in documents)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a", "label": "ugly"}, "its label 'ugly' is none of bad, good"),
        ({"text": "a", "label": 2}, "its label 2 is none of bad, good"),
        ({"text": "a", "label": None}, "its label None is none of bad, good"),
        ({"text": "a"}, "it has no label"),
        ({"text": " ", "label": 1}, "its text is empty"),
    ],
)
def test_a_row_without_a_text_or_a_known_label_is_named(tmp_path, tokenizer_folder, row, reason):
    good = {"text": "one", "label": "good"}
    write_rows(tmp_path / "a.jsonl", [good, row])
    told = problem_of(a_job(tmp_path, tokenizer_folder, DATA))
    assert told.startswith("D013: 1 of 2 rows of a are broken")
    assert f"a.jsonl line 2: {reason}" in told
    assert "name each of their labels in data.labels" in told


@pytest.mark.parametrize("text", ["text", "content"])
def test_labels_are_not_left_out_without_being_asked_for(tmp_path, tokenizer_folder, text):
    write_rows(tmp_path / "a.jsonl", [{text: "The fox", "label": n % 2} for n in range(3)])
    told = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl, held_out: 0"))
    assert told.startswith("D016: the rows of a are texts with a label")
    assert "set data.kind: classification" in told
    data = "kind: text, path: a.jsonl, seq_len: 2, held_out: 0"
    assert open_index(prepared(a_job(tmp_path, tokenizer_folder, data))).train[0].documents == 3


def test_one_class_alone_is_refused(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [{"text": f"{n}", "label": "good"} for n in range(3)])
    told = problem_of(a_job(tmp_path, tokenizer_folder, DATA))
    assert told.startswith("D019: every text of a has the label good")


def test_a_long_text_is_cut_before_its_label(tmp_path, tokenizer_folder):
    rows = [{"text": "fox " * 50, "label": 1}, {"text": "fox", "label": 0}]
    write_rows(tmp_path / "a.jsonl", rows)
    assert "D017" in problem_of(a_job(tmp_path, tokenizer_folder, DATA))
    folder = prepared(a_job(tmp_path, tokenizer_folder, f"{DATA}, too_long: cut"))
    (long, trained), _ = documents_of(folder)
    assert (len(long), long[-1], trained[-1]) == (33, 1, True)
    (left_out,) = [each for each in open_index(folder).left_out if each.documents]
    assert left_out.reason == "longer than seq_len 32: cut"
    assert left_out.example.endswith("a.jsonl line 1")


def test_truth_values_are_labels_by_their_names(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [{"text": "The fox", "label": n > 0} for n in range(3)])
    data = DATA.replace("[bad, good]", "[false, true]")
    folder = prepared(a_job(tmp_path, tokenizer_folder, data))
    assert [tokens[-1] for tokens, _ in documents_of(folder)] == [0, 1, 1]


def test_completions_with_a_label_are_not_trained_on_without_being_asked_for(
    tmp_path, tokenizer_folder
):
    rows = [{"prompt": "one", "completion": "two", "label": n > 0} for n in range(3)]
    write_rows(tmp_path / "a.jsonl", rows)
    told = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl, held_out: 0"))
    assert told.startswith("D016: the rows of a are completions with a label")
    data = "kind: completion, path: a.jsonl, held_out: 0"
    assert open_index(prepared(a_job(tmp_path, tokenizer_folder, data))).train[0].documents == 3
