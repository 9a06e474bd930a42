"""The journal's file: what was written is read, whatever was torn or damaged."""

import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.journal import Journal, read_journal
from paceline.errors import JobError


def written(path, entries=(b"one", b"two", b"three")):
    journal = Journal(path)
    journal.begin(b"snapshot")
    for entry in entries:
        journal.write(entry, sync=True)
    journal.close()
    return path.read_bytes()


def test_what_was_written_is_read(tmp_path):
    written(tmp_path / "journal")
    assert read_journal(tmp_path / "journal") == [b"snapshot", b"one", b"two", b"three"]


def test_only_its_owner_may_read_it_as_it_holds_the_secret_of_the_run(tmp_path):
    before = os.umask(0)
    try:
        written(tmp_path / "journal")
    finally:
        os.umask(before)
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_without_a_file_there_is_nothing(tmp_path):
    assert read_journal(tmp_path / "journal") == []


def test_a_torn_end_is_cut_at_every_byte_and_the_writer_goes_on_after_it(tmp_path):
    path = tmp_path / "journal"
    whole = written(path)
    last = len(whole) - len(b"three") - 12
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        assert read_journal(path) == [b"snapshot", b"one", b"two"]
        journal = Journal(path)
        journal.go_on()
        journal.write(b"again", sync=False)
        journal.close()
        assert read_journal(path) == [b"snapshot", b"one", b"two", b"again"]


def test_zeros_that_a_power_failure_left_at_the_end_are_cut(tmp_path):
    path = tmp_path / "journal"
    path.write_bytes(written(path) + bytes(100))
    assert read_journal(path) == [b"snapshot", b"one", b"two", b"three"]


def test_any_flipped_bit_before_the_last_record_is_an_error_with_a_code(tmp_path):
    path = tmp_path / "journal"
    whole = written(path)
    for at in range(len(whole) - len(b"three") - 12):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(JobError, match="R042"):
                read_journal(path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_read_is_always_a_beginning_of_what_was_written(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "journal"
    entries = data.draw(st.lists(st.binary(max_size=40), max_size=8))
    whole = bytearray(written(path, entries))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        found = read_journal(path)
    except JobError:
        return
    assert found == [b"snapshot", *entries][: len(found)]


def test_beginning_anew_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.begin(b"first")
    journal.write(b"one", sync=True)

    def crash(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            journal.begin(b"second")
    assert read_journal(path) == [b"first", b"one"]
    journal.begin(b"third")
    journal.write(b"two", sync=True)
    assert read_journal(path) == [b"third", b"two"]


def test_a_full_disk_ends_the_journal_and_not_the_run(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.begin(b"first")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        journal.write(b"one", sync=True)
        assert journal.is_lost
        assert not path.exists()
        journal.begin(b"second")
        assert journal.is_lost
    journal.begin(b"third")
    assert not journal.is_lost
    assert read_journal(path) == [b"third"]
