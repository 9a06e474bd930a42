"""What answering requests costs."""

from dataclasses import replace

import pytest

from paceline.catalog.price import Price
from paceline.estimate.serving import Load, break_even, serving_costs

ALWAYS = Price(
    provider="lambda",
    instance="1x",
    spelled="A10",
    accelerator="A10",
    num_accelerators=1,
    per_hour_usd=0.5,
    spot_per_hour_usd=None,
    as_of="2026-09-06",
    source="a list",
)
BY_REQUEST = replace(ALWAYS, provider="modal", per_hour_usd=1.0)


def test_a_machine_that_is_always_on_is_paid_for_the_whole_day():
    (cost,) = serving_costs([ALWAYS], Load(requests_per_day=10_000, latency_s=0.5))
    assert cost.usd_per_day == 12
    assert cost.usd_per_1000_requests == pytest.approx(1.2)
    assert cost.busy == pytest.approx(5000 / 86_400)


def test_a_second_machine_comes_when_one_cannot_answer_all():
    (cost,) = serving_costs([ALWAYS], Load(requests_per_day=100_000, latency_s=1.0))
    assert cost.num_instances == 2
    (cost,) = serving_costs([ALWAYS], Load(requests_per_day=100_000, latency_s=1.0, concurrency=2))
    assert cost.num_instances == 1


def test_by_the_request_only_its_seconds_are_paid():
    (cost,) = serving_costs([BY_REQUEST], Load(requests_per_day=3600, latency_s=1.0))
    assert cost.usd_per_day == pytest.approx(1.0)
    assert cost.num_instances is None


def test_at_the_break_even_both_cost_the_same():
    load = Load(requests_per_day=1, latency_s=2.0)
    even = break_even([ALWAYS, BY_REQUEST], load)
    assert even is not None
    assert even.busy == pytest.approx(0.5)  # half the price an hour: half of the time
    here = replace(load, requests_per_day=even.requests_per_day)
    a, b = serving_costs([ALWAYS, BY_REQUEST], here)
    assert a.usd_per_day == pytest.approx(b.usd_per_day)


def test_without_a_price_of_both_kinds_there_is_no_break_even():
    assert break_even([ALWAYS], Load(requests_per_day=1, latency_s=1.0)) is None


def test_machines_come_whole_so_the_break_even_is_that_of_one():
    """At $0.86 an hour against $1, one machine answers 86,400 requests of a second and is cheaper
    from 74,304 on; two from 148,608 on, which leaves the loads between to the other."""
    load = Load(requests_per_day=1, latency_s=1.0)
    prices = [replace(ALWAYS, per_hour_usd=0.86), BY_REQUEST]
    even = break_even(prices, load)
    assert even is not None
    assert even.most_per_day == pytest.approx(86_400)

    def is_on(requests):
        return not serving_costs(prices, replace(load, requests_per_day=requests))[0].serverless

    for count in range(1, even.machines_for_good + 3):
        assert is_on(count * even.requests_per_day + 1)
        assert is_on(count * even.most_per_day - 1)
        later = is_on(count * even.most_per_day + 1)
        assert later == (count >= even.machines_for_good)
