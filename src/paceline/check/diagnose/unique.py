"""Reduces logs to their kinds of lines: each once, how often, and on which ranks.

Numbers, addresses and times make no new kind. Bounded in memory: beyond KEEP_KINDS kinds, lines of
new kinds are only counted.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.check.diagnose.line import Line, read_line, with_rank, without_colours
from paceline.check.diagnose.scan import readable, whole_lines
from paceline.check.diagnose.seen import Source

KEEP_KINDS = 50_000

_VARIES = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[█▏▎▍▌▋▊▉#=>-]{2,}|\bnan\b|\binf\b"
)


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


def unique_events(
    logs: Iterable[tuple[str, Iterable[bytes], int | None, str | None]],
) -> Events:
    """The kinds of lines of (name, blocks, rank, host) of each log."""
    kinds: dict[str, Event] = {}
    num_lines = left_out = 0
    troubles = []
    for name, blocks, rank, host in logs:
        number = 0
        source = Source(name)
        for block in whole_lines(readable(blocks, source)):
            for raw in without_colours(block).splitlines():
                number += 1
                if not raw.strip():
                    continue
                num_lines += 1
                line = with_rank(
                    read_line(raw[:4096].decode("utf-8", "replace"), source=name, number=number),
                    rank,
                    host,
                )
                kind = _VARIES.sub("#", line.message)
                event = kinds.get(kind)
                if event is None:
                    if len(kinds) >= KEEP_KINDS:
                        left_out += 1
                        continue
                    event = kinds[kind] = Event(first=line)
                event.count += 1
                if line.rank is not None:
                    event.ranks.add(line.rank)
        if source.trouble:
            troubles.append(f"{source.trouble}: {name}")
    return Events(
        kinds=list(kinds.values()), num_lines=num_lines, left_out=left_out, troubles=troubles
    )
