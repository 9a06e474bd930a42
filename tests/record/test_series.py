"""Columns of a run's steps, and how they are thinned."""

import math
from dataclasses import replace

import numpy as np
from tests.report import made

from paceline.record.series import Series, thinned


def test_series_replaces_the_rows_of_steps_that_are_repeated():
    series = Series()
    series.take([made.line(step, step, loss=1.0) for step in (1, 2, 3, 4)])
    series.take([made.line(step, 9 + step, loss=2.0) for step in (3, 4, 5)])
    assert series.column("step").tolist() == [1, 2, 3, 4, 5]
    assert series.column("train/loss").tolist() == [1, 1, 2, 2, 2]
    assert series.cuts == [2]


def test_series_keeps_what_was_not_measured_and_what_was_logged_late_apart_from_zero():
    series = Series()
    series.take([replace(made.line(1, 1), mfu=None)])
    series.take([replace(made.line(2, 2), logged={"score": 3.0}, mfu=0.5)])
    assert math.isnan(series.column("speed/mfu")[0])
    assert series.newest("speed/mfu") == 0.5
    assert series.logged == ["score"]
    assert math.isnan(series.column("score")[0])
    assert series.column("score")[1] == 3.0


def test_series_grows_past_its_first_room():
    series = Series()
    for first in range(1, 5000, 500):
        series.take([made.line(step, step) for step in range(first, first + 500)])
    assert series.column("step").tolist() == list(range(1, 5001))


def test_thinned_column_keeps_a_spike_of_one_step_and_its_mean():
    column = np.ones(10_000)
    column[7_777] = 9.0
    column[3] = np.nan
    (thin,) = thinned([column], 100)
    assert len(thin.mean) == 100
    assert thin.high[77] == 9.0
    assert thin.low[77] == 1.0
    assert thin.mean[77] == 1.08
    assert thin.mean[0] == 1.0


def test_stretch_without_a_number_stays_unknown_and_a_short_column_is_untouched():
    (thin,) = thinned([np.array([np.nan, np.nan, 1.0, 2.0])], 2)
    assert math.isnan(thin.mean[0])
    assert thin.mean[1] == 1.5
    (thin,) = thinned([np.array([1.0, 5.0])], 2)
    assert thin.mean.tolist() == [1.0, 5.0]
