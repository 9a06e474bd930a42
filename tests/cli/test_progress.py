"""What a run prints: nothing before it begins, six lines of its plan, one live line."""

import io
import sys

import msgspec
import pytest
from tests.control.test_core import SETUP
from tests.preflight.test_here import JOB
from tests.report.made import line, started

from paceline.cli import screen
from paceline.cli.progress import ProgressView
from paceline.cli.screen import Screen
from paceline.control import messages as say
from paceline.control.controller import Progress
from paceline.control.state import State
from paceline.job import load_job
from paceline.plan import plan_job
from paceline.record.run import create_run
from paceline.report.plan_text import plan_summary


@pytest.fixture
def planned(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    job = load_job(path)
    plan = plan_job(job)
    return job, plan, create_run(job, plan, folder=tmp_path / "run", runs=tmp_path)


def view_of(planned, before=None, *, verbose=False):
    job, plan, run = planned
    return ProgressView(
        job=job, run=run, plan=plan, before=before, to_stderr=False, verbose=verbose
    )


def test_the_plan_is_six_lines(planned):
    lines = plan_summary(planned[1])
    assert [line.split()[0] for line in lines] == ["layout", "on", "batch", "memory", "time", "run"]
    assert max(map(len, lines)) <= 100


def test_the_plan_is_printed_when_the_run_has_begun_and_not_before(planned, capsys):
    view = view_of(planned)
    view.note("node-a is reached")
    assert "layout" not in capsys.readouterr().out
    view.event(started())
    view.event(started())
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == plan_summary(planned[1])
    assert lines[6].startswith("run folder  ")
    assert len(lines) == 7


def test_a_resume_does_not_print_the_plan_again_but_names_another_layout(planned, capsys):
    view = view_of(planned, before=[started()])
    view.event(started())
    said = capsys.readouterr().out
    assert "memory" not in said
    assert f"The layout was DDP over 2 ranks and is {planned[1].layout.name}" in said or (
        planned[1].layout.name == "DDP over 2 ranks"
    )


def test_verbose_prints_all_of_the_plan(planned, capsys):
    view_of(planned, verbose=True).event(started())
    assert "\ndecided\n" in capsys.readouterr().out


def done(step):
    message = say.StepDone(step=step, loss=2.5, tokens_per_s=1000.0, unit="tokens")
    return Progress(rank=0, message=message, num_alive=2, num_ranks=2)


def test_a_log_file_gets_the_first_and_the_last_step_at_once(planned, capsys, monkeypatch):
    monkeypatch.setattr(screen, "_LOG_EVERY_S", 1e9)
    view = view_of(planned)
    for step in (1, 2, 3, 4):
        view.progress(done(step))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/4", "4/4"]
    assert lines[0].startswith("step 1/4  loss 2.5000      1K tokens/s")


def test_s1_17_the_time_of_a_step_is_the_recorded_one_however_late_it_is_heard_of(planned, capsys):
    """After a lost controller the steps come at once: 0.18 ms a step was printed as measured."""
    lines = b"\n".join(msgspec.json.encode(line(step, 0.1 * step)) for step in range(1, 5))
    planned[2].metrics_file.write_bytes(lines + b"\n")
    view = view_of(planned)
    view.event(started())
    for step in (1, 2, 3, 4):
        view.progress(done(step))
    view.closing(State(setup=SETUP, outcome="finished"), None, "")
    assert "time        100 ms a step measured (median)" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_takes_the_place_of_the_live_line(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    shown = Screen(to_stderr=False)
    shown.live("step 1")
    shown.line("saved")
    shown.live("step 2")
    shown.end_live()
    shown.line("over")
    assert stream.getvalue() == (
        "\r\x1b[2Kstep 1" + "\r\x1b[2Ksaved\n" + "\r\x1b[2Kstep 2" + "\n" + "over\n"
    )


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_left_ends_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Closed())
    shown = Screen(to_stderr=False)
    shown.line("one")
    shown.live("two")


def test_a_line_never_stands_behind_what_a_script_has_begun(capfdbinary):
    shown = Screen(to_stderr=False)
    shown.output(b"epoch 1: 50%")
    shown.line("rank 0 lost")
    shown.output(b"whole\n")
    shown.line("over")
    assert capfdbinary.readouterr().out == b"epoch 1: 50%\nrank 0 lost\nwhole\nover\n"
