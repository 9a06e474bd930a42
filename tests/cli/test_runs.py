"""`paceline runs` and `paceline runs compare`, as they are typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.record.made_runs import AT, evaluated, finished, job_with, make_run, started

from paceline.cli.runs import command
from paceline.errors import JobError
from paceline.report.runs_text import COLUMNS as FIELDS
from paceline.report.table import COLUMNS, UNBOUNDED


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number, rate in enumerate((0.001, 0.1)):
        make_run(
            tmp_path / f"runs/r{number}",
            job=job_with(learning_rate=rate),
            events=[started(), evaluated(10, 2.0 + number), finished()],
            losses=[3.0, 2.0 + number],
            created_at=AT + number,
        )
    return tmp_path / "runs"


def printed(runs: Path, *words: str) -> str:
    done = CliRunner().invoke(command, ["--runs", str(runs), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_list_has_state_step_and_both_losses(runs):
    head, first, second = printed(runs).splitlines()
    assert head.split()[:5] == ["RUN", "STATE", "STEP", "LOSS", "EVAL_LOSS"]
    assert first.split()[:5] == ["r0", "finished", "2/100", "2.0000", "2.0000"]
    assert second.split()[:5] == ["r1", "finished", "2/100", "3.0000", "3.0000"]


def test_s0_23_filter_order_and_columns_act_on_the_json_too(runs):
    words = ["--sort", "-train.learning_rate", "--columns", "run,train.learning_rate", "--json"]
    assert json.loads(printed(runs, *words)) == [
        {"run": "r1", "train.learning_rate": 0.1},
        {"run": "r0", "train.learning_rate": 0.001},
    ]
    assert json.loads(printed(runs, "--where", "eval_loss<2.5", *words[-1:]))[0]["run"] == "r0"


def test_a_bad_expression_is_refused_with_its_place(runs):
    with pytest.raises(JobError, match=r"character 10 of 'eval_loss'"):
        printed(runs, "--where", "eval_loss")


def test_a_damaged_run_is_named_with_the_line(runs):
    with (runs / "r1/events.jsonl").open("a") as file:
        file.write("garbage\n")
    lines = printed(runs).splitlines()
    assert lines[2].split()[1] == "damaged"
    assert lines[3].startswith("r1: events.jsonl, line 4, cannot be read")


def test_s0_23_compare_shows_what_differs_and_whether_bits_are_equal(runs):
    text = printed(runs, "compare", "r0", "r1")
    assert "train.learning_rate" in text
    assert "train.seed" not in text
    assert "losses differ from step 2 on, of 2 shared steps" in text
    assert "train.seed" in printed(runs, "compare", "r0", "r1", "--all")


def test_compare_gives_all_of_it_as_json(runs):
    found = json.loads(printed(runs, "compare", "r0", "r1", "--json"))
    assert found["settings"] == [{"name": "train.learning_rate", "values": [0.001, 0.1]}]
    assert [row["run"] for row in found["runs"]] == ["r0", "r1"]
    assert found["bits"][0]["losses"] == {"num_steps": 2, "first_difference": 2}


def test_listing_imports_none_of_what_takes_long():
    heavy = ("pydantic", "torch", "numpy", "yaml", "asyncio", "paceline.plan", "paceline.job")
    program = (
        "import sys\nfrom paceline.cli import runs\n"
        "from paceline.record import query, compare\nfrom paceline.report import runs_text\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(("columns", "is_whole"), [(80, False), (UNBOUNDED, True)])
def test_a_pipe_gets_every_column_and_a_terminal_those_that_fit(runs, columns, is_whole):
    token = COLUMNS.set(columns)
    try:
        done = CliRunner().invoke(command, ["--runs", str(runs)])
    finally:
        COLUMNS.reset(token)
    assert ("columns have no room" not in done.stdout) is is_whole
    assert len(done.stdout.splitlines()[0].split()) == len(FIELDS) or not is_whole
