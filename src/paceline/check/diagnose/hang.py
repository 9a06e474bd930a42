"""Who is behind in a hang, from the watchdogs' lines; and what the lines before them speak for.

A watchdog's line is never the cause. Which rank has no line, or stands at an earlier collective,
is; and what the run was doing last says why.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from paceline.catalog.load import read_shipped
from paceline.check.diagnose.messages import spans
from paceline.check.diagnose.precedence import Level
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

    seq: int
    op: str | None
    num_in: int | None
    behind: Sequence[int]
    absent: Sequence[int]
    num_heard: int
    """Ranks whose watchdogs say where they stood."""

    sizes: Sequence[int]
    """Elements that ranks bring to it; more than one where ranks differ."""

    ops: Sequence[str]
    """Operations at that number; more than one where ranks differ."""

    is_early: bool
    """Among the first collectives of its group."""

    is_small: bool
    """One element: mostly a barrier."""

    is_apart: bool
    """Ranks wait in different operations, at different numbers."""

    crossed: str | None = None
    """That a rank finished a collective in which another still waits, in words."""


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
    size = next((each.num_in for each in at if each.num_in is not None), None)
    places = sorted({each.seq for each in first}, key=lambda place: (place != seq, place))
    parts = [_waits([each for each in first if each.seq == place]) for place in places[:_PLACES]]
    if absent and len(absent) < world:
        parts.append(f"rank{'s' * (len(absent) > 1)} {spans(absent)} reported nothing")
    return Standing(
        what="; ".join(parts),
        seq=seq,
        op=ops[0] if ops else None,
        num_in=size,
        behind=behind,
        absent=absent,
        num_heard=len(set(ranks)),
        ops=ops,
        sizes=sorted({each.num_in for each in at if each.num_in is not None}),
        is_early=seq <= 10,
        is_small=size is not None and size <= 8,
        crossed=_crossed(first),
        is_apart=_is_apart(first),
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
    facts = set(_facts(seen, standing))
    said = asdict(standing) if standing else {}
    said |= {name: ", ".join(map(str, said[name])) for name in ("ops", "sizes") if name in said}
    said["behind"] = spans(standing.behind) if standing else ""
    rows = [(level, *row) for name, level in _LEVELS.items() for row in _ROWS[name]["reasons"]]
    for place, (level, name, needs, why) in enumerate(rows):
        if all((need.lstrip("!") in facts) is not need.startswith("!") for need in needs.split()):
            order = place - len(rows)
            yield Reason(id=name, level=level, order=order, why=why.format_map(said))


_LEVELS = {"likely": Level.LIKELY_HANG, "possible": Level.POSSIBLE, "fits": Level.FITS}
_OF_STANDING: Mapping[str, Callable[[Standing], object]] = {
    "stands": lambda stands: True,
    "early": lambda stands: stands.is_early,
    "late": lambda stands: not stands.is_early,
    "small": lambda stands: stands.is_small,
    "ops": lambda stands: len(stands.ops) > 1,
    "sizes": lambda stands: len(stands.sizes) > 1,
    "crossed": lambda stands: stands.crossed,
    "apart": lambda stands: stands.is_apart,
    "behind": lambda stands: stands.behind,
}


def _facts(seen: Seen, standing: Standing | None) -> Iterator[str]:
    before = near(seen)
    last, op = before[-_LAST:], (standing.op or "") if standing else ""
    for part, text in (("near", before), ("last", last), ("run", around(seen)), ("op", op)):
        yield from (name for name, form in _ROWS[part].items() if re.search(form, text))
    if _ends_epoch(last):
        yield "epoch_end"
    if standing is not None:
        yield from (name for name, holds in _OF_STANDING.items() if holds(standing))


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
