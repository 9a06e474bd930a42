"""The GPU kit's own code, on a CPU: what it shows of a GPU, only a GPU can say."""

import json
import subprocess
import sys

import pytest
import torch
from tests.gpu import kit
from tests.gpu.checks import CHECKS
from tests.gpu.kit import BEGIN, END, LIMITS_S, PAGE, Line, run_check, table, with_figures


def test_without_a_gpu_the_kit_says_so_in_one_sentence_and_does_not_pass(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kit.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("./test-gpu: nothing was checked: PyTorch")
    assert said.err.count("\n") == 1


def test_all_checks_together_take_25_minutes_at_most():
    assert sum(LIMITS_S.values()) <= 25 * 60
    assert list(CHECKS) == list(LIMITS_S)


def test_an_unknown_check_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as ended:
        kit.main(["memry"])
    assert ended.value.code == 2
    assert "there is no check memry; there are contract, memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "said"),
    [("import os; os._exit(3)", "exit code 3"), ("import time; time.sleep(60)", "nothing in 1 s")],
)
def test_a_check_that_dies_or_hangs_is_a_fail_and_the_next_one_begins(monkeypatch, program, said):
    real = kit.subprocess.Popen
    monkeypatch.setattr(
        kit.subprocess,
        "Popen",
        lambda command, **options: real([sys.executable, "-c", program], **options),
    )
    line = run_check("death", "cpu", limit_s=1 if "sleep" in program else 60)
    assert (line.verdict, line.found) == ("fail", said)


def test_the_table_replaces_the_pages_figures_and_nothing_else():
    lines = [Line(name="death", expected="-", found="0.1 s", verdict="measured", seconds=1.5)]
    page = PAGE.read_text()
    new = with_figures(page, table(lines, "cpu"))
    assert "| death | - | 0.1 s | measured | 1.5 |" in new
    assert "CPU (shows nothing of a GPU)" in new
    assert new.partition(BEGIN)[0] == page.partition(BEGIN)[0]
    assert new.partition(END)[2] == page.partition(END)[2]


@pytest.mark.parametrize(
    "name",
    [
        *("stall", "guard", "death"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sticky", "gloo-on-gpu")),
    ],
)
def test_a_check_runs_on_a_cpu_and_holds(name):
    line = CHECKS[name]("cpu")
    assert line.name == name
    assert line.verdict in ("pass", "measured"), line


def test_two_ranks_on_one_gpu_are_not_run_without_nccl():
    line = CHECKS["two-ranks"]("cpu")
    assert (line.verdict, line.found) == ("not run", "no NCCL")


@pytest.mark.slow
def test_one_rank_of_a_layout_takes_real_steps_under_a_fake_group():
    words = ["pipeline 4, last", "cpu", "cpu", "off"]
    command = [sys.executable, "-m", "tests.gpu.layouts", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=kit.ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["peak"] is None
    assert found["seconds"] > 0
