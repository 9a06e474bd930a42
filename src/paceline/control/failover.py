"""What a controller must not forget, and how the next one comes to know it.

`advance` is the only way on: it is given what happened, and changes the memory in the same way
when it happens and when it is replayed from the journal.
"""

import pickle
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

import paceline
from paceline.control import messages as say
from paceline.control import state as st
from paceline.control.core import decide
from paceline.control.journal import read_journal
from paceline.control.reliable_link import Inbox, Outbox
from paceline.errors import JobError
from paceline.record.events import AnyEvent


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened: a record of the journal."""

    monotonic_s: float
    """Clock of the machine, so that it resumes from one controller to the next."""

    unix_s: float
    node: int | None
    number: int
    """That it gave its words."""

    event: st.Happening


@dataclass(slots=True)
class Link:
    """The conversation with one agent, from its first connection to its end."""

    incarnation: str
    pid: int
    outbox: Outbox[say.ToAgent] = field(default_factory=Outbox)
    inbox: Inbox = field(default_factory=Inbox)


@dataclass(slots=True)
class Memory:
    """All that a controller knows."""

    state: st.State
    token: str
    """That agents and controllers of this run know each other by."""

    lines_before: int
    """Events in the run's log before this part of the run."""

    num_events: int = 0
    """Events since."""

    links: dict[int, Link] = field(default_factory=dict)
    at_s: float = 0.0
    """Monotonic clock of the last thing that happened."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a journal holds."""

    memory: Memory
    events: list[AnyEvent]
    """Those after the snapshot; the last may not be in the log yet."""

    events_before: int
    """How many of this part of the run there were before them."""


def advance(memory: Memory, entry: Entry) -> list[st.Action]:
    """Take in one thing that happened; what is to be sent is in the links."""
    event = entry.event
    memory.at_s = entry.monotonic_s
    link = memory.links.get(entry.node) if entry.node is not None else None
    if link is not None:
        link.inbox.last = max(link.inbox.last, entry.number)
    if isinstance(event, st.AgentJoined):
        memory.links[event.node] = Link(event.incarnation, event.pid)
    if isinstance(event, st.AgentLost):
        memory.links.pop(event.node, None)
    clock = st.Clock(monotonic_s=entry.monotonic_s, unix_s=entry.unix_s)
    actions = decide(memory.state, event, clock)
    for action in actions:
        if isinstance(action, st.Record):
            memory.num_events += 1
        elif isinstance(action, st.Send) and action.node in memory.links:
            memory.links[action.node].outbox.add(action.message)
    return actions


def encode_entry(entry: Entry) -> bytes:
    return msgspec.msgpack.encode(entry)


def snapshot(memory: Memory) -> bytes:
    """All of it, for the beginning of a journal."""
    return pickle.dumps((paceline.__version__, memory))


def replay(path: Path) -> Replayed:
    """What the last controller knew.

    Raises:
        JobError: The journal is not there, is damaged, or is of another version.
    """
    first, *rest = read_journal(path) or [b""]
    memory = _restored(path, first)
    events_before = memory.num_events
    decode = msgspec.msgpack.Decoder(Entry).decode
    events = [
        action.event
        for record in rest
        for action in advance(memory, decode(record))
        if isinstance(action, st.Record)
    ]
    return Replayed(memory, events, events_before)


def _restored(path: Path, content: bytes) -> Memory:
    version: object = None
    try:
        version, memory = _OursOnly(BytesIO(content)).load()
        if version == paceline.__version__ and isinstance(memory, Memory):
            return memory
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError):
        pass
    of = f"of Paceline {version}, this is {paceline.__version__}" if content else "gone"
    raise JobError.of(
        code="R043",
        what=f"the controller's journal is {of}",
        where=str(path),
        fix="wait until the run's workers have stopped "
        "(recovery.lease and recovery.grace) and resume from the newest checkpoint",
    )


class _OursOnly(pickle.Unpickler):
    """Makes nothing but what a snapshot is made of."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        # Asked before anything is imported: an import alone can run code.
        if (module_name, global_name) in _PLAIN:
            return super().find_class(module_name, global_name)
        if module_name.startswith(_OURS) and isinstance(
            found := super().find_class(module_name, global_name), type
        ):
            return found
        raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong here")


_OURS = ("paceline.control.", "paceline.record.", "paceline.parallel.")
_PLAIN = {
    ("builtins", "set"),
    ("collections", "deque"),
    ("msgspec._utils", "rebuild"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}
