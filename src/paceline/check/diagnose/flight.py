"""PyTorch's flight recorder: which collective ranks differ at, from one dump of each rank.

A dump is a pickle of plain data, or the same as JSON. A pickle can run any code when it is loaded,
so only plain data are accepted: whatever names a class or a function is refused.
"""

import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 512 << 20
"""A dump that is read whole. The recorder keeps 2,000 entries by default, some MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """One rank's dump."""

    source: str
    rank: int | None
    entries: Sequence[Mapping[str, Any]]
    groups: Mapping[str, Mapping[str, Any]]
    generation: int = 0
    """The run's generation, in a dump that Paceline kept; 0 in any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first collective at which ranks differ."""

    id: str
    what: str
    ranks: Sequence[int]
    """Who differs, or is missing."""

    place: str | None
    source: str


class _PlainData(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a dump has plain data alone")


def is_dump(start: bytes) -> bool:
    """Whether a file that begins so may be a dump."""
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":
        return b"entries" in start or b"pg_config" in start or b"nccl_comm_state" in start
    head = start[:4096].lstrip()
    return head[:1] == b"{" and (b'"entries"' in start or b'"pg_config"' in start)


def read_dump(data: bytes, *, source: str, rank: int | None) -> Dump:
    """A dump's content.

    Raises:
        ValueError: It is damaged, or is no dump.
    """
    try:
        content = json.loads(data) if data[:1] != b"\x80" else _PlainData(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a flight-recorder dump: {error}") from None
    except (
        IndexError, KeyError, TypeError, AttributeError, MemoryError, OverflowError, RecursionError
    ) as error:  # fmt: skip
        raise ValueError(f"a damaged flight-recorder dump: {type(error).__name__}") from None
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("no flight-recorder dump: it has no entries")
    entries = [each for each in content["entries"] if isinstance(each, dict)]
    if not any(isinstance(each.get("collective_seq_id"), int) or "p2p_seq_id" in each
               or "record_id" in each for each in entries):  # fmt: skip
        raise ValueError("a flight-recorder dump without a collective in it")
    groups, generation = content.get("pg_config"), content.get("generation")
    if rank is None and isinstance(content.get("rank"), int):
        rank = content["rank"]
    return Dump(
        source=source,
        rank=rank,
        entries=entries,
        groups=groups if isinstance(groups, dict) else {},
        generation=generation if isinstance(generation, int) else 0,
    )


def first_difference(dumps: Sequence[Dump]) -> Difference | None:
    """The first collective that ranks call differently, or that some have not called."""
    ranked = {dump.rank if dump.rank is not None else at: dump for at, dump in enumerate(dumps)}
    found = []
    for group in sorted({_group(each) for dump in dumps for each in dump.entries}):
        difference = _differs_in(group, ranked)
        if difference is not None:
            found.append(difference)
    mismatch = [each for each in found if each.id == "collective-mismatch"]
    return next(iter([*mismatch, *found]), None)


def of_newest_generation(dumps: Sequence[Dump]) -> list[Dump]:
    """The dumps that can be compared: collectives are counted anew in each generation of a run."""
    newest = max((dump.generation for dump in dumps), default=0)
    return [dump for dump in dumps if dump.generation == newest]


def last_calls(dump: Dump) -> str:
    """What one rank's dump shows alone: where it waits in each group, or what it called last."""
    told = []
    for group in sorted({_group(each) for each in dump.entries}):
        own = [
            each
            for each in dump.entries
            if _group(each) == group and isinstance(each.get("collective_seq_id"), int)
        ]
        own.sort(key=lambda each: int(each["collective_seq_id"]))
        if not own:
            continue
        pending = next((each for each in own if not _has_ended(each)), None)
        shown = own[-1] if pending is None else pending
        at = _place(shown)
        call = (
            f"{shown['collective_seq_id']} ({_short(shown.get('profiling_name'))}"
            f"{f' at {at}' if at else ''})"
        )
        told.append(
            f"group {group}: all ended, the last was collective {call}"
            if pending is None
            else f"group {group}: waits in collective {call}"
        )
    whose = "it" if dump.rank is None else f"rank {dump.rank}"
    return f"{whose}: {'; '.join(told) or 'no collective, only sends between two ranks'}"


def _differs_in(group: str, dumps: Mapping[int, Dump]) -> Difference | None:
    calls: dict[int, dict[int, Mapping[str, Any]]] = {}
    for rank, dump in dumps.items():
        if not _is_member(rank, dump, group):
            continue
        own = {
            int(each["collective_seq_id"]): each
            for each in dump.entries
            if _group(each) == group
            and not each.get("is_p2p")
            and isinstance(each.get("collective_seq_id"), int)
        }
        if own:
            calls[rank] = own
    if len(calls) < 2:
        return None
    first = max(min(own) for own in calls.values())
    last = {rank: max(own) for rank, own in calls.items()}
    for seq in range(first, max(last.values()) + 1):
        here = {rank: own[seq] for rank, own in calls.items() if seq in own}
        absent = sorted(rank for rank in calls if last[rank] < seq)
        if difference := _differ(group, seq, here, dumps):
            return difference
        waiting = [rank for rank, each in here.items() if not _has_ended(each)]
        if absent and here and waiting:
            return _missing(group, seq, here, absent, calls, dumps)
    return None


def _differ(
    group: str, seq: int, here: Mapping[int, Mapping[str, Any]], dumps: Mapping[int, Dump]
) -> Difference | None:
    for name, key in (
        ("operation", "profiling_name"),
        ("input sizes", "input_sizes"),
        ("type", "input_dtypes"),
    ):
        values: dict[str, list[int]] = {}
        for rank, each in here.items():
            if key == "input_sizes" and _may_differ(each):
                continue
            values.setdefault(_short(each.get(key)), []).append(rank)
        if len(values) < 2:
            continue
        odd = min(values.values(), key=len)
        told = "; ".join(f"rank {_list(ranks)} {value}" for value, ranks in values.items())
        return Difference(
            id="collective-mismatch",
            what=f"group {group}, collective {seq}: ranks differ in {name}: {told}",
            ranks=sorted(odd),
            place=_place(here[odd[0]]),
            source=dumps[odd[0]].source,
        )
    return None


def _missing(
    group: str,
    seq: int,
    here: Mapping[int, Mapping[str, Any]],
    absent: Sequence[int],
    calls: Mapping[int, Mapping[int, Mapping[str, Any]]],
    dumps: Mapping[int, Dump],
) -> Difference:
    one = next(iter(here.values()))
    if len(here) < len(absent):
        return _alone(group, seq, here, absent, dumps)
    before = calls[absent[0]][max(calls[absent[0]])]
    at, was = _place(one), _place(before)
    what = (
        f"group {group}: rank {_list(absent)} never called collective {seq} "
        f"({_short(one.get('profiling_name'))}{f' at {at}' if at else ''}), for which rank "
        f"{_list(list(here))} waits; its last was {before.get('collective_seq_id')} "
        f"({_short(before.get('profiling_name'))}{f' at {was}' if was else ''}, "
        f"{'completed' if _has_ended(before) else before.get('state')})"
    )
    return Difference(
        id="collective-watchdog-timeout",
        what=what,
        ranks=list(absent),
        place=was,
        source=dumps[absent[0]].source,
    )


def _alone(
    group: str,
    seq: int,
    here: Mapping[int, Mapping[str, Any]],
    absent: Sequence[int],
    dumps: Mapping[int, Dump],
) -> Difference:
    """Fewer ranks call a collective than do not: they go on where the others have stopped."""
    rank = next(iter(here))
    at = _place(here[rank])
    what = (
        f"group {group}: only rank {_list(list(here))} called collective {seq} "
        f"({_short(here[rank].get('profiling_name'))}{f' at {at}' if at else ''}); rank "
        f"{_list(absent)} had ended or went on to something else"
    )
    return Difference(
        id="uneven-inputs-hang",
        what=what,
        ranks=sorted(here),
        place=at,
        source=dumps[rank].source,
    )


def _has_ended(entry: Mapping[str, Any]) -> bool:
    """Whether a collective is over; of gloo's only `retired` says so."""
    return entry.get("state") == "completed" or entry.get("retired") is True


def _may_differ(entry: Mapping[str, Any]) -> bool:
    name = str(entry.get("profiling_name", ""))
    return any(
        each in name for each in ("all_to_all", "scatter", "gather_v", "coalesced", "broadcast")
    )


def _group(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    if isinstance(group, (list, tuple)) and group:
        return " ".join(str(each) for each in group if str(each) not in {"", "undefined"})
    return str(entry.get("pg_id", "0"))


def _is_member(rank: int, dump: Dump, group: str) -> bool:
    config = dump.groups.get(group.split(" ")[0])
    ranks = config.get("ranks") if isinstance(config, Mapping) else None
    if not isinstance(ranks, str):
        return True
    members = [int(each) for each in ranks.strip("[] ").split(",") if each.strip().isdigit()]
    return not members or rank in members


def _place(entry: Mapping[str, Any]) -> str | None:
    """The deepest frame in the reader's own code; frames come deepest first."""
    from paceline.check.diagnose.seen import Frame

    for each in entry.get("frames") or ():
        if isinstance(each, Mapping) and each.get("filename"):
            frame = Frame(
                file=str(each["filename"]),
                line=int(each.get("line") or 0),
                function=str(each.get("name", "")),
            )
            if frame.is_users:
                return str(frame)
    return None


def _short(value: object) -> str:
    return re.sub(r"^(nccl|gloo|ucc|mpi|xccl):", "", str(value)).replace("torch.", "")[:80]


def _list(ranks: Sequence[int]) -> str:
    from paceline.check.diagnose.messages import spans

    return spans(sorted(ranks))
