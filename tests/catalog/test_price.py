"""Prices: mapped to our names, per accelerator-hour, dated."""

import re

import pytest

from paceline.catalog import (
    cheapest_prices,
    find_prices,
    load_accelerators,
    load_prices,
    load_providers,
    offers_of_nodes,
)
from paceline.catalog.price import Price


def price(provider: str, per_hour_usd: float, *, num_accelerators: int = 8) -> Price:
    return Price(
        provider=provider,
        instance="x8",
        spelled="H100",
        accelerator="H100-SXM",
        num_accelerators=num_accelerators,
        per_hour_usd=per_hour_usd,
        spot_per_hour_usd=None,
        as_of="2026-09-01",
        source="a list",
    )


def test_every_shipped_price_has_a_date_and_a_source():
    for row in load_prices():
        assert re.fullmatch(r"(by )?\d{4}-\d\d-\d\d", row.as_of)
        assert row.source
        assert row.instance
        assert row.per_hour_usd > 0
        assert row.accelerator is None or row.accelerator in load_accelerators()


def test_a_price_that_has_no_name_of_ours_is_kept_and_says_why():
    unmapped = [row for row in load_prices() if row.accelerator is None]
    assert unmapped
    assert all(row.note for row in unmapped)
    assert {"A800", "RTXA5000"} <= {row.spelled for row in unmapped}


def test_an_accelerator_hour_is_the_instance_divided_by_its_accelerators():
    (row,) = [row for row in find_prices("H100-SXM") if row.instance == "p5.48xlarge"]
    assert row.per_accelerator_hour_usd == pytest.approx(55.04 / 8)
    assert row.spot_per_accelerator_hour_usd is None
    (spot,) = [row for row in find_prices("H100-SXM") if row.instance == "ND96isr_H100_v5"]
    assert spot.spot_per_accelerator_hour_usd == pytest.approx(18.169536 / 8)


def test_an_a100_is_told_apart_by_memory_and_form():
    by_instance = {row.instance: row.accelerator for row in load_prices()}
    assert by_instance["p4d.24xlarge"] == "A100-40"
    assert by_instance["a2-ultragpu-1g"] == "A100-80"
    assert by_instance["NC24ads_A100_v4"] == "A100-80-PCIe"


def test_a_part_of_a_card_is_no_price_of_a_card():
    (row,) = [row for row in load_prices() if row.instance == "NV6ads_A10_v5"]
    assert row.accelerator is None


def test_prices_come_cheapest_first():
    prices = (price("b", 32.0), price("a", 16.0), price("c", 1.0, num_accelerators=1))
    assert [row.provider for row in find_prices("H100-SXM", prices=prices)] == ["c", "a", "b"]


def test_the_cheapest_of_each_provider_is_one_row_a_provider():
    prices = (price("a", 32.0), price("a", 16.0), price("b", 24.0))
    found = cheapest_prices("H100-SXM", prices=prices)
    assert [(row.provider, row.per_hour_usd) for row in found] == [("a", 16.0), ("b", 24.0)]


def test_an_accelerator_that_nobody_rents_has_no_price():
    assert find_prices("M4-Max") == ()


def test_every_provider_of_a_price_is_known_and_what_it_bills_has_a_day_and_a_source():
    providers = load_providers()
    assert {row.provider for row in load_prices()} <= set(providers)
    instances = {(row.provider, row.instance) for row in load_prices()}
    for provider in providers.values():
        for rent in (provider.storage, provider.egress):
            assert rent is None or (rent.as_of and rent.source)
        for instance, fabric in provider.fabrics.items():
            assert (provider.name, instance) in instances
            assert fabric.source


def test_an_accelerator_s_price_serves_any_number_where_the_provider_bills_so():
    rows = offers_of_nodes(find_prices("H100-SXM"), 8)
    assert {row.num_accelerators for row in rows} == {8}
    (modal,) = [row for row in rows if row.provider == "modal"]
    assert modal.per_hour_usd == pytest.approx(8 * 3.9492, rel=1e-3)
    assert "hyperbolic" not in {row.provider for row in rows}  # three at the most
