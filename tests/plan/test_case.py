"""A plan keeps what it was priced with, and says what it decides by the machine it runs on."""

from dataclasses import replace

import pytest
from tests.plan.scene import JOB, cluster_of, job_of, plan_of

from paceline.errors import PlanError
from paceline.estimate import price_one
from paceline.parallel import Layout
from paceline.plan import plan_from_json, plan_to_json
from paceline.plan.case import case_of_plan
from paceline.plan.search_inputs import decide_precision
from paceline.profile import resolve_profile


def test_a_plans_case_has_the_constants_of_a_catalog_file_of_ones_own():
    plan = plan_of()
    slow = {"H100-SXM": {"sustained": 0.4}}
    again = plan_from_json(plan_to_json(replace(plan, measured_rates=slow)))
    assert again.measured_rates == slow
    usual, own = (price_one(plan.layout, case_of_plan(each)) for each in (plan, again))
    assert usual.step_s == pytest.approx(plan.estimate.step_s)
    assert own.terms["compute"] > 1.5 * usual.terms["compute"]


def test_a_case_priced_again_keeps_its_constants():
    plan = plan_of()
    case = case_of_plan(replace(plan, measured_rates={"H100-SXM": {"sustained": 0.4}}))
    job = job_of(JOB, "cluster.nodes=2")
    other = case.again(cluster=cluster_of(job), profile=resolve_profile(job))
    assert other.efficiencies == case.efficiencies
    assert other.cluster.num_nodes == 2


def test_a_plan_of_an_engines_version_is_priced_with_that_versions_facts():
    plan = plan_of(JOB, "engine=torchtune 0.6")
    assert (plan.engine, plan.engine_version) == ("torchtune", "0.6")
    assert case_of_plan(plan).engine.loss_peak_bytes == 2.5


def test_compiling_has_an_effect_on_the_step():
    plain, quick = (plan_of(JOB, f"train.compile={word}") for word in ("false", "true"))
    assert quick.estimate.terms["compute"] < plain.estimate.terms["compute"]
    assert price_one(quick.layout, case_of_plan(quick)).step_s == pytest.approx(
        quick.estimate.step_s
    )


def test_fp16_is_taken_on_this_machine_too_where_bf16_is_missing():
    job = job_of(JOB, "cluster.accelerator=V100-32", "model={preset: gpt2-large}")
    here = replace(cluster_of(job), is_local=True)
    assert decide_precision(job, here) == "fp16"


def test_adamw_of_8_bits_is_offered_on_this_machine_where_nothing_fits():
    small = "cluster={per_node: 2}", "train.precision=fp32", "train.global_batch=2"
    with pytest.raises(PlanError, match=r"set train\.optimizer to adamw-8bit"):
        plan_of(JOB, *small, "model={preset: gpt2-large}", "data.seq_len=512")


def test_s4_3_states_in_bf16_are_offered_where_a_mac_cannot_hold_them_in_float32():
    mac = "cluster={accelerator: M2-Ultra, per_node: 1, memory: 96GB}"
    asked = (mac, "model={preset: llama-3-8b}", "train.global_batch=8", "data.seq_len=2048")
    with pytest.raises(PlanError, match=r"set train\.states to bf16: 1 rank fits"):
        plan_of(JOB, *asked)
    assert plan_of(JOB, *asked, "train.states=bf16").states == "bf16"


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ({"sharding": "zero1"}, "data 2 x context parallel 2 (ring), ZeRO-1"),
        ({"sharding": "full", "tensor": 2}, "data 2 x context parallel 2 (ring) x tensor 2, FSDP2"),
        ({"sharding": "none"}, "data 2 x context parallel 2 (ring), DDP"),
    ],
)
def test_a_layouts_name_gives_the_axes_and_then_what_is_shared(layout, name):
    assert Layout(data=2, micro_batch=1, accumulation=1, context=2, **layout).name == name
