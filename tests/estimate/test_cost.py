"""What a run costs."""

from dataclasses import replace

import pytest

from paceline.catalog import find_prices
from paceline.catalog.price import Price
from paceline.estimate.cost import Failures, accelerator_hours, cheapest_costs, run_costs
from paceline.estimate.goodput import DEFAULT_RANK_MTBF_S

EIGHT = Price(
    provider="near",
    instance="8x",
    spelled="H100",
    accelerator="H100-SXM",
    num_accelerators=8,
    per_hour_usd=24.0,
    spot_per_hour_usd=8.0,
    as_of="2026-09-06",
    source="a price list",
)
FAR = replace(EIGHT, provider="far", per_hour_usd=40.0, spot_per_hour_usd=None)
FAILURES = Failures(save_s=30, restart_s=600, rank_mtbf_s=DEFAULT_RANK_MTBF_S)
HOUR = 3600.0


def test_ten_hours_on_16_accelerators_are_two_instances_for_ten_hours():
    (cost,) = run_costs(num_accelerators=16, train_s=10 * HOUR, prices=[EIGHT], epochs=4)
    assert (cost.num_instances, cost.hours, cost.accelerator_hours) == (2, 10, 160)
    assert cost.usd == 480
    assert cost.usd_per_epoch == 120
    assert (cost.way, cost.as_of) == ("on demand", "2026-09-06")


def test_an_instance_that_is_used_in_part_is_paid_in_whole():
    (cost,) = run_costs(num_accelerators=9, train_s=HOUR, prices=[EIGHT])
    assert cost.accelerator_hours == 16


def test_spot_is_left_out_until_it_is_known_what_an_interruption_costs():
    ways = [cost.way for cost in run_costs(num_accelerators=8, train_s=HOUR, prices=[EIGHT])]
    assert ways == ["on demand"]


def test_spot_takes_longer_and_may_still_be_cheaper():
    costs = run_costs(num_accelerators=8, train_s=100 * HOUR, prices=[EIGHT], failures=FAILURES)
    spot, demand = costs
    assert (spot.way, demand.way) == ("spot", "on demand")
    assert spot.hours > demand.hours > 100
    assert spot.usd < demand.usd
    assert spot.useful < demand.useful < 1


def test_spot_on_a_thousand_instances_is_not_worth_it():
    costs = run_costs(num_accelerators=8000, train_s=100 * HOUR, prices=[EIGHT], failures=FAILURES)
    assert costs[0].way == "on demand"


def test_the_terms_of_a_cost_add_up_to_it():
    for cost in run_costs(
        num_accelerators=8,
        train_s=HOUR,
        prices=[EIGHT, FAR],
        failures=FAILURES,
        storage_usd=3.0,
    ):
        assert sum(cost.terms.values()) == pytest.approx(cost.usd)
        assert cost.terms["storage"] == 3.0


def test_the_cheapest_of_each_provider_and_way_is_kept():
    dear = replace(EIGHT, instance="dear", per_hour_usd=30.0)
    costs = run_costs(
        num_accelerators=8, train_s=HOUR, prices=[dear, EIGHT, FAR], failures=FAILURES
    )
    kept = [(cost.provider, cost.way, cost.instance) for cost in cheapest_costs(costs)]
    assert kept == [("near", "spot", "8x"), ("near", "on demand", "8x"), ("far", "on demand", "8x")]


def test_the_shipped_prices_price_a_run():
    costs = run_costs(num_accelerators=8, train_s=HOUR, prices=find_prices("H100-SXM"))
    assert costs
    assert all(5 < cost.usd < 200 for cost in costs)


def test_accelerator_hours_count_every_rank():
    assert accelerator_hours(16_384, HOUR) == 16_384
