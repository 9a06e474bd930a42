"""Every kind of line once: counted, with its ranks, also where only digits of a line are read."""

import tracemalloc
from collections.abc import Iterator

import pytest

from paceline.check.diagnose.unique import KEEP_KINDS, unique_events


def _events(text: str, rank: int | None = None):
    return unique_events([("-", [text.encode()], rank, None)])


def test_lines_that_differ_in_numbers_and_ids_are_one_kind_with_all_its_ranks():
    text = "".join(
        f"[rank{rank}]: 2026-05-01 12:00:{rank:02},{step:03} step={step} loss={1 / (step + 3)} "
        f"to s3://b/{step * 2654435761 % 2**32:08x}\n"
        for step in range(40)
        for rank in (3, 11, 12)
    )
    [event] = _events(text).kinds
    assert (event.count, event.ranks, event.first.number) == (120, {3, 11, 12}, 1)


def test_a_rank_behind_a_fraction_of_changing_length_is_read():
    text = "".join(
        f"2026-05-01T12:00:00.{'7' * width}Z [rank{width}]: hello\n" for width in range(1, 13)
    )
    [event] = _events(text).kinds
    assert event.ranks == set(range(1, 13))


def test_a_number_that_is_no_rank_is_none():
    [event] = _events("attempt 3 of 5\nattempt 4 of 5\n").kinds
    assert event.ranks == set()
    [event] = _events("attempt 3 of 5\nattempt 4 of 5\n", rank=7).kinds
    assert event.ranks == {7}


@pytest.mark.parametrize("before", [b"caf\xe9 ", b"\xf0\x9f caf\xc3\xa9 ", b"a\xed\xa0\x80b "])
def test_a_rank_is_read_behind_bytes_that_are_no_text(before: bytes):
    log = b"".join(before + b"Rank %d] error\n" % rank for rank in (3, 4, 7))
    [event] = unique_events([("-", [log], None, None)]).kinds
    assert (event.count, event.ranks) == (3, {3, 4, 7})


def test_kinds_beyond_the_limit_are_counted_and_the_known_ones_still_are():
    letters = "abcdefghij"
    names = ("".join(letters[int(digit)] for digit in str(n)) for n in range(KEEP_KINDS + 5))
    events = _events("".join(f"name {name}\n" for name in names) + "name a\n\n")
    assert (len(events.kinds), events.left_out, events.num_lines) == (
        KEEP_KINDS,
        5,
        KEEP_KINDS + 6,
    )
    assert events.kinds[0].count == 2


def test_a_rank_in_digits_of_another_script_ends_no_reading():
    [event] = _events("Rank \N{ARABIC-INDIC DIGIT THREE}] error\n").kinds
    assert event.count == 1


@pytest.mark.parametrize(("num_lines", "length"), [(12_000, 4_000), (600, 60_000)])
def test_what_is_remembered_of_a_log_is_bounded_in_bytes(num_lines: int, length: int):
    letters = str.maketrans("012345", "abcdef")

    def blocks() -> Iterator[bytes]:
        for n in range(num_lines):
            name = "".join(str(n // 6**at % 6) for at in range(6)).translate(letters)
            yield f"{'x' * (length - 20)} {name}00 {name}00\n".encode()

    tracemalloc.start()
    unique_events([("-", blocks(), None, None)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 28e6
