"""Reduces logs to their kinds of lines: each once, how often, and on which ranks.

Numbers, addresses, ids and times make no new kind. A line that differs in its digits alone from one
that was read is of its kind, and only its rank is read. Bounded in memory: beyond KEEP_KINDS kinds,
lines of new kinds are only counted.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.check.diagnose.line import MAX_LINE, Line, read_line, with_rank, without_colours
from paceline.check.diagnose.matcher import with_zeros, without_ids
from paceline.check.diagnose.scan import readable, whole_lines
from paceline.check.diagnose.seen import Source

KEEP_KINDS = 50_000

_KEEP_BYTES = 16 << 20
"""Bytes of one log's shapes that are remembered. A guess: a hundred thousand of usual lines."""

_VARIES = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\b[0-9a-f]{8,}\b"
    r"|\b(?=[A-F]*\d)[0-9A-F]{8,}\b|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[█▏▎▍▌▋▊▉#=>-]{2,}"
    r"|\bnan\b|\binf\b"
)
_DIGITS = re.compile(r"[0-9]+")


@dataclass(slots=True, kw_only=True)
class Event:
    """One kind of line."""

    first: Line
    count: int = 0
    ranks: set[int] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Events:
    """All kinds, in the order in which they came up first."""

    kinds: list[Event]
    num_lines: int
    left_out: int
    """Lines of kinds beyond KEEP_KINDS."""

    troubles: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What lines have in common that differ in their digits alone."""

    event: Event | None
    """None: of a kind beyond KEEP_KINDS."""

    rank_at: slice | None
    """Where the digits of the rank stand; None where the line does not say it."""


def unique_events(
    logs: Iterable[tuple[str, Iterable[bytes], int | None, str | None]],
) -> Events:
    """The kinds of lines of (name, blocks, rank, host) of each log."""
    found = Events(kinds=[], num_lines=0, left_out=0)
    kinds: dict[str, Event] = {}
    for name, blocks, rank, host in logs:
        source = Source(name, rank, host)
        _read(source, blocks, kinds, found)
        if source.trouble:
            found.troubles.append(f"{source.trouble}: {name}")
    found.kinds += kinds.values()
    return found


def _read(source: Source, blocks: Iterable[bytes], kinds: dict[str, Event], found: Events) -> None:
    shapes: dict[bytes, _Shape] = {}
    number = num_bytes = 0
    for block in whole_lines(readable(blocks, source)):
        clean = without_colours(block)
        for raw, zeros in zip(clean.splitlines(), with_zeros(clean).splitlines(), strict=True):
            number += 1
            if not zeros.strip():
                continue
            found.num_lines += 1
            zeros = zeros[:MAX_LINE]
            shape = shapes.get(zeros)
            if shape is None:
                form = without_ids(zeros)
                shape = shapes.get(form)
                if shape is None or not _is_before_ids(shape, zeros, form):
                    shape = _shape(source, raw, number, kinds)
                if num_bytes > _KEEP_BYTES:
                    shapes.clear()
                    num_bytes = 0
                if _is_before_ids(shape, zeros, form):
                    shapes[zeros] = shapes[form] = shape
                    num_bytes += len(zeros) + len(form)
            if shape.event is None:
                found.left_out += 1
                continue
            shape.event.count += 1
            if shape.rank_at is not None:
                shape.event.ranks.add(int(raw[shape.rank_at]))


def _is_before_ids(shape: _Shape, zeros: bytes, form: bytes) -> bool:
    """Whether the rank stands where it does however long the ids and fractions behind it are."""
    return shape.rank_at is None or zeros.startswith(form[: shape.rank_at.stop])


def _shape(source: Source, raw: bytes, number: int, kinds: dict[str, Event]) -> _Shape:
    text = raw[:MAX_LINE].decode("utf-8", "replace")
    line = with_rank(read_line(text, source=source.name, number=number), source.rank, source.host)
    kind = _VARIES.sub("#", line.message)
    if kind not in kinds and len(kinds) >= KEEP_KINDS:
        return _Shape(None, None)
    event = kinds.setdefault(kind, Event(first=line))
    rank_at = _rank_at(source, raw[:MAX_LINE], line.rank) if line.rank is not None else None
    if line.rank is not None:
        event.ranks.add(line.rank)
    return _Shape(event, rank_at)


def _rank_at(source: Source, raw: bytes, rank: int) -> slice | None:
    """The digits that the rank is read from: with others in their place it is another."""
    text = raw.decode("utf-8", "surrogateescape")
    for digits in _DIGITS.finditer(text):
        if int(digits[0]) != rank:
            continue
        other = digits[0].translate(_NEXT_DIGIT)
        changed = text[: digits.start()] + other + text[digits.end() :]
        read = read_line(changed, source=source.name, number=0)
        if read.rank == int(other):
            start = len(text[: digits.start()].encode("utf-8", "surrogateescape"))
            return slice(start, start + len(other))
    return None


_NEXT_DIGIT = str.maketrans("0123456789", "1234567890")
