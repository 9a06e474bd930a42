"""Every row of the fault matrix that this machine can inject, each against its oracle.

A test is one `paceline drill`: the job on real ranks, with the fault and without, over gloo and
over the double of NCCL, where data arrive late and an abort raises nothing (`tests/sim`). The rows
that no drill can make are tests that are skipped, each with its reason, so that they are counted.
Rows that need four ranks or two nodes are in `test_fault_matrix_wide.py`.
"""

import json
import os
from pathlib import Path

import pytest
from tests.run.scene import Scene

from paceline.job import load_job
from paceline.job.corpus import find_corpus
from paceline.job.fault_grammar import MATRIX
from paceline.runtime.sampling import sample_ids

pytestmark = pytest.mark.ranks

USUAL = ("--steps", "14", "--set", "checkpoint.every=4", "--set", "evaluate.every=100")
FROM_DISK = ("--set", "recovery.state=checkpoint")

OVER_BOTH = pytest.mark.parametrize(
    "scene", [pytest.param("gloo", marks=pytest.mark.repeat), "double"], indirect=True
)
OVER_BOTH_SLOWLY = pytest.mark.parametrize(
    "scene", ["gloo", pytest.param("double", marks=pytest.mark.slow)], indirect=True
)


def drill(scene: Scene, *faults: str, options: tuple[str, ...] = ()) -> dict:
    """What a drill says, which must be that all held."""
    asked = [part for fault in faults for part in ("--fault", fault)]
    done = scene.paceline("drill", "job.yaml", *asked, *USUAL, *options, "--json", timeout=600)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    said = json.loads(done.stdout)
    wrong = [check for check in said["checks"] if check["ok"] is False]
    logs = scene.logs(str(Path(said["run"]).relative_to(scene.folder)))
    assert not wrong, f"{wrong}\n{done.stderr}\n{logs}"
    assert done.returncode == 0
    return said


def sources(said: dict) -> set[str]:
    return {fault["recovered"]["source"] for fault in said["faults"] if fault["recovered"]}


@OVER_BOTH
def test_rows_1_2_10_and_25_every_way_to_die_at_each_place_of_a_step_costs_no_step(scene):
    said = drill(
        scene,
        "kill rank=0 step=3 phase=start",
        "segv rank=1 step=4 phase=forward",
        "abort rank=0 step=5 phase=backward",
        "exit rank=1 step=6 phase=reduce",
        "kill rank=0 step=7 phase=vote",
        "kill rank=1 step=8 phase=apply",
        "kill rank=0 step=9 phase=applied",
        "raise rank=1 step=11 phase=start",
    )
    assert sources(said) <= {"own", "replica"}
    assert said["steps_lost"] == 0


@OVER_BOTH_SLOWLY
@pytest.mark.slow
def test_row_36_the_fork_server_of_the_only_node_dies(scene):
    said = drill(scene, "fork-server rank=1 step=11")
    assert sources(said) <= {"checkpoint", "initial"}


@pytest.mark.repeat  # the decisions are in `tests/control/test_core.py`
@OVER_BOTH_SLOWLY
def test_rows_8_and_26_the_store_dies_at_work_and_a_worker_while_another_is_replaced(scene):
    drill(
        scene,
        "store rank=1 step=4",
        "kill rank=1 step=8",
        "kill rank=1 step=8 phase=restore",
    )


@OVER_BOTH_SLOWLY
@pytest.mark.slow
def test_row_8_the_store_dies_at_the_vote(scene):
    drill(scene, "store rank=1 step=6 phase=vote")


@pytest.mark.repeat  # a takeover is in `tests/run/test_controller.py`
@OVER_BOTH_SLOWLY
def test_rows_9_and_28_a_parked_spare_dies_and_another_controller_takes_over(scene):
    drill(
        scene,
        "kill rank=1 step=3",
        "spare rank=0 step=5",
        "controller rank=1 step=8",
        "kill rank=0 step=11",
    )


@OVER_BOTH_SLOWLY
@pytest.mark.slow
def test_row_26_a_worker_dies_about_to_meet_the_others(scene):
    drill(scene, "kill rank=1 step=6", "kill rank=1 step=6 phase=meet")


@OVER_BOTH_SLOWLY
@pytest.mark.slow  # the quick one is in `tests/run/test_memory.py`
def test_row_29_no_spare_is_left(scene):
    said = drill(scene, "kill rank=1 step=6", options=("--set", "recovery.spares=0"))
    assert said["steps_lost"] == 0


@OVER_BOTH_SLOWLY
@pytest.mark.slow  # the quick one is in `tests/run/test_recovery.py`
def test_s4_15_row_24_killed_while_a_checkpoint_is_written(scene):
    drill(scene, "kill rank=1 step=8 phase=save")


@OVER_BOTH_SLOWLY
@pytest.mark.parametrize("kind", ["torn", "zeroed", "flipped", "swapped", "missing"])
@pytest.mark.slow
def test_rows_15_to_17_a_damaged_checkpoint_is_passed_over(scene, kind):
    said = drill(scene, f"{kind} rank=0 step=11", options=FROM_DISK)
    assert sources(said) <= {"checkpoint", "initial"}
    events = (scene.folder / said["run"] / "events.jsonl").read_text()
    assert "CheckpointRefused" in events


@OVER_BOTH_SLOWLY
def test_row_21_a_poisoned_sample_is_named(scene):
    job = load_job(scene.folder / "job.yaml")
    num_samples = (find_corpus(job).num_train_bytes - 1) // job.spec.data.seq_len
    read = sample_ids(5, range(8), seed=0, global_batch=8, num_samples=num_samples)
    said = drill(scene, f"poison sample={read[3]}")
    assert str(read[3]) in said["faults"][0]["verdict"]


@OVER_BOTH_SLOWLY
def test_rows_20_22_and_23_a_loss_that_is_no_number_a_full_memory_and_a_clock_that_jumps(scene):
    drill(
        scene,
        "oom rank=1 step=3",
        "clock rank=0 step=5",
        "nan rank=1 step=6",
        "nan rank=0+1 step=8",
        "kill rank=1 step=11",
    )


@OVER_BOTH_SLOWLY
@pytest.mark.slow  # the quick one is of Ctrl-C, in `tests/run/test_resume.py`
def test_row_30_sigterm_saves_and_goes_on_when_started_again(scene):
    drill(scene, "term rank=1 step=6")


@OVER_BOTH_SLOWLY
@pytest.mark.slow  # the quick one is in `tests/run/test_own_code.py`
def test_row_31_a_crash_loop_ends(scene):
    drill(scene, "raise rank=1 step=6 times=9")


@OVER_BOTH_SLOWLY
def test_row_32_what_only_takes_long_is_left_alone(scene):
    drill(
        scene,
        "long rank=1 step=6 for=2s",
        "pause rank=0 step=8 for=1s",
        "long rank=1 step=8 phase=save for=1s",
        "pause-agent rank=1 step=10 for=500ms",
        "slow rank=1 step=11 for=1s",
    )


@OVER_BOTH_SLOWLY
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "deadlock", "gil", "loop"])
def test_rows_3_and_5_a_hang_is_found_named_and_fenced(scene, kind):
    said = drill(scene, f"{kind} rank=1 step=8")
    assert said["steps_lost"] == 0


@OVER_BOTH_SLOWLY
@pytest.mark.slow
def test_row_4_a_zombie_comes_back_and_is_refused(scene):
    drill(scene, "zombie rank=1 step=8 for=13s", options=("--steps", "400"))


@pytest.mark.parametrize("row", [row for row in MATRIX if row.skipped], ids=lambda r: r.title)
def test_a_row_that_cannot_be_injected(row):
    pytest.skip(f"row {row.number}, {row.title}: {row.skipped}")


@OVER_BOTH_SLOWLY
@pytest.mark.slow  # the quick one is in `tests/drill/test_soak.py`
def test_s1_18_random_faults_and_a_schedule_of_their_own(scene):
    seed = int.from_bytes(os.urandom(3))
    done = scene.paceline(
        *("drill", "job.yaml", "--random", "4", "--seed", str(seed), *USUAL), timeout=590
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
