"""In which order layouts are chosen and listed, and how the order is explained."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.plan.scene import JOB, plan_of

from paceline.estimate.estimate import price_one
from paceline.job import PlanSpec
from paceline.parallel import Layout, table_of
from paceline.plan.case import case_of_plan
from paceline.plan.choose import SIMPLER, order_of
from paceline.plan.reasons import _against_best, _terms_that_differ
from paceline.plan.search import Priced
from paceline.report.plan_explain import explain_plan
from paceline.report.plan_text import format_plan

ONLY_DATA = ("layout.tensor=1", "layout.pipeline=1", "layout.context=1")


def test_of_layouts_within_the_margin_one_without_a_pipeline_is_taken_however_it_is_sharded():
    layouts = []
    for pipeline, context, sharding, schedule in (
        (8, 1, "zero1", "zero-bubble"),
        (8, 1, "zero1", "1f1b"),
        (1, 2, "hybrid", "1f1b"),
    ):
        layouts.append(
            Layout(
                data=8 // pipeline // context,
                context=context,
                pipeline=pipeline,
                sharding=sharding,
                schedule=schedule,
                micro_batch=1,
                accumulation=64 // (8 // pipeline // context),
            )
        )
    priced = Priced(
        layouts=table_of(layouts), step_s=np.array([1.03, 1.04, 1.0]), memory_bytes=np.zeros(3)
    )
    assert list(order_of(priced, 1.05, np.inf)) == [2, 1, 0]
    assert list(order_of(priced, 1.0, np.inf)) == [2, 0, 1]  # beyond the margin the faster one


def test_a_simpler_layout_that_fills_the_memory_loses_to_a_faster_one_that_leaves_room():
    layouts = [
        Layout(data=8, sharding=sharding, micro_batch=1, accumulation=1)
        for sharding in ("none", "zero1")
    ]

    def first(ddp_s: float, ddp_bytes: float) -> int:
        priced = Priced(
            layouts=table_of(layouts),
            step_s=np.array([ddp_s, 1.0]),
            memory_bytes=np.array([ddp_bytes, 40.0]),
        )
        return int(order_of(priced, 1.05, 72.0)[0])

    assert first(1.02, 71.9) == 1
    assert first(1.02, 60.0) == 0
    assert first(0.99, 71.9) == 0


def test_the_others_that_fit_are_sorted_by_the_time_that_is_shown():
    for nodes in (1, 2, 4):
        plan = plan_of(JOB, f"cluster.nodes={nodes}")
        fit = [e for e in plan.rejected if e.estimate.memory.known_bytes <= plan.limit_bytes]
        assert [e.estimate.step_s for e in fit] == sorted(e.estimate.step_s for e in fit)
        assert list(plan.rejected[: len(fit)]) == fit


def test_a_faster_layout_that_lost_says_by_how_much_and_what_simpler_means():
    plan = plan_of(JOB, "data.seq_len=10240")
    faster = [each for each in plan.rejected if "faster" in each.reason]
    assert faster
    assert all(
        re.fullmatch(r"[\d.]+% faster", each.reason)
        and each.passed_over == "faster by less than 5% (plan.simpler_margin), but more complex"
        for each in faster
    )
    screen = format_plan(plan)
    assert screen.count("but more complex") == 1
    assert re.search(r"why         more complex: up to [\d.]+% faster; .+% slower\n", screen)
    assert SIMPLER[0] in " ".join(explain_plan(plan).split())


def test_a_faster_layout_that_is_later_at_the_slow_end_of_its_range_says_that_it_lost_by_that():
    plan = plan_of(EXPERTS)
    faster = [each for each in plan.rejected if "faster (" in each.reason]
    assert faster
    for each in faster:
        assert each.passed_over.startswith("likely faster, but slower at the slow end")
        assert re.fullmatch(
            r"[\d.]+% faster \([\d.]+% slower at the slow end of both ranges\)", each.reason
        )
        assert each.estimate.step_high_s > plan.estimate.step_high_s
    assert "takes the least time at the slow end of" in " ".join(format_plan(plan).split())


EXPERTS = """\
name: experts
model: {preset: qwen3-30b-a3b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, nodes: 2, per_node: 8}
train: {global_batch: 256, steps: 1000}
engine: megatron
"""


def test_a_dispatcher_that_is_asked_for_has_tokens_to_send():
    assert plan_of(EXPERTS).layout.expert == 1
    assert plan_of(EXPERTS, "train.token_dispatcher=alltoall").layout.expert > 1


def test_a_need_just_over_its_limit_is_printed_with_the_digits_that_tell_them_apart():
    """ "2 needs 72 GiB of 72 GiB" was the reason for one sample at a time."""
    fixed = ("layout.sharding=full", "layout.recompute=none", *ONLY_DATA)
    tight = plan_of(JOB, *fixed, "cluster.memory=70GiB")
    layout = tight.layout
    assert layout.micro_batch == 1
    double = replace(layout, micro_batch=2, accumulation=layout.accumulation // 2)
    needed = price_one(double, case_of_plan(tight)).memory.known_bytes
    little = (needed - 2**20) / (1 - PlanSpec().head_room)
    plan = plan_of(JOB, *fixed, f"cluster.memory={little:.0f}")
    (reason,) = (each.reason for each in plan.decisions if each.field == "layout.micro_batch")
    fits = "the largest that fits without recompute; micro-batch "
    claim = fits + r"2 needs ([\d.]+) GiB, more than the ([\d.]+) GiB that a rank may use"
    found = re.fullmatch(claim, reason)
    assert found is not None
    assert 0 < float(found[1]) - float(found[2]) < 0.01


def test_the_largest_micro_batch_is_claimed_only_with_the_recompute_it_was_tried_with():
    """2 fits with every block recomputed; every fourth leaves no room for it."""
    fixed = ("layout.sharding=full", "layout.recompute_every=4", *ONLY_DATA)
    plan = plan_of(JOB, *fixed)
    layout = plan.layout
    (reason,) = (each.reason for each in plan.decisions if each.field == "layout.micro_batch")
    assert layout.recompute_every > 1
    double = replace(
        layout,
        micro_batch=2 * layout.micro_batch,
        accumulation=layout.accumulation // 2,
        recompute_every=1,
    )
    assert price_one(double, case_of_plan(plan)).memory.known_bytes < plan.limit_bytes
    claim = f"the largest that fits with full recompute every {layout.recompute_every} blocks; "
    assert reason.startswith(claim)


def test_a_faster_layout_of_another_sharding_lost_because_the_chosen_one_is_simpler():
    plan = plan_of()
    faster = replace(plan.estimate, step_s=0.96 * plan.estimate.step_s)
    choice = SimpleNamespace(
        layout=plan.layout,
        estimate=plan.estimate,
        case=case_of_plan(plan),
        limit_bytes=plan.limit_bytes,
        margin=0.05,
    )
    said = _against_best(choice, [(plan.layout, faster)])
    assert re.fullmatch(
        r"simpler than .*, which is 4.0% faster \(plan.simpler_margin: 5%\)",
        said,
    )
    ddp = replace(plan.layout, sharding="none")
    assert ", but leaves little room: it needs " in _against_best(choice, [(ddp, faster)])


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("accelerate", "full gradients (do not fit|would need .* more), so every"),
        ("torchtitan", "the engine reduces them after each micro-batch$"),
    ],
)
def test_why_gradients_are_reduced_each_time_is_the_engine_only_where_it_has_no_choice(
    engine: str, reason: str
):
    """Accelerate's files set it either way, and the plan said that it is how the engine does it."""
    asked = ("layout.sharding=full", "layout.micro_batch=1", "cluster.accelerator=A100-40")
    plan = plan_of(JOB, f"engine={engine}", *asked)
    assert plan.layout.reduce_every_micro_batch
    field = "gradient accumulation"
    (found,) = (each.reason for each in plan.decisions if each.field == field)
    assert re.search(reason, found)


def test_the_least_sharding_is_claimed_only_where_no_variant_of_a_lesser_one_fits():
    """It read: ZeRO-2 needs 54.7 GiB, more than 36, and a smaller micro-batch fits."""
    text = JOB.replace("llama-3-8b", "llama-2-13b").replace("per_node: 8", "per_node: 2")
    given = ("cluster.accelerator=A100-40", "train.global_batch=64", "data.seq_len=4096")
    plan = plan_of(text, *given)
    assert plan.layout.sharding == "full"
    assert plan_of(text, *given, "layout.sharding=zero2", *ONLY_DATA).num_fitting
    (reason,) = (each.reason for each in plan.decisions if each.field == "layout.sharding")
    assert re.fullmatch(r"fits; .*ZeRO-2.* is estimated [\d.]+% slower", reason)


def test_the_terms_of_a_layout_that_lost_add_up_to_what_it_takes_more():
    """It read: 0.5% slower: compute +157 ms, context comm +141 ms, data-parallel comm -352 ms."""
    plan = plan_of(JOB, "data.seq_len=4096", "train.global_batch=128")
    told = 0
    for each in plan.rejected:
        parts = re.findall(r"([+-])([\d.]+) (m?)s\b", each.reason)
        more_s = sum(float(f"{sign}{size}") / (1000 if m else 1) for sign, size, m in parts)
        step_s = each.estimate.step_s
        if parts and step_s is not None:
            told += 1
            assert more_s == pytest.approx(step_s - plan.estimate.step_s, abs=0.002 * step_s)
    assert told


def test_two_times_that_round_alike_are_told_apart():
    """It read: 0.5% slower: 1m 37s a step, not 1m 37s."""
    chosen = replace(plan_of().estimate, step_s=97.0, terms={"compute": 97.0})
    other = replace(chosen, step_s=97.4, terms={"compute": 97.4})
    assert _terms_that_differ(other, chosen) == "400 ms a step more"
