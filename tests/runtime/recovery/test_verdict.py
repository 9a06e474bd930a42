"""Who is wrong, from the fingerprints of all ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.recovery.verdict import Verdict, differing, farther, held_by_all, judge

PAIR, THREE, PAIRS = ((0, 1),), ((0, 1, 2),), ((0, 2), (1, 3))


def still(num: int) -> list[bool]:
    return [False] * num


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4), st.integers(1, 4))
def test_ranks_that_agree_within_their_groups_are_never_accused(values: list[int], copies: int):
    num = len(values)
    groups = tuple(tuple(group + num * copy for copy in range(copies)) for group in range(num))
    assert judge(groups, values * copies, still(num * copies)) is None


@pytest.mark.parametrize("wrong", range(3))
def test_of_three_replicas_the_one_that_is_alone_is_odd(wrong: int):
    values = [5, 5, 5]
    values[wrong] = 6
    found = judge(THREE, values, still(3))
    assert found is not None
    assert found.odd == (wrong,)
    assert found.source_of[wrong] != wrong
    assert found.can_copy


def test_two_replicas_that_differ_are_both_suspects():
    found = judge(PAIRS, [1, 2, 1, 3], still(4))
    assert found == Verdict(undecided=((1, 3),), source_of={})
    assert found.suspects == (1, 3)
    assert not found.can_copy


def test_the_one_of_two_whose_bytes_changed_while_nothing_wrote_is_odd():
    found = judge(PAIR, [1, 2], [True, False])
    assert found == Verdict(odd=(0,), source_of={0: 1})


def test_a_rank_without_replicas_is_odd_by_its_own_word_and_has_no_source():
    found = judge(((0,), (1,)), [1, 2], [False, True])
    assert found == Verdict(odd=(1,), source_of={})
    assert not found.can_copy


def test_four_replicas_two_against_two_are_undecided_and_three_against_one_are_not():
    assert judge(((0, 1, 2, 3),), [1, 1, 2, 2], still(4)) == Verdict(
        undecided=((0, 1, 2, 3),), source_of={}
    )
    found = judge(((0, 1, 2, 3),), [1, 1, 2, 1], still(4))
    assert found == Verdict(odd=(2,), source_of={2: 0})


def test_three_that_all_differ_are_undecided():
    assert judge(THREE, [1, 2, 3], still(3)) == Verdict(undecided=THREE, source_of={})


def test_tensors_are_those_that_differ_from_the_replica_that_is_right():
    clean = {"a": 1, "b": 2, "c": 3}
    odd = judge(THREE, [5, 6, 5], still(3))
    assert odd is not None
    assert differing(odd, [clean, {**clean, "b": 9}, clean], [()] * 3) == {1: ("b",)}
    pair = judge(PAIR, [5, 6], still(2))
    assert pair is not None
    assert differing(pair, [clean, {**clean, "c": 9}], [()] * 2) == {0: ("c",), 1: ("c",)}
    alone = judge(((0,), (1,)), [5, 6], [False, True])
    assert alone is not None
    assert differing(alone, [clean, clean], [(), ("a",)]) == {1: ("a",)}


def test_only_what_replicas_hold_alike_is_copied_or_compared():
    one, other = {"a": 1, "b": 2}, {"a": 9, "c": 2}
    pair = judge(PAIR, [5, 6], still(2))
    assert pair is not None
    tensors = differing(pair, [one, other], [()] * 2)
    assert tensors == {0: ("a", "c", "b"), 1: ("a", "c", "b")}
    assert held_by_all(pair, [one, other], tensors) == {0: ("a",), 1: ("a",)}
    odd = judge(THREE, [5, 6, 5], still(3))
    assert odd is not None
    tensors = differing(odd, [one, other, one], [()] * 3)
    assert held_by_all(odd, [one, other, one], tensors) == {1: ("a",)}
    alone = judge(((0,), (1,)), [5, 6], [False, True])
    assert alone is not None
    assert held_by_all(alone, [one, other], {1: ("c",)}) == {1: ("c",)}


def test_the_replay_accuses_the_rank_that_is_farther_from_it():
    assert farther({0: 0.0, 1: 1e-30}) == (1,)
    assert farther({0: float("inf"), 1: 3.0}) == (0,)
    assert farther({2: 0.5, 3: 0.5}) == ()
    assert farther({2: 0.5, 3: 0.6}) == ()  # off by what a wrong parameter did to all
    assert farther({0: 0.0, 1: 1e-9}, noise=1e-8) == ()  # right by chance
