"""What a rank that waited speaks for: time-outs, connections that closed, tracebacks cut off."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.catalog.symptom import load_symptoms
from paceline.check.diagnose.candidate import Candidate, ranks_of
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.hang import Reason, Standing, reasons, stand
from paceline.check.diagnose.messages import spans, who
from paceline.check.diagnose.precedence import Level
from paceline.check.diagnose.progress import Progress
from paceline.check.diagnose.seen import Seen

_WAITS = {
    "collective-watchdog-timeout",
    "nccl-works-failed-banner",
    "gloo-peer-closed",
    "store-wait-timeout",
}
"""A rank waited for another."""


def hangs(seen: Seen, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """What a time-out speaks for, where nothing else is seen."""
    waits = [each for each in candidates if each.id in _WAITS]
    standing = stand(seen)
    if not waits and standing is None:
        return
    if any(each.level <= Level.EXCEPTION for each in candidates):
        return
    timed_out = standing is not None or any(
        re.search(r"(?i)timed ?out|timeout", line.raw) for each in waits for line in each.lines
    )
    if not timed_out:
        yield from _left_early(seen, waits)
        return
    lines = [each.line for each in seen.watched] or waits[0].lines
    found: dict[str, list[Reason]] = {}
    for reason in reasons(seen, standing):
        found.setdefault(reason.id, []).append(reason)
    odd = _odd(standing) or (() if standing else _unlike_the_others(seen, waits))
    if standing and not odd:  # who waits is not who is waited for
        lines = [replace(line, rank=None) for line in lines]
    for name, why in found.items():
        level = why[0].level
        said = "; ".join(dict.fromkeys(each.why for each in why if each.level is level))
        yield Candidate(
            id=name,
            level=level,
            confidence=_CONFIDENCE.get(level, Confidence.POSSIBLE),
            lines=lines,
            what=f"{standing.what}; {said}" if standing else f"{_stands_apart(odd, waits)}{said}",
            count=len(lines),
            order=why[0].order,
            rank=odd[0] if odd else None,
        )


def stood_still(seen: Seen, stands: Progress) -> Iterator[Candidate]:
    """Why a run may stand that prints no more steps and nothing else that is known."""
    checks = {each.id: each.check for each in load_symptoms()["collective-timeout"].causes}
    found: dict[str, Reason] = {}
    for reason in reasons(seen, None):
        found.setdefault(reason.id, reason)
    for name, reason in found.items():
        yield Candidate(
            id=name,
            level=reason.level,
            confidence=Confidence.POSSIBLE,
            lines=[replace(stands.line, rank=None)],  # who prints last is not who is waited for
            what=f"{stands.what}; {reason.why}",
            rank=stands.behind[0] if stands.behind else None,
            order=reason.order,
            check=checks.get(name),
        )


def _odd(standing: Standing | None) -> Sequence[int]:
    """The ranks that others wait for: those behind, or the few of whom nothing is heard.

    Where most say nothing they have only not been given.
    """
    if standing is None or standing.behind:
        return standing.behind if standing else ()
    return standing.absent if 2 * len(standing.absent) <= standing.num_heard else ()


def _unlike_the_others(seen: Seen, waits: Sequence[Candidate]) -> Sequence[int]:
    """Ranks that most others wait for: the silent ones, else those that wait elsewhere."""
    waiting = {line.rank for each in waits for line in each.lines} - {None}
    raised = {each.rank: each for each in seen.raised if each.rank is not None}
    known = seen.ranks | {each.rank for each in seen.sources if each.rank is not None}
    silent = sorted(known - waiting - raised.keys())
    if silent:
        return silent if 2 * len(silent) <= len(waiting) else ()
    places = {
        rank: tuple(frame.function for frame in each.frames if frame.is_users)
        for rank, each in raised.items()
    }
    [(usual, count)] = Counter(places.values()).most_common(1) or [((), 0)]
    odd = sorted(rank for rank, place in places.items() if place != usual)
    return odd if 2 * len(odd) <= count else ()


def _stands_apart(odd: Sequence[int], waits: Sequence[Candidate]) -> str:
    if not odd:
        return ""
    waiting = {line.rank for each in waits for line in each.lines}
    many, once = ("s", "") if len(odd) > 1 else ("", "s")
    does = f"wait{once} elsewhere" if waiting & set(odd) else f"report{once} nothing"
    return f"the others wait for rank{many} {spans(odd)}, which {does}; "


_CONFIDENCE = {Level.LIKELY_HANG: Confidence.LIKELY}

_WAITS_FOR_RANK_0 = re.compile(
    r"main_process_first|main_first|local_main|wait_for_everyone|barrier"
)
_BAR_AT_LIMIT = re.compile(r"\[(?:0?9:5\d|10:0\d|29:[45]\d|30:[0-4]\d|59:[45]\d|1:00:[0-4]\d)<")
"""A progress bar that stopped at 10, 30 or 60 minutes: the time-outs of NCCL and gloo, old and
new, as in torch/distributed/constants.py."""


def cut_off(seen: Seen) -> Iterator[Candidate]:
    """A traceback that breaks off where a rank waits for rank 0, as a bar nears a limit."""
    for begun in seen.begun:
        waits = any(_WAITS_FOR_RANK_0.search(frame.function) for frame in begun.frames)
        if waits and (bar := _BAR_AT_LIMIT.search(begun.header.raw)):
            yield Candidate(
                id="rank0-preprocess-timeout",
                level=Level.LIKELY_HANG,
                confidence=Confidence.LIKELY,
                lines=[begun.header, *([begun.last] if begun.last else [])],
                what=f"the work of one rank stands at {bar[0][1:-1]}, near a time-out, while "
                "another stopped in its wait for it",
            )
            return


def _left_early(seen: Seen, waits: Sequence[Candidate]) -> Iterator[Candidate]:
    """A rank's connection closed, and no process ended by a signal or an error of its own."""
    closed = [line for each in waits for line in each.lines if "closed by peer" in line.raw]
    if closed and seen.exits and all(each.code in (1, -15) for each in seen.exits):
        yield Candidate(
            id="uneven-inputs-hang",
            level=Level.LIKELY_HANG,
            confidence=Confidence.LIKELY,
            lines=closed,
            what=f"{who(ranks_of(closed))}the peer left without an error while this rank still "
            "trained",
            count=len(closed),
        )


def only_symptom(seen: Seen, secondary: list[Candidate]) -> Candidate:
    """Where only consequences are seen: the one that says most of where ranks stood."""
    ranking = ("collective-watchdog-timeout", "store-wait-timeout", "gloo-peer-closed")
    best = min(
        secondary,
        key=lambda each: ranking.index(each.id) if each.id in ranking else len(ranking),
    )
    standing = stand(seen)
    if best.id == "collective-watchdog-timeout" and standing is not None:
        odd = _odd(standing)
        best.what = standing.what
        best.rank = odd[0] if odd else None
    best.confidence = Confidence.POSSIBLE
    return best
