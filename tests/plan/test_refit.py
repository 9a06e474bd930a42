"""The layouts that a run which is out of memory takes, one after the other."""

from itertools import pairwise

from tests.plan.scene import JOB, TINY, cluster_of, job_of

from paceline.parallel import Layout
from paceline.plan import Plan, make_plan
from paceline.plan.refit import next_fit, rungs
from paceline.profile import resolve_decoder, resolve_profile


def made(job) -> Plan:
    return make_plan(job, cluster_of(job), resolve_profile(job), resolve_decoder(job))


def ladder(job):
    """The plan of a job, then of each rung until none is left."""
    plan = made(job)
    yield {}, plan
    while (found := next_fit(job, plan, made)) is not None:
        job, plan = found.job, found.plan
        yield found.changes, plan


def test_s0_13_an_odd_micro_batch_is_divided_by_its_smallest_factor():
    for size, smaller in ((12, 6), (9, 3), (7, 1)):
        layout = Layout(data=1, sharding="none", micro_batch=size, accumulation=1)
        assert next(rungs(layout)) == {"micro_batch": smaller}
    layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=1)
    assert "micro_batch" not in next(rungs(layout))


def test_s0_13_every_rung_keeps_the_global_batch_and_the_ranks_and_needs_less_memory():
    sharded = ("layout.sharding=none", "layout.recompute=none")
    for job in (job_of(TINY, *sharded), job_of(JOB, "layout.recompute=none")):
        steps = list(ladder(job))
        kinds = [next(iter(changes)) for changes, _ in steps[1:]]
        order = ["micro_batch", "recompute", "sharding", "offload"]
        assert kinds == sorted(kinds, key=order.index), kinds
        assert len(kinds) >= 2
        first = steps[0][1]
        for (_, before), (changes, after) in pairwise(steps):
            assert after.layout.global_batch == first.layout.global_batch
            assert after.layout.num_ranks == first.layout.num_ranks
            assert after.estimate.memory.known_bytes < before.estimate.memory.known_bytes
            for name, value in changes.items():
                assert getattr(after.layout, name) == value
    assert kinds[-1] == "offload"


def test_s0_13_on_one_card_the_last_rung_is_sharding_that_offloads():
    alone = Layout(data=1, sharding="none", micro_batch=1, accumulation=1, recompute="full")
    assert list(rungs(alone)) == [{"offload": "cpu", "sharding": "full"}]
    changes, after = list(ladder(job_of(JOB, "model.preset=gpt2-xl", "cluster.per_node=1")))[-1]
    assert changes == {"offload": "cpu", "sharding": "full"}
    assert after.layout.keeps_shards


def test_s0_13_what_the_planner_refuses_is_passed_over():
    kinds = {name for changes, _ in ladder(job_of(TINY)) for name in changes}
    assert "offload" not in kinds, "there is nothing to offload to on this machine's CPU"


def test_s0_13_a_plan_prints_that_the_run_may_change_its_layout():
    job = job_of(TINY, "recovery.on_oom=refit")
    assert [one.value for one in made(job).decisions if one.field == "recovery.on_oom"] == ["refit"]
    assert not [one for one in made(job_of(TINY)).decisions if one.field == "recovery.on_oom"]
