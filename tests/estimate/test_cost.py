"""What a run costs."""

from dataclasses import replace

import pytest

from paceline.catalog import find_prices
from paceline.catalog.price import Price
from paceline.estimate.cost import (
    Failures,
    Keeping,
    Needs,
    accelerator_hours,
    cannot_run,
    cheapest_costs,
    run_costs,
    why_none,
)
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
        keeping=Keeping(stored_bytes=1e12, sent_bytes=1e12),
    ):
        assert sum(cost.terms.values()) == pytest.approx(cost.usd)
        assert {"storage", "egress"}.isdisjoint(cost.terms)  # nobody knows them of `near`
        assert len(cost.unknown) == 2


GIB = 2**30
TWO_NODES = Needs(
    num_nodes=2,
    accelerators_per_node=8,
    host_memory_bytes=164 * GIB,
    network_bytes_per_s=400e9,
    is_rdma=True,
)
P5 = replace(EIGHT, provider="aws", instance="p5.48xlarge", host_memory_bytes=2048 * GIB)


def test_a_machine_that_cannot_run_the_plan_has_no_cost():
    small = replace(P5, instance="small", host_memory_bytes=128 * GIB, per_hour_usd=1.0)
    four = replace(P5, instance="half", num_accelerators=4, per_hour_usd=1.0)
    no_rdma = replace(P5, provider="gcp", instance="a3-highgpu-8g", per_hour_usd=1.0)
    slow = replace(P5, instance="p4d.24xlarge", per_hour_usd=1.0)
    costs = run_costs(
        num_accelerators=16,
        train_s=HOUR,
        prices=[small, four, no_rdma, slow, P5],
        needs=TWO_NODES,
    )
    assert [cost.instance for cost in costs] == ["p5.48xlarge"]
    assert cannot_run(small, TWO_NODES) == "128 GiB of host memory, a node needs 164 GiB"
    assert cannot_run(no_rdma, TWO_NODES) == "no RDMA between nodes, which the plan needs"
    assert "400 Gb/s a node, the run counts on 3200 Gb/s" in str(cannot_run(slow, TWO_NODES))


def test_one_node_needs_no_network():
    alone = replace(TWO_NODES, num_nodes=1)
    no_rdma = replace(P5, provider="gcp", instance="a3-highgpu-8g")
    assert cannot_run(no_rdma, alone) is None
    (cost,) = run_costs(num_accelerators=8, train_s=HOUR, prices=[no_rdma], needs=alone)
    assert cost.runs_as_planned


def test_a_machine_whose_network_is_unknown_comes_after_those_that_are_known_to_run_it():
    cheap = replace(P5, provider="cudo", instance="8x", per_hour_usd=1.0)
    known, unknown = run_costs(
        num_accelerators=16, train_s=HOUR, prices=[cheap, P5], needs=TWO_NODES
    )
    assert (known.provider, unknown.provider) == ("aws", "cudo")
    assert unknown.usd < known.usd
    assert unknown.unknown == ("the network between instances",)
    assert not unknown.runs_as_planned


@pytest.mark.parametrize("provider", ["aws", "modal"])
def test_host_memory_that_is_unknown_is_named_wherever_the_run_needs_some(provider):
    unread = replace(P5, provider=provider, host_memory_bytes=None)
    needs = Needs(accelerators_per_node=8, host_memory_bytes=2130 * GIB)
    (cost,) = run_costs(num_accelerators=8, train_s=HOUR, prices=[unread], needs=needs)
    assert cost.unknown_facts == ("host memory",)
    none = replace(needs, host_memory_bytes=0.0)
    (cost,) = run_costs(num_accelerators=8, train_s=HOUR, prices=[unread], needs=none)
    assert cost.unknown_facts == ()


def test_nothing_is_asked_of_a_machine_of_the_reader_s_own():
    (cost,) = run_costs(num_accelerators=16, train_s=HOUR, prices=[EIGHT], needs=TWO_NODES)
    assert cost.unknown == ()


def test_storage_is_paid_by_the_month_and_traffic_out_by_its_steps():
    month = 365 * 24 / 12 * HOUR
    (cost,) = run_costs(
        num_accelerators=8,
        train_s=month,
        prices=[P5],
        keeping=Keeping(stored_bytes=1e12, sent_bytes=1e12),
    )
    assert cost.terms["storage"] == pytest.approx(1000 * 0.023)
    assert cost.terms["egress"] == pytest.approx(900 * 0.09)  # its first 100 GB are free


def test_rented_accelerators_without_a_rank_are_counted_as_idle():
    (cost,) = run_costs(num_accelerators=12, train_s=HOUR, prices=[EIGHT])
    assert cost.terms == pytest.approx({"training": 36, "idle": 12})


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


def test_a_provider_whose_second_largest_machine_can_run_it_is_not_refused():
    """The machine with the most host memory was asked alone: `gcp has no RDMA`."""
    small = replace(EIGHT, provider="gcp", instance="another-8g", host_memory_bytes=2**40)
    large = replace(small, instance="a3-highgpu-8g", host_memory_bytes=2**41)
    needs = Needs(num_nodes=2, accelerators_per_node=8, is_rdma=True)
    assert why_none("gcp", [large], needs) is not None
    assert why_none("gcp", [large, small], needs) is None
