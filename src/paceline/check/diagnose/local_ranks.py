"""Global ranks of lines that say only which of a node's processes wrote them (`[default5]:`).

torchrun numbers the processes of one node in one row, so the lines that say both numbers tell the
first rank of the node, and with it those of all its lines.
"""

from dataclasses import replace

from paceline.check.diagnose.line import Line
from paceline.check.diagnose.seen import Begun, Seen


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
