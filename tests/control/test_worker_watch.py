"""Real processes that get stuck in every way there is, and what their watcher calls it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.control.adaptive_timeouts import UNKNOWN_S, UNKNOWN_STEP_S
from paceline.control.kernel import ProcessTimes, ThreadTimes
from paceline.control.messages import Seen
from paceline.control.slots import Phase, Reading, create_slot
from paceline.control.worker_watch import MOST_UNSEEN_S, Lookout, Watch, classify

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

PROGRAM = Path(__file__).with_name("stuck_program.py")


@dataclass
class Watched:
    """A process that gets stuck, and its watcher."""

    process: "subprocess.Popen[bytes]"
    lookout: Lookout

    def watch(self, seconds: float) -> list[Seen]:
        """Look ten times a second, as an agent does."""
        found: list[Seen] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found += self.lookout.late()
            time.sleep(0.1)
        return found

    def watch_until_late(self) -> Seen:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            if found := self.lookout.late():
                return found[0]
            time.sleep(0.1)
        raise AssertionError("never late")

    def look_closer(self) -> Seen:
        (finding,) = asyncio.run(self.lookout.look_closer())
        return finding


@pytest.fixture
def stuck(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    for phase in UNKNOWN_S:
        monkeypatch.setitem(UNKNOWN_S, phase, 60.0)
    monkeypatch.setattr("paceline.control.adaptive_timeouts.UNKNOWN_STEP_S", 32.0)
    slot = create_slot(7)
    command = [sys.executable, str(PROGRAM), str(slot.fd), request.param]
    process = subprocess.Popen(command, pass_fds=[slot.fd])
    lookout = Lookout(floor_s=0.5)  # a twentieth of the usual one
    until = time.monotonic() + 300
    while slot.read().phase is not Phase.VOTE and request.param != "runs":
        assert time.monotonic() < until
        time.sleep(0.01)
    lookout.add(7, process.pid, slot)
    yield Watched(process, lookout)
    process.kill()
    process.wait()
    lookout.close()


@pytest.mark.parametrize(
    ("stuck", "kind"),
    [
        ("sleeps", "waiting"),
        ("deadlocks", "waiting"),
        ("loops", "looping"),
        ("holds the interpreter asleep", "gil held"),
        ("holds the interpreter busy", "gil held"),
    ],
    indirect=["stuck"],
)
def test_a_worker_that_is_stuck_is_called_what_it_is(stuck: Watched, kind: str):
    finding = stuck.watch_until_late()
    assert finding.kind == kind
    assert not finding.is_certain
    assert finding.phase is Phase.VOTE
    assert finding.limit_s == pytest.approx(1.6)
    assert finding.waited_s > 1.6


@pytest.mark.parametrize("stuck", ["sleeps"], indirect=True)
def test_a_stopped_worker_is_certain_and_its_tracebacks_are_not_waited_for(stuck: Watched):
    os.kill(stuck.process.pid, signal.SIGSTOP)
    finding = stuck.watch_until_late()
    assert (finding.kind, finding.is_certain) == ("stopped", True)
    closer = stuck.look_closer()
    assert "T in do_signal_stop" in closer.stacks or ": T" in closer.stacks


@pytest.mark.parametrize("stuck", ["deadlocks", "holds the interpreter busy"], indirect=True)
def test_tracebacks_say_where_it_is_stuck_even_if_the_interpreter_is_held(stuck: Watched):
    stuck.watch(0.3)
    closer = stuck.look_closer()
    assert 'stuck_program.py", line' in closer.stacks
    assert "in main" in closer.stacks
    assert closer.in_collective is False
    assert not closer.is_late


@pytest.mark.parametrize("stuck", ["holds the interpreter asleep"], indirect=True)
def test_asking_for_tracebacks_does_not_change_what_it_is_called(stuck: Watched):
    assert stuck.watch_until_late().kind == "gil held"
    assert stuck.look_closer().kind == "gil held"


@pytest.mark.parametrize("stuck", ["runs"], indirect=True)
def test_a_worker_that_goes_on_is_never_late_and_can_be_looked_at(stuck: Watched):
    assert stuck.watch(2.5) == []
    assert "stuck_program.py" in stuck.look_closer().stacks
    assert stuck.process.poll() is None


@pytest.mark.parametrize("stuck", ["sleeps"], indirect=True)
def test_a_watcher_that_was_away_itself_blames_nobody(stuck: Watched):
    assert stuck.watch(0.2) == []
    time.sleep(3.0)  # the agent was stopped
    assert stuck.lookout.late() == []


@pytest.mark.parametrize("stuck", ["sleeps"], indirect=True)
def test_who_stays_late_is_reported_again_and_not_at_every_look(stuck: Watched):
    stuck.watch_until_late()
    assert 1 <= len(stuck.watch(2.4)) <= 3
    assert stuck.lookout.places() == {7: (Phase.VOTE, 1)}


def test_the_default_patience_is_generous():
    assert UNKNOWN_STEP_S == 300.0


# The same without processes, where a real one would take too long or cannot be had.


def reading(progress: int = 1, liveness_ns: int = 0) -> Reading:
    return Reading(
        worker=0,
        generation=1,
        step=1,
        phase=Phase.FORWARD,
        micro_batch=0,
        is_first_step=False,
        progress=progress,
        liveness_ns=liveness_ns,
        training_thread=1,
        liveness_thread=2,
        stacks_ready=True,
        is_torn=False,
    )


def times(
    at_s: float, *, runnable_s: float = 0.0, switches: int = 0, state: str = "S"
) -> ProcessTimes:
    thread = ThreadTimes(state=state, runnable_s=runnable_s, switches=switches)
    return ProcessTimes(at_ns=round(at_s * 1e9), process=thread, training=thread, liveness=thread)


def test_frozen_by_its_control_group_it_counts_as_stopped():
    assert classify(reading(liveness_ns=1), times(10), times(11, state="S")) == "stopped"


def test_it_holds_the_interpreter_when_the_second_thread_keeps_asking_for_it():
    assert classify(reading(liveness_ns=1), times(10), times(11, switches=190)) == "gil held"


def test_time_that_nobody_watched_does_not_count_as_waiting():
    watch = Watch()
    watch.look(reading(), at_ns=10**9)
    assert watch.look(reading(), at_ns=100 * 10**9) == MOST_UNSEEN_S
    assert watch.look(reading(progress=2), at_ns=101 * 10**9) == 0.0
