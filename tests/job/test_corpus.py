import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.job import parse_job
from paceline.job.corpus import find_corpus

JOB = """
model: {decoder: {layers: 1, hidden: 8, heads: 1}}
train: {global_batch: 2, steps: 3}
data:
  path: %s
  seq_len: %d
  held_out: %s
"""


def corpus(folder, path="corpus", seq_len=4, held_out=0.2):
    job = parse_job(JOB % (path, seq_len, held_out), source="job.yaml", folder=folder)
    return find_corpus(job)


def problem_of(folder, *args, **options):
    with pytest.raises(JobError) as caught:
        corpus(folder, *args, **options)
    (problem,) = caught.value.problems
    return problem


def fill(folder, names, text="some text of a few words"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names_of(folder, found):
    return sorted({str(path.relative_to(folder)) for path in found.train + found.held_out})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("corpus", ["corpus/a.txt", "corpus/deep/b.txt", "corpus/deep/c.md"]),
        ("corpus/**/*.txt", ["corpus/a.txt", "corpus/deep/b.txt"]),
        ("corpus/*.txt", ["corpus/a.txt"]),
        ("[corpus/*.txt, corpus/deep, corpus/a.txt]", None),
        ("./corpus/../corpus/deep/*", ["corpus/deep/b.txt", "corpus/deep/c.md"]),
    ],
)
def test_files_are_found_by_glob_folder_or_list_and_each_once(tmp_path, asked, expected):
    everything = ["corpus/a.txt", "corpus/deep/b.txt", "corpus/deep/c.md"]
    fill(tmp_path, [*everything, "corpus/.hidden/x.txt", "other/d.txt"])
    found = corpus(tmp_path, asked)
    assert names_of(tmp_path, found) == (expected or everything)


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    fill(tmp_path, ["a[1].txt", "a1.txt"], text="x" * 100)
    assert corpus(tmp_path, "'a[1].txt'").train == (tmp_path / "a[1].txt",)


@settings(deadline=None)
@given(share=st.floats(0.01, 0.9), num_files=st.integers(2, 30))
def test_both_sides_have_a_file_and_no_file_is_on_both(tmp_path_factory, share, num_files):
    folder = tmp_path_factory.mktemp("many")
    fill(folder, [f"corpus/{index}.txt" for index in range(num_files)])
    found = corpus(folder, held_out=share)
    assert found.train
    assert found.held_out
    assert not set(found.train) & set(found.held_out)
    assert len(found.train) + len(found.held_out) == num_files


def test_a_new_file_moves_no_other_file_to_the_other_side(tmp_path):
    fill(tmp_path, [f"corpus/{index}.txt" for index in range(100)])
    before = corpus(tmp_path)
    fill(tmp_path, ["corpus/new.txt"])
    after = corpus(tmp_path)
    assert set(before.train) <= set(after.train)
    assert set(before.held_out) <= set(after.held_out)
    assert before.fingerprint != after.fingerprint


def test_the_bytes_are_counted_with_a_line_end_between_files(tmp_path):
    fill(tmp_path, ["corpus/a", "corpus/b", "corpus/c"], text="12345")
    found = corpus(tmp_path, held_out=0)
    assert (found.num_train_bytes, found.num_held_out_bytes) == (17, 0)


def test_a_single_file_gives_its_end(tmp_path):
    fill(tmp_path, ["a.txt"], text="x" * 1000)
    found = corpus(tmp_path, "a.txt", held_out=0.1)
    assert found.train == found.held_out == (tmp_path / "a.txt",)
    assert (found.split_byte, found.num_train_bytes, found.num_held_out_bytes) == (900, 900, 100)


def test_the_standard_library_is_a_corpus_without_installed_packages():
    text = JOB.replace("path: %s", "corpus: python-stdlib") % (256, "0.05")
    found = find_corpus(parse_job(text, source="job.yaml", folder=None))
    assert found.num_train_bytes > 5_000_000
    assert 0.01 < found.num_held_out_bytes / found.num_train_bytes < 0.15
    assert not any("site-packages" in path.parts for path in found.train + found.held_out)


def test_a_path_that_matches_nothing_names_the_folder_and_what_is_near(tmp_path):
    fill(tmp_path, ["corpora/a.txt"])
    problem = problem_of(tmp_path, "corpus/*.txt")
    assert problem.code == "D001"
    assert problem.what == f"data.path 'corpus/*.txt' matches no file in {tmp_path}"
    assert problem.where == "data.path, job.yaml line 5"
    assert problem.fix == "did you mean corpora?"


def test_a_misspelt_file_is_told_the_one_that_is_there(tmp_path):
    fill(tmp_path, ["corpus/shakespeare.txt"])
    assert problem_of(tmp_path, "corpus/shakspeare.txt").fix == (
        "did you mean corpus/shakespeare.txt?"
    )


def test_s2_12_a_folder_that_is_not_mounted_is_no_slip_for_one_of_the_system(tmp_path):
    assert "did you mean" not in problem_of(tmp_path, "/usrr/none/*.txt").fix


def test_every_pattern_that_matches_nothing_is_told(tmp_path):
    with pytest.raises(JobError) as caught:
        corpus(tmp_path, "[a, b]")
    assert [problem.code for problem in caught.value.problems] == ["D001", "D001"]


def test_an_unreadable_file_is_named_with_the_reason(tmp_path, monkeypatch):
    fill(tmp_path, ["corpus/a.txt", "corpus/b.txt"])
    opened = type(tmp_path).open

    def refuse(path, *args):
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args)

    monkeypatch.setattr(type(tmp_path), "open", refuse)
    problem = problem_of(tmp_path)
    assert (problem.code, problem.what) == (
        "D002",
        f"{tmp_path / 'corpus/b.txt'} cannot be read: Permission denied",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_read_permission_is_named(tmp_path):
    fill(tmp_path, ["corpus/a.txt"])
    (tmp_path / "corpus/a.txt").chmod(0)
    assert problem_of(tmp_path).code == "D002"


def test_binary_files_are_named(tmp_path):
    fill(tmp_path, ["corpus/a.txt"])
    (tmp_path / "corpus/model.bin").write_bytes(b"\0\1\2")
    problem = problem_of(tmp_path)
    assert problem.code == "D003"
    assert problem.what.startswith("1 of 2 files hold zero bytes")
    assert "model.bin" in problem.what


def test_files_that_are_all_empty_are_no_corpus(tmp_path):
    fill(tmp_path, ["corpus/a.txt", "corpus/b.txt"], text="")
    problem = problem_of(tmp_path)
    assert (problem.code, problem.what) == ("D003", "all 2 files are empty")


def test_a_sequence_longer_than_the_data_is_told_both_lengths(tmp_path):
    fill(tmp_path, ["a.txt"], text="x" * 812)
    problem = problem_of(tmp_path, "a.txt", seq_len=4096, held_out=0)
    assert problem.code == "D004"
    assert problem.what == "data.seq_len 4096 needs 4097 bytes, the training split has 812"
    assert problem.where == "data.seq_len, job.yaml line 6"
    assert problem.fix == "set data.seq_len to 811 or less, or give more text in data.path"


def test_too_little_held_out_text_is_told_with_the_share_that_would_do(tmp_path):
    fill(tmp_path, ["a.txt"], text="x" * 1000)
    problem = problem_of(tmp_path, "a.txt", seq_len=100, held_out=0.05)
    assert problem.code == "D005"
    assert problem.what == (
        "the held-out split has 50 bytes (0.05 of 1000), one sample of data.seq_len 100 needs 101"
    )
    assert problem.fix.startswith("raise data.held_out to 0.11, lower data.seq_len")
    assert corpus(tmp_path, "a.txt", seq_len=100, held_out=0.11).num_held_out_bytes == 110


def test_nothing_held_out_is_allowed(tmp_path):
    fill(tmp_path, ["a.txt"], text="x" * 1000)
    found = corpus(tmp_path, "a.txt", held_out=0)
    assert (found.held_out, found.split_byte, found.num_train_bytes) == ((), None, 1000)
