"""Which ranks share which link."""

from dataclasses import replace

import pytest
from tests.clusters import h100s

from paceline.catalog import load_accelerators, load_links
from paceline.topology import Level, find_levels
from paceline.topology.levels import host_bytes_per_s, link_of_rate


def levels(name: str, *, nodes: int, per_node: int) -> tuple[Level, ...]:
    known = load_accelerators()[name]
    return find_levels(
        known,
        load_links(),
        num_nodes=nodes,
        ranks_per_node=per_node,
        network_node_bytes_per_s=known.network_node_bytes_per_s,
    )


def shape(found: tuple[Level, ...]) -> list[tuple[str, int, float]]:
    return [(level.name, level.size, level.bytes_per_s) for level in found]


def test_h100_nodes_share_nvlink_inside_and_a_nic_each_between():
    found = levels("H100-SXM", nodes=8, per_node=8)
    assert shape(found) == [("scale-up", 8, 450e9), ("network", 64, 50e9)]
    assert [level.link for level in found] == ["nvlink-4", "infiniband-ndr"]
    assert found[0].latency_s < found[1].latency_s


def test_gb200_share_nvlink_across_the_nodes_of_a_rack():
    assert shape(levels("GB200", nodes=16, per_node=4)) == [("scale-up", 64, 900e9)]
    assert shape(levels("GB200", nodes=36, per_node=4)) == [
        ("scale-up", 72, 900e9),
        ("network", 144, 50e9),
    ]


def test_cards_without_a_fast_link_meet_over_pcie():
    assert shape(levels("L40S", nodes=2, per_node=8)) == [
        ("node", 8, 31.5e9),
        ("network", 16, 6.25e9),
    ]


def test_bridged_pairs_are_a_level_inside_the_node():
    assert shape(levels("H100-NVL", nodes=1, per_node=8)) == [
        ("scale-up", 2, 300e9),
        ("node", 8, 63e9),
    ]


def test_more_in_a_node_than_share_the_fast_link_meet_over_pcie():
    assert shape(levels("H100-SXM", nodes=1, per_node=16)) == [
        ("scale-up", 8, 450e9),
        ("node", 16, 63e9),
    ]


def test_part_of_a_node_is_a_smaller_group():
    assert shape(levels("H100-SXM", nodes=1, per_node=4)) == [("scale-up", 4, 450e9)]


def test_one_rank_has_no_level():
    assert levels("H100-SXM", nodes=1, per_node=1) == ()


def test_nodes_of_one_rank_have_the_network_alone():
    assert shape(levels("M3-Ultra", nodes=4, per_node=1)) == [("network", 4, 10e9)]


def test_a_rate_that_the_reader_changed_is_the_rate_of_the_level():
    ours = replace(load_accelerators()["H100-SXM"], link_bytes_per_s=400e9)
    (level,) = find_levels(
        ours, load_links(), num_nodes=1, ranks_per_node=8, network_node_bytes_per_s=1e9
    )
    assert level.bytes_per_s == 400e9


def test_each_level_holds_more_ranks_than_the_one_inside_it():
    for name in load_accelerators():
        sizes = [level.size for level in levels(name, nodes=32, per_node=4)]
        assert sizes == sorted(set(sizes)), name


@pytest.mark.parametrize(
    ("gigabits", "name"),
    [
        (3200, "infiniband-ndr"),
        (400, "infiniband-ndr"),
        (200, "infiniband-hdr"),
        (100, "infiniband-edr"),
        (350, "infiniband-ndr"),
        (10, "ethernet-10"),
        (1, "ethernet-1"),
    ],
)
def test_a_declared_rate_is_of_the_link_it_is_a_whole_number_of(gigabits: int, name: str):
    links = load_links()
    assert link_of_rate(links["infiniband-ndr"], links, gigabits * 1e9 / 8).name == name


def test_a_link_of_ones_own_is_rdma_because_its_row_says_so():
    ours = replace(load_links()["ethernet-100"], name="campus-fibre", is_rdma=True)
    known = replace(load_accelerators()["L4"], network="campus-fibre")
    found = find_levels(
        known,
        {**load_links(), "campus-fibre": ours},
        num_nodes=2,
        ranks_per_node=8,
        network_node_bytes_per_s=12.5e9,
    )
    cluster = replace(h100s(num_nodes=2, ranks_per_node=8), levels=found)
    assert (cluster.network_link, cluster.uses_rdma) == ("campus-fibre", True)
    plain = replace(found[-1], is_rdma=False)
    assert not replace(cluster, levels=(*found[:-1], plain)).uses_rdma
    assert not replace(cluster, levels=found[:-1]).uses_rdma


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("V100-32", 15.75e9),  # PCIe 3.0 x16
        ("T4", 15.75e9),
        ("A40", 31.5e9),  # PCIe 4.0 x16
        ("MI210", 31.5e9),
        ("H100-SXM", 63e9),  # PCIe 5.0 x16
        ("MI300X", 63e9),
        ("GH200", 450e9),  # NVLink-C2C
        ("GB300", 225e9),  # half of it: two GPUs a CPU
        ("GB10", 136e9),  # the host's memory, read and written
        ("TPU-v5p", None),
    ],
)
def test_a_card_has_the_host_link_of_its_data_sheet(name: str, rate: float | None):
    assert host_bytes_per_s(load_accelerators()[name], load_links()) == rate


def test_a_link_to_its_host_does_not_join_a_card_to_the_others_of_its_node():
    (node,) = levels("GH200", nodes=1, per_node=4)
    assert node.link == "pcie-5-x16"
