"""Meeting in one generation after the other, in one process."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from paceline.control.error_texts import names_lost_peer
from paceline.control.messages import Join
from paceline.runtime.recovery import groups as module
from paceline.runtime.recovery.groups import Groups, Interrupted, listen_for_store

CPU = torch.device("cpu")


def order(generation: int, port: int) -> Join:
    return Join(
        generation=generation,
        rank=0,
        local_rank=0,
        world_size=1,
        host="127.0.0.1",
        port=port,
        faults=[],
    )


def test_after_a_meeting_that_broke_off_the_next_has_the_names_of_everybody_else():
    groups = Groups(backend="gloo", listener=listen_for_store(0))
    alone = order(1, groups.address[1])
    two = Join(**{name: getattr(alone, name) for name in alone.__struct_fields__} | {"rank": 5})
    with pytest.raises((ValueError, RuntimeError, Interrupted)):
        groups.join(two, CPU)  # rank 5 of 1: the meeting breaks off inside torch
    groups.leave()
    groups.join(order(2, groups.address[1]), CPU)
    try:
        assert dist.distributed_c10d._get_process_group_name(dist.group.WORLD) == "0"
    finally:
        groups.leave()


def test_a_worker_whose_store_has_died_can_be_called_away_from_looking_for_it():
    gone = listen_for_store(0)
    port = gone.getsockname()[1]
    gone.close()
    groups = Groups(backend="gloo", listener=listen_for_store(0))
    caller = threading.Timer(0.3, groups.abort, [1])
    caller.start()
    began = time.monotonic()
    with pytest.raises(Interrupted):
        groups.join(order(1, port), CPU)
    assert time.monotonic() - began < 60.0  # the store would be looked for 300 s long
    groups.leave()


def test_a_store_listens_on_this_machine_alone():
    listener = listen_for_store(0)
    try:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert isinstance(listener, socket.socket)
    finally:
        listener.close()


@pytest.fixture
def joined() -> Iterator[Groups]:
    groups = Groups(backend="gloo", listener=listen_for_store(0))
    groups.join(order(1, groups.address[1]), CPU)
    yield groups
    groups.leave()


def test_sockets_that_other_threads_open_meanwhile_outlive_an_abort(joined: Groups) -> None:
    """Such as one to a place that keeps logs, and those of a server of the program's own."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        with joined.opening():
            client = socket.create_connection(service.getsockname())
            served, _ = service.accept()
        with client, served:
            joined.interrupt(1)
            joined.abort(1)
            assert joined._aborting is not None
            joined._aborting.join()
            client.sendall(b"still there")
            assert served.recv(64) == b"still there"
    assert joined._store is not None
    with pytest.raises(RuntimeError):  # the one to the store was shut
        joined._store.set("key", "value")


def test_gloos_sockets_are_told_from_those_of_other_clients() -> None:
    """By what gloo of this torch sets on both ends."""
    store = dist.HashStore()
    before = module._tcp_sockets()

    def meet(rank: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    with ThreadPoolExecutor(2) as both:
        pair = list(both.map(meet, range(2)))
    found = set(module._tcp_sockets(store_port=0)) - set(before)
    assert len(found) == 2
    del pair


def test_an_interruption_alone_shuts_nothing(joined: Groups) -> None:
    joined.interrupt(1)
    dist.barrier()
    assert joined._store is not None
    joined._store.set("key", "value")
    with pytest.raises(Interrupted), joined.opening():
        pass


class Part:
    """An accelerator's part of a group, whose abort does as it is told."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        self.act = act
        self.begun = threading.Event()

    def abort(self) -> None:
        self.begun.set()
        self.act()


def fails() -> None:
    raise RuntimeError("unhandled cuda error")


def test_an_abort_that_blocks_or_raises_holds_up_no_other_and_no_later_order(
    joined: Groups, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    may_end = threading.Event()
    parts = [Part(may_end.wait), Part(fails), Part()]
    monkeypatch.setattr(module, "_abortable", lambda: parts)
    joined.abort(1)
    joined.abort(1)
    joined.interrupt(2)
    assert all(part.begun.wait(300) for part in parts)
    may_end.set()
    joined.leave()
    assert "did not abort: unhandled cuda error" in capfd.readouterr().err


def test_a_communicator_that_is_made_during_an_abort_is_aborted_as_well(
    joined: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Part()]
    monkeypatch.setattr(module, "_abortable", lambda: list(parts))

    def open_two() -> None:
        with joined.opening():
            joined.abort(1)
            assert parts[0].begun.wait(300)
            parts.append(Part())  # a mesh has several groups: this one is made now

    with pytest.raises(Interrupted):
        open_two()
    joined.leave()
    assert parts[1].begun.is_set()


def test_a_worker_whose_groups_cannot_be_aborted_ends_itself(
    joined: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(module, "_abortable", lambda: [Part(may_end.wait)])
    monkeypatch.setattr(module, "_ABORT_S", 0.01)
    monkeypatch.setattr(joined, "_limit", timedelta())
    monkeypatch.setattr(module.os, "_exit", lambda code: ended.set())
    joined.abort(1)
    assert ended.wait(300)
    may_end.set()


def test_the_word_of_an_earlier_generations_watchdog_is_taken_out_of_the_store() -> None:
    groups = Groups(backend="gloo", listener=listen_for_store(0))
    store = dist.TCPStore("127.0.0.1", groups.address[1], None, False)
    store.set("exception_dump", "rank 3")
    store.set("other", "stays")
    groups.join(order(1, groups.address[1]), CPU)
    try:
        assert not store.check(["exception_dump"])
        assert store.check(["other"])
    finally:
        groups.leave()


def test_operations_over_gloo_have_a_time_limit_of_their_own(joined: Groups) -> None:
    backend = dist.group.WORLD._get_backend(CPU)  # type: ignore[union-attr]
    assert backend.options._timeout == module._HOST_LIMIT


def test_nothing_that_a_generation_which_is_over_has_left_behind_is_settled(joined: Groups):
    joined.settle(CPU)
    joined.interrupt(1)
    with pytest.raises(Interrupted):
        joined.settle(CPU)


CUDA = torch.device("cuda")


class Noted:
    """An accelerator's group, of which torch's watchdog has noted something."""

    _device_types = (CUDA,)
    error = ErrorType.SUCCESS

    def _get_backend(self, device: torch.device) -> "Noted":
        return self

    def get_error(self) -> ErrorType:
        return self.error


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    group = Noted()
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, group, ("nccl", None))
    monkeypatch.setattr(module, "synchronize", lambda device: None)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return group


@pytest.fixture
def alone() -> Groups:
    """As it stands in generation 1, without groups of its own."""
    groups = Groups(backend="gloo", listener=listen_for_store(0))
    groups._generation = 1
    return groups


@pytest.mark.parametrize("error", [ErrorType.COMM_ERROR, ErrorType.REMOTE_ERROR])
def test_on_an_accelerator_a_lost_connection_settles_nothing(
    alone: Groups, noted: Noted, error: ErrorType
) -> None:
    alone.settle(CUDA)
    noted.error = error
    with pytest.raises(dist.DistBackendError, match=error.name) as raised:
        alone.settle(CUDA)
    assert names_lost_peer(str(raised.value))


def test_what_came_late_is_settled_unless_torch_itself_has_aborted_it(
    alone: Groups, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted.error = ErrorType.TIMEOUT
    alone.settle(CUDA)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "no")  # as torch also reads 0
    alone.settle(CUDA)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    with pytest.raises(dist.DistBackendError) as raised:
        alone.settle(CUDA)
    assert names_lost_peer(str(raised.value))


@pytest.mark.parametrize("error", [ErrorType.COMM_ERROR, ErrorType.TIMEOUT])
def test_what_torchs_watchdog_notes_is_reported_once_in_a_generation_as_a_lost_connection(
    alone: Groups, noted: Noted, error: ErrorType
) -> None:
    reports: list[str] = []
    alone.report_error(reports.append)
    assert reports == []
    noted.error = error
    alone.report_error(reports.append)
    alone.report_error(reports.append)
    assert len(reports) == 1
    assert names_lost_peer(reports[0])
    alone.interrupt(1)
    alone._generation = 2
    alone.report_error(reports.append)
    assert len(reports) == 2


def test_what_is_noted_of_a_generation_that_is_over_is_not_reported(
    alone: Groups, noted: Noted
) -> None:
    noted.error = ErrorType.COMM_ERROR
    alone.interrupt(1)
    reports: list[str] = []
    alone.report_error(reports.append)
    assert reports == []


def test_a_watch_goes_on_asking(alone: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a group that was being left has raised."""
    looks, seen = [True, False], threading.Event()

    def look(report: Callable[[str], object]) -> None:
        if not looks.pop():
            raise RuntimeError("the group is gone")
        seen.set()
        threading.Event().wait()  # this thread looks no more

    monkeypatch.setattr(module, "_ASK_S", 0.001)
    monkeypatch.setattr(alone, "report_error", look)
    alone.watch(print)
    assert seen.wait(60)


def test_an_abort_frees_a_worker_that_waits_for_its_peers_while_it_leaves(monkeypatch) -> None:
    groups = Groups(backend="gloo", listener=listen_for_store(0))
    groups.join(order(1, groups.address[1]), CPU)
    leaving, freed = threading.Event(), threading.Event()
    destroy = dist.destroy_process_group

    def wait_for_peers() -> None:
        leaving.set()
        assert freed.wait(60), "nothing aborted it"
        destroy()

    monkeypatch.setattr(module, "_abortable", lambda: [Part(freed.set)])
    monkeypatch.setattr(dist, "destroy_process_group", wait_for_peers)
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(groups.leave)
        assert leaving.wait(60)
        groups.abort(1)
        left.result()
    groups.abort(1)
    assert groups._aborting is None  # nor does it start for what has been left
