"""What a person sees of a script's ranks."""

from types import SimpleNamespace

import pytest
from tests.record.made_runs import AT, finished, make_run, started

from paceline.cli.script_progress import ScriptView
from paceline.job import make_script
from paceline.record import events as log
from paceline.record.run import RunFolder

FAILURE = b"""step 3
Traceback (most recent call last):
  File "train.py", line 9, in <module>

ValueError: bad sample
and more
"""


@pytest.fixture
def view(tmp_path):
    def make(*ranks: int) -> ScriptView:
        job = make_script({"command": ["python", "train.py"], "processes": 3}, tmp_path)
        return ScriptView(job=job, run=RunFolder(tmp_path), ranks=ranks, to_stderr=False)

    return make


def test_one_rank_is_shown_as_it_is_and_our_lines_begin_on_lines_of_their_own(view, capsysbinary):
    shown = view(0)
    shown.output(0, b"\r 10%|#")
    shown.event(log.Noted(text="hello"))
    shown.output(0, b"\r 20%|##\n")
    shown.output(1, b"not shown\n")
    text = capsysbinary.readouterr().out
    assert text.startswith(b"\r 10%|#\n")
    assert text.endswith(b"hello\n\r 20%|##\n")
    assert b"not shown" not in text


def test_many_ranks_are_shown_line_by_line_with_the_last_picture_of_a_bar(view, capsysbinary):
    shown = view(0, 2)
    shown.output(2, b"\r 10%|#\r 20")
    shown.output(0, b"one\n")
    shown.output(2, b"%|##\r\n")
    assert capsysbinary.readouterr().out == b"rank 0: one\nrank 2:  20%|##\n"


@pytest.mark.parametrize("prefix", [b"", b"[rank1]: "])
@pytest.mark.parametrize("piece", [3, 1000])
def test_a_hidden_ranks_traceback_is_shown_to_its_exception(view, capsysbinary, piece, prefix):
    shown = view(0)
    content = FAILURE.replace(b"\n", b"\n" + prefix)
    for at in range(0, len(content), piece):
        shown.output(1, content[at : at + piece])
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert lines[0].endswith("Traceback (most recent call last):")
    assert lines[-1].endswith("ValueError: bad sample")
    assert all(line.startswith("rank 1: ") for line in lines)


def test_with_no_rank_shown_not_even_tracebacks_are(view, capsysbinary):
    view().output(1, FAILURE)
    assert capsysbinary.readouterr().out == b""


def test_a_script_that_prints_its_exceptions_again_and_again_does_not_fill_the_screen(
    view, capsysbinary
):
    shown = view(0)
    for _ in range(1000):
        shown.output(1, FAILURE)
    assert capsysbinary.readouterr().out.count(b"ValueError") == 20


def test_s0_22_the_time_at_the_end_is_that_of_status_and_report(tmp_path, capsysbinary):
    run = make_run(tmp_path / "run", events=[started(AT), finished(AT + 12.5)], plan=None)
    script = make_script({"command": ["python", "train.py"]}, tmp_path)
    view = ScriptView(job=script, run=RunFolder(run), ranks=[0], to_stderr=False)
    view.ending(SimpleNamespace(outcome="finished", restarts=0, reason=None))
    last = capsysbinary.readouterr().out.decode().strip().split("\n")[0]
    assert last.endswith("0 restarts, ran for 12.5 s")
