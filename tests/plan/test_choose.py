"""In which order layouts are chosen and listed, and how the order is explained."""

import re

import numpy as np
from tests.plan.scene import JOB, plan_of

from paceline.parallel import Layout, table_of
from paceline.plan.choose import SIMPLER, order_of
from paceline.plan.search import Priced
from paceline.report.plan_text import format_plan


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
    assert list(order_of(priced, 1.05)) == [2, 1, 0]
    assert list(order_of(priced, 1.0)) == [2, 0, 1]  # beyond the margin the faster one


def test_the_others_that_fit_are_sorted_by_the_time_that_is_shown():
    for nodes in (1, 2, 4):
        plan = plan_of(JOB, f"cluster.nodes={nodes}")
        fit = [e for e in plan.rejected if e.estimate.memory.known_bytes <= plan.limit_bytes]
        assert [e.estimate.step_s for e in fit] == sorted(e.estimate.step_s for e in fit)
        assert list(plan.rejected[: len(fit)]) == fit


def test_a_faster_layout_that_lost_says_what_it_is_at_worst_and_what_simpler_means():
    plan = plan_of()
    faster = [each.reason for each in plan.rejected if "faster" in each.reason]
    assert faster
    assert all(re.search(r"% faster \(.* at worst\)", reason) for reason in faster)
    assert "simpler, in order: " + SIMPLER[0] in format_plan(plan)
