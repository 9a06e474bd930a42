"""The file format of prepared data, and its packs."""

from pathlib import Path

import numpy as np
import pytest

from paceline.errors import JobError
from paceline.prepare import Index, SourceIndex, fingerprint, open_index
from paceline.prepare.index import data_type, write_documents, write_index
from paceline.prepare.pack import pack_documents


def an_index(**changes) -> Index:
    source = SourceIndex(
        name="chats",
        weight=3.0,
        folder="train/0",
        documents=2,
        tokens=9,
        targets=4,
        samples=1,
        source_files={"a.jsonl": "00ff"},
    )
    values = {
        "tokenizer": "abc",
        "vocab": 300,
        "eos": 2,
        "seq_len": 8,
        "pack": "documents",
        "dtype": "uint16",
        "train": (source,),
        "held_out": (),
        "settings": {"train_on": "assistant"},
        "versions": {"paceline": "0"},
    }
    return Index(**values | changes)


def test_an_index_is_read_as_it_was_written(tmp_path: Path):
    write_index(tmp_path, an_index())
    assert open_index(tmp_path) == an_index()
    assert open_index(tmp_path).train[0].padding(8) == pytest.approx(1 / 8)


def test_an_index_of_another_form_is_refused_by_name(tmp_path: Path):
    write_index(tmp_path, an_index(form=99))
    with pytest.raises(JobError, match=r"D020: .* form 99"):
        open_index(tmp_path)


def test_a_folder_without_an_index_is_refused_by_name(tmp_path: Path):
    with pytest.raises(JobError, match=r"D020: .* no index.json"):
        open_index(tmp_path)


def test_the_fingerprint_changes_with_a_source_file(tmp_path: Path):
    write_index(tmp_path, an_index())
    before = fingerprint(tmp_path)
    write_index(tmp_path, an_index(tokenizer="other"))
    assert fingerprint(tmp_path) != before


def test_documents_are_written_as_the_format_says(tmp_path: Path):
    documents = [np.array([5, 6, 7]), np.array([8, 9])]
    trained = [np.array([False, True, True]), np.array([False, True])]
    packs = pack_documents(np.array([2, 1]), 4)
    write_documents(tmp_path, documents, dtype="uint16", trained=trained, packs=packs)
    assert np.fromfile(tmp_path / "tokens.bin", "<u2").tolist() == [5, 6, 7, 8, 9]
    assert np.load(tmp_path / "ends.npy").tolist() == [3, 5]
    bits = np.unpackbits(np.fromfile(tmp_path / "trained.bin", np.uint8), count=5)
    assert bits.tolist() == [0, 1, 1, 0, 1]
    assert np.load(tmp_path / "pack_starts.npy").tolist() == [0, 2]
    assert np.load(tmp_path / "pack_documents.npy").tolist() == [0, 1]


def test_a_vocabulary_past_65536_takes_four_bytes():
    assert (data_type(1 << 16), data_type((1 << 16) + 1)) == ("uint16", "uint32")


@pytest.mark.parametrize("median", [60, 300])
def test_packs_are_full_hold_each_document_once_and_never_overflow(median: int):
    draws = np.random.default_rng(0).lognormal(np.log(median), 0.8, 20_000)
    lengths = np.clip(draws, 1, 4096).astype(np.int64)
    starts, documents = pack_documents(lengths, 4096)
    filled = np.add.reduceat(lengths[documents], starts[:-1])
    assert sorted(documents.tolist()) == list(range(len(lengths)))
    assert filled.max() <= 4096
    assert lengths.sum() / (len(filled) * 4096) >= 0.995


def test_no_documents_make_no_packs():
    starts, documents = pack_documents(np.zeros(0, np.int64), 8)
    assert (starts.tolist(), documents.tolist()) == ([0], [])
