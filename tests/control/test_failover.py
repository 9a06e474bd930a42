"""A controller that dies at any record of its journal, and the one that takes its place."""

import dataclasses
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.control.test_core import FAULT, FOUR, completed, crashed, done, restored

from paceline.control import messages as say
from paceline.control import state as st
from paceline.control.failover import Entry, Memory, advance, encode_entry, replay, snapshot
from paceline.control.journal import Journal, read_journal
from paceline.errors import JobError
from paceline.record import events as log

SETUP = dataclasses.replace(FOUR, peers=((0, 1, 2, 3),))


def said(worker: int, generation: int, message: say.FromWorker) -> say.Said:
    return say.Said(worker=worker, generation=generation, message=message)


def ready(worker: int) -> list[st.Happening]:
    pid = 100 + worker
    up = said(worker, 0, say.Ready(host="10.0.0.1", port=5000 + worker))
    return [say.Started(worker=worker, pid=pid), up]


def trains(
    workers: list[int], generation: int, *, source: say.Source = "own", steps: range
) -> list[st.Happening]:
    met = say.Met(world_size=4, backend="gloo")
    return [
        *(said(worker, generation, met) for worker in workers),
        *(said(worker, generation, restored(steps[0], source)) for worker in workers),
        *(
            said(worker, generation, msgspec.structs.replace(done(step), own_s=0.1 + worker / 100))
            for step in steps
            for worker in workers
        ),
    ]


def parks(workers: list[int], generation: int) -> list[st.Happening]:
    parked = say.Parked(applied_step=1)
    return [said(worker, generation, parked) for worker in workers]


def dies(worker: int) -> list[st.Happening]:
    return [say.Exited(worker=worker, pid=100 + worker, returncode=-9, fenced=False)]


STORY: list[st.Happening] = [
    st.Begin(),
    st.AgentJoined(0, "a0", 50),
    st.AgentJoined(1, "a1", 51),
    *(event for worker in range(4) for event in ready(worker)),
    *trains([0, 1, 2, 3], 1, source="initial", steps=range(1, 6)),
    *ready(4),
    st.Tick(),
    said(1, 1, say.FaultDue(fault=FAULT)),
    say.FaultDone(worker=1, pid=101, fault=FAULT, monotonic_s=1007.0),
    *dies(1),
    *parks([0, 2, 3], 1),
    *trains([0, 4, 2, 3], 2, steps=range(6, 8)),
    *ready(5),
    st.AgentLost(1),
    st.Tick(),
    *parks([0, 4], 2),
    st.AgentJoined(1, "b1", 52),
    *ready(6),
    *trains([0, 4, 5, 6], 3, steps=range(8, 10)),
    said(0, 3, crashed()),
    *parks([4, 5, 6, 0], 3),
    st.TookOver(3.0),
    st.StopWanted("SIGTERM"),
    *trains([0, 4, 5, 6], 4, steps=range(10, 12)),
    *(
        said(worker, 4, completed(11, outcome="interrupted", world_size=4))
        for worker in (0, 4, 5, 6)
    ),
]
"""A run with a fault, a lost node, a worker that raises, and a stop."""


def entries() -> list[Entry]:
    """The story as the shell would write it, each agent's words with their numbers."""
    numbers = {0: 0, 1: 0}
    found = []
    for index, event in enumerate(STORY):
        at_s = 1000.0 + index / 10
        node, number = None, 0
        if isinstance(event, say.Said | say.Started | say.Exited | say.FaultDone):
            node = 0 if event.worker in (0, 1, 4) else 1
            numbers[node] += 1
            number = numbers[node]
        if isinstance(event, st.AgentJoined):
            numbers[event.node] = 0
        found.append(
            Entry(monotonic_s=at_s, unix_s=at_s + 1e9, node=node, number=number, event=event)
        )
    return found


def new_memory() -> Memory:
    state = st.State(setup=SETUP, faults=(FAULT,))
    return Memory(state=state, token="secret", lines_before=0)


def plain(value: Any) -> Any:
    """Something to compare by: the numbers in a value, whatever it is made of."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist().__repr__()  # NaN is equal to NaN
    if hasattr(value, "__dict__"):
        return plain(vars(value))
    return repr(value)


def test_the_story_goes_as_it_is_told():
    memory = new_memory()
    for entry in entries():
        advance(memory, entry)
    assert memory.state.outcome == "interrupted", memory.state
    assert (memory.state.generation, memory.state.epoch) == (4, 2)


def test_a_controller_killed_at_any_record_is_replaced_by_one_that_knows_the_same(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    lived = new_memory()
    journal.begin(snapshot(lived))
    for entry in entries():
        # It dies between writing and acting: nothing of what was decided has left the process.
        journal.write(encode_entry(entry), sync=False)
        actions = advance(lived, entry)
        replayed = replay(path)
        assert plain(replayed.memory) == plain(lived)
        recorded = [action.event for action in actions if isinstance(action, st.Record)]
        assert replayed.events[len(replayed.events) - len(recorded) :] == recorded


def test_one_killed_before_it_wrote_is_told_again_and_ends_the_same(tmp_path):
    path = tmp_path / "journal"
    told = entries()
    undisturbed = new_memory()
    for entry in told:
        advance(undisturbed, entry)
    for killed_at in range(len(told)):
        journal = Journal(path)
        memory = new_memory()
        journal.begin(snapshot(memory))
        for entry in told[:killed_at]:
            journal.write(encode_entry(entry), sync=False)
        journal.close()
        memory = replay(path).memory
        # Agents say again what was not heard, and more than that.
        for entry in told[max(0, killed_at - 3) : killed_at]:
            link = memory.links.get(entry.node) if entry.node is not None else None
            joined_since = any(
                isinstance(other.event, st.AgentJoined) and other.event.node == entry.node
                for other in told[told.index(entry) : killed_at]
            )
            if link is not None and not joined_since:
                assert not link.inbox.can_take(entry.number, entry.number - 1)
        for entry in told[killed_at:]:
            advance(memory, entry)
        assert plain(memory) == plain(undisturbed)


def test_a_snapshot_anywhere_changes_nothing(tmp_path):
    told = entries()
    undisturbed = new_memory()
    for entry in told:
        advance(undisturbed, entry)
    for begun_at in range(0, len(told), 7):
        path = tmp_path / f"journal-{begun_at}"
        journal = Journal(path)
        memory = new_memory()
        for entry in told[:begun_at]:
            advance(memory, entry)
        journal.begin(snapshot(memory))
        for entry in told[begun_at:]:
            journal.write(encode_entry(entry), sync=False)
        replayed = replay(path)
        assert plain(replayed.memory) == plain(undisturbed)
        assert replayed.events_before + len(replayed.events) == undisturbed.num_events


def test_orders_that_were_decided_and_not_sent_are_sent_by_the_next_one(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.begin(snapshot(new_memory()))
    for entry in entries()[:3]:
        journal.write(encode_entry(entry), sync=False)
    link = replay(path).memory.links[1]
    orders = [message for *_, message in link.outbox.after(0)]
    assert orders == [say.StartWorker(worker=2, rank=2), say.StartWorker(worker=3, rank=3)]


def test_an_order_for_a_node_whose_agent_is_gone_waits_for_nobody(monkeypatch):
    memory = new_memory()
    for entry in entries()[:2]:  # node 1 has not joined
        advance(memory, entry)
    both = [st.Send(0, say.Look()), st.Send(1, say.Look())]
    monkeypatch.setattr("paceline.control.failover.decide", lambda *_: both)
    assert advance(memory, entries()[3]) == both
    waiting = {
        node: [message for *_, message in link.outbox.after(0)]
        for node, link in memory.links.items()
    }
    assert waiting == {0: [say.Look()]}


def test_a_jump_of_the_wall_clock_changes_no_decision():
    def actions(offset_s: float) -> list[Any]:
        memory = new_memory()
        found = []
        for index, entry in enumerate(entries()):
            jump_s = offset_s if index > 20 else 0.0
            moved = msgspec.structs.replace(entry, unix_s=entry.unix_s + jump_s)
            found += [each for each in advance(memory, moved) if not isinstance(each, st.Record)]
        return found

    assert actions(3600.0) == actions(-3600.0) == actions(0.0)


def test_the_taking_over_is_in_the_record_and_nobody_is_late_for_it():
    memory = new_memory()
    told = entries()
    cut = next(i for i, entry in enumerate(told) if isinstance(entry.event, say.Exited)) + 1
    for entry in told[:cut]:
        advance(memory, entry)
    at_s = told[cut - 1].monotonic_s
    before_s = memory.state.form_deadline_s
    assert before_s is not None

    def feed(event: st.Happening, at_s: float) -> list[st.Action]:
        return advance(
            memory, Entry(monotonic_s=at_s, unix_s=at_s, node=None, number=0, event=event)
        )

    actions = feed(st.TookOver(60.0), at_s + 60.0)
    assert any(
        isinstance(action, st.Record) and isinstance(action.event, log.ControllerReplaced)
        for action in actions
    )
    assert memory.state.form_deadline_s == before_s + 60.0
    assert feed(st.Tick(), at_s + 60.5) == []


def test_a_journal_that_holds_something_else_is_refused(tmp_path):
    path = tmp_path / "journal"
    with pytest.raises(JobError, match="R043"):
        replay(path)
    journal = Journal(path)
    for content in (b"", b"garbage", b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04N."):
        journal.begin(content)
        with pytest.raises(JobError, match="R043"):
            replay(path)
    assert len(read_journal(path)) == 1


def test_a_journal_imports_nothing_that_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    path = tmp_path / "journal"
    Journal(path).begin(b"cthis\ns\n.")
    with pytest.raises(JobError, match="R043"):
        replay(path)
    assert "this" not in sys.modules
