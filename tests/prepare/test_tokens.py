"""Files that are tokenized already: nanoGPT's and Megatron's."""

import struct
from pathlib import Path

import numpy as np
import pytest
from tests.prepare.conftest import a_job

from paceline.errors import JobError
from paceline.prepare import open_index, prepared

TOKENS = np.array([5, 6, 7, 0, 8, 9, 0])


def write_megatron(path: Path, tokens: np.ndarray, lengths: list[int]) -> None:
    tokens.astype("<i4").tofile(path)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
    starts = np.cumsum([0, *lengths[:-1]]) * 4
    documents = np.arange(len(lengths) + 1)
    body = (np.array(lengths, "<i4"), starts.astype("<i8"), documents.astype("<i8"))
    path.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in body))


def ends_of(job) -> list[int]:
    folder = prepared(job)
    (source,) = open_index(folder).train
    assert np.fromfile(folder / source.folder / "tokens.bin", "<u2").tolist() == TOKENS.tolist()
    return np.load(folder / source.folder / "ends.npy").tolist()


def test_nanogpts_file_has_documents_that_end_with_eos(tmp_path, tokenizer_folder):
    TOKENS.astype("<u2").tofile(tmp_path / "a.bin")
    data = "path: a.bin, kind: tokens, seq_len: 2, held_out: 0"
    assert ends_of(a_job(tmp_path, tokenizer_folder, data)) == [4, 7]


def test_llm_cs_header_is_no_token(tmp_path, tokenizer_folder):
    head = np.zeros(256, "<i4")
    head[0] = 20240520
    (tmp_path / "a.bin").write_bytes(head.tobytes() + TOKENS.astype("<u2").tobytes())
    data = "path: a.bin, kind: tokens, seq_len: 2, held_out: 0"
    assert ends_of(a_job(tmp_path, tokenizer_folder, data)) == [4, 7]


def test_megatrons_index_says_where_documents_end(tmp_path, tokenizer_folder):
    (tmp_path / "d").mkdir()
    write_megatron(tmp_path / "d" / "a.bin", TOKENS, [3, 4])
    job = a_job(tmp_path, tokenizer_folder, "path: d, kind: tokens, seq_len: 2, held_out: 0")
    assert ends_of(job) == [3, 7]
    write_megatron(tmp_path / "d" / "a.bin", TOKENS, [2, 5])
    assert ends_of(job) == [2, 7]


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path, tokenizer_folder):
    np.array([5, 60_000], "<u2").tofile(tmp_path / "a.bin")
    job = a_job(tmp_path, tokenizer_folder, "path: a.bin, kind: tokens, seq_len: 2, held_out: 0")
    with pytest.raises(JobError, match="D021: it holds the token 60000"):
        prepared(job)


def test_an_index_that_does_not_fit_is_refused(tmp_path, tokenizer_folder):
    write_megatron(tmp_path / "a.bin", TOKENS, [3, 9])
    job = a_job(tmp_path, tokenizer_folder, "path: a.bin, kind: tokens, seq_len: 2, held_out: 0")
    with pytest.raises(JobError, match="D002: it holds 7 tokens, its index 12"):
        prepared(job)
