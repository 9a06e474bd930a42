"""The simulator: draws, rhythm, ledger, other systems, and the controller's core at work in it."""

from dataclasses import replace
from math import isclose

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from paceline.estimate.goodput import daly_interval_s, goodput
from paceline.job.failure_rates import PRESETS, read_failures
from paceline.simulation.costs import (
    SYSTEMS,
    Costs,
    Phase,
    System,
    costs_on_gloo,
    costs_on_nccl,
    read_phase,
)
from paceline.simulation.failures import DAY_S, Fault, draw_faults, expected_per_s
from paceline.simulation.goodput import Ledger
from paceline.simulation.machines import Machines
from paceline.simulation.renewal import play
from paceline.simulation.rhythm import Rhythm, train
from paceline.simulation.scene import Outcome, Scene
from paceline.simulation.world import simulate

HOUR_S = 3600.0
RHYTHM = Rhythm(step_s=20.0, save_every=50, save_s=10.0, write_s=30.0)


def fixed(seconds: float) -> Phase:
    return Phase(seconds=seconds, known="given", source="this test")


def scene_of(**changes: object) -> Scene:
    fields = {
        "num_nodes": 600,
        "ranks_per_node": 8,
        "rhythm": RHYTHM,
        "costs": costs_on_nccl(copy_s=2.0, reload_s=60.0, meet="log2"),
        "tier": "replica",
        "covered": 1.0,
        "num_spares": 600,
        "repair_s": 4 * HOUR_S,
        "horizon_s": 5 * DAY_S,
        **changes,
    }
    return Scene(**fields)  # type: ignore[arg-type]


def lived(scene: Scene, *faults: Fault) -> Outcome:
    return simulate(scene, faults, np.random.default_rng(0))


def shares(scene: Scene, *faults: Fault) -> dict[str, float]:
    return dict(lived(scene, *faults).ledger.shares(scene.horizon_s))


# Draws.


@pytest.mark.parametrize(
    "text",
    [
        "6.5e-3/node-day",
        "6.5e-3/node-day, weibull 0.7",
        "6.5e-3/node-day, weibull 2, repeat 0.02 x 10",
        "ft-hsdp-100k",
    ],
)
def test_as_many_faults_are_drawn_as_the_process_says(text: str):
    spec, nodes, horizon_s = read_failures(text), 8192, 30 * DAY_S
    drawn = [
        len(draw_faults(spec, nodes, horizon_s, np.random.default_rng(seed))) for seed in range(8)
    ]
    assert np.mean(drawn) == pytest.approx(expected_per_s(spec, nodes) * horizon_s, rel=0.05)


def test_faults_come_in_order_and_take_whole_racks_of_nodes_that_there_are():
    spec = read_failures("2e-2/node-day, rack 0.5 of 16")
    faults = draw_faults(spec, 100, 30 * DAY_S, np.random.default_rng(0))
    assert [each.at_s for each in faults] == sorted(each.at_s for each in faults)
    racks = [each for each in faults if each.kind == "rack"]
    assert racks
    for each in racks:
        assert each.first_node % 16 == 0
        assert each.num_nodes == min(16, 100 - each.first_node)
        assert each.takes_nodes


def test_bursts_have_a_larger_spread_than_a_poisson_process():
    def spread(shape: str) -> float:
        spec = read_failures(f"2e-1/node-day, {shape}")
        counts = [
            len(draw_faults(spec, 20, 10 * DAY_S, np.random.default_rng(seed)))
            for seed in range(300)
        ]
        return float(np.var(counts) / np.mean(counts))

    assert spread("weibull 0.5") > 1.5 > spread("poisson") > 0.7 > spread("weibull 3")


def test_infant_mortality_comes_first_and_on_top():
    spec = read_failures("1e-2/node-day, infant 4 for 2 days")
    faults = draw_faults(spec, 4000, 30 * DAY_S, np.random.default_rng(0))
    first = sum(each.at_s < 2 * DAY_S for each in faults)
    last = sum(each.at_s >= 28 * DAY_S for each in faults)
    assert first > 2 * last
    assert len(faults) == pytest.approx(4000 * 1e-2 * (30 + 3 * 2), rel=0.1)


def test_repeat_offenders_take_their_part_of_the_failures():
    spec = read_failures("1e-2/node-day, repeat 0.01 x 50")
    faults = draw_faults(spec, 2000, 100 * DAY_S, np.random.default_rng(0))
    _, counts = np.unique([each.first_node for each in faults], return_counts=True)
    worst = np.sort(counts)[-20:].sum() / len(faults)
    assert worst == pytest.approx(0.01 * 50 / (0.99 + 0.5), abs=0.06)


# The rhythm and the ledger.


@settings(max_examples=300, deadline=None)
@given(
    step_s=some.floats(0.5, 50),
    every=some.none() | some.integers(1, 20),
    save_s=some.floats(0, 30),
    write_s=some.floats(0, 100),
    after=some.integers(0, 50),
    seconds=some.floats(0, 5000),
)
def test_a_stretch_is_what_walking_through_its_steps_gives(
    step_s, every, save_s, write_s, after, seconds
):
    rhythm = Rhythm(step_s=step_s, save_every=every, save_s=save_s, write_s=write_s)
    found = train(rhythm, after, seconds)
    now, steps, stall, committed = 0.0, 0, 0.0, None
    saves = []
    while now + step_s <= seconds + 1e-9:
        now, steps = now + step_s, steps + 1
        if every is not None and (after + steps) % every == 0:
            stalled = min(save_s, max(0.0, seconds - now))
            stall, now = stall + stalled, now + save_s
            saves.append((now + write_s, after + steps))
    committed = max((step for end, step in saves if end <= seconds), default=None)
    edge = any(isclose(end, seconds, rel_tol=1e-6, abs_tol=1e-6) for end, _ in saves)
    whole = found.steps * step_s + found.stall_s + found.partial_s
    assert whole == pytest.approx(seconds, abs=1e-6)
    if abs(found.steps - steps) <= 1 and found.steps != steps:
        # A float's last bit decides whether the last step was just finished.
        assert min(found.partial_s, step_s - found.partial_s) < 1e-6
    else:
        assert found.steps == steps
        assert found.stall_s == pytest.approx(stall, abs=1e-6)
        assert edge or found.committed == committed


def test_a_ledger_that_does_not_add_up_is_refused():
    ledger = Ledger()
    ledger.add("useful", 50.0)
    ledger.add("detect", 10.0)
    assert sum(ledger.shares(60.0).values()) == pytest.approx(1)
    with pytest.raises(AssertionError, match="accounted for"):
        ledger.shares(61.0)
    with pytest.raises(AssertionError, match="more was lost than was done"):
        ledger.lose(60.0)


def test_machines_come_back_after_their_repair_and_spares_fill_in():
    machines = Machines(num_spares=2, repair_s=100.0)
    machines.lose(0.0, 2)
    assert machines.enough_at(1.0) == 1.0
    assert machines.enough_at(1.0, besides=1) == 100.0
    machines.lose(10.0, 2)
    assert machines.enough_at(11.0) == 100.0
    assert machines.enough_at(105.0) == 105.0
    assert Machines(0, 10.0).enough_at(0.0, besides=1) == float("inf")


# Phases.


def test_phases_grow_as_their_law_says():
    assert read_phase("meet=2@8:linear")[1].at(80) == 20
    assert read_phase("meet=2")[1].at(80) == 2
    cited = costs_on_nccl(copy_s=0, reload_s=0, meet="cited").meet
    assert cited.at(16_384) == pytest.approx(200)
    assert cited.at(98_304) == pytest.approx(900)
    assert 0.1186 < cited.at(1024) < 200
    hang = costs_on_gloo(copy_s=0, reload_s=0).detect_hang
    assert hang.at(4, step_s=2.0) == 7.0


@pytest.mark.parametrize("text", ["meet", "met=3", "meet=x", "meet=3@8", "meet=3@8:cubic"])
def test_a_phase_that_is_none_is_refused(text: str):
    with pytest.raises(ValueError, match="is no"):
        read_phase(text)


def test_s4_16_every_phase_and_system_says_how_it_is_known():
    for costs in (
        costs_on_gloo(copy_s=1, reload_s=1),
        costs_on_nccl(copy_s=1, reload_s=1, meet="cited"),
    ):
        assert all(phase.source and phase.known for phase in costs.phases().values())
    assert all(each.restart.source for each in SYSTEMS.values())
    assert all(each.source for each in PRESETS.values())


# Other systems.


@pytest.mark.parametrize(("nodes", "save_s", "restart_s"), [(128, 20, 300), (2048, 20, 600)])
def test_checkpoint_restart_is_what_dalys_closed_form_says(nodes, save_s, restart_s):
    spec = read_failures("6.5e-3/node-day")
    mtbf_s = 1 / expected_per_s(spec, nodes)
    every = round(daly_interval_s(save_s, mtbf_s) / 20)
    known = goodput(mtbf_s=mtbf_s, interval_s=every * 20, save_s=save_s, restart_s=restart_s)
    horizon_s = 3000 * mtbf_s
    ledger = play(
        System(
            name="x",
            detect=fixed(0),
            restart=fixed(restart_s),
            lost="checkpoint",
            save_s=save_s,
        ),
        draw_faults(spec, nodes, horizon_s, np.random.default_rng(0)),
        rhythm=Rhythm(step_s=20.0, save_every=every, save_s=save_s),
        machines=Machines(10**6, 1.0),
        ranks=8 * nodes,
        horizon_s=horizon_s,
    )
    assert ledger.shares(horizon_s)["useful"] == pytest.approx(known.useful, rel=0.02)


# The world.


def test_a_run_that_nothing_disturbs_loses_its_start_and_its_saves_only():
    found = shares(scene_of())
    lost = {part for part, share in found.items() if share > 0} - {"useful", "stall"}
    assert lost <= {"meet", "state", "degraded", "recompute", "fence"}
    assert found["useful"] == pytest.approx(50 * 20 / (50 * 20 + 10), abs=1e-3)


def test_one_lost_node_costs_its_phases_and_less_than_a_step():
    scene = scene_of()
    before = lived(scene)
    after = lived(scene, Fault(2 * DAY_S, "node", 17, 1))
    costs, ranks = scene.costs, scene.num_ranks
    for part, phase in (
        ("detect", costs.detect_node),
        ("meet", costs.meet),
        ("state", costs.state),
    ):
        grown = after.ledger.seconds[part] - before.ledger.seconds[part]
        assert grown == pytest.approx(phase.at(ranks), abs=1e-6), part
    redone = after.ledger.seconds["recompute"] - before.ledger.seconds["recompute"]
    assert abs(redone) <= scene.rhythm.step_s
    assert (after.num_recoveries, after.in_place, after.from_checkpoint) == (1, 1, 0)
    assert after.downtimes_s == [
        pytest.approx(
            sum(
                phase.at(ranks, 20.0)
                for phase in (
                    costs.detect_node,
                    costs.fence,
                    costs.meet,
                    costs.state,
                    costs.first_step,
                )
            )
            + scene.rhythm.whole_step_s
        )
    ]


def test_without_a_live_copy_the_work_since_the_checkpoint_is_done_again():
    fault = Fault(2 * DAY_S, "node", 17, 1)
    kept = shares(scene_of(), fault)
    lost = shares(scene_of(covered=0.0), fault)
    assert lost["recompute"] > kept["recompute"]
    checkpoint = lived(scene_of(tier="checkpoint"), fault)
    assert checkpoint.from_checkpoint == 1


def test_a_process_that_ends_takes_no_copy_with_it():
    outcome = lived(scene_of(covered=0.0), Fault(2 * DAY_S, "process", 17, 1))
    assert outcome.from_checkpoint == 0


def test_snapshots_in_memory_lose_what_came_after_them():
    every = lived(scene_of(tier="memory", memory_every=1), Fault(2 * DAY_S, "node", 3, 1))
    rare = lived(scene_of(tier="memory", memory_every=40), Fault(2 * DAY_S, "node", 3, 1))
    more = rare.ledger.seconds["recompute"] - every.ledger.seconds["recompute"]
    assert 0 < more <= 40 * 20


def test_a_hang_takes_as_long_to_notice_as_the_learned_time_out():
    scene = scene_of()
    hang = lived(scene, Fault(2 * DAY_S, "hang", 17, 1))
    # Then every agent looks at its workers, which may take 0.3 s, and the core names the one.
    assert hang.ledger.seconds["detect"] == pytest.approx(1 + 3 * 20 + 0.3, abs=0.01)


def test_more_lost_nodes_than_spares_wait_for_the_repair():
    found = lived(scene_of(num_spares=2), Fault(2 * DAY_S, "rack", 16, 8))
    assert found.ledger.seconds["idle"] == pytest.approx(4 * HOUR_S, rel=0.01)
    assert (
        lived(scene_of(num_spares=8), Fault(2 * DAY_S, "rack", 16, 8)).ledger.seconds["idle"] == 0
    )


def test_a_fault_in_the_middle_of_a_recovery_is_recovered_from_as_well():
    scene = scene_of(costs=costs_on_nccl(copy_s=2.0, reload_s=60.0, meet="cited"))
    twice = lived(scene, Fault(2 * DAY_S, "node", 17, 1), Fault(2 * DAY_S + 30, "node", 400, 1))
    assert twice.num_recoveries == 1
    assert twice.downtimes_s[0] > 30 + scene.costs.meet.at(scene.num_ranks)


def test_a_run_that_gives_up_waits_for_a_person():
    # The same one again and again, each time in the recovery from the time before.
    storm = [Fault(2 * DAY_S + 30.0 * n, "process", 75, 1) for n in range(40)]
    scene = scene_of(costs=costs_on_nccl(copy_s=2.0, reload_s=60.0, meet="cited"))
    found = lived(scene, *storm)
    assert found.num_given_up >= 1
    assert found.ledger.seconds["idle"] >= 1800


@settings(max_examples=40, deadline=None)
@given(
    faults=some.lists(
        some.builds(
            Fault,
            some.floats(0, 5 * DAY_S),
            some.sampled_from(["process", "hang", "node", "rack", "switch"]),
            some.integers(0, 500),
            some.integers(1, 40),
        ),
        max_size=30,
    ),
    spares=some.sampled_from([0, 1, 5, 600]),
    tier=some.sampled_from(["replica", "memory", "checkpoint"]),
    covered=some.sampled_from([0.0, 0.5, 1.0]),
)
def test_every_second_is_accounted_for_whatever_fails(faults, spares, tier, covered):
    faults = sorted(faults, key=lambda fault: fault.at_s)
    scene = scene_of(num_spares=spares, tier=tier, covered=covered)
    found = shares(scene, *faults)
    assert sum(found.values()) == pytest.approx(1)
    assert all(share >= -1e-9 for share in found.values())


def test_the_reduced_world_is_as_good_as_every_node_by_itself():
    spec = read_failures("6.5e-3/node-day, x 20")
    scene = scene_of(num_nodes=64, num_spares=64)
    faults = draw_faults(spec, 64, scene.horizon_s, np.random.default_rng(0))
    whole = shares(replace(scene, representatives=64), *faults)
    reduced = shares(scene, *faults)
    assert reduced["useful"] == pytest.approx(whole["useful"], abs=2e-3)


def test_the_same_seed_gives_the_same_run():
    spec = read_failures("llama3, x 4, rack 0.05")
    scene = scene_of(covered=0.9)
    faults = draw_faults(spec, 600, scene.horizon_s, np.random.default_rng(3))
    assert shares(scene, *faults) == shares(scene, *faults)


def test_our_core_over_checkpoints_is_what_dalys_closed_form_says():
    none, restart_s = fixed(0.0), 300.0
    costs = Costs(
        detect=none,
        detect_node=none,
        detect_hang=none,
        fence=fixed(100.0),
        meet=fixed(100.0),
        state=fixed(100.0),
        reload=fixed(100.0),
        cold_start=none,
        first_step=none,
    )
    spec = read_failures("6.5e-3/node-day")
    mtbf_s = 1 / expected_per_s(spec, 600)
    every = round(daly_interval_s(20.0, mtbf_s) / 20)
    horizon_s = 1500 * mtbf_s
    scene = scene_of(
        costs=costs,
        tier="checkpoint",
        covered=0.0,
        rhythm=Rhythm(step_s=20.0, save_every=every, save_s=20.0),
        horizon_s=horizon_s,
        num_spares=10**6,
        max_restarts=1000,
    )
    faults = draw_faults(spec, 600, horizon_s, np.random.default_rng(0))
    known = goodput(mtbf_s=mtbf_s, interval_s=every * 20, save_s=20.0, restart_s=restart_s)
    assert shares(scene, *faults)["useful"] == pytest.approx(known.useful, rel=0.02)
