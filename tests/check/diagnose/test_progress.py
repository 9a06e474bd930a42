"""Logs that show steps and no failure: whether the run's end is in them, and whether it stands."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tests.check.diagnose.corpus import diagnose_text

from paceline.check.diagnose.diagnose import diagnose
from paceline.record.log_files import Log
from paceline.report.diagnose_text import diagnosis_lines

HEALTHY = Path(__file__).parent.parent / "healthy_logs"
BEGUN = datetime(2026, 5, 1, 12)


def steps_of(*ranks, until=100, every_s=1):
    """Lines of so many steps of each rank, one a second."""
    return "".join(
        f"[rank{rank}]: {BEGUN + timedelta(seconds=every_s * step)},123 INFO step={step} "
        f"loss={9 / (step + 1):.3f}\n"
        for step in range(until + 1)
        for rank in ranks
    )


def beats(minutes):
    """A line a minute that says nothing of training, from ten minutes after the start on."""
    return "".join(
        f"[rank0]: {BEGUN + timedelta(minutes=10 + minute)},123 INFO gpu temperature 61 C\n"
        for minute in range(minutes)
    )


def test_logs_that_end_in_the_middle_of_training_are_no_proof_that_nothing_is_wrong():
    diagnosis = diagnose_text(steps_of(0, 1))
    assert not diagnosis.has_failed
    assert not diagnosis.is_concluded
    assert diagnosis.open_end == "progress stopped at step 100 at 12:01:40"
    screen = " ".join(" ".join(diagnosis_lines(diagnosis)).split())
    assert screen.startswith("unknown progress stopped at step 100 at 12:01:40; no error line")


def test_a_setting_that_costs_speed_is_not_all_that_a_log_says_which_stops_in_training():
    slow = "[W501 reducer.cpp:1389] Warning: find_unused_parameters=True was specified in DDP "
    slow += "constructor, but did not find any unused parameters in the forward pass.\n"
    diagnosis = diagnose_text(slow + steps_of(0, 1))
    assert diagnosis.causes[0].id == "ddp-find-unused-overhead"
    assert diagnosis.open_end == "progress stopped at step 100 at 12:01:40"
    screen = " ".join(" ".join(diagnosis_lines(diagnosis)).split())
    assert "no error that ended the run; progress stopped at step 100" in screen


@pytest.mark.parametrize(
    "end",
    [
        "Training completed\n",
        "INFO finished training in 3 h\n",
        "`Trainer.fit` stopped: `max_steps=100` reached.\n",
        "[exiting program at iteration 101] datetime: 2026-05-01 10:10:00\n",
        "[INFO] [launch.py:351:main] Process 1201 exits successfully.\n",
        "{'train_runtime': 431.2, 'train_loss': 2.21, 'epoch': 1.0}\n",
        "step 101/101 loss 0.31\n",
        "100%|##########| 101/101 [07:11<00:00,  4.31s/it]\n",
    ],
)
def test_a_run_that_prints_its_end_is_over(end):
    diagnosis = diagnose_text(steps_of(0, 1) + end)
    assert diagnosis.open_end is None
    assert diagnosis.is_concluded


@pytest.mark.parametrize("name", ["deepspeed", "hugging_face_trainer", "lightning", "torchtitan"])
def test_the_healthy_logs_of_engines_show_their_end(name):
    assert diagnose_text((HEALTHY / f"{name}.txt").read_text()).is_concluded


def test_a_log_without_steps_is_asked_for_no_end():
    assert diagnose_text("loading data\nconnected to 4 hosts\n").is_concluded


def test_a_run_that_was_interrupted_by_hand_has_no_other_end():
    stopped = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nKeyboardInterrupt\n'
    assert diagnose_text(steps_of(0) + stopped).open_end is None


def test_a_rank_whose_steps_end_before_the_others_is_named():
    logs = [
        Log(name=f"rank-{rank}.log", rank=rank, blocks=[steps_of(rank, until=until).encode()])
        for rank, until in enumerate((100, 80, 100, 100))
    ]
    assert "rank 1 prints none after step 80" in (diagnose(logs).open_end or "")
    assert "rank" not in (diagnose_text(steps_of(0, 1, 2)).open_end or "")


def test_steps_that_stop_while_other_lines_go_on_are_a_symptom_of_a_hang():
    diagnosis = diagnose_text(steps_of(0, 1) + beats(20))
    assert diagnosis.has_failed
    cause = diagnosis.causes[0]
    assert (cause.id, str(cause.confidence), cause.rank) == ("uneven-inputs-hang", "possible", None)
    assert "and other lines came for 27m 20s after it" in cause.what
    assert cause.check


def test_a_save_before_the_steps_stopped_speaks_for_a_save_that_not_all_ranks_call():
    saved = "[rank0]: 2026-05-01 12:01:41,000 INFO saving model to /checkpoints\n"
    assert diagnose_text(steps_of(0, 1) + saved).open_end is not None
    cause = diagnose_text(steps_of(0, 1) + saved + beats(20)).causes[0]
    assert cause.id == "rank0-only-collective-save"


def test_a_step_that_takes_as_long_as_the_others_is_no_hang():
    assert not diagnose_text(steps_of(0, 1, until=5, every_s=300) + beats(20)).has_failed
