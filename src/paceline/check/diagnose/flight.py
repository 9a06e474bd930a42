"""PyTorch's flight recorder: which collective ranks differ at, from one dump of each rank.

A dump is a pickle of plain data, or the same as JSON. A pickle can run any code when it is loaded,
so only plain data are accepted: whatever names a class or a function is refused.
"""

import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.check.diagnose.line import Line
from paceline.check.diagnose.messages import spans
from paceline.check.diagnose.seen import Found, Frame

MAX_BYTES = 512 << 20
"""A dump that is read whole. The recorder keeps 2,000 entries by default, some MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective of one rank."""

    group: str
    seq: int
    """Its number among those of the group, from the recorder."""

    name: str
    sizes: str | None
    """None where ranks may bring tensors of different size."""

    dtypes: str
    state: str
    place: str | None
    """The deepest frame in the reader's own code."""

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return self.state == "completed"

    def __str__(self) -> str:
        return f"{self.seq} ({self.name}{f' at {self.place}' if self.place else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """One rank's dump."""

    source: str
    rank: int | None
    calls: Sequence[Call]
    groups: Mapping[str, Mapping[str, Any]]
    generation: int = 0
    """The run's generation, in a dump that Paceline kept; 0 in any other."""


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
        calls=tuple(_calls(entries)),
        groups=groups if isinstance(groups, dict) else {},
        generation=generation if isinstance(generation, int) else 0,
    )


def _calls(entries: Sequence[Mapping[str, Any]]) -> Iterator[Call]:
    for each in entries:
        seq, name = each.get("collective_seq_id"), str(each.get("profiling_name", ""))
        if not isinstance(seq, int) or each.get("is_p2p"):
            continue
        group, state = each.get("process_group"), str(each.get("state"))
        if isinstance(group, (list, tuple)) and group:
            group = " ".join(str(part) for part in group if str(part) not in {"", "undefined"})
        else:
            group = str(each.get("pg_id", "0"))
        yield Call(
            group=group,
            seq=seq,
            name=_short(name),
            sizes=None if _UNEVEN.search(name) else _short(each.get("input_sizes")),
            dtypes=_short(each.get("input_dtypes")),
            state="completed" if each.get("retired") is True else state,  # gloo's alone says so
            place=_place(each.get("frames") or ()),
        )


_UNEVEN = re.compile("all_to_all|scatter|gather_v|coalesced|broadcast")
"""Collectives to which ranks may bring tensors of different size."""


def _place(frames: Sequence[Any]) -> str | None:
    """The deepest frame in the reader's own code; frames come deepest first."""
    known = (each for each in frames if isinstance(each, Mapping) and each.get("filename"))
    found = (
        Frame(
            file=str(each["filename"]),
            line=int(each.get("line") or 0),
            function=str(each.get("name", "")),
        )
        for each in known
    )
    return next((str(frame) for frame in found if frame.is_users), None)


def _short(value: object) -> str:
    return re.sub(r"^(nccl|gloo|ucc|mpi|xccl):", "", str(value)).replace("torch.", "")[:80]


def of_newest_generation(dumps: Sequence[Dump]) -> list[Dump]:
    """The dumps that can be compared: collectives are counted anew in each generation of a run."""
    newest = max((dump.generation for dump in dumps), default=0)
    return [dump for dump in dumps if dump.generation == newest]


def last_calls(dump: Dump) -> str:
    """What one rank's dump shows alone: where it waits in each group, or what it called last."""
    told = []
    for group in sorted({call.group for call in dump.calls}):
        own = sorted(
            (each for each in dump.calls if each.group == group), key=lambda call: call.seq
        )
        pending = next((each for each in own if not each.has_ended), None)
        does = f"waits in collective {pending}"
        if pending is None:
            does = f"all ended, the last was collective {own[-1]}"
        told.append(f"group {group}: {does}")
    whose = "it" if dump.rank is None else f"rank {dump.rank}"
    return f"{whose}: {'; '.join(told) or 'no collective, only sends between two ranks'}"


def first_difference(dumps: Sequence[Dump]) -> Found | None:
    """The first collective that ranks call differently, or that some have not called."""
    ranked = {dump.rank if dump.rank is not None else at: dump for at, dump in enumerate(dumps)}
    groups = sorted({call.group for dump in dumps for call in dump.calls})
    found = [each for group in groups if (each := _differs_in(group, ranked)) is not None]
    return min(found, key=lambda each: not each.is_certain, default=None)


def _differs_in(group: str, dumps: Mapping[int, Dump]) -> Found | None:
    calls: dict[int, dict[int, Call]] = {}
    for rank, dump in dumps.items():
        own = {call.seq: call for call in dump.calls if call.group == group}
        if own and _is_member(rank, dump, group):
            calls[rank] = own
    if len(calls) < 2:
        return None
    sources = {rank: dump.source for rank, dump in dumps.items()}
    first = max(min(own) for own in calls.values())
    last = {rank: own[max(own)] for rank, own in calls.items()}
    for seq in range(first, max(call.seq for call in last.values()) + 1):
        here = {rank: own[seq] for rank, own in calls.items() if seq in own}
        if difference := _mismatch(group, here, sources):
            return difference
        absent = {rank: call for rank, call in last.items() if call.seq < seq}
        if absent and any(not call.has_ended for call in here.values()):
            return _missing(group, here, absent, sources)
    return None


def _is_member(rank: int, dump: Dump, group: str) -> bool:
    config = dump.groups.get(group.split(" ")[0])
    ranks = config.get("ranks") if isinstance(config, Mapping) else None
    members = [int(each) for each in re.findall(r"\d+", ranks)] if isinstance(ranks, str) else []
    return not members or rank in members


def _mismatch(group: str, here: Mapping[int, Call], sources: Mapping[int, str]) -> Found | None:
    """Ranks that call another operation at one number, or bring other tensors to it."""
    for name, key in (("operation", "name"), ("input sizes", "sizes"), ("type", "dtypes")):
        values: dict[str, list[int]] = {}
        for rank, call in here.items():
            if (value := getattr(call, key)) is not None:
                values.setdefault(value, []).append(rank)
        if len(values) < 2:
            continue
        odd = min(values.values(), key=len)
        told = "; ".join(f"rank {spans(ranks)} {value}" for value, ranks in values.items())
        what = f"group {group}, collective {here[odd[0]].seq}: ranks differ in {name}: {told}"
        return _found("collective-mismatch", what, {rank: here[rank] for rank in odd}, sources)
    return None


def _missing(
    group: str, here: Mapping[int, Call], absent: Mapping[int, Call], sources: Mapping[int, str]
) -> Found:
    """Ranks that never called what others wait in; or those others, where they are fewer."""
    call, ranks, others = next(iter(here.values())), spans(list(here)), spans(list(absent))
    if len(here) < len(absent):
        what = (
            f"group {group}: only rank {ranks} called collective {call}; rank {others} had ended "
            "or went on to something else"
        )
        return _found("uneven-inputs-hang", what, here, sources)
    before = absent[min(absent)]
    how = f", {'completed' if before.has_ended else before.state})"
    what = (
        f"group {group}: rank {others} never called collective {call}, for which rank {ranks} "
        f"waits; its last was {str(before)[:-1]}{how}"
    )
    return _found("collective-watchdog-timeout", what, absent, sources)


def _found(name: str, what: str, odd: Mapping[int, Call], sources: Mapping[int, str]) -> Found:
    first = min(odd)
    return Found(
        id=name,
        what=what,
        line=Line(source=sources[first], number=0, raw=what, message=what),
        ranks=tuple(sorted(odd)),
        place=odd[first].place,
        is_certain=name == "collective-mismatch",
    )
