"""Rows of the fault matrix that need four ranks or two nodes; the others are in
`test_fault_matrix.py`.
"""

import pytest
from tests.drill.test_fault_matrix import OVER_BOTH, OVER_BOTH_SLOWLY, drill, sources

# Lost nodes, flipped bits and broken lines are run once each in `tests/run/`; their decisions are
# in `tests/control/`.
pytestmark = [pytest.mark.ranks, pytest.mark.repeat]

FOUR = ("--set", "cluster.per_node=4")
NODES = ("--set", "cluster.nodes=2", "--set", "cluster.per_node=1")


@OVER_BOTH_SLOWLY
@pytest.mark.slow
def test_row_6_a_killed_agent_takes_its_workers_along_and_its_node_comes_back(scene):
    said = drill(scene, "agent rank=1 step=6", options=NODES)
    assert said["steps_lost"] == 0


@OVER_BOTH_SLOWLY
@pytest.mark.slow  # the quick one is in `tests/run/test_sharded_recovery.py`
def test_row_7_a_lost_node_comes_back(scene):
    said = drill(scene, "node rank=0 step=6", options=NODES)
    assert said["steps_lost"] == 0


@OVER_BOTH_SLOWLY
def test_rows_11_and_36_a_node_connects_again_and_begins_another_fork_server_when_one_dies(scene):
    faults = ("disconnect rank=1 step=3", "fork-server rank=1 step=6", "kill rank=1 step=10")
    said = drill(scene, *faults, options=NODES)
    assert sources(said) == {"replica"}
    assert said["steps_lost"] == 0


@OVER_BOTH_SLOWLY
@pytest.mark.slow
def test_row_8_the_store_dies_while_the_others_meet(scene):
    drill(scene, "kill rank=1 step=6", "store rank=1 step=6 phase=meet", options=FOUR)


@OVER_BOTH
def test_rows_26_and_27_a_survivor_dies_parked_and_two_at_once_leave_a_replica(scene):
    said = drill(
        scene,
        "kill rank=1 step=4",
        "kill rank=0 step=4 phase=parked",
        "kill rank=0+2 step=10",
        options=FOUR,
    )
    assert said["steps_lost"] == 0


@OVER_BOTH_SLOWLY
@pytest.mark.parametrize("of", ["parameters", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_row_18_a_flipped_bit_is_found_and_healed(scene, of):
    drill(scene, f"flip rank=1 step=6 of={of}", options=FOUR)
