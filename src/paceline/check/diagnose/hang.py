"""Ranks that waited: who is behind, by the watchdogs' lines; and what the lines before speak for.

A watchdog's line is never the cause. Which rank has no line, or stands at an earlier collective,
is; and what the run was doing last says why.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.catalog.load import read_shipped
from paceline.catalog.symptom import load_symptoms
from paceline.check.diagnose.candidate import Candidate, Level, ranks_of
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.messages import spans, who
from paceline.check.diagnose.progress import Progress
from paceline.check.diagnose.seen import Seen, Watched
from paceline.units import counted

_NEAR = 6_000
"""Characters before the first failure that count as what the run was doing then. A guess: some
sixty lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the ranks stood."""

    what: str
    """In words."""

    odd: Sequence[int]
    """The ranks that others wait for: those behind, or the few of whom nothing is heard. Where most
    say nothing they have only not been given."""

    op: str
    facts: Mapping[str, object]
    """What holds of it, by the names of hang_reasons.toml, as it is said in a reason."""


def stand(seen: Seen) -> Standing | None:
    """Where the ranks stood when the first watchdogs gave up."""
    first = _first_of_each(seen.watched)
    if not first:
        return None
    waiting = Counter(each.seq for each in first)
    seq, _ = max(waiting.items(), key=lambda item: (item[1], item[0]))
    at = [each for each in first if each.seq == seq]
    ranks = [each.rank for each in first if each.rank is not None]
    world = max([*ranks, *seen.ranks], default=-1) + 1
    absent = [rank for rank in range(world) if rank not in ranks] if world <= 65_536 else []
    lowest = min((each.enqueued for each in first if each.enqueued is not None), default=None)
    behind = [
        each.rank
        for each in first
        if each.rank is not None
        and (each.seq < seq or (lowest is not None and each.enqueued == lowest < seq))
    ]
    ops = sorted({each.op for each in at if each.op})
    sizes = sorted({each.num_in for each in at if each.num_in is not None})
    size = next((each.num_in for each in at if each.num_in is not None), None)
    places = sorted({each.seq for each in first}, key=lambda place: (place != seq, place))
    parts = [_waits([each for each in first if each.seq == place]) for place in places[:_PLACES]]
    if absent and len(absent) < world:
        parts.append(f"rank{'s' * (len(absent) > 1)} {spans(absent)} reported nothing")
    few = absent if 2 * len(absent) <= len(set(ranks)) else ()
    return Standing(
        what="; ".join(parts),
        odd=behind or few,
        op=ops[0] if ops else "",
        facts={
            "stands": True,
            "seq": seq,
            "early": seq <= 10,  # among the first collectives of its group
            "late": seq > 10,
            "small": size is not None and size <= 8,  # mostly a barrier
            "ops": ", ".join(ops) if len(ops) > 1 else None,
            "sizes": ", ".join(map(str, sizes)) if len(sizes) > 1 else None,
            "crossed": _crossed(first),
            "apart": _is_apart(first),
            "behind": spans(behind),
        },
    )


_PLACES = 3
"""Collectives that are named of those in which ranks waited."""


def _waits(at: Sequence[Watched]) -> str:
    """Who waited how long in one collective, in words."""
    ranks = [each.rank for each in at if each.rank is not None]
    who = f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}" if ranks else "a rank"
    limit = next((f" {each.timeout_ms / 1000:.0f} s" for each in at if each.timeout_ms), "")
    told = sorted({each.op for each in at if each.op})
    told += [counted(each.num_in, "element") for each in at if each.num_in is not None][:1]
    return f"{who} waited{limit} in collective {at[0].seq}" + f" ({', '.join(told)})" * bool(told)


_NEEDS_ALL = re.compile(r"ALLREDUCE|ALLGATHER|REDUCE_SCATTER|ALLTOALL|BARRIER")
"""Operations that no rank finishes before all have come. A broadcast's source may."""


def _crossed(first: Sequence[Watched]) -> str | None:
    """A rank beyond a collective that it cannot have finished: it called another one there."""
    named = [each for each in first if each.group is not None and each.rank is not None]
    for waits in sorted(named, key=lambda each: each.seq):
        for ahead in named:
            same = ahead.group == waits.group and ahead.rank != waits.rank
            beyond = ahead.seq > waits.seq and (ahead.completed or waits.seq) >= waits.seq
            if same and beyond and waits.op and _NEEDS_ALL.search(waits.op):
                return (
                    f"rank {ahead.rank} stands at collective {ahead.seq} ({ahead.op}) and rank "
                    f"{waits.rank} still waits in {waits.seq} ({waits.op}), which needs all ranks"
                )
    return None


def _is_apart(first: Sequence[Watched]) -> bool:
    """Whether a rank waits at a lower number in another operation. Each group counts its own
    collectives, so ranks of which lines name different groups are not compared."""
    last = max(first, key=lambda each: each.seq)
    return any(
        each.seq < last.seq
        and each.op != last.op
        and each.group in {last.group, None}
        and _NEEDS_ALL.search(each.op or "") is not None
        for each in first
        if last.op
    )


def _first_of_each(watched: Sequence[Watched]) -> list[Watched]:
    found: dict[object, Watched] = {}
    for each in watched:
        key = each.rank if each.rank is not None else ("line", each.seq, each.op)
        if key not in found or (each.seq < found[key].seq and each.rank is not None):
            found[key] = each
    return list(found.values())


def near(seen: Seen) -> str:
    """What the logs say just before the first failure."""
    texts = [source.before[-_NEAR:] for source in seen.sources[:64] if source.before]
    return "\n".join(texts)[-16 * _NEAR :]


def around(seen: Seen) -> str:
    """Heads, and what is near the failure and behind it: for what the run is, not what it did."""
    texts = [f"{s.head}\n{s.before}\n{s.after}\n{s.tail}" for s in seen.sources[:16]]
    return "\n".join(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """What speaks for a failure where ranks waited."""

    id: str
    level: Level
    order: int
    """Among all reasons: the most telling first, all below 0."""

    why: str


_ROWS = read_shipped("hang_reasons.toml")
_LAST = 2_500
"""Characters before the first failure that count as the last lines. A guess, as `_NEAR`."""


def reasons(seen: Seen, standing: Standing | None) -> Iterator[Reason]:
    """What the lines before a hang, and where ranks stood in it, speak for; most telling first."""
    facts, said = set(_facts(seen, standing)), standing.facts if standing else {}
    rows = [(level, *row) for name, level in _LEVELS.items() for row in _ROWS[name]["reasons"]]
    for place, (level, name, needs, why) in enumerate(rows):
        if all((need.lstrip("!") in facts) is not need.startswith("!") for need in needs.split()):
            order = place - len(rows)
            yield Reason(id=name, level=level, order=order, why=why.format_map(said))


_LEVELS = {"likely": Level.LIKELY_HANG, "possible": Level.POSSIBLE, "fits": Level.FITS}


def _facts(seen: Seen, standing: Standing | None) -> Iterator[str]:
    before = near(seen)
    last, op = before[-_LAST:], standing.op if standing else ""
    for part, text in (("near", before), ("last", last), ("run", around(seen)), ("op", op)):
        yield from (name for name, form in _ROWS[part].items() if re.search(form, text))
    if _ends_epoch(last):
        yield "epoch_end"
    if standing is not None:
        yield from (name for name, holds in standing.facts.items() if holds)


_EPOCH_END = re.compile(r"\b(9[5-9]|100)%\|")
_STEP_OF = re.compile(r"\b(\d+)/(\d+)\b")


def _ends_epoch(text: str) -> bool:
    if _EPOCH_END.search(text):
        return True
    steps = _STEP_OF.findall(text)
    if not steps:
        return False
    done, of = (int(each) for each in steps[-1])
    return of >= 10 and of * 0.95 <= done <= of


_WAITED = {
    "collective-watchdog-timeout",
    "nccl-works-failed-banner",
    "gloo-peer-closed",
    "store-wait-timeout",
}
"""A rank waited for another."""


def hangs(seen: Seen, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """What a time-out speaks for, where nothing else is seen."""
    waits = [each for each in candidates if each.id in _WAITED]
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
    odd = standing.odd if standing else unlike_the_others(seen, waits)
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


def unlike_the_others(seen: Seen, known: Sequence[Candidate]) -> Sequence[int]:
    """Ranks that most others wait for: the silent ones, else those that wait elsewhere."""
    waits = [each for each in known if each.id in _WAITED]
    waiting = {line.rank for each in waits for line in each.lines} - {None}
    raised = {each.rank: each for each in seen.raised if each.rank is not None}
    known_ranks = seen.ranks | {each.rank for each in seen.sources if each.rank is not None}
    known_ranks |= {each.rank for each in seen.exits if each.rank is not None}
    silent = sorted(known_ranks - waiting - raised.keys())
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
    victims = {line.rank for line in closed}
    own = [each for each in seen.exits if each.code > 0 and each.rank not in victims | {None}]
    if victims != {None} and own:  # an error of its own, of which its log is not here
        return
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


def only_symptom(secondary: list[Candidate]) -> Candidate:
    """Where only consequences are seen: the one that says most of where ranks stood."""
    ranking = ("collective-watchdog-timeout", "store-wait-timeout", "gloo-peer-closed")
    best = min(
        secondary,
        key=lambda each: ranking.index(each.id) if each.id in ranking else len(ranking),
    )
    best.confidence = Confidence.POSSIBLE
    return best
