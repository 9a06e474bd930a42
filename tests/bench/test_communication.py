"""Exposed and hidden communication, from made events."""

import pytest

from paceline.runtime.bench.communication import BEGIN, END, Event, communication_in


def event(name: str, start: float, end: float, thread: int = 1, **fields) -> Event:
    base = {"is_async": False, "on_device": False, **fields}
    return Event(name=name, start=start * 1e9, end=end * 1e9, thread=thread, **base)


MARKS = [event(BEGIN, 0, 0), event(END, 10, 10)]


def seen(*events: Event):
    return communication_in([*MARKS, *events], 2)


def test_a_collective_behind_an_operation_is_hidden_and_the_rest_is_exposed():
    found = seen(event("gloo:all_reduce", 2, 6, is_async=True), event("aten::mm", 3, 5))
    assert found.in_flight_s == pytest.approx(2.0)  # 4 s in 2 steps
    assert found.exposed_s == pytest.approx(1.0)
    assert found.step_s == pytest.approx(5.0)


def test_two_collectives_at_once_count_once():
    found = seen(event("gloo:send", 0, 4), event("gloo:recv", 2, 6))
    assert found.in_flight_s == pytest.approx(3.0)
    assert found.num_collectives == 1


def test_waiting_inside_an_operation_is_not_computing():
    found = seen(
        event("gloo:all_gather", 0, 4),
        event("aten::linear", 0, 6),
        event("_c10d_functional::wait_tensor", 1, 4),
    )
    assert found.exposed_s == pytest.approx(1.5)


def test_another_thread_that_computes_hides_a_collective():
    found = seen(
        event("gloo:all_reduce", 0, 4),
        event("c10d::allreduce_", 0, 4),
        event("aten::mm", 0, 4, thread=2),
    )
    assert found.exposed_s == 0


def test_only_what_is_between_the_marks_counts():
    found = seen(event("gloo:all_reduce", -3, 1), event("gloo:barrier", 11, 12))
    assert found.in_flight_s == pytest.approx(0.5)


def test_on_a_device_its_own_kernels_count():
    found = seen(
        event("ncclDevKernel_AllReduce", 2, 6, on_device=True),
        event("ampere_sgemm", 3, 5, on_device=True),
        event("aten::mm", 0, 10),
    )
    assert (found.in_flight_s, found.exposed_s) == (pytest.approx(2.0), pytest.approx(1.0))


def test_a_profile_without_its_marks_says_nothing():
    assert communication_in([event("gloo:all_reduce", 0, 1)], 1) is None


def test_a_stage_stands_idle_while_it_waits_for_a_message_and_for_nothing_else():
    found = seen(
        event("gloo:recv", 0, 4),  # 1 s of it computing, 1 s in an all-reduce
        event("aten::mm", 0, 1),
        event("gloo:all_reduce", 1, 2),
        event("gloo:recv", 5, 5.5),  # as long as a message takes
        event("gloo:send", 6, 8),
    )
    assert found.waiting_s == pytest.approx((2.0 - 0.5) / 2)


def test_on_a_device_nccls_kernel_for_messages_is_waiting():
    found = seen(
        event("ncclDevKernel_SendRecv", 0, 4, on_device=True),
        event("ncclDevKernel_SendRecv", 5, 6, on_device=True),
        event("ampere_sgemm", 0, 1, on_device=True),
    )
    assert found.waiting_s == pytest.approx((3.0 - 1.0) / 2)
