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
from paceline.catalog.load import read_shipped
from paceline.catalog.price import PRICE_COLUMNS, Price, read_prices
from paceline.catalog.provider import read_rents
from paceline.errors import JobError, Problem


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


@pytest.mark.parametrize(
    ("accelerator", "instance"),
    [("A100-80", "a2-ultragpu-8g"), ("H100-SXM", "a3-megagpu-8g"), ("H200", "a3-ultragpu-8g")],
)
def test_gcp_has_machines_of_eight_cards(accelerator, instance):
    (row,) = [row for row in find_prices(accelerator) if row.instance == instance]
    assert (row.provider, row.num_accelerators, row.as_of) == ("gcp", 8, "by 2026-11-28")
    assert row.spot_per_hour_usd < row.per_hour_usd


@pytest.mark.parametrize(
    ("accelerator", "provider", "count"),
    [
        ("T4", "aws", 8),
        ("L4", "gcp", 8),
        ("B200", "gcp", 8),
        ("TPU-v5e", "gcp", 8),
        ("TPU-v5p", "gcp", 4),
        ("TPU-v6e", "gcp", 8),
        ("Trainium1", "aws", 16),
    ],
)
def test_a_provider_s_whole_node_has_a_price(accelerator, provider, count):
    nodes = offers_of_nodes(find_prices(accelerator), count)
    assert provider in {row.provider for row in nodes}


def test_a_part_of_a_card_is_no_price_of_a_card():
    (row,) = [row for row in load_prices() if row.instance == "NV6ads_A10_v5"]
    assert row.accelerator is None


ROW = dict.fromkeys(PRICE_COLUMNS, "") | {
    "provider": "us",
    "spelled": "H100",
    "name": "H100-SXM",
    "num_accelerators": "8",
    "per_hour_usd": "16.0",
    "as_of": "2026-11-01",
    "source": "invoice",
}


def problems_of_table(
    *rows: dict[str, str], head: tuple[str, ...] = PRICE_COLUMNS
) -> list[Problem]:
    lines = [head, *(row.values() for row in rows)]
    text = "\n".join(",".join(line) for line in lines)
    with pytest.raises(JobError) as caught:
        read_prices(text, file="p.csv", accelerators=load_accelerators())
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("column", "cell", "fix"),
    [
        *(("per_hour_usd", cell, "a number above 0") for cell in ("nan", "inf", "-1", "0", "$2")),
        *(("spot_per_hour_usd", cell, "a number above 0") for cell in ("nan", "-inf", "0", "1e99")),
        *(("num_accelerators", cell, "a whole number above 0") for cell in ("0", "-8", "2.5")),
        ("host_memory_gib", "-1", "a number above 0"),
        ("vcpus", "nan", "a number above 0"),
        ("memory_gib", "80GB", "a number above 0"),
        ("as_of", "yesterday", "a day, such as 2026-09-01"),
        ("as_of", "2026-13-01", "a day, such as 2026-09-01"),
    ],
)
def test_a_cell_that_is_no_price_is_refused_with_file_line_value_and_fix(
    column: str, cell: str, fix: str
):
    (problem,) = problems_of_table(ROW, ROW | {column: cell})
    assert problem.code == "T013"
    assert problem.what == f"`{column}` is {cell!r}"
    assert problem.where == f"line 3.{column} in p.csv"
    assert problem.fix == f"write {fix}"


def test_every_wrong_row_of_a_table_is_shown_at_once():
    found = problems_of_table(
        ROW | {"name": "H100-SXN"}, ROW | {"per_hour_usd": ""}, ROW | {"note": "a, b"}
    )
    assert [(each.code, each.where) for each in found] == [
        ("T001", "line 2.name in p.csv"),
        ("T012", "line 3 in p.csv"),
        ("T013", "line 4 in p.csv"),
    ]
    assert "did you mean `H100-SXM`" in found[0].fix


def test_a_column_that_nothing_reads_and_one_that_is_missing_are_named():
    head = (*PRICE_COLUMNS[:-1], "egress")
    found = problems_of_table(head=head)
    assert {each.what for each in found} == {
        "`egress` is no key of line 1",
        "`line 1` has no `note`",
    }


def test_a_table_s_spelling_of_an_accelerator_stands_for_our_name():
    text = "\n".join(",".join(line) for line in (PRICE_COLUMNS, (ROW | {"name": "H100"}).values()))
    (row,) = read_prices(text, file="p.csv", accelerators=load_accelerators())
    assert (row.accelerator, row.spelled, row.spot_per_hour_usd) == ("H100-SXM", "H100", None)


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
        for rent in (provider.rents.storage, provider.rents.egress):
            assert rent is None or (rent.as_of and rent.source)
            rates = [usd for _, usd in rent.steps] if rent else []
            assert all(0 <= usd < 1 for usd in rates)
            assert rent is None or rent.usd_per_gb_month is None or 0 < rent.usd_per_gb_month < 1
        for instance, fabric in provider.fabrics.items():
            assert (provider.name, instance) in instances
            assert fabric.source


def test_the_network_between_eight_of_the_newer_gpus_is_known_at_the_large_clouds():
    """GCP's a4-highgpu-8g was priced with an open question."""
    providers = load_providers()
    newer = ("H100-SXM", "H200", "B200", "B300")
    unknown = {
        (row.provider, row.instance)
        for row in load_prices()
        if row.provider in ("aws", "azure", "gcp")
        and row.accelerator in newer
        and row.num_accelerators == 8
        and row.instance not in providers[row.provider].fabrics
    }
    assert unknown == set()


def test_the_shipped_prices_of_storage_and_traffic_pass_as_a_reader_s_own_do():
    for name, row in read_shipped("providers.toml").items():
        own = {key: row[key] for key in ("storage", "egress") if key in row}
        assert read_rents(own, where=name, file="my.toml") == (load_providers()[name].rents, [])


def test_an_accelerator_s_price_serves_any_number_where_the_provider_bills_so():
    rows = offers_of_nodes(find_prices("H100-SXM"), 8)
    assert {row.num_accelerators for row in rows} == {8}
    (modal,) = [row for row in rows if row.provider == "modal"]
    assert modal.per_hour_usd == pytest.approx(8 * 3.9492, rel=1e-3)
    assert "hyperbolic" not in {row.provider for row in rows}  # three at the most
