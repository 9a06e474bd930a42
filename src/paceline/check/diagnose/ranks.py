"""Global ranks of lines that do not say them: by the node's first rank, or by their GPU.

torchrun numbers the processes of one node in one row, so lines that say both numbers tell the first
rank of the node, and with it those of all its lines (`[default5]:`). A line of the kernel about a
GPU gets the rank that computes on it: from NCCL's `rank 3 nranks 8 cudaDev 3 busId 3b000`, and from
any line with a rank and a PCI address.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from paceline.check.diagnose.line import Line
from paceline.check.diagnose.seen import Begun, Gpu, Seen


def note_first_rank(seen: Seen, line: Line) -> None:
    """What a line with both numbers says of the first rank of its log's node."""
    if line.rank is not None and line.local_rank is not None:
        seen.first_ranks.setdefault(line.source, set()).add(line.rank - line.local_rank)


def name_ranks(seen: Seen) -> None:
    """Give their ranks to the lines that were kept, in logs of one node each."""
    if not seen.first_ranks:
        return

    def named(line: Line) -> Line:
        firsts = seen.first_ranks.get(line.source, set())
        if line.rank is not None or line.local_rank is None or len(firsts) != 1:
            return line
        rank = min(firsts) + line.local_rank
        seen.ranks.add(rank)
        return replace(line, rank=rank)

    for raised in seen.raised:
        raised.line, raised.header = named(raised.line), named(raised.header)
        raised.rank = raised.rank if raised.rank is not None else raised.line.rank
    seen.begun = [
        Begun(named(each.header), each.frames, each.last and named(each.last))
        for each in seen.begun
    ]
    for error in seen.error_lines.values():
        error.line = named(error.line)
    for sighting in seen.sightings.values():
        sighting.first = [(named(line), groups) for line, groups in sighting.first]


_NCCL = re.compile(r"\brank (?P<rank>\d+) n[Rr]anks \d+.{0,60} busId (?P<bus>[0-9a-f]+)")
_ADDRESS = r"[0-9a-fA-F]{4,8}:(?P<bus>[0-9a-fA-F]{2}):[0-9a-fA-F]{2}\b"
_PAIR = re.compile(rf"\b[Rr]ank[ =:]*(?P<rank>\d+)\b.{{0,80}}\b{_ADDRESS}")
_OF_GPU = re.compile(r"\((?:PCI:)?" + _ADDRESS)


def gpu_of_rank(line: Line) -> tuple[Gpu, int] | None:
    """The GPU and the rank that a line puts together."""
    if match := _NCCL.search(line.raw):
        return (line.host, int(match["bus"], 16) >> 12), int(match["rank"])
    if match := _PAIR.search(line.raw):
        return (line.host, int(match["bus"], 16)), int(match["rank"])
    return None


def with_rank_of_gpu(line: Line, ranks: Mapping[Gpu, int]) -> Line:
    """The line with the rank whose GPU it is about, where that can be only one."""
    match = _OF_GPU.search(line.raw)
    if line.rank is not None or match is None:
        return line
    bus = int(match["bus"], 16)
    on_host = {rank for (host, at), rank in ranks.items() if at == bus and host == line.host}
    anywhere = {rank for (_, at), rank in ranks.items() if at == bus}
    found = on_host or anywhere
    return replace(line, rank=found.pop()) if len(found) == 1 else line
