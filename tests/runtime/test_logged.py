"""What `session.log` takes, and when it is read."""

import numpy as np
import pytest
import torch

from paceline.errors import RunError
from paceline.runtime.logged import Logged


def opened(**values) -> Logged:
    logged = Logged()
    logged.open()
    logged.add(values, keep=True, where="program")
    return logged


def test_numbers_and_tensors_of_one_number_are_read_at_the_end_of_the_step():
    logged = opened(accuracy=torch.tensor(0.75), count=3)
    assert logged.numbers == {"count": 3.0}
    logged.read(lambda: None)
    assert logged.numbers == {"accuracy": 0.75, "count": 3.0}


def test_a_tensor_is_not_read_before_its_value_has_arrived():
    logged = opened(accuracy=torch.tensor(0.75))

    def interrupted() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        logged.read(interrupted)
    assert logged.numbers == {}


def test_a_tensor_that_is_overwritten_later_keeps_the_value_it_was_logged_with():
    running = torch.tensor(1.0, requires_grad=True)
    logged = opened(running=running)
    with torch.no_grad():
        running.fill_(9.0)
    logged.read(lambda: None)
    assert logged.numbers == {"running": 1.0}


@pytest.mark.parametrize("values", [(1.0, torch.tensor(2.0)), (torch.tensor(1.0), 2.0)])
def test_the_last_value_of_a_name_counts(values):
    logged = Logged()
    logged.open()
    for value in values:
        logged.add({"score": value}, keep=True, where="program")
    logged.read(lambda: None)
    assert logged.numbers == {"score": 2.0}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("loss", 1.0, "own_loss"),
        ("train/loss", 1.0, "a step's line has its own `train/loss`"),
        ("logged", 1.0, "own_logged"),
        ("", 1.0, "'' cannot be a name"),
        ("a b", 1.0, "begin with a letter"),
        ("$x$", 1.0, "begin with a letter"),
        ("nothing", None, "`nothing` is a NoneType, and no number, text or picture"),
        ("wave", 1j, "`wave` is a complex, and no number"),
        ("wave", torch.tensor(1j), "`wave` is a Tensor, and no number"),
        ("floats", np.zeros((4, 4, 3)), "`floats` is a ndarray, and no number, text or picture"),
        ("rows", torch.zeros(5, 6, 7, dtype=torch.uint8), "5 x 6 x 7, which is no picture"),
        ("huge", np.zeros((1, 1 << 25), np.uint8), "the picture `huge` is 1 x 33554432"),
        ("logits", torch.zeros(3, 4), "`logits` is a tensor of 3 x 4 numbers"),
    ],
)
def test_what_cannot_be_logged_is_refused_on_every_rank(name, value, said):
    logged = opened()
    with pytest.raises(RunError) as refused:
        logged.add({name: value}, keep=False, where="program")
    assert refused.value.problems[0].code == "R025"
    assert said in str(refused.value)


def test_nothing_can_be_logged_before_a_step_after_it_and_in_an_evaluation():
    logged, ended = Logged(), opened()
    ended.read(lambda: None)
    for each in (logged, ended):
        with pytest.raises(RunError, match="outside a step"):
            each.add({"score": 1.0}, keep=True, where="program")


def test_other_ranks_numbers_are_not_kept_and_nothing_of_a_step_is_in_the_next():
    logged = opened(score=1.0)
    logged.add({"other": 2.0}, keep=False, where="program")
    assert logged.numbers == {"score": 1.0}
    logged.open()
    assert logged.numbers == {}


def test_texts_and_pictures_are_kept_with_their_colours_last():
    picture = torch.arange(30, dtype=torch.uint8).reshape(3, 2, 5)
    logged = opened(
        words="hello", first=picture, last=np.zeros((2, 4, 3), np.uint8), grey=picture[0]
    )
    logged.read(lambda: None)
    assert logged.numbers == {}
    shapes = {name: np.shape(value) for name, value in logged.media.items()}
    assert shapes == {"words": (), "first": (2, 5, 3), "last": (2, 4, 3), "grey": (2, 5)}
    assert logged.media["first"][0, 1].tolist() == [1, 11, 21]


def test_an_image_of_pil_is_kept_in_colours():
    image = pytest.importorskip("PIL.Image").new("P", (4, 2))
    assert opened(image=image).media["image"].shape == (2, 4, 3)


def test_a_name_is_a_number_or_a_picture_whatever_came_last():
    logged = opened(score=np.zeros((2, 2), np.uint8))
    logged.add({"score": 2.0}, keep=True, where="program")
    assert (logged.numbers, logged.media) == ({"score": 2.0}, {})
