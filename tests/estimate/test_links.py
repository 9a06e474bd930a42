"""Which link a step's traffic uses, and how wide its range is."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.plan.scene import JOB, cluster_of, job_of

from paceline.catalog import load_accelerators, load_links
from paceline.catalog.engines import load_engines
from paceline.estimate import Estimate, case_of, price_one
from paceline.estimate.rates import shipped_share
from paceline.parallel import Layout
from paceline.profile import profile_decoder, resolve_decoder
from paceline.topology.read_nvidia import FoundGpu
from paceline.topology.unknown import pcie_link

SHARDED = Layout(data=8, sharding="full", micro_batch=1, accumulation=1)


def priced(layout: Layout, *overrides: str, engine: str = "torchtitan") -> Estimate:
    job = job_of(JOB, *overrides)
    shape = resolve_decoder(job)
    assert shape is not None
    profile = profile_decoder(shape, job.spec.data.seq_len)
    return price_one(
        layout, case_of(profile, cluster_of(job), precision="bf16", engine=load_engines()[engine])
    )


@pytest.mark.parametrize("accelerator", ["RTX-4090", "L40S", "H100-PCIe", "A100-80-PCIe"])
def test_cards_of_one_node_talk_over_pcie_and_not_over_its_network(accelerator: str):
    asked = [f"cluster.accelerator={accelerator}", "cluster.per_node=8"]
    slow = priced(SHARDED, *asked, "cluster.network=1Gb/s")
    assert slow.terms == priced(SHARDED, *asked, "cluster.network=400Gb/s").terms
    # 8 billion parameters gathered twice and reduced in float32, over some 25 GB/s.
    assert 0.3 < slow.terms["data"] < 10


@pytest.mark.parametrize("geforce", ["RTX-3090", "RTX-4090", "RTX-5090"])
def test_cards_without_peer_to_peer_send_through_the_host_s_memory(geforce: str):
    """The catalog's own source said that it is off, and 0.7 of PCIe was priced, as of an A100: 28
    of 63 GB/s were measured on 8 RTX 5090."""
    direct = "RTX-PRO-6000-Server" if geforce == "RTX-5090" else "A100-80-PCIe"
    mine, its = (
        cluster_of(job_of(JOB, f"cluster.accelerator={name}", "cluster.per_node=8")).levels[0]
        for name in (geforce, direct)
    )
    assert (mine.bytes_per_s, mine.size) == (its.bytes_per_s, its.size)
    assert shipped_share(mine) / shipped_share(its) == pytest.approx(0.44 / 0.7)


def test_a_card_that_is_found_has_its_row_s_share_of_the_link_that_its_tool_reports():
    found = FoundGpu(name="RTX-4090", memory_bytes=None, pcie_generation=4, pcie_lanes=8)
    link = pcie_link(found, load_accelerators()["RTX-4090"], load_links())
    assert (link.bytes_per_s, link.collective_share) == (31.5e9 / 2, 0.44)


def test_a_pair_of_a_mesh_pays_for_its_one_link():
    """2 x MI300X: 64 GB/s between them, of the 448 that all eight of a node share."""
    layout = Layout(
        data=1, sharding="none", tensor=2, sequence_parallel=True, micro_batch=1, accumulation=64
    )
    asked = ("cluster.accelerator=MI300X", "train.global_batch=64")
    two = priced(layout, *asked, "cluster.per_node=2").terms["tensor"]
    eight = priced(replace(layout, tensor=8), *asked, "cluster.per_node=8").terms["tensor"]
    # Half of 34 MB over 48 GB/s, or seven eighths over 336, and hops.
    assert 2.5 < two / eight < 4


def test_a_bridged_pair_is_priced_over_its_bridge():
    """H100 NVL has two thirds of the SXM's raw rate between two, not PCIe's seventh."""
    layout = Layout(
        data=1, sharding="none", tensor=2, sequence_parallel=True, micro_batch=1, accumulation=64
    )
    bridged, switched = (
        priced(layout, f"cluster.accelerator={name}", "cluster.per_node=2").terms["tensor"]
        for name in ("H100-NVL", "H100-SXM")
    )
    assert 1.0 < bridged / switched < 1.8


def test_a_pair_of_four_on_one_bridge_has_a_third_of_a_cards_links():
    """4 x H200 NVL: 150 GB/s between two; 16 samples, 32 blocks, 8 tensors of 16.8 MB each."""
    layout = Layout(
        data=2, sharding="none", tensor=2, sequence_parallel=True, micro_batch=1, accumulation=16
    )
    asked = ("cluster.accelerator=H200-NVL", "cluster.per_node=4", "data.seq_len=4096")
    sent = 16 * 32 * 8 * 4096 * 4096 * 2 / 2
    assert priced(layout, *asked, "train.global_batch=32").terms["tensor"] > sent / 150e9


def test_deepspeed_waits_for_the_parameters_that_a_step_has_updated():
    """Its step() ends with an all-gather that no forward pass hides: 16 GB over 400 Gb/s a rank."""
    layout = Layout(data=16, sharding="zero2", micro_batch=1, accumulation=1)
    asked = ("cluster.nodes=2", "cluster.per_node=8")
    waits, hides = (
        priced(layout, *asked, engine=name).terms["data"] for name in ("deepspeed", "accelerate")
    )
    assert waits > 2 * 8e9 / (8 * 50e9)
    assert waits > hides


def test_a_row_of_the_links_in_a_file_of_ones_own_changes_the_estimate(tmp_path: Path):
    """Rate and latency of the shipped accelerator's link, which were shown and not read."""
    row = "[links.nvlink-4]\nbytes_per_s = {}\nlatency_s = {}\n"

    def of(rate: float, latency_s: float) -> Estimate:
        own = tmp_path / "own.toml"
        own.write_text(row.format(rate, latency_s))
        return priced(SHARDED, f"cluster.catalog={own}", "train.global_batch=8")

    shipped = of(450e9, 1.9e-6).terms
    assert of(450e9, 1.9e-6).terms == priced(SHARDED, "train.global_batch=8").terms
    assert of(4.5e9, 1.9e-6).terms["data"] > 10 * shipped["data"]
    assert of(450e9, 1.0).terms["data"] > 7  # seven hops of a second in every gather


def test_a_ring_hides_behind_attention_and_not_behind_the_rest_of_the_block():
    """Over 200 Gb/s a node the keys of 512 tokens travel longer than 512 queries attend to them."""
    asked = ("cluster.nodes=16", "cluster.per_node=1", "cluster.network=200Gb/s")
    asked = (*asked, "train.global_batch=16")
    short = Layout(
        data=1, sharding="none", context=16, context_kind="ring", micro_batch=1, accumulation=16
    )
    near = priced(short, *asked, "data.seq_len=8192", engine="fsdp1")
    far = priced(short, *asked, "data.seq_len=131072", engine="fsdp1")
    assert near.terms["context"] > 0.4 * near.terms["compute"]
    assert far.terms["context"] < 0.05 * far.terms["compute"]


def test_attention_of_a_ring_is_as_slow_as_that_of_one_ranks_part_of_the_sample():
    asked = ("cluster.nodes=1", "train.global_batch=16", "data.seq_len=8192")
    layout = Layout(
        data=1, sharding="none", context=8, context_kind="ring", micro_batch=1, accumulation=16
    )
    ring = priced(layout, *asked).terms["compute"]
    ulysses = priced(replace(layout, context_kind="ulysses"), *asked).terms["compute"]
    assert ring > 1.1 * ulysses


def test_a_pipeline_with_two_stages_a_node_still_crosses_the_network():
    layout = Layout(data=4, sharding="none", micro_batch=1, accumulation=16, pipeline=4)
    asked = ("cluster.nodes=2", "train.global_batch=64")
    fast, slow = (
        priced(layout, *asked, f"cluster.network={rate}").terms["pipeline"]
        for rate in ("400Gb/s", "1Gb/s")
    )
    assert slow > 5 * fast


def test_a_step_that_waits_for_links_has_the_wider_range():
    alone = priced(SHARDED)
    apart = priced(
        Layout(data=64, sharding="full", micro_batch=1, accumulation=1),
        "cluster.nodes=8",
        "cluster.network=10Gb/s",
    )
    widths = [(each.step_high_s or 0) / (each.step_s or 1) for each in (alone, apart)]
    assert 1.15 < widths[0] < widths[1] < 1.65


def test_a_stage_in_1f1b_waits_for_what_it_sends_and_receives():
    """Two hops in each of 64 micro-batches, and six to fill and drain: torch's `Schedule1F1B` and
    Megatron's batched messages. Half of them was taken as hidden: `prove` was 32 % slower."""
    stages = Layout(
        data=2,
        tensor=4,
        pipeline=4,
        sharding="zero1",
        micro_batch=1,
        accumulation=64,
        sequence_parallel=True,
    )
    asked = ("cluster.nodes=4", "cluster.accelerator=A100-80")
    slow, fast = (
        priced(stages, *asked, f"cluster.network={rate}Gb/s", engine="paceline").terms["pipeline"]
        for rate in (100, 200)
    )
    message_s = 2 * 4096 * 4096 / (100e9 / 8 / 8)  # eight ranks share the node's port
    assert slow - fast == pytest.approx((2 * 64 + 6) * message_s / 2, rel=0.2)
    megatron = [
        priced(stages, *asked, f"cluster.network={rate}Gb/s", engine="megatron").terms["pipeline"]
        for rate in (200, 400)
    ]  # each of four tensor ranks sends its part of the sequence, and the others' hop passes behind
    # the head of the last stage, which sets the pace and has one neighbor
    waited = (64 + 3) / (2 * 64 + 3)
    assert megatron[0] - megatron[1] == pytest.approx((slow - fast) / 2 / 4 * waited, rel=0.01)
