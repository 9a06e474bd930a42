"""A rank is killed in every kind of layout with a copy of its state: nothing is lost."""

import pytest
from tests.run.scene import Scene

from paceline.record import events as log

pytestmark = pytest.mark.ranks

LAYOUTS = [  # rows 26 and 27 in `tests/drill/test_fault_matrix_wide.py` kill ranks that have copies
    pytest.param(("sharding=hybrid", "shard=2"), id="HSDP 2x2", marks=pytest.mark.repeat),
    pytest.param(("tensor=2",), id="DDP 2 x tensor 2", marks=pytest.mark.slow),
    pytest.param(("pipeline=2",), id="DDP 2 x pipeline 2", marks=pytest.mark.slow),
    pytest.param(("context=2",), id="DDP 2 x context 2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_kills_cost_no_step_and_no_bit(layout, tmp_path):
    scene = Scene(tmp_path)
    degree = 4 if layout[0].startswith("sharding") else 2
    options = [f"layout.{option}" for option in (f"data={degree}", *layout)]
    sets = [part for option in ("cluster.per_node=4", *options) for part in ("--set", option)]
    clean = scene.run("clean", *sets)
    kills = "drill.kill=[rank=1@step=5@backward, rank=0@step=9@apply]"
    run = scene.run("killed", *sets, "--set", kills)
    assert run.digest == clean.digest
    assert run.samples == clean.samples
    recovered = run.of(log.Recovered)
    assert [event.lost_rank for event in recovered] == [1, 0]
    assert [event.steps_lost for event in recovered] == [0, 0]
    assert {event.source for event in recovered} == {"replica"}


@pytest.mark.slow
def test_muon_killed_in_the_update_of_its_shards_goes_on_from_a_checkpoint(tmp_path):
    """Its update needs whole matrices, so that no rank can roll the step forward alone."""
    scene = Scene(tmp_path)
    sets = ("layout.sharding=full", "train.optimizer=muon", "recovery.state=checkpoint")
    options = [part for option in (*sets, "checkpoint.every=2") for part in ("--set", option)]
    clean = scene.run("clean", *options)
    run = scene.run("killed", *options, "--set", "drill.kill=[rank=1@step=11@apply]")
    assert run.digest == clean.digest
    assert run.samples == clean.samples
    (recovered,) = run.of(log.Recovered)
    assert (recovered.lost_rank, recovered.source) == (1, "checkpoint")
    applied = 10, 11  # a kill in `apply` may come after the other had applied
    assert recovered.steps_lost in [step - recovered.resumed_from_step for step in applied]
