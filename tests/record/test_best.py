"""The best evaluation so far, which early stopping goes by."""

import math

import msgspec

from paceline.record.best import Best


def standing(*losses: float, min_delta: float = 0.0) -> Best:
    best = Best()
    for number, loss in enumerate(losses):
        best = best.after(10 * number, loss, min_delta=min_delta)
    return best


def test_a_lower_loss_is_an_improvement_and_an_equal_one_is_not():
    assert standing(2.0, 1.5).waited == 0
    assert standing(2.0, 1.5, 1.5, 1.6).waited == 2


def test_of_equal_losses_the_newest_is_the_best_as_it_is_the_one_that_is_kept():
    best = standing(2.0, 1.5, 1.5, 1.6)
    assert (best.loss, best.step) == (1.5, 20)


def test_small_gains_do_not_add_up_to_an_improvement_unless_together_they_are_one():
    best = standing(2.0, 1.95, 1.92, min_delta=0.1)
    assert (best.waited, best.loss, best.step) == (2, 1.92, 20)
    assert standing(2.0, 1.95, 1.92, 1.89, min_delta=0.1).waited == 0


def test_a_loss_that_is_not_finite_is_waited_for_and_never_the_best():
    best = standing(2.0, math.nan, math.inf)
    assert (best.waited, best.loss, best.step, best.counted) == (2, 2.0, 0, 20)
    assert standing(math.nan).loss is None


def test_an_evaluation_that_is_repeated_counts_once():
    best = standing(2.0, 1.5, 1.6)
    assert best.after(20, 1.4) is best
    assert best.after(10, 1.4) is best


def test_it_is_kept_by_checkpoints_without_loss():
    best = standing(2.0, 1.5, math.nan)
    assert msgspec.json.decode(msgspec.json.encode(best), type=Best) == best
