"""Logs of runs that did well, with the warnings such runs print: nothing is wrong with them."""

from pathlib import Path

import pytest
from tests.check.diagnose.corpus import diagnose_text

HEALTHY = sorted((Path(__file__).parent.parent / "healthy_logs").glob("*.txt"))


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_run_has_not_failed(path):
    diagnosis = diagnose_text(path.read_text(encoding="utf-8"))
    assert not diagnosis.has_failed, [each.text for each in diagnosis.unknown]
    assert not [each.id for each in diagnosis.causes if each.confidence != "possible"]


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_one_to_three_lines_of_a_healthy_run_are_no_words_about_a_trouble(path):
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    step = len(lines) // 100 + 1
    parts = ["".join(lines[at : at + n]) for n in (1, 2, 3) for at in range(0, len(lines), step)]
    named = {part: cause.id for part in parts for cause in diagnose_text(part + "\n").causes}
    assert named == {}


@pytest.mark.parametrize(
    "text",
    [
        (
            "INFO Waiting for creating a placement group of specs for 30 seconds.\n"
            "step 1: loss 2.3\n"
        ),
        "".join(
            f"I CreateSession still waiting for response from worker: /job:ps/task:{n}\n"
            for n in range(4)
        ),
        "W dso_loader.cc:64] dlerror: libcudart.so.11.0: cannot open shared object file\n",
        (
            "Multi-processing is handled by Slurm.\n"
            "initializing ddp: GLOBAL_RANK: 0, MEMBER: 1/8\nEpoch 0: loss 2.3\n"
        ),
    ],
)
def test_a_start_that_waits_for_a_while_has_not_failed(text):
    diagnosis = diagnose_text(text)
    assert not diagnosis.has_failed
    assert not diagnosis.causes


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("step 1\n(python3:1234): frobnicator failure: quux exploded\n", "quux exploded"),
        ('Traceback (most recent call last):\n  File "/u/a.py", line 3, in f\n    x()\n', "a.py"),
        ("the worker returned exit code: 134\n", "134"),
        ('{"exitCode": 143}\n', "143"),
    ],
)
def test_a_sign_of_failure_that_nothing_explains_is_unknown_and_shown(text, shown):
    diagnosis = diagnose_text(text)
    assert diagnosis.has_failed
    assert not diagnosis.is_concluded
    assert any(shown in each.text for each in diagnosis.unknown)


@pytest.mark.parametrize(
    ("text", "name", "confidence"),
    [
        ("Training failed with exit code -9\n", "host-oom-sigkill", "likely"),
        ("ERROR: error code -9\n", "host-oom-sigkill", "likely"),
        ("make: *** [train] Error 137\n", "host-oom-sigkill", "likely"),
        ("the task exited on signal 11 (Segmentation fault)\n", "segfault-exit-11", "certain"),
        ("worker: returncode=-7\n", "sigbus-exit-7", "certain"),
        (
            (
                "slurmstepd: error: Job 12 exceeded memory limit (9 > 8), being killed\n"
                "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2019-01-01T00:00:00 ***\n"
            ),
            "slurm-oom-kill",
            "certain",
        ),
        ("You requested 2 GPUs but launched 1 slurm tasks\n", "slurm-ntasks-mismatch", "certain"),
        (
            "Coordination service agent in error status: DEADLINE_EXCEEDED: x\n",
            "jax-coordination-timeout",
            "certain",
        ),
        (
            (
                "n1:1:1 [0] misc/shmutils.cc:87 NCCL WARN Cuda failure 'x'\n"
                "n1:1:1 [0] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-a\n"
            ),
            "shm-too-small",
            "possible",
        ),
        (
            (
                "Map: 33%|#| 1/3 [29:55<59:00, 3.1 ex/s]Traceback (most recent call last):\n"
                '  File "/u/t.py", line 3, in main_process_first\n    dist.barrier()\n'
            ),
            "rank0-preprocess-timeout",
            "likely",
        ),
    ],
)
def test_other_wordings_of_a_failure_are_known_and_no_surer_than_they_are(text, name, confidence):
    cause = diagnose_text(text).causes[0]
    assert (cause.id, cause.confidence) == (name, confidence)
