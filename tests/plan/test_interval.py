"""`checkpoint.every` left open and fixed, where a step takes hours."""

import re

import pytest
from tests.plan.scene import JOB, job_of, plan_of

from paceline.plan import Plan
from paceline.plan.outlook import DEFAULTS, outlook
from paceline.report.plan_text import format_plan

SLOW = (
    "model.preset=llama-3-8b",
    "train.precision=bf16",
    "data.seq_len=1048576",
    "cluster.nodes=32",
    "train.global_batch=256",
    "train.steps=1000",
    "recovery.state=checkpoint",
)


def decided(plan: Plan) -> dict[str, str]:
    return {each.field: f"{each.value}: {each.reason}" for each in plan.decisions}


def useful(plan: Plan) -> float:
    assert plan.goodput is not None
    return plan.goodput.useful


@pytest.fixture(scope="module")
def slow() -> Plan:
    return plan_of(JOB, *SLOW)


@pytest.fixture(scope="module")
def fixed() -> Plan:
    return plan_of(JOB, *SLOW, "checkpoint.every=100")


def test_an_open_interval_of_hours_a_step_is_the_advised_one(slow: Plan):
    assert slow.checkpoint_every < 100
    assert useful(slow) > 0.99
    why = decided(slow)["checkpoint.every"]
    assert "if saved every 100; assumed: a failure every" in why
    assert not [each for each in slow.cautions if each.about == "checkpoint"]


def test_the_lost_state_counts_with_the_interval_of_the_run(slow: Plan, fixed: Plan):
    for plan in (slow, fixed):
        assert plan.state is not None
        assert plan.goodput is not None
        last = plan.state.tier("checkpoint")
        assert last.interval_s == pytest.approx(plan.goodput.interval_s)
        assert last.useful == pytest.approx(useful(plan), abs=0.01)


def test_a_fixed_interval_that_loses_much_is_a_warning_with_what_another_saves(
    slow: Plan, fixed: Plan
):
    assert fixed.checkpoint_every == 100
    (caution,) = [each for each in fixed.cautions if each.about == "checkpoint"]
    assert "checkpoint.every is 100 steps" in caution.what
    assert f"the goodput is {useful(fixed):.1%}" in caution.what
    assert f"set checkpoint.every to {slow.checkpoint_every}," in caution.fix
    assert "less in all" in caution.fix
    assert "warning     checkpoint: checkpoint.every is 100 steps" in format_plan(fixed)


def test_where_copies_cover_most_failures_the_same_interval_loses_little():
    plan = plan_of(JOB, *SLOW[:-1], "checkpoint.every=100")
    assert plan.state is not None
    assert plan.state.chosen == "replica"
    assert useful(plan) > 0.95
    assert not [each for each in plan.cautions if each.about == "checkpoint"]
    why = decided(plan_of(JOB, *SLOW[:-1]))["checkpoint.every"]
    assert ", if every failure resumed from a checkpoint" in why


def test_a_tenth_of_the_steps_stays_where_it_costs_next_to_nothing():
    plan = plan_of(JOB, "train.steps=1000")
    assert plan.checkpoint_every == 100
    assert decided(plan)["checkpoint.every"].startswith("100 steps: a tenth of the run")
    short = decided(plan_of(JOB, "train.steps=2"))
    assert short["evaluate.every"] == "1 step: a tenth of the run"  # it was "1 steps"


def test_a_better_interval_is_taken_where_the_printed_goodput_differs():
    asked = (
        *("cluster.nodes=32", "train.steps=5000", "train.global_batch=4096"),
        "recovery.state=checkpoint",
    )
    plan = plan_of(JOB, *asked)
    why = decided(plan)["checkpoint.every"]
    named = re.search(r"goodput ([\d.]+%); ([\d.]+%) if saved every 500; assumed: a failure", why)
    assert named is not None, why
    assert float(named[1][:-1]) > float(named[2][:-1])
    assert plan.checkpoint_every < 500
    assert why.startswith(f"{plan.checkpoint_every} steps: ")
    assert useful(plan) > useful(plan_of(JOB, *asked, "checkpoint.every=500"))


def test_training_stands_still_for_a_checkpoint_that_the_engine_does_not_write_in_the_background():
    asked = ("cluster.nodes=2", "checkpoint.every=100", "model.preset=gpt2", "data.seq_len=1024")
    ours, theirs = (
        outlook(plan_of(JOB, *asked, *engine), job_of(JOB, *asked, *engine))
        for engine in ((), ("engine=torchtitan",))
    )
    assert ours.background_s == ours.write_s
    assert theirs.background_s == 0
    assert theirs.save_s > theirs.write_s == ours.write_s > ours.save_s
    assert theirs.goodput is not None
    assert ours.goodput is not None
    assert theirs.goodput.terms["saving"] > 10 * ours.goodput.terms["saving"]


def test_all_nodes_together_write_no_faster_than_the_fastest_storage():
    assert DEFAULTS.storage_of(8) == 8 * DEFAULTS.storage_bytes_per_s
    assert DEFAULTS.storage_of(100_000) == DEFAULTS.most_storage_bytes_per_s


def test_on_spot_the_goodput_the_time_and_the_interval_are_those_of_spot_machines():
    """The time was that of spot machines, and the goodput beside it that of machines on demand."""
    text = JOB.replace("per_node: 8", "per_node: 8, nodes: 16").replace("1000", "50000")
    ways = ("plan.provider=azure", "plan.spot=true")
    spot, demand = (plan_of(text, ways[0], f"plan.spot={way}") for way in ("true", "false"))
    train_s = demand.wall_s * demand.goodput.useful
    assert spot.wall_s == pytest.approx(train_s / spot.goodput.useful)
    assert spot.goodput.useful == pytest.approx(spot.cost.useful)
    assert spot.goodput.useful < demand.goodput.useful
    assert spot.checkpoint_every < demand.checkpoint_every
    interval_s = spot.checkpoint_every * spot.estimate.step_s
    assert spot.goodput.interval_s == pytest.approx(interval_s, abs=spot.estimate.step_s)
    fixed = plan_of(text, *ways, "checkpoint.every=500")
    assert fixed.checkpoint_every == 500
    assert fixed.goodput.interval_s == pytest.approx(500 * fixed.estimate.step_s)
    assert fixed.goodput.useful < spot.goodput.useful
    shown = " ".join(format_plan(spot).split())
    assert f"goodput {spot.goodput.useful:.2%}" in shown.partition("recovery")[0]
    assert "assumed: a failure or spot instance taken every" in shown


def test_on_spot_each_interval_has_what_it_is_for():
    """Two stood there, and one reason, of neither."""
    text = JOB.replace("per_node: 8", "per_node: 8, nodes: 16").replace("1000", "50000")
    plan = plan_of(text, "plan.provider=azure", "plan.spot=true", "recovery.state=memory")
    assert (
        "recovery from a copy in host memory (asked for) after a failure; from the checkpoint, "
        f"saved every {plan.checkpoint_every} steps, where a spot instance is taken; below are "
        "failures alone host memory goodput"
    ) in " ".join(format_plan(plan).split())


def test_a_run_shorter_than_the_best_interval_has_one_goodput_on_the_whole_screen():
    text = JOB.replace("1000", "40")
    plan = plan_of(text, "cluster.nodes=2")
    view = outlook(plan, job_of(text, "cluster.nodes=2"))
    assert view.checkpoints.every_steps == 40
    assert view.checkpoints.goodput.interval_s == pytest.approx(40 * view.step_s)
    assert view.checkpoints.goodput == view.goodput
