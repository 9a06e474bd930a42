"""A worker's line to its agent: a generation is left in two moves."""

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from paceline.control import messages as say
from paceline.runtime.channel import Channel

JOIN = say.Join(
    generation=3, rank=0, local_rank=0, world_size=2, host="127.0.0.1", port=1, faults=[]
)


class Line:
    """A channel that has joined generation 3, and the agent's end of it."""

    def __init__(self) -> None:
        self.agent, theirs = socket.socketpair()
        self.channel = Channel(theirs.detach())
        self.channel.open()
        self.order(JOIN)
        self.channel.wait_for_join()
        self._words = self.agent.makefile("rb")

    def order(self, message: say.ToWorker) -> None:
        self.agent.sendall(say.encode(message))

    def next_word(self) -> say.FromWorker:
        return say.from_worker(self._words.readline()).message

    def waits_for_abort(self) -> threading.Thread:
        waiting = threading.Thread(target=self.channel.wait_for_abort, daemon=True)
        waiting.start()
        return waiting


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.agent.shutdown(socket.SHUT_RDWR)
    line.channel._listening.join(60)
    line.channel._socket.close()
    line._words.close()
    line.agent.close()


def test_an_interruption_is_answered_after_its_flag_is_set(line: Line) -> None:
    flags: list[int] = []
    line.channel.on_interrupt = flags.append
    line.order(say.Interrupt(generation=3))
    assert line.next_word() == say.Heard(generation=3)
    assert flags == [3]
    assert line.channel.is_interrupted


def test_over_gloo_a_worker_leaves_its_groups_when_it_is_interrupted(line: Line) -> None:
    aborted: list[int] = []
    line.channel.leaves_at_once = True
    line.channel.on_abort = aborted.append
    waiting = line.waits_for_abort()
    line.order(say.Interrupt(generation=3))
    assert line.next_word() == say.Heard(generation=3)
    waiting.join(60)
    assert not waiting.is_alive()
    assert aborted == [3]


def test_a_worker_stays_in_its_groups_until_all_ranks_have_heard(line: Line) -> None:
    aborted = threading.Event()
    line.channel.on_abort = lambda generation: aborted.set()
    waiting = line.waits_for_abort()
    line.order(say.Interrupt(generation=3))
    line.order(say.Interrupt(generation=3))
    assert [line.next_word(), line.next_word()] == [say.Heard(generation=3)] * 2
    assert waiting.is_alive()
    assert not aborted.is_set()
    line.order(say.Abort(generation=3))
    waiting.join(60)
    assert not waiting.is_alive()
    assert aborted.wait(60)


def test_an_abort_of_an_older_generation_lets_nobody_out(line: Line) -> None:
    waiting = line.waits_for_abort()
    line.order(say.Abort(generation=2))
    line.order(say.Interrupt(generation=3))
    assert line.next_word() == say.Heard(generation=3)
    assert waiting.is_alive()
    line.order(say.Abort(generation=3))
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_worker_whose_agent_is_gone_waits_for_no_abort(line: Line) -> None:
    waiting = line.waits_for_abort()
    line.agent.shutdown(socket.SHUT_RDWR)
    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.parametrize("which", ["on_interrupt", "on_abort"])
def test_an_error_in_what_an_order_brings_about_leaves_the_worker_listening(
    line: Line, which: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(generation: int) -> None:
        raise RuntimeError("no such communicator")

    setattr(line.channel, which, fails)
    line.order(say.Interrupt(generation=3))
    line.order(say.Abort(generation=3))
    line.order(say.StopAtBoundary())
    line.order(say.Interrupt(generation=4))
    assert line.next_word() == say.Heard(generation=3)
    assert line.next_word() == say.Heard(generation=4)
    assert line.channel.stop_wanted
    assert "no such communicator" in capfd.readouterr().err


def test_a_worker_whose_recorder_cannot_be_read_hears_orders_all_the_same(line: Line) -> None:
    may_end, has_begun = threading.Event(), threading.Event()

    def reads() -> dict[str, say.At]:
        has_begun.set()
        may_end.wait()
        return {"0,1": (7, 6)}

    line.channel.collectives = reads
    line.order(say.ReportCollectives())
    assert has_begun.wait(300)
    line.order(say.ReportCollectives())  # asked again: the first answer is still to come
    line.order(say.Interrupt(generation=3))
    assert line.next_word() == say.Heard(generation=3)
    may_end.set()
    assert line.next_word() == say.Collectives(groups={"0,1": (7, 6)})


def test_s1_11_what_a_worker_says_is_readable_by_its_agent(line: Line) -> None:
    line.channel.send(say.PeerLost(reason="Connection closed by peer"))
    word = msgspec.json.decode(line._words.readline())
    assert word["generation"] == 3
    assert word["message"]["type"] == "PeerLost"
