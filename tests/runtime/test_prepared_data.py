"""Prepared data, read by number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.prepare.conftest import write_documents

from paceline.errors import JobError
from paceline.prepare.index import Index, SourceIndex, write_index
from paceline.prepare.join import pack_documents
from paceline.runtime.data import load_prepared
from paceline.runtime.sampling import Mixture
from paceline.runtime.strategy import IGNORED


def prepare(folder, sources, *, seq_len=8, pack="documents", vocab=300, weights=None, trained=None):
    """`sources`: name -> documents. All are for training."""
    described = []
    dtype = "uint16" if vocab <= 65536 else "uint32"
    for number, (name, documents) in enumerate(sources.items()):
        lengths = np.array([len(document) - 1 for document in documents])
        packs = pack_documents(lengths, seq_len) if pack == "documents" else None
        masks = None if trained is None else [trained(document) for document in documents]
        write_documents(
            folder / name, map(np.array, documents), dtype=dtype, packs=packs, trained=masks
        )
        tokens = sum(map(len, documents))
        samples = (tokens - 1) // seq_len if packs is None else len(packs[0]) - 1
        source = SourceIndex(
            name=name,
            weight=weights[number] if weights else None,
            folder=name,
            documents=len(documents),
            tokens=tokens,
            targets=int(lengths.sum()) if packs is not None else samples * seq_len,
            samples=samples,
            source_files={},
        )
        described.append(source)
    index = Index(
        tokenizer="t",
        vocab=vocab,
        eos=None,
        seq_len=seq_len,
        pack=pack,
        dtype=dtype,
        train=tuple(described),
        held_out=(),
        settings={},
        versions={},
    )
    write_index(folder, index)
    return folder


def parts(inputs_S, targets_S, ends_E):
    """The documents of a sample, each with its last target, and what comes after them."""
    found, at = [], 0
    for end in ends_E.tolist():
        if end > at:
            found.append((inputs_S[at:end].tolist(), targets_S[at:end].tolist()))
            at = end
    return found


documents_of_9 = st.lists(st.lists(st.integers(1, 299), min_size=2, max_size=9), min_size=1)


@given(documents=documents_of_9)
@settings(deadline=None)
def test_each_document_is_in_one_pack_whole_and_the_rest_is_no_target(tmp_path_factory, documents):
    data, held_out = load_prepared(prepare(tmp_path_factory.mktemp("p"), {"a": documents}))
    assert held_out is None
    inputs, targets, ends = data.samples(range(data.num_samples))
    read, num_targets = [], 0
    for row in zip(inputs, targets, ends, strict=True):
        for tokens, wanted in parts(*row):
            if wanted[0] == IGNORED:
                assert set(wanted) == {IGNORED}
                continue
            assert tokens[1:] == wanted[:-1]
            read.append([*tokens, wanted[-1]])
            num_targets += len(wanted)
    assert sorted(read) == sorted(documents)
    assert data.targets_per_sample * data.num_samples == num_targets
    assert set(ends[:, -1].tolist()) == {8}


def test_windows_run_over_documents_as_the_windows_of_bytes_do(tmp_path):
    documents = [list(range(1, 11)), list(range(11, 31))]
    data, _ = load_prepared(prepare(tmp_path, {"a": documents}, pack="windows"))
    inputs, targets = data.samples([2, 0])
    assert inputs.tolist() == [list(range(17, 25)), list(range(1, 9))]
    assert targets.tolist() == [list(range(18, 26)), list(range(2, 10))]


@pytest.mark.parametrize("pack", ["windows", "documents"])
def test_only_tokens_that_are_marked_are_targets(tmp_path, pack):
    documents = [[5, 6, 7], [8, 5, 9, 4, 3], [3, 6, 6, 2]]
    folder = prepare(
        tmp_path, {"a": documents}, pack=pack, seq_len=5, trained=lambda d: np.array(d) > 5
    )
    data, _ = load_prepared(folder)
    _, targets, *_ = data.samples(range(data.num_samples))
    counted = targets[targets != IGNORED]
    inside = [token for document in documents for token in document[1:]]
    expected = inside if pack == "documents" else [6, 7, 8, 5, 9, 4, 3, 3, 6, 6]
    assert sorted(counted.tolist()) == sorted(token for token in expected if token > 5)


def test_tokens_beyond_two_bytes_are_read_whole(tmp_path):
    data, _ = load_prepared(prepare(tmp_path, {"a": [[70_000, 3, 99_999]]}, vocab=100_000))
    inputs, targets, _ = data.samples([0])
    assert inputs[0, :2].tolist() == [70_000, 3]
    assert targets[0, :2].tolist() == [3, 99_999]


def test_ids_run_through_the_sources_and_weights_make_a_mixture(tmp_path):
    sources = {"a": [[1, 2, 3]] * 5, "b": [[7, 8, 9]] * 9}
    data, _ = load_prepared(prepare(tmp_path / "w", sources, seq_len=2, weights=(3.0, 1.0)))
    assert data.sources == {"a": range(5), "b": range(5, 14)}
    inputs, _, _ = data.samples([13, 0, 5, 4])
    assert inputs[:, 0].tolist() == [7, 1, 7, 1]
    assert data.order == Mixture(sizes=(5, 9), weights=(3.0, 1.0))
    by_size, _ = load_prepared(prepare(tmp_path / "s", sources, seq_len=2))
    assert by_size.order == 14


@pytest.mark.parametrize("sample", [-1, 1])
def test_a_sample_that_is_not_there_is_an_error(tmp_path, sample):
    data, _ = load_prepared(prepare(tmp_path, {"a": [[1, 2, 3]]}))
    with pytest.raises(IndexError, match="sample ids are 0 to 0"):
        data.samples([sample])


def test_tokens_that_were_cut_short_are_refused_by_name(tmp_path):
    folder = prepare(tmp_path, {"a": [[1, 2, 3]]})
    (folder / "a" / "tokens.bin").write_bytes(b"\1\0")
    with pytest.raises(JobError, match=r"D020: tokens.bin: 2 bytes; the index says 6 bytes"):
        load_prepared(folder)
