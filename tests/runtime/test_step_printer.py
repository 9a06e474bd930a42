"""Every rank's log holds its newest steps."""

from types import SimpleNamespace

from paceline.runtime import step_printer
from paceline.runtime.step_printer import StepPrinter


def test_the_first_and_the_last_step_are_printed_and_others_now_and_then(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(step_printer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    printer = StepPrinter(5, "tokens")
    for step in range(1, 6):
        printer.step_done(step, 2.5 if step < 5 else None, 1000.0)
        now[0] += step_printer.EVERY_S if step == 2 else 0.1
    assert capsys.readouterr().out.splitlines() == [
        "step 1/5  loss 2.5000      1K tokens/s",
        "step 3/5  loss 2.5000      1K tokens/s",
        "step 5/5  loss not finite      1K tokens/s",
    ]


def test_a_full_disk_ends_no_step(monkeypatch):
    def full(*words: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.print", full)
    StepPrinter(5, "tokens").step_done(1, 1.0, 1.0)
