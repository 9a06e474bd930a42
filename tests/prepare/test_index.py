"""The file format of prepared data, and its packs."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from paceline.errors import JobError
from paceline.prepare import Index, SourceIndex, fingerprint, open_index
from paceline.prepare.index import data_type, write_index
from paceline.prepare.join import pack_documents


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


def test_the_padding_of_a_batch_counts_each_source_by_its_share_of_the_samples():
    full, (half,) = replace(an_index().train[0], tokens=10), an_index().train
    by_size = an_index(train=tuple(replace(each, weight=None) for each in (full, half)))
    assert by_size.padding == pytest.approx(1 / 16)
    by_weight = an_index(train=(replace(full, weight=1.0), replace(half, weight=3.0)))
    assert by_weight.padding == pytest.approx(3 / 32)
    assert an_index(pack="windows").padding == 0


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
