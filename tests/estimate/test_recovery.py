"""Tiers of recovery state: who has copies, what they cost, which is taken."""

from dataclasses import replace

import pytest

from paceline.estimate.recovery import (
    Machine,
    Reliability,
    Training,
    copies_elsewhere,
    copies_of,
    state_plan,
)
from paceline.parallel import Layout, replicas_of
from paceline.report.recovery_text import tier_text

TRAINING = Training(
    num_parameters=8_000_000_000,
    moment_bytes=8,
    step_s=10,
    save_s=96_000_000_000 / 16_384 / 10e9,
    write_s=6,
)
MACHINE = Machine(num_domains=2048, ranks_per_node=8, network_bytes_per_s=50e9)
LLAMA3 = Reliability(rank_mtbf_s=16_384 * 54 * 24 * 3600 / 419, restart_s=600)


def layout_of(sharding: str = "full", **changes: int) -> Layout:
    fields = {"data": 16_384, "micro_batch": 1, "accumulation": 1, **changes}
    return Layout(sharding=sharding, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "per_node"),
    [
        (layout_of("none", data=16), 8),
        (layout_of("hybrid", data=16, shard=8), 8),
        (layout_of("hybrid", data=16, shard=2), 8),
        (layout_of("hybrid", data=8, shard=2, tensor=2, pipeline=2), 4),
        (layout_of("none", data=4, tensor=4), 8),
        (layout_of("full", data=16), 8),
        (layout_of("hybrid", data=4, context=2, shard=4, tensor=2), 8),
        (layout_of("hybrid", data=8, shard=2, expert=4), 4),
        (layout_of("none", data=8, expert=4), 4),
        (layout_of("zero1", data=8), 4),
    ],
)
def test_copies_are_counted_as_the_rank_map_places_them(layout: Layout, per_node: int):
    for rank in range(layout.num_ranks):
        same = next(group for group in replicas_of(layout) if rank in group)
        elsewhere = [each for each in same if each // per_node != rank // per_node]
        assert copies_of(layout) == len(same)
        assert copies_elsewhere(layout, per_node) == len(elsewhere)


def test_a_layout_with_copies_on_other_nodes_takes_them_for_they_cost_nothing():
    found = state_plan(layout_of("hybrid", shard=64), TRAINING, MACHINE, LLAMA3)
    assert found.chosen == "replica"
    replica = found.tier("replica")
    assert (replica.host_bytes, replica.network_bytes_per_step, replica.step_s) == (0, 0, 0)
    assert replica.useful is not None
    assert replica.useful > 0.99


def test_full_sharding_of_many_ranks_is_worth_a_copy_in_host_memory():
    found = state_plan(layout_of(), TRAINING, MACHINE, LLAMA3)
    assert found.tier("replica").why_not == "no other rank holds the same state"
    assert found.chosen == "memory"
    best, plain = found.tier(found.chosen).useful, found.tier("checkpoint").useful
    assert best is not None
    assert plain is not None
    assert best > plain + 0.03


def test_routed_experts_are_kept_as_often_as_they_are_there():
    layout = layout_of("none", data=8, expert=4)
    dense = state_plan(layout, TRAINING, MACHINE, LLAMA3).tier("memory")
    routed = replace(TRAINING, num_routed=TRAINING.num_parameters)
    experts = state_plan(layout, routed, MACHINE, LLAMA3).tier("memory")
    assert experts.host_bytes == pytest.approx(dense.host_bytes / 4)


def test_few_ranks_that_hardly_fail_keep_to_checkpoints():
    few = replace(MACHINE, num_domains=1)
    found = state_plan(layout_of(data=8), TRAINING, few, LLAMA3)
    assert found.chosen == "checkpoint"
    assert found.tier("memory").why_not == "a copy in host memory needs a second node"


def test_copies_inside_one_node_help_only_where_the_node_stays():
    inside, across = (
        state_plan(layout, TRAINING, replace(MACHINE, num_domains=nodes), LLAMA3).tier("replica")
        for layout, nodes in ((layout_of("none", data=8), 1), (layout_of("none", data=64), 8))
    )
    assert inside.covered == pytest.approx(54 / 419)
    assert across.covered > 0.99


def test_copies_inside_one_node_serve_processes_alone_however_often_those_fail():
    mostly_software = replace(LLAMA3, process_share=0.6)
    inside = state_plan(
        layout_of("none", data=8), TRAINING, replace(MACHINE, num_domains=1), mostly_software
    ).tier("replica")
    assert "covers 60.0% of failures (a process ends, its node stays up)" in tier_text(inside)
    assert not inside.outlives_node


def test_the_more_often_it_fails_the_less_is_useful_and_the_shorter_the_interval():
    often = replace(LLAMA3, rank_mtbf_s=LLAMA3.rank_mtbf_s / 4)
    one, four = (state_plan(layout_of(), TRAINING, MACHINE, each) for each in (LLAMA3, often))
    for name in ("memory", "checkpoint"):
        before, after = one.tier(name), four.tier(name)
        assert (before.useful or 0) > (after.useful or 1)
        if before.interval_s and after.interval_s:
            assert after.interval_s <= before.interval_s


def test_what_the_job_asks_for_is_taken_and_what_it_gives_away_is_said():
    found = state_plan(layout_of(), TRAINING, MACHINE, LLAMA3, asked="checkpoint")
    assert (found.chosen, found.is_asked) == ("checkpoint", True)
    assert found.reason.startswith("asked for checkpoint; ")
