"""What a run costs at every provider, of a plan and of a size alone."""

import re
from dataclasses import replace

import pytest
from tests.plan.scene import JOB, job_of, plan_of

from paceline.catalog import find_accelerator, find_prices
from paceline.estimate.cost import Needs, cannot_run, why_none
from paceline.plan.bill import ASSUMED_MFU, Size, bill_of_plan, bill_of_size, keeping_of
from paceline.plan.outlook import needs_of
from paceline.report.cost_text import format_bill
from paceline.report.plan_text import format_plan, plan_summary

H100 = find_accelerator("H100-SXM", where="a test")
SEVEN = Size(num_parameters=7e9, tokens=1e12, num_ranks=64)
PEAK = 989.4e12


def bill(size: Size = SEVEN, **choices):
    return bill_of_size(size, H100, find_prices("H100-SXM"), **choices)


def test_s0_15_a_size_takes_six_flops_a_parameter_and_token():
    found = bill(Size(num_parameters=7e9, tokens=1e12, num_ranks=64, mfu=0.5))
    assert found.train_s == pytest.approx(4.2e22 / (64 * PEAK * 0.5))
    assert any("6 FLOPs a parameter and token" in line for line in found.basis)


def test_an_mfu_that_is_assumed_is_said_to_be():
    found = bill()
    assert found.train_s == pytest.approx(4.2e22 / (64 * PEAK * ASSUMED_MFU))
    assert any("assumed" in line and "MFU 40%" in line for line in found.basis)


def test_full_recomputation_makes_it_eight_flops():
    size = Size(num_parameters=7e9, tokens=1e12, num_ranks=64, recompute="full")
    assert bill(size).train_s == pytest.approx(8 / 6 * bill().train_s)
    assert any("makes it 8" in line for line in bill(size).basis)


def test_a_given_mfu_counts_no_recomputed_work_and_stays_below_the_peak_with_it():
    plain = replace(SEVEN, mfu=0.5)
    again = bill(replace(plain, recompute="full"))
    assert again.train_s == bill(plain).train_s
    assert any("MFU 50%, as given: 67% of the peak computes" in line for line in again.basis)
    assert bill(replace(SEVEN, mfu=0.75, recompute="full")).costs
    with pytest.raises(ValueError, match=r"99% with full .* 132% of the peak.*0.75 at most"):
        bill(replace(SEVEN, mfu=0.99, recompute="full"))


def test_tokens_a_second_above_the_bf16_peak_are_said_to_be():
    fast = bill(replace(SEVEN, tokens_per_s=1.4e6, recompute="full"))
    assert any("124% of the bf16 peak, 62% of the fp8 peak" in line for line in fast.basis)
    assert not any("only fp8" in line for line in bill(replace(SEVEN, tokens_per_s=1e6)).basis)


def test_measured_tokens_a_second_need_no_peak():
    size = Size(num_parameters=7e9, tokens=1e12, num_ranks=64, tokens_per_s=1e6)
    assert bill(size).train_s == pytest.approx(1e6)


def test_a_run_of_eight_nodes_is_priced_first_where_the_network_is_known_to_serve_it():
    found = bill()
    assert found.costs[0].runs_as_planned
    a100 = find_accelerator("A100-40", where="a test")
    old = bill_of_size(SEVEN, a100, find_prices("A100-40"))
    assert "aws" in {cost.provider for cost in old.costs}
    assert "a network of 100 Gb/s a node, the run counts on 400" in dict(old.refused)["gcp"]


def test_a_size_that_does_not_fit_names_the_least_that_does():
    big = Size(num_parameters=70e9, tokens=1e9, num_ranks=8)
    with pytest.raises(ValueError, match="8 x H100-SXM have 637 GiB: take 14 or more"):
        bill(big)
    assert bill(replace(big, tokens_per_s=100.0)).costs  # it was measured, so it fits


def test_s0_15_tokens_a_second_show_their_mfu_and_are_held_against_the_peak():
    found = bill(replace(SEVEN, tokens_per_s=650e3))
    assert any("MFU 43% in bf16" in line for line in found.basis)
    with pytest.raises(ValueError, match=r"more than 64 x H100-SXM can compute: 3.02M at"):
        bill(replace(SEVEN, tokens_per_s=4e6))


def test_the_answer_stands_before_its_basis():
    top = "\n".join(format_bill(bill()).splitlines()[:5])
    assert "29,479 accelerator-hours" in " ".join(top.split())
    assert "\ncost        from $67,577 spot at gcp" in top
    assert "; cheaper, with open questions (?): $" in " ".join(top.split())


def test_a_card_without_a_price_is_named():
    text = format_bill(bill_of_size(SEVEN, H100, ()))
    assert "the catalog has no price of H100-SXM" in text


def test_a_provider_that_bills_by_the_accelerator_has_a_price_of_any_number_of_them():
    one_node = bill(Size(num_parameters=7e9, tokens=1e12, num_ranks=8))
    (cost,) = [each for each in one_node.costs if each.provider == "modal"]
    assert cost.per_instance_hour_usd == pytest.approx(8 * 3.9492, rel=1e-3)


def test_a_plan_s_bill_names_what_it_does_not_know():
    job, plan = job_of(JOB), plan_of()
    found = bill_of_plan(plan, job, find_prices(plan.cluster.accelerator))
    assert found.train_s == pytest.approx(plan.estimate.step_s * job.spec.train.steps)
    text = format_bill(found)
    assert "TOTAL lacks storage and egress, whose price is unknown" in text
    assert "no spot     price known at " in text
    assert all(cost.as_of.removeprefix("by ") in text for cost in found.costs)


def test_a_machine_with_too_little_host_memory_is_not_shown_as_the_price():
    plan = plan_of(
        JOB,
        "model.preset=llama-3-70b",
        "cluster.accelerator=H100-SXM",
        "cluster.nodes=8",
        "cluster.per_node=8",
        "engine=megatron",
        "train.global_batch=128",
    )
    assert plan.cost is not None
    assert plan.cost.runs_as_planned
    assert all("8x64v128gb" not in cost.instance for cost in plan.costs)


def test_accelerators_that_fill_no_machine_are_priced_with_those_that_stay_idle():
    b300 = find_accelerator("B300", where="a test")
    seven = bill_of_size(
        Size(num_parameters=7e9, tokens=1e9, num_ranks=7), b300, find_prices("B300")
    )
    assert {cost.provider for cost in seven.costs if cost.is_by_hand} == {"aws", "oci"}
    assert all(cost.terms["idle"] > 0 for cost in seven.costs if cost.is_by_hand)
    text = format_bill(seven)
    assert "cost        from $" in text
    assert "paceline render` writes no files that rent them" in " ".join(text.split())


def test_nodes_of_four_share_machines_of_eight_and_nodes_of_five_do_not():
    def machines(nodes: int, per_node: int) -> set[int]:
        sets = (f"cluster.nodes={nodes}", f"cluster.per_node={per_node}")
        plan = plan_of(JOB, "cluster.accelerator=A100-SXM-80GB", "train.global_batch=120", *sets)
        found = bill_of_plan(plan, job_of(JOB, *sets), find_prices("A100-80"))
        return {each.num_instances for each in found.costs if each.provider == "oci"}

    assert machines(3, 4) == {2}
    assert machines(4, 5) == {4}


def test_a_plan_without_a_price_says_so_and_why():
    plan = plan_of(JOB, "cluster.accelerator=RTX-4090", "cluster.nodes=2", "cluster.per_node=16")
    assert plan.cost is None
    for text in (format_plan(plan), "\n".join(plan_summary(plan))):
        assert "unknown: no machine with a price can run it" in " ".join(text.split())


def test_an_engine_that_deletes_no_checkpoint_pays_for_all_it_writes():
    asked = ("cluster.nodes=2", "checkpoint.every=100", "model.preset=gpt2", "data.seq_len=1024")
    for engine, count in (("megatron", 10), ("torchtitan", 3)):
        job = job_of(JOB, *asked, f"engine={engine}")
        plan = plan_of(JOB, *asked, f"engine={engine}")
        keeping = keeping_of(plan, job)
        assert keeping.stored_bytes == count * plan.estimate.num_checkpoint_bytes
        basis = bill_of_plan(plan, job, find_prices("H100-SXM")).basis
        assert any("deletes no checkpoint: all 10" in each for each in basis) == (count == 10)


def test_spot_machines_that_go_faster_than_the_run_restarts_have_no_price():
    large = bill(replace(SEVEN, num_ranks=16_384))
    assert {cost.way for cost in large.costs} == {"on demand"}
    assert "azure" in large.spot_taken
    assert "azure" not in large.spot_unpriced
    text = " ".join(format_bill(large).split())
    assert "taken away more often than the run can restart" in text
    assert "spot at" not in text.partition("PROVIDER")[0]
    assert not bill().spot_taken


def test_a_machine_that_is_too_small_is_the_largest_of_the_price_list_not_of_the_provider():
    prices = [row for row in find_prices("L4") if row.instance == "g2-standard-4"]
    why = why_none("gcp", prices, Needs(accelerators_per_node=8))
    assert why == (
        "its largest machine in the price list (g2-standard-4) has 1 accelerator, "
        "a node of the run needs 8"
    )


def test_the_host_memory_that_a_machine_lacks_is_told_in_parts_that_add_up():
    needs = needs_of(plan_of(JOB, "layout.offload=cpu"), None)
    assert sum(needs.host_parts.values()) == needs.host_memory_bytes
    assert set(needs.host_parts) == {
        "offloaded",
        "a checkpoint's copy",
        "copies in memory",
        "processes",
    }
    small = replace(find_prices("H100-SXM")[0], num_accelerators=8, host_memory_bytes=2**30)
    why = cannot_run(small, needs) or ""
    assert re.search(r"GiB \(offloaded .*, a checkpoint's copy .*, processes .*\)", why)


def test_copies_in_memory_are_a_part_of_the_host_memory_that_a_machine_must_have():
    text = JOB.replace("per_node: 8", "per_node: 8, nodes: 2")
    kept = plan_of(text, "recovery.state=memory")
    needs, alone = needs_of(kept, kept.state), needs_of(kept, None)
    copies = kept.state.tier("memory").host_bytes
    assert copies > 0
    assert needs.host_memory_bytes - alone.host_memory_bytes == copies
    assert needs.host_parts["copies in memory"] == copies


def test_a_mixture_of_experts_computes_its_active_parameters_and_stores_all():
    """DeepSeek-V3: 671B, 37B of them active, 14.8T tokens took 2.66M H800 hours to pre-train
    (arXiv:2412.19437, table 1), in FP8; here at the MFU that makes in bf16."""
    dense = Size(num_parameters=671e9, tokens=14.8e12, num_ranks=2048, mfu=0.4)
    whole, some = bill(dense), bill(replace(dense, num_active=37e9))
    assert whole.train_s is not None
    assert some.train_s == pytest.approx(whole.train_s * 37 / 671)
    assert some.keeping == whole.keeping
    assert "(37B active)" in some.name
    assert (some.size.num_active, some.size.num_parameters) == (37e9, 671e9)
    assert any(
        "every parameter counts as active (fewer: --active-params)" in line for line in whole.basis
    )
    assert not any("taken as active" in line for line in some.basis)
    with pytest.raises(ValueError, match="7B active parameters are more than the model's 1B"):
        bill(Size(num_parameters=1e9, num_active=7e9, tokens=1e9, num_ranks=64))
