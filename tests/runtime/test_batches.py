"""How large the batch of each step is, and where its data begins."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.batches import Batches


@given(
    first=st.integers(1, 9),
    resized=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), max_size=6),
)
def test_s1_16_each_step_begins_where_the_one_before_ended(first, resized):
    batches, sizes = Batches(first), [first] * 40
    for step, size in resized:
        batches.begin(step, size)
        sizes[step - 1 :] = [size] * (41 - step)
    assert [batches.size(step) for step in range(1, 41)] == sizes
    assert [batches.start(step) for step in range(1, 42)] == [
        sum(sizes[:before]) for before in range(41)
    ]


def test_a_run_that_never_shrinks_keeps_nothing():
    batches = Batches(8)
    batches.begin(5, 8)
    assert batches.changes == ()


def test_a_run_that_went_back_forgets_what_came_later():
    batches = Batches(8)
    batches.begin(5, 6)
    batches.begin(9, 4)
    batches.begin(7, 6)
    assert batches.changes == ((5, 6),)
