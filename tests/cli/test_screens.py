"""Screens: as wide as the terminal, in few colours, and in a pipe as plain text of 80 columns."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.command import run_command

from paceline.cli import cli
from paceline.cli.screen import fitted, painted
from paceline.report.table import COLUMNS, format_table, wrapped


@contextmanager
def columns_are(count: int) -> Iterator[None]:
    token = COLUMNS.set(count)
    try:
        yield
    finally:
        COLUMNS.reset(token)


EXAMPLES = Path(__file__).parents[2] / "examples"
HANG = Path(__file__).parents[1] / "check/hangs/other-shape"

SCREENS = {
    "plan": ("plan", f"{EXAMPLES}/plan-70b/job.yaml"),
    "plan --explain": ("plan", f"{EXAMPLES}/plan-70b/job.yaml", "--explain"),
    "plan --all": ("plan", f"{EXAMPLES}/plan-70b/job.yaml", "--all", "20"),
    "cost": ("cost", f"{EXAMPLES}/plan-70b/job.yaml"),
    "accelerators": ("catalog", "accelerators"),
    "one accelerator": ("catalog", "accelerators", "H100-SXM"),
    "links": ("catalog", "links"),
    "models": ("catalog", "models"),
    "prices": ("catalog", "prices"),
    "prices of one": ("catalog", "prices", "H100-SXM"),
    "engines": ("render", "--for", "list"),
    "diagnose": ("diagnose", str(HANG)),
    "explain": ("explain", "shm-too-small", "R015", "collective-timeout"),
    "explain --list": ("explain", "--list"),
}


def screen(*words: str, columns: int) -> list[str]:
    with columns_are(columns):
        return CliRunner().invoke(cli, words).stdout.splitlines()


@pytest.mark.parametrize("words", SCREENS.values(), ids=SCREENS)
def test_a_screen_fits_80_columns(words):
    lines = screen(*words, columns=80)
    assert lines
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []


def test_wider_terminals_show_more_columns_of_a_table():
    narrow, wide = (screen("catalog", "accelerators", columns=each) for each in (80, 160))
    assert "NETWORK" not in narrow[0]
    assert narrow[-1].startswith("80 columns have no room for (see --json): ")
    assert "NETWORK" in narrow[-1]
    assert "NETWORK" in wide[0]
    assert len(wide) == len(narrow) - 1


def test_paragraphs_stay_readable_on_a_wide_terminal():
    with columns_are(300):
        assert max(map(len, wrapped("why         ", "word " * 100))) in range(95, 101)


def test_a_table_keeps_every_word_of_what_it_wraps():
    cells = ("name", "a long text with many words " * 8, "another one that is long " * 5)
    with columns_are(80):
        table = format_table([("NAME", "WHAT", "MORE"), cells])
    assert max(map(len, table.splitlines())) <= 80
    assert sorted(table.split()) == sorted(" ".join(("NAME WHAT MORE", *cells)).split())


def test_a_table_never_cuts_a_name():
    name = "model.layers.0." * 5 + "weight-scale"
    with columns_are(60):
        table = format_table([("TENSOR", "WHAT"), (name, "many words " * 8)])
    assert name in table.split()
    assert len(table.splitlines()) > 2


def test_a_line_is_continued_under_its_text():
    with columns_are(80):
        assert fitted("label       " + "word " * 20, 80)[1].startswith(" " * 12 + "word")
        assert fitted("a sentence without a label " + "word " * 20, 80)[1].startswith("  word")


@pytest.mark.parametrize(
    ("line", "colour", "words"),
    [
        ("cause       out of memory", "31", "cause"),
        ("J003: no such key", "31", "J003"),
        ("fails    torch   not installed", "31", "fails"),
        ("warning     the disk is nearly full", "33", "warning"),
        ("NAME  KIND  RATE", "1", "NAME  KIND  RATE"),
        ("layout      DDP over 2 ranks", "1", "layout"),
        ("a plain sentence", None, ""),
        ("  parameters      2.55 MiB  #", None, ""),
    ],
)
def test_failures_are_red_warnings_yellow_and_labels_bold(line, colour, words):
    expected = line if colour is None else line.replace(words, f"\x1b[{colour}m{words}\x1b[0m", 1)
    assert painted(line) == expected


def on_a_terminal(*words: str, **environment: str) -> str:
    """What the command prints to a terminal of its own."""
    ours, theirs = pty.openpty()
    try:
        kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        subprocess.run(
            [sys.executable, "-m", "paceline", *words],
            stdout=theirs,
            env={**kept, "TERM": "xterm", **environment},
            check=True,
        )
        return os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_colour_is_for_terminals_whose_user_wants_it():
    assert "\x1b[1mNAME" in on_a_terminal("catalog", "links", COLUMNS="100")
    assert "\x1b" not in on_a_terminal("catalog", "links", COLUMNS="100", NO_COLOR="1")
    assert "\x1b" not in on_a_terminal("catalog", "links", COLUMNS="100", TERM="dumb")


def test_a_pipe_has_no_colour_and_takes_its_width_from_columns():
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "catalog", "accelerators"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
        check=True,
    )
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) in range(120, 161)


@pytest.mark.parametrize(
    "words",
    [
        ("catalog", "prices"),
        ("diagnose", "training hangs, no error"),
        ("explain", "missing-set-epoch"),
    ],
)
def test_what_goes_to_a_pipe_is_neither_wrapped_nor_cut(words):
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
        check=True,
    )
    lines = done.stdout.splitlines()
    assert not [line for line in lines if re.match(r" {12}[a-z]", line)]  # the rest of a line
    assert "columns have no room" not in done.stdout
    assert max(map(len, lines)) > 110


def test_a_diagnosis_ends_its_explanations_at_a_sentence_and_names_where_the_rest_is():
    lines = screen("diagnose", str(HANG), columns=80)
    told = [line for line in lines if not re.match(r"evidence| {12}.*(?:what|/)", line)]
    assert not any(line.endswith("...") for line in told)
    assert "more        paceline explain gloo-size-mismatch" in lines


def test_escape_sequences_of_a_log_or_a_program_do_not_reach_the_terminal(tmp_path: Path):
    (tmp_path / "train.log").write_text("RuntimeError: \x1bc\x07 NCCL error \x1b]0;x\x07\n")
    (tmp_path / "t.py").write_text(
        "import torch.distributed as dist\n"
        "def f(rank, x):\n    if rank == 0:\n        dist.all_reduce(x)  # \x1bc\x07\n"
    )
    for command in ("diagnose train.log", "lint t.py"):
        done = run_command(*command.split(), folder=tmp_path)
        assert "\x1b" not in done.stdout + done.stderr, command
        assert "\x07" not in done.stdout + done.stderr, command
        assert "NCCL error" in done.stdout or "all_reduce" in done.stdout
