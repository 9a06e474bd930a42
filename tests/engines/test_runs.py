"""The check of real runs is itself checked: every way that launchers are known to lie is found."""

import json
import sys
from pathlib import Path

import pytest
from tests.engines import runs
from tests.engines.runs import BadRun, check_losses, check_run, start


def end(rank: int, **changes: object) -> str:
    said = {
        "rank": rank,
        "world_size": 2,
        "wrapper": "DistributedDataParallel",
        "sharded": 0,
        "sha256": "ab",
    }
    return json.dumps(said | changes)


def steps(*losses: float) -> str:
    return "\n".join(json.dumps({"step": n, "loss": loss}) for n, loss in enumerate(losses, 1))


def checked(*parts: str, **changes: object) -> list[float]:
    wanted = {"world_size": 2, "wrapper": "DistributedDataParallel", "sharded": False}
    return check_run("\n".join(parts), **(wanted | changes))


def test_a_good_run_gives_its_losses():
    assert checked(steps(5.5, 5.25), end(1), end(0)) == [5.5, 5.25]


def test_what_a_launcher_puts_before_a_line_does_not_hide_it():
    lines = [f"[default0]:{line}" for line in steps(5.5, 5.25).splitlines()]
    assert checked("{not json}", *lines, f"(worker pid=3) {end(0)}{end(1)}") == [5.5, 5.25]


def test_a_rank_that_never_said_its_end_is_missed():
    with pytest.raises(BadRun, match=r"ranks \[0\] said their end"):
        checked(steps(5.5), end(0))


def test_one_silent_process_is_no_run_of_two():
    with pytest.raises(BadRun, match=r"ranks \[0\] said their end, each counting \[1\]"):
        checked(steps(5.5), end(0, world_size=1))


def test_several_runs_of_one_rank_are_no_run_of_several():
    with pytest.raises(BadRun, match="2 runs of one rank each"):
        checked(steps(5.5), steps(5.5), end(0, world_size=1), end(0, world_size=1))


def test_ranks_that_count_otherwise_are_found():
    with pytest.raises(BadRun, match="rank 1 counted 4 ranks, not 2"):
        checked(steps(5.5), end(0), end(1, world_size=4))


def test_another_wrapper_than_asked_is_found():
    with pytest.raises(
        BadRun, match="trained a DistributedDataParallel, not a FSDPLlamaForCausalLM"
    ):
        checked(steps(5.5), end(0), end(1), wrapper="FSDPLlamaForCausalLM")


def test_parameters_that_were_not_sharded_are_found():
    with pytest.raises(BadRun, match="parts of 0 parameters; wanted: True"):
        checked(steps(5.5), end(0), end(1), sharded=True)


def test_parameters_that_should_be_whole_are_found_in_parts():
    with pytest.raises(BadRun, match="parts of 3 parameters; wanted: False"):
        checked(steps(5.5), end(0), end(1, sharded=3))


def test_the_number_of_sharded_parameters_counts_where_one_is_given():
    assert checked(steps(5.5), end(0, sharded=3), end(1, sharded=3), sharded=3) == [5.5]
    with pytest.raises(BadRun, match="parts of 1 parameters; wanted: 3"):
        checked(steps(5.5), end(0, sharded=3), end(1, sharded=1), sharded=3)


def test_replicas_that_differ_are_found():
    with pytest.raises(BadRun, match="2 different hashes"):
        checked(steps(5.5), end(0), end(1, sha256="cd"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_found(bad):
    with pytest.raises(BadRun, match="not finite"):
        checked(steps(5.5, bad), end(0), end(1))


def test_a_run_without_steps_is_found():
    with pytest.raises(BadRun, match="no step was printed"):
        checked(end(0), end(1))


def test_a_missing_step_is_found():
    with pytest.raises(BadRun, match=r"steps are missing: \[1, 3\]"):
        checked('{"step": 1, "loss": 5.0}', '{"step": 3, "loss": 5.0}', end(0), end(1))


def test_a_step_may_come_twice_only_after_a_restart():
    with pytest.raises(BadRun, match="more than once"):
        checked(steps(5.5, 5.25), steps(5.5), end(0), end(1))
    assert checked(steps(5.5), steps(5.5, 5.25), end(0), end(1), restarted=True) == [5.5, 5.25]


def test_a_program_that_fails_is_no_run(tmp_path):
    python = Path(sys.executable)
    with pytest.raises(BadRun, match="ended with 3"):
        start([str(python), "-c", "raise SystemExit(3)"], tmp_path, python=python)


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path):
    python = Path(sys.executable)
    with pytest.raises(BadRun, match="did not end in 1 s"):
        start(["sh", "-c", "sleep 60 & wait"], tmp_path, python=python, limit_s=1)


def compared(monkeypatch, *losses: float, first_step: int = 1) -> None:
    """With a single device that is off by 1e-7 at the first step, and exact at the others."""
    single = ([5.0, 4.0, 3.0], [5.0 * (1 + 1e-7), 4.0, 3.0], 256)
    monkeypatch.setattr(runs, "_single_device", lambda folder, precision: single)
    check_losses(losses, Path("any"), first_step=first_step)


def test_losses_that_rounding_explains_are_a_single_devices(monkeypatch):
    most = 17.0 * 1e-7  # order_of_sums(256) times what the single device is off
    compared(monkeypatch, 5.0, 4.0 * (1 + 0.9 * most), 3.0)
    compared(monkeypatch, 4.0, 3.0, first_step=2)


def test_losses_that_rounding_does_not_explain_are_found(monkeypatch):
    with pytest.raises(BadRun, match="step 2: the loss"):
        compared(monkeypatch, 5.0, 4.0 * (1 + 1.1 * 17.0 * 1e-7), 3.0)


def test_a_loss_that_is_no_number_equals_none(monkeypatch):
    with pytest.raises(BadRun, match="step 1"):
        compared(monkeypatch, float("nan"), 4.0, 3.0)


def test_steps_that_were_not_done_are_missed(monkeypatch):
    with pytest.raises(BadRun, match="2 steps were done, not 3"):
        compared(monkeypatch, 5.0, 4.0)
