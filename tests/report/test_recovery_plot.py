"""The picture of one recovery."""

from tests.drill.made import injected, line, lost, recovered

from paceline.report.recovery_plot import draw_recovery, recovery_to_show


def test_the_recovery_with_the_middle_downtime_is_shown():
    slow, middle, quick = (recovered(downtime_s=seconds) for seconds in (9.0, 0.5, 0.1))
    assert recovery_to_show([slow, quick, middle]) is middle
    assert recovery_to_show([]) is None


def test_the_picture_names_the_phases_and_is_the_same_every_time():
    one = recovered()
    events = [injected("kill rank=1 step=6"), lost("killed by SIGKILL"), one]
    lines = [line(step) for step in range(4, 10)]
    svg = draw_recovery(one, events, lines)
    assert svg == draw_recovery(one, events, lines)
    for words in ("detect", "fence", "meet", "state", "first step", "killed by SIGKILL"):
        assert words in svg
