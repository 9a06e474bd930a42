"""The pretraining example: its two parquet files and its tokenizer become a mixture."""

import importlib.util
import shutil
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="parquet files need the data extra")
pytest.importorskip("tokenizers", reason="the example trains a tokenizer")

from paceline.job import load_job
from paceline.prepare import open_index, prepared

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain"


def test_the_examples_files_become_two_sources_with_weights_of_its_own_tokens(
    tmp_path, monkeypatch
):
    spec = importlib.util.spec_from_file_location("pretrain_prepare", EXAMPLE / "prepare.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    few = list(islice(example.python_files(), 40))
    monkeypatch.setattr(example, "FOLDER", tmp_path / "work")
    monkeypatch.setattr(example, "python_files", lambda: iter(few))
    example.main()
    shutil.copy(EXAMPLE / "job.yaml", tmp_path)

    index = open_index(prepared(load_job(tmp_path / "job.yaml")))
    assert [(source.name, source.weight) for source in index.train] == [("code", 3), ("docs", 1)]
    documents = sum(source.documents for source in (*index.train, *index.held_out))
    docs = set(example.docstrings(text for _, text in few))
    assert documents == len([text for _, text in few if text]) + len(docs)
    assert index.eos is not None
    assert index.vocab <= example.VOCAB
