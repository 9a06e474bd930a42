"""Parts of a step are timed where they happen: by the host, or by an accelerator's events."""

import pytest
import torch

from paceline.parallel.layout import Layout
from paceline.runtime.phase_clock import EventClock, HostClock, PartTimes, make_clock, own_seconds


class Stream:
    """An accelerator whose only work is what a test says: events are passed in its order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waited = 0
        stream = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                self.at: float | None = None

            def record(self) -> None:
                self.at = stream.now_s

            def synchronize(self) -> None:
                stream.waited += 1

            def elapsed_time(self, end: "Event") -> float:
                assert self.at is not None
                assert end.at is not None
                return 1000 * (end.at - self.at)

        self.Event = Event

    def works(self, seconds: float) -> None:
        self.now_s += seconds


def a_step(clock: EventClock, stream: Stream, *, forward: float = 3.0) -> PartTimes:
    clock.begin()
    stream.works(1.0)
    clock.enter("forward")
    stream.works(forward)
    clock.enter("backward")
    stream.works(5.0)
    clock.enter("vote")
    stream.works(0.5)
    clock.voted()
    return clock.end()


def test_events_give_the_parts_of_this_step_and_the_update_of_the_one_before():
    stream = Stream()
    clock = EventClock(stream)
    first = a_step(clock, stream)
    assert first == PartTimes(data_s=1.0, forward_s=3.0, backward_s=5.0, vote_s=0.5, apply_s=None)


def test_the_update_is_read_a_step_later_and_nothing_waits_but_once_a_step():
    stream = Stream()
    clock = EventClock(stream)
    clock.begin()
    clock.enter("vote")
    clock.voted()
    stream.works(0.25)  # the update, which the host does not wait for
    clock.end()
    stream.works(9.0)  # a checkpoint between the steps is of neither
    assert a_step(clock, stream).apply_s == 0.25
    assert stream.waited == 2


def test_a_step_that_was_interrupted_is_forgotten():
    stream = Stream()
    clock = EventClock(stream)
    clock.begin()
    clock.enter("forward")
    stream.works(60.0)  # the recovery
    assert a_step(clock, stream).forward_s == 3.0


def test_micro_batches_add_up():
    stream = Stream()
    clock = EventClock(stream)
    clock.begin()
    for _ in range(3):
        clock.enter("forward")
        stream.works(1.0)
        clock.enter("backward")
        stream.works(2.0)
    clock.enter("vote")
    clock.voted()
    times = clock.end()
    assert (times.forward_s, times.backward_s, times.vote_s) == (3.0, 6.0, 0.0)


def test_a_slow_device_shows_in_its_own_seconds_where_the_forward_pass_waits_for_nobody():
    stream = Stream()
    clock = EventClock(stream)
    replicas = Layout(data=2, sharding="none", micro_batch=1, accumulation=1)
    usual, slow = a_step(clock, stream), a_step(clock, stream, forward=4.5)
    assert own_seconds(usual, replicas) == 4.0
    assert own_seconds(slow, replicas) == 5.5


@pytest.mark.parametrize("split", [{"sharding": "full"}, {"tensor": 2}, {"pipeline": 2}])
def test_own_seconds_are_unknown_where_the_forward_pass_waits_for_others(split):
    wide = {"data": 2, "sharding": "none", "micro_batch": 1, "accumulation": 2} | split
    assert own_seconds(PartTimes(data_s=1.0, forward_s=1.0), Layout(**wide)) is None
    assert (
        own_seconds(PartTimes(), Layout(data=1, sharding="none", micro_batch=1, accumulation=1))
        is None
    )


def test_the_hosts_clock_leaves_a_recovery_out_of_the_update(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("paceline.runtime.phase_clock.time.perf_counter", lambda: now[0])
    clock = make_clock(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    clock.begin()
    for seconds, part in ((1, "forward"), (2, "backward"), (4, "vote")):
        now[0] += seconds
        clock.enter(part)
    now[0] += 8
    clock.voted()
    now[0] += 100  # interrupted here
    clock.resume()
    now[0] += 16
    assert clock.end() == PartTimes(data_s=1, forward_s=2, backward_s=4, vote_s=8, apply_s=16)
