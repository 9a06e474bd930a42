"""`recovery.state` in a plan: chosen, shown, refused where it cannot be."""

import pytest
from tests.plan.scene import JOB, TINY, job_of, plan_of

from paceline.catalog import find_prices
from paceline.errors import PlanError
from paceline.plan import plan_from_json, plan_to_json
from paceline.plan.bill import bill_of_plan
from paceline.report.plan_text import format_plan

LARGE = (
    "cluster.nodes=512",
    "train.global_batch=4096",
    "layout.data=4096",
    "recovery.state=auto",
)


def test_a_plan_names_the_tier_it_takes_with_the_worth_of_all():
    plan = plan_of(JOB, *LARGE, "layout.sharding=full")
    assert plan.state is not None
    assert plan.state.chosen in ("memory", "checkpoint")
    text = format_plan(plan)
    assert "recovery    from a copy in host memory (chosen: " in text
    assert "replica      not possible: no other rank holds the same state" in text
    assert plan_from_json(plan_to_json(plan)).state == plan.state


def test_a_hybrid_layout_takes_its_live_copies():
    plan = plan_of(JOB, *LARGE, "layout.sharding=hybrid", "layout.shard=8")
    assert plan.state is not None
    assert (plan.state.chosen, plan.state.copies) == ("replica", 512)


def test_another_engine_has_its_checkpoints_alone():
    wanted = (*LARGE, "engine=megatron", "model.preset=gpt2")
    state = plan_of(JOB, *wanted).state
    assert state is not None
    assert state.chosen == "checkpoint"
    assert state.tier("replica").why_not == "megatron saves only checkpoints"
    assert state.tier("memory").useful is None
    with pytest.raises(PlanError, match=r"P005: recovery\.state is replica, and megatron keeps"):
        plan_of(JOB, *wanted, "recovery.state=replica")


def test_a_replica_where_there_is_none_is_refused():
    with pytest.raises(PlanError, match="P005"):
        plan_of(JOB, "layout.sharding=full", "recovery.state=replica")


def test_memory_on_a_single_node_is_refused_and_on_this_machine_ranks_stand_for_nodes():
    with pytest.raises(PlanError, match="no second node"):
        plan_of(JOB, "recovery.state=memory")
    plan = plan_of(TINY, "layout.sharding=full", "recovery.state=memory")
    assert plan.state is not None
    assert plan.state.chosen == "memory"
    assert plan.state.tier("memory").useful is not None


def test_copies_that_stay_on_their_own_node_take_half_the_memory_and_outlive_processes_alone():
    both = plan_of(JOB, *LARGE, "layout.sharding=full").state
    own = plan_of(JOB, *LARGE, "layout.sharding=full", "recovery.snapshot_peers=false").state
    assert both is not None
    assert own is not None
    sent, kept = both.tier("memory"), own.tier("memory")
    assert kept.host_bytes == pytest.approx(sent.host_bytes / 2, abs=1)
    assert (kept.network_bytes_per_step, kept.fetch_s) == (0.0, 0.0)
    assert kept.covered == pytest.approx(54 / 419)
    assert sent.covered > 0.9
    alone = plan_of(JOB, "recovery.state=memory", "recovery.snapshot_peers=false").state
    assert alone is not None
    assert alone.chosen == "memory"


def test_checkpoints_that_the_job_fixes_are_priced_as_they_are():
    often = plan_of(JOB, "recovery.state=checkpoint", "checkpoint.every=1").state
    best = plan_of(JOB, "recovery.state=checkpoint").state
    assert often is not None
    assert best is not None
    assert (often.tier("checkpoint").useful or 1) < (best.tier("checkpoint").useful or 0)


def test_a_node_alone_keeps_no_snapshots_on_this_machine_as_on_a_declared_one():
    lone = "a copy in host memory needs a second node"
    for text in (JOB, TINY):
        state = plan_of(text, "layout.sharding=full").state
        assert state is not None
        assert state.tier("memory").why_not == lone
        assert state.chosen != "memory"


def test_snapshots_take_no_more_than_a_node_has():
    full = (*LARGE, "layout.sharding=full")
    state = plan_of(JOB, *full).state
    assert state is not None
    needed = state.tier("memory").host_bytes
    small = f"cluster.host_memory={needed // 2**20 - 1}MiB"
    state = plan_of(JOB, *full, small).state
    assert state is not None
    assert "of host memory, which has" in (state.tier("memory").why_not or "")
    with pytest.raises(
        PlanError, match=r"P005: recovery\.state is memory, and 4 copies of .*which"
    ):
        plan_of(JOB, *full, small, "recovery.state=memory")


@pytest.mark.parametrize("state", ["auto", "memory", "checkpoint"])
def test_the_run_its_time_and_its_cost_are_of_the_recovery_that_was_chosen(state: str):
    """They were of checkpoints alone, whatever was chosen; the time of copies was in no run."""
    words = (*LARGE[:-1], f"recovery.state={state}", "layout.sharding=full")
    plan, job = plan_of(JOB, *words), job_of(JOB, *words)
    assert plan.state is not None
    assert plan.goodput is not None
    assert plan.wall_s is not None
    assert plan.cost is not None
    assert plan.estimate.step_s is not None
    chosen = plan.state.tier(plan.state.chosen)
    assert plan.goodput.useful == pytest.approx(chosen.useful)
    assert plan.goodput.useful + sum(plan.goodput.terms.values()) == pytest.approx(1)
    assert ("copies" in plan.goodput.terms) == (plan.state.chosen == "memory")
    train_s = job.spec.train.steps * plan.estimate.step_s
    assert plan.wall_s == pytest.approx(train_s / (chosen.useful or 0))
    assert plan.cost.hours * 3600 == pytest.approx(plan.wall_s)
    bill = bill_of_plan(plan, job, find_prices(plan.cluster.accelerator))
    same = next(each for each in bill.costs if each.instance == plan.cost.instance)
    assert same.usd == pytest.approx(plan.cost.usd)
    assert sum(same.terms.values()) == pytest.approx(same.usd)
    spot = [each.useful for each in bill.costs if each.way == "spot"]
    assert all(share < plan.goodput.useful for share in spot)
    assert any("of failures recover from" in line for line in bill.basis) == (
        plan.state.chosen != "checkpoint"
    )
