"""Which link a step's traffic uses, and how wide its range is."""

import pytest
from tests.plan.scene import JOB, cluster_of, job_of

from paceline.catalog.engines import load_engines
from paceline.estimate import Estimate, case_of, price_one
from paceline.parallel import Layout
from paceline.profile import profile_decoder, resolve_decoder

SHARDED = Layout(data=8, sharding="full", micro_batch=1, accumulation=1)


def priced(layout: Layout, *overrides: str) -> Estimate:
    job = job_of(JOB, *overrides)
    shape = resolve_decoder(job)
    assert shape is not None
    engine = load_engines()["torchtitan"]
    profile = profile_decoder(shape, job.spec.data.seq_len)
    return price_one(layout, case_of(profile, cluster_of(job), precision="bf16", engine=engine))


@pytest.mark.parametrize("accelerator", ["RTX-4090", "L40S", "H100-PCIe", "A100-80-PCIe"])
def test_cards_of_one_node_talk_over_pcie_and_not_over_its_network(accelerator: str):
    asked = [f"cluster.accelerator={accelerator}", "cluster.per_node=8"]
    slow = priced(SHARDED, *asked, "cluster.network=1Gb/s")
    assert slow.terms == priced(SHARDED, *asked, "cluster.network=400Gb/s").terms
    # 8 billion parameters gathered twice and reduced in float32, over some 25 GB/s.
    assert 0.3 < slow.terms["data"] < 10


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
