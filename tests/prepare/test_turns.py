"""Where the answers of prepared conversations end, and generation with them."""

import json
from pathlib import Path

import numpy as np
from tests.prepare.conftest import a_chat, write_documents, write_rows
from tests.prepare.test_index import an_index

from paceline.job import Job, parse_job
from paceline.launch.export import _end_at_turns
from paceline.prepare import prepared
from paceline.prepare.index import write_index
from paceline.prepare.turns import end_of_turn


def write(folder: Path, documents: list[list[int]], trained: list[list[int]] | None) -> Path:
    write_documents(
        folder / "train/0",
        [np.array(each) for each in documents],
        dtype="uint16",
        trained=None if trained is None else [np.array(each, dtype=bool) for each in trained],
    )
    write_index(folder, an_index())
    return folder


def test_the_end_of_answers_is_the_last_token_that_counts_in_every_document(tmp_path: Path):
    documents = [[5, 6, 7, 9, 1], [5, 8, 9, 1], [4, 3]]
    trained = [[0, 1, 1, 1, 0], [0, 1, 1, 0], [0, 0]]
    assert end_of_turn(write(tmp_path / "a", documents, trained)) == 9
    documents[1][2] = 2
    assert end_of_turn(write(tmp_path / "b", documents, trained)) is None
    assert end_of_turn(write(tmp_path / "c", documents, None)) is None


def a_job(folder: Path, tokenizer: Path) -> Job:
    write_rows(folder / "a.jsonl", [a_chat(), a_chat("Hello?", "I am fine.")])
    text = (
        "model:\n  decoder: {layers: 1, hidden: 8, heads: 1, vocab: 512}\n"
        f"  tokenizer: {tokenizer}\n"
        "data: {path: a.jsonl, seq_len: 64, held_out: 0}\ntrain: {global_batch: 2, steps: 3}\n"
    )
    return parse_job(text, source="job.yaml", folder=folder)


def test_generation_ends_where_answers_end_and_where_it_ended_before(
    tmp_path: Path, tokenizer_folder: Path
):
    job = a_job(tmp_path, tokenizer_folder)
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"eos_token_id": 0, "pad_token_id": null}')
    assert not list(_end_at_turns(job, out))  # not prepared, as if the data had gone
    prepared(job, processes=1)
    (note,) = _end_at_turns(job, out)
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [0, 2]}  # <|endoftext|>, <|im_end|>
    assert "also ends at token 2" in note
    assert not list(_end_at_turns(job, out))
