"""Seconds of a collective by the links its group runs over."""

import numpy as np
import pytest
from tests.plan.scene import JOB, cluster_of, job_of

from paceline.catalog.efficiencies import load_efficiencies
from paceline.catalog.engines import load_engines
from paceline.estimate.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    dispatch_s,
    p2p_s,
)
from paceline.estimate.rates import Rates, rates_of

GB = 1e9


def rates(accelerator: str, *, nodes: int = 1, per_node: int = 8, precision: str = "bf16") -> Rates:
    job = job_of(
        JOB,
        f"cluster.accelerator={accelerator}",
        f"cluster.nodes={nodes}",
        f"cluster.per_node={per_node}",
    )
    found = rates_of(cluster_of(job), load_engines()["torchtitan"], precision, load_efficiencies())
    assert found is not None
    return found


def gathered(found: Rates, degree: int, stride: int = 1) -> float:
    """Bytes a second that pass each rank in a large all-gather."""
    num_bytes = 100 * GB
    seconds = float(all_gather_s(num_bytes, degree, stride, found))
    return num_bytes * (degree - 1) / degree / seconds


def test_two_ranks_of_a_mesh_share_one_link_of_seven():
    mesh = rates("MI300X")
    one = 0.75 * 64 * GB
    for degree in (2, 4, 8):
        assert gathered(mesh, degree) == pytest.approx((degree - 1) * one, rel=0.01)
    assert gathered(mesh, 2, stride=4) == pytest.approx(one, rel=0.01)


def test_two_ranks_behind_a_switch_reach_half_of_it_and_four_what_all_do():
    """0.46 to 0.57 of NVLink was measured between two, 0.75 between eight."""
    switch = rates("H100-SXM")
    assert gathered(switch, 2) == pytest.approx(0.5 * 450 * GB, rel=0.01)
    assert gathered(switch, 4) == pytest.approx(gathered(switch, 8), rel=0.01)
    assert float(all_reduce_s(GB, 2, 1, switch)) == pytest.approx(GB / (225 * GB), rel=0.02)


def test_one_rank_of_a_mesh_sends_over_one_link_and_of_a_switch_over_all():
    sent = GB / float(p2p_s(GB, 8, rates("Gaudi3")))
    assert sent == pytest.approx(0.7 * 525 / 7 * GB, rel=0.01)
    assert GB / float(p2p_s(GB, 8, rates("H100-SXM"))) == pytest.approx(0.71 * 450 * GB, rel=0.01)


def test_a_group_along_one_axis_of_a_torus_has_two_of_its_links():
    cube = rates("TPU-v5p", nodes=128, per_node=4)  # 8 x 8 x 8
    whole = 0.7 * 600 * GB
    assert gathered(cube, 8) == pytest.approx(whole / 3, rel=0.01)
    assert gathered(cube, 64) == pytest.approx(2 * whole / 3, rel=0.01)
    assert gathered(cube, 512) == pytest.approx(whole, rel=0.01)


def test_all_to_all_round_a_ring_passes_the_chips_between():
    cube = rates("TPU-v5p", nodes=128, per_node=4)
    on_a_link = float(all_to_all_s(GB, 4, 1, cube)) / (3 / 4)
    assert float(all_to_all_s(GB, 8, 1, cube)) / (7 / 8) == pytest.approx(2 * on_a_link, rel=0.01)


def test_a_bridged_pair_has_its_bridge_and_four_cards_have_pcie():
    cards = rates("H100-NVL")
    assert gathered(cards, 2) == pytest.approx(0.7 * 300 * GB, rel=0.01)
    # Each of the two cards of a pair has a PCIe link of its own to the other pairs.
    assert gathered(cards, 8) == pytest.approx(2 * 0.7 * 63 * GB, rel=0.01)
    assert gathered(cards, 2, stride=2) == pytest.approx(0.7 * 63 * GB, rel=0.01)


def test_rings_between_nodes_use_the_cards_of_all_their_members():
    nodes = rates("H100-SXM", nodes=8)
    assert gathered(nodes, 64) == pytest.approx(gathered(nodes, 8), rel=0.02)
    assert gathered(nodes, 32, stride=2) == pytest.approx(4 * 0.85 * 50 * GB, rel=0.01)
    assert gathered(nodes, 8, stride=8) == pytest.approx(0.85 * 50 * GB, rel=0.01)


def test_the_latency_of_a_ring_grows_with_its_ranks_and_not_with_their_logarithm():
    nodes = rates("H100-SXM", nodes=128)
    latency = {n: float(all_gather_s(0.0, n, 1, nodes)) for n in (8, 64, 1024)}
    # NCCL's own model: 14 us, 1.9 us a hop inside a node and 4 us between.
    assert latency[8] == pytest.approx(14e-6 + 7 * 1.9e-6)
    assert latency[1024] == pytest.approx(14e-6 + 896 * 1.9e-6 + 127 * 4.0e-6)
    assert latency[1024] > 10 * latency[64]


def test_a_large_all_reduce_of_few_bytes_goes_up_a_tree():
    nodes = rates("H100-SXM", nodes=128)
    ring = 2 * float(all_gather_s(0.0, 1024, 1, nodes))
    assert float(all_reduce_s(0.0, 1024, 1, nodes)) < 0.1 * ring


def test_an_all_reduce_inside_a_node_is_faster_than_two_gathers_where_it_was_measured():
    node = rates("H100-SXM")
    once = float(all_gather_s(GB, 8, 1, node))
    assert float(all_reduce_s(GB, 8, 1, node)) == pytest.approx(2 * once * 0.75 / 0.99, rel=0.01)


def test_groups_that_stay_in_a_node_do_not_notice_the_network():
    near, far = rates("H100-SXM"), rates("H100-SXM", nodes=4)
    for seconds in (all_gather_s, all_reduce_s, all_to_all_s):
        assert float(seconds(GB, 8, 1, near)) == float(seconds(GB, 8, 1, far))
    assert float(dispatch_s(GB, 8, 8, 1, near)) == float(dispatch_s(GB, 8, 8, 1, far))


def test_node_limited_routing_sends_a_token_to_fewer_nodes():
    """DeepSeek-V3: 8 of 256 experts in 4 of 8 groups, a group on each of 8 nodes. By hand: a token
    reaches 4 x (1 - 0.75^8) = 3.6 nodes, not 8 x (1 - 0.875^8) = 5.25; one in 8 is its own."""
    found = rates("H100-SXM", nodes=8)
    free = float(dispatch_s(GB, 8, 64, 1, found))
    limited = float(dispatch_s(GB, 8, 64, 1, found, groups=(8, 4)))
    assert limited / free == pytest.approx(4 * (1 - 0.75**8) / (8 * (1 - 0.875**8)), rel=0.01)
    copies = float(all_to_all_s(8 * GB, 64, 1, found))
    assert limited / copies == pytest.approx(4 * (1 - 0.75**8) / 8, rel=0.01)
    half = float(dispatch_s(GB, 8, 32, 1, rates("H100-SXM", nodes=4), groups=(8, 4)))
    assert half < limited  # 4 groups of 8 are on nearly all of 4 nodes


def test_one_rank_alone_takes_no_time():
    found = rates("H100-SXM", nodes=2)
    for seconds in (all_gather_s, all_reduce_s, all_to_all_s):
        assert float(seconds(GB, 1, 8, found)) == 0.0


def test_columns_of_groups_are_priced_as_each_of_them():
    found = rates("MI300X", nodes=4)
    degree, stride = np.array([1, 2, 8, 16, 32]), np.array([1, 4, 1, 2, 1])
    together = all_gather_s(GB, degree, stride, found)
    alone = [
        float(all_gather_s(GB, n, apart, found)) for n, apart in zip(degree, stride, strict=True)
    ]
    assert together == pytest.approx(alone)


def sent(found: Rates, crossing: int) -> float:
    """Bytes a second of each of so many ranks of a node that send to the next node at once."""
    num_bytes = 100 * GB
    return num_bytes / float(p2p_s(num_bytes, 16, found, crossing=crossing))


def test_ranks_that_cross_at_once_share_the_one_nic_of_their_node():
    one_nic = rates("A100-80-PCIe", nodes=2)
    alone = sent(one_nic, 1)
    assert alone == pytest.approx(0.85 * 12.5 * GB, rel=0.05)
    assert [sent(one_nic, ranks) for ranks in (2, 8, 16)] == [
        pytest.approx(alone / 2, rel=0.01),
        pytest.approx(alone / 8, rel=0.01),
        pytest.approx(alone / 8, rel=0.01),
    ]


def test_one_rank_has_no_more_than_the_nic_beside_it():
    eight_nics = rates("H100-SXM", nodes=2)
    assert sent(eight_nics, 1) == pytest.approx(sent(eight_nics, 8))
    alone = rates("H100-SXM", nodes=2, per_node=1)
    assert gathered(alone, 2) == pytest.approx(gathered(eight_nics, 2, stride=8), rel=0.01)
