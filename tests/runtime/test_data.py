import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.job import parse_job
from paceline.runtime.data import TextData, load_text
from paceline.runtime.language_model import bigram_loss

JOB = """
model: {decoder: {layers: 1, hidden: 8, heads: 1}}
train: {global_batch: 2, steps: 3}
data: {path: %s, seq_len: %d, held_out: %s}
"""


def job(folder, path, seq_len=4, held_out=0.2):
    text = JOB % (path, seq_len, held_out)
    return parse_job(text, source="job.yaml", folder=folder)


def as_array(text):
    return np.frombuffer(text, dtype=np.uint8)


@given(text=st.binary(min_size=3, max_size=200), seq_len=st.integers(2, 40))
def test_every_byte_but_the_first_is_a_target_once(text, seq_len):
    data = TextData(text=as_array(text), seq_len=seq_len)
    inputs, targets = data.samples(range(data.num_samples))
    used = data.num_samples * seq_len
    assert inputs.flatten().tolist() == list(text[:used])
    assert targets.flatten().tolist() == list(text[1 : used + 1])
    assert len(text) - 1 - used < seq_len


def test_samples_come_in_the_order_asked_for():
    data = TextData(text=as_array(bytes(range(20))), seq_len=4)
    inputs, targets = data.samples([3, 0])
    assert inputs.tolist() == [[12, 13, 14, 15], [0, 1, 2, 3]]
    assert targets.tolist() == [[13, 14, 15, 16], [1, 2, 3, 4]]


def test_who_marks_the_targets_of_one_sample_leaves_its_inputs_as_they_are():
    data = TextData(text=as_array(bytes(range(20))), seq_len=4)
    inputs, targets = data.samples([3])
    targets[:] = -100
    assert inputs.tolist() == [[12, 13, 14, 15]]


@pytest.mark.parametrize("sample", [-1, 4])
def test_a_sample_that_is_not_there_is_an_error(sample):
    data = TextData(text=as_array(bytes(20)), seq_len=4)
    with pytest.raises(IndexError, match="sample ids are 0 to 3"):
        data.samples([sample])


def test_files_are_joined_by_a_line_end(tmp_path):
    for name, text in {"a.txt": "first", "b.txt": "second", "c.txt": "third"}.items():
        (tmp_path / name).write_text(text)
    train, held_out = load_text(job(tmp_path, "'*.txt'", held_out=0))
    assert train.text.tobytes() == b"first\nsecond\nthird"
    assert held_out is None


def test_the_end_of_a_single_file_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    train, held_out = load_text(job(tmp_path, "a.txt"))
    assert train.text.tobytes() == bytes(range(1, 81))
    assert held_out.text.tobytes() == bytes(range(81, 101))


def test_a_file_that_went_away_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text that is long enough")
    asked = job(tmp_path, "a.txt")

    def gone(path):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", gone)
    with pytest.raises(JobError, match=r"D002: .*a\.txt cannot be read: No such file"):
        load_text(asked)


@given(st.binary(min_size=2, max_size=60), st.binary(min_size=2, max_size=60))
def test_the_bigram_loss_is_that_of_counting_by_hand(train, held_out):
    pairs = list(itertools.pairwise(train))
    losses = []
    for first, second in itertools.pairwise(held_out):
        count = pairs.count((first, second)) + 0.1
        total = sum(pair[0] == first for pair in pairs) + 0.1 * 256
        losses.append(-math.log(count / total))
    expected = sum(losses) / len(losses)
    assert bigram_loss(as_array(train), as_array(held_out)) == pytest.approx(expected)


def test_pairs_across_chunks_are_counted(monkeypatch):
    text = as_array(bytes(range(7)) * 9)
    whole = bigram_loss(text, text)
    monkeypatch.setattr("paceline.runtime.language_model._CHUNK", 5)
    assert bigram_loss(text, text) == whole
