"""Following files of JSON lines that grow, are torn, cut or replaced."""

import msgspec
import pytest
from tests.report import made

from paceline.record.follow import Follower, LineFollower, RunFollower, rising


def test_follower_gives_each_line_once(tmp_path):
    path = tmp_path / "lines"
    follower = LineFollower(path)
    assert follower.look().lines == []
    path.write_bytes(b"a\nb\n")
    assert follower.look().lines == [b"a", b"b"]
    assert follower.look().lines == []
    with path.open("ab") as file:
        file.write(b"c\n")
    assert follower.look().lines == [b"c"]


def test_torn_last_line_waits_for_its_end(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"a":1}\n{"a"')
    follower = Follower(path, msgspec.json.decode)
    assert follower.look().lines == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b":2}\n")
    assert follower.look().lines == [{"a": 2}]


def test_file_is_read_a_chunk_at_a_time_and_no_line_is_cut(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%04d\n" % i for i in range(100)))
    follower = LineFollower(path, chunk_bytes=7)
    found = follower.look().lines
    while follower.has_more:
        found += follower.look().lines
    assert found == [b"%04d" % i for i in range(100)]


@pytest.mark.parametrize("how", ["cut", "replaced"])
def test_file_that_is_cut_or_replaced_is_read_anew(tmp_path, how):
    path = tmp_path / "lines"
    path.write_bytes(b"1\n2\n3\n")
    follower = Follower(path, msgspec.json.decode)
    assert follower.look().lines == [1, 2, 3]
    if how == "cut":
        path.write_bytes(b"9\n")
    else:
        other = tmp_path / "other"
        other.write_bytes(b"7\n8\n9\n10\n")
        other.replace(path)
    news = follower.look()
    assert news.is_anew
    assert news.lines[-1] in (9, 10)
    assert news.lines[0] in (7, 9)
    assert not follower.look().is_anew


def test_line_that_cannot_be_decoded_is_left_out(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"1\nnot json\n\n2\n")
    follower = Follower(path, msgspec.json.decode)
    assert follower.look().lines == [1, 2]


def test_run_follower_gives_all_of_a_run_again_when_one_of_its_files_was_replaced(tmp_path):
    encode = msgspec.json.encode
    metrics, events = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    follower = RunFollower(tmp_path)
    assert follower.look().metrics == []
    metrics.write_bytes(b"".join(encode(made.line(s, s)) + b"\n" for s in (1, 2, 3)))
    events.write_bytes(encode(made.started()) + b"\n")
    news = follower.look()
    assert [line.step for line in news.metrics] == [1, 2, 3]
    assert news.events == [made.started()]
    assert not news.is_anew
    metrics.write_bytes(encode(made.line(1, 1)) + b"\n")
    news = follower.look()
    assert news.is_anew
    assert [line.step for line in news.metrics] == [1]
    assert news.events == [made.started()]


def test_rising_begins_a_stretch_where_the_run_went_back():
    lines = [made.line(step, at) for at, step in enumerate((1, 2, 3, 2, 3, 4, 4))]
    steps = [[line.step for line in stretch] for stretch in rising(lines)]
    assert steps == [[1, 2, 3], [2, 3, 4], [4]]
