"""The simulated clock, on steps made by hand."""

import pytest

from paceline.prove.collectives import Issued
from paceline.prove.places import Place
from paceline.prove.segments import Arrive, Compute, Issue, Read, Segment, Step, Wait
from paceline.prove.timeline import WaitsForeverError, simulate


def step(*work):
    place = Place("forward", 1, 0, "", None, False)
    return Step({}, [Segment(place, {}, 0.0, {}, "", list(work))])


def message(kind, rank, peer):
    return Issue(Issued(kind, 10, (rank, peer), True))


def run(*steps, host_s=0.0):
    return simulate(steps, range(len(steps)), lambda what: what.num_bytes * 0.1, host_s=host_s)


def test_a_message_of_a_simulated_rank_arrives_when_that_rank_has_sent_it():
    first = step(Compute(5.0, 1, "kernels"), message("send", 0, 1))
    second = step(message("receive", 1, 0), Wait(1, "receive"), Compute(1.0, 1, "kernels"))
    _, waited = run(first, second)
    assert waited.end_s == pytest.approx(7.0)  # 5 computed, 1 on the way, 1 computed
    assert waited.bubble_s == pytest.approx(6.0)


def test_a_rank_of_a_ring_that_is_not_simulated_sends_when_this_one_does():
    turn = (
        message("send", 0, 8),
        message("receive", 0, 16),
        Compute(0.25, 1, "kernels"),
        Wait(1, "receive"),
    )
    (time,) = run(step(*turn, *turn))
    assert time.end_s == pytest.approx(2.0)
    assert time.exposed_s == pytest.approx(1.5)
    assert time.bubble_s == 0


@pytest.mark.parametrize(("between", "expected"), [((), 6.0), ((Read(),), 9.0)])
def test_a_host_that_reads_a_value_launches_nothing_meanwhile(between, expected):
    (time,) = run(
        step(Compute(5.0, 1, "kernels"), *between, Compute(1.0, 4, "kernels")), host_s=1.0
    )
    assert time.end_s == pytest.approx(expected)


def test_ranks_that_wait_for_each_other_are_named():
    waits = [
        step(
            message("receive", rank, 1 - rank), Wait(1, "receive"), message("send", rank, 1 - rank)
        )
        for rank in (0, 1)
    ]
    with pytest.raises(WaitsForeverError, match="rank 0 waits for rank 1; rank 1 waits for rank 0"):
        run(*waits)


def test_a_state_on_the_host_waits_for_gradients_and_its_weights_come_back_before_the_step_ends():
    work = [
        Compute(5.0, 1, "kernels"),
        Compute(2.0, 1, "to host"),
        Compute(3.0, 1, "host"),
        Compute(1.0, 1, "from host"),
    ]
    (time,) = run(step(*work))
    assert time.end_s == pytest.approx(11.0)
    assert (time.compute_s, time.offload_s) == pytest.approx((5.0, 6.0))


def test_kernels_wait_for_parameters_on_their_way_from_the_host():
    copy, kernel = Compute(4.0, 1, "from host"), Compute(1.0, 1, "kernels")
    (hidden,), (waited,) = run(step(copy, kernel)), run(step(copy, Arrive(), kernel))
    assert (hidden.end_s, waited.end_s) == pytest.approx((4.0, 5.0))
