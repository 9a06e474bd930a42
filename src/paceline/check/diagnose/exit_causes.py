"""What the way in which processes ended says: by which signal, with which code, which first."""

from collections.abc import Iterator, Sequence

from paceline.catalog.failure import load_failures
from paceline.check.diagnose.candidate import Candidate
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.messages import say
from paceline.check.diagnose.precedence import level_of
from paceline.check.diagnose.seen import Seen

_ENDS = {
    -11: "segfault-exit-11",
    -7: "sigbus-exit-7",
    -9: "host-oom-sigkill",
    -1: "sighup-terminal-closed",
}
_CODES = {name: code for code, name in _ENDS.items()} | {"shm-too-small": -7}


def ended(seen: Seen, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """What the way in which a process ended says."""
    for code, name in _ENDS.items():
        ends = [each for each in seen.exits if each.code == code]
        if not ends:
            continue
        first = min(ends, key=lambda each: (each.line.time_s or 0.0, not each.first_observed))
        known = next((each for each in candidates if each.id == name), None)
        if known is not None:
            known.rank = known.rank if known.rank is not None else first.rank
            continue
        yield Candidate(
            id=name,
            level=level_of(load_failures()[name]),
            confidence=Confidence.LIKELY,
            lines=[each.line for each in ends],
            what=say(name, first.line, {}, [first.rank] if first.rank is not None else []),
            count=len(ends),
            rank=first.rank,
        )


def rank_of_exit(seen: Seen, failure: str | None = None) -> int | None:
    """Rank of the process that ended first as a failure ends it; else with an error of its own."""
    code = _CODES.get(failure or "")
    ends = [
        each
        for each in seen.exits
        if each.rank is not None and (each.code == code if code else each.code > 0)
    ]
    ends.sort(key=lambda each: (each.line.time_s or 0.0, not each.first_observed))
    return ends[0].rank if ends else None
