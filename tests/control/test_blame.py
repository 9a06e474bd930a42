"""Who the others wait for, from what is seen of all ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.control.blame import (
    Fence,
    NobodyBehind,
    Wait,
    blame,
)
from paceline.control.messages import Seen
from paceline.control.slots import Phase
from paceline.control.worker_watch import ends_in_collective

VICTIM = Seen(
    worker=0,
    generation=1,
    step=7,
    phase=Phase.BACKWARD,
    micro_batch=1,
    kind="waiting",
    is_certain=False,
    waited_s=11.0,
    limit_s=10.0,
    is_late=True,
    in_collective=True,
)


def all_but(rank: int, culprit: Seen, num_ranks: int = 4) -> dict[int, Seen]:
    return {n: culprit if n == rank else VICTIM for n in range(num_ranks)}


@pytest.mark.parametrize(
    ("what", "culprit"),
    [
        ("stopped in the same phase", replace(VICTIM, kind="stopped", is_certain=True)),
        ("holds its interpreter in the same phase", replace(VICTIM, kind="gil held")),
        ("loops in the forward pass", replace(VICTIM, phase=Phase.FORWARD, kind="looping")),
        ("deadlocked in an earlier micro-batch", replace(VICTIM, micro_batch=0)),
        ("deadlocked in the step before", replace(VICTIM, step=6, phase=Phase.BOUNDARY)),
        ("a lock in the same phase", replace(VICTIM, in_collective=False)),
        ("loops in the same phase", replace(VICTIM, kind="looping", in_collective=None)),
    ],
)
def test_the_culprit_is_fenced_and_no_victim(what: str, culprit: Seen):
    assert blame(all_but(2, culprit), num_ranks=4) == Fence((2,))


def test_who_is_behind_has_until_its_own_limit():
    saves = replace(VICTIM, step=6, phase=Phase.SAVE, is_late=False)
    verdict = blame(all_but(0, saves), num_ranks=4)
    assert verdict == Wait("the others wait for rank 0, in save within the time that takes")


def test_a_victim_that_burns_its_core_in_a_collective_is_not_blamed():
    victim = replace(VICTIM, kind="looping")
    seen = {0: victim, 1: replace(VICTIM, phase=Phase.FORWARD), 2: victim}
    assert blame(seen, num_ranks=3) == Fence((1,))


def test_in_a_pipeline_a_rank_in_an_earlier_micro_batch_is_not_behind():
    early = replace(VICTIM, micro_batch=0, phase=Phase.FORWARD)
    stuck = replace(VICTIM, micro_batch=3, in_collective=False)
    seen = {0: early, 1: stuck}
    assert blame(seen, num_ranks=2, in_order=False) == Fence((1,))
    assert blame(seen, num_ranks=2) == Fence((0,))


def test_two_that_are_stuck_by_themselves_are_both_fenced():
    loops = replace(VICTIM, phase=Phase.FORWARD, micro_batch=0, kind="looping")
    assert blame({0: loops, 1: VICTIM, 2: loops}, num_ranks=3) == Fence((0, 2))


def test_of_those_behind_the_one_that_waits_for_the_other_is_a_victim_too():
    waits = replace(VICTIM, phase=Phase.FORWARD)
    stuck = replace(waits, in_collective=False)
    assert blame({0: VICTIM, 1: waits, 2: stuck, 3: VICTIM}, num_ranks=4) == Fence((2,))


def test_a_rank_nothing_was_seen_of_may_be_the_one_so_nobody_else_is_blamed():
    assert blame({0: VICTIM}, num_ranks=2) == Wait("nothing was seen of rank 1")


def test_a_stopped_rank_is_fenced_whatever_else_is_unknown():
    stopped = replace(VICTIM, kind="stopped", is_certain=True)
    assert blame({1: stopped}, num_ranks=4) == Fence((1,))


def test_ranks_that_all_wait_for_each_other_are_said_to():
    assert blame(dict.fromkeys(range(3), VICTIM), num_ranks=3) == NobodyBehind()


def test_a_single_rank_that_is_late_is_fenced():
    assert blame({0: replace(VICTIM, in_collective=None)}, num_ranks=1) == Fence((0,))


def test_nobody_is_fenced_once_the_run_goes_on():
    seen = dict.fromkeys(range(3), replace(VICTIM, is_late=False))
    assert blame(seen, num_ranks=3) == Wait("no rank is late any more")


def test_a_rank_that_has_not_come_so_far_as_to_meet_is_behind():
    joins = replace(VICTIM, step=0, phase=Phase.JOINING)
    imports = replace(VICTIM, step=9, phase=Phase.IMPORTING, kind="gil held")
    assert blame({0: joins, 1: imports}, num_ranks=2) == Fence((1,))


def at(**groups: tuple[int, int]) -> Seen:
    """A victim by all else, that is so far in these groups: `_0_1` is that of ranks 0 and 1,
    `b_0_1` another one of the same ranks."""
    parted = {name.partition("_"): place for name, place in groups.items()}
    places = {f"{one}|{ranks.replace('_', ',')}": at for (one, _, ranks), at in parted.items()}
    return replace(VICTIM, phase=Phase.VOTE, in_collective=False, collectives=places)


def test_of_ranks_that_look_alike_the_one_that_has_not_called_a_collective_is_fenced():
    """As on a GPU, where every host waits in the vote."""
    seen = {0: at(_0_1_2=(7, 6)), 1: at(_0_1_2=(6, 6)), 2: at(_0_1_2=(7, 6))}
    assert blame(seen, num_ranks=3) == Fence((1,))


def test_a_rank_is_behind_in_one_of_two_groups_with_the_same_ranks():
    seen = {0: at(_0_1=(50, 49), b_0_1=(900, 900)), 1: at(_0_1=(49, 49), b_0_1=(900, 900))}
    assert blame(seen, num_ranks=2) == Fence((1,))


def test_where_no_rank_is_behind_in_any_group_nobody_is_fenced():
    seen = {rank: at(_0_1_2=(7, 6)) for rank in range(3)}
    assert blame(seen, num_ranks=3) == NobodyBehind()


def test_who_is_behind_because_it_waits_in_another_group_is_a_victim():
    """Rank 3 has not come to the group of 2 and 3; 1 and 0 wait for 2 in turn."""
    seen = {
        0: at(_0_1=(4, 3), _0_2=(9, 8)),
        1: at(_0_1=(4, 3), _1_3=(9, 8)),
        2: at(_2_3=(4, 3), _0_2=(8, 8)),
        3: at(_2_3=(3, 3), _1_3=(8, 8)),
    }
    assert blame(seen, num_ranks=4) == Fence((3,))


def test_a_rank_that_has_called_no_collective_of_a_group_is_behind_there():
    seen = {0: at(_0_1=(4, 4), _0_1_2=(1, 0)), 1: at(_0_1=(4, 4), _0_1_2=(1, 0)), 2: at(_2=(4, 4))}
    assert blame(seen, num_ranks=3) == Fence((2,))


def test_a_rank_whose_collectives_are_not_known_is_not_blamed_for_that():
    seen = {0: at(_0_1_2=(7, 6)), 1: at(), 2: at(_0_1_2=(7, 6))}
    assert blame(seen, num_ranks=3) == NobodyBehind()


sightings = st.builds(
    Seen,
    worker=st.just(0),
    generation=st.just(1),
    waited_s=st.just(11.0),
    limit_s=st.just(10.0),
    step=st.integers(0, 3),
    phase=st.sampled_from(Phase),
    micro_batch=st.integers(0, 2),
    kind=st.sampled_from(["stopped", "gil held", "looping", "waiting"]),
    is_late=st.booleans(),
    is_certain=st.booleans(),
    in_collective=st.sampled_from([None, True, False]),
)


@given(st.lists(sightings, min_size=1, max_size=6), st.booleans())
def test_only_late_ranks_are_ever_fenced(seen: list[Seen], in_order: bool):
    verdict = blame(dict(enumerate(seen)), num_ranks=len(seen), in_order=in_order)
    if isinstance(verdict, Fence):
        assert verdict.ranks
        assert all(seen[rank].is_late for rank in verdict.ranks)


def test_a_traceback_outside_of_a_collective_is_told_from_one_inside():
    frame = 'Current thread 0x1 (most recent call first):\n  File "/a/{}", line 1 in f\n'
    assert ends_in_collective(frame.format("torch/distributed/distributed_c10d.py")) is True
    assert ends_in_collective(frame.format("torch/autograd/graph.py")) is True
    assert ends_in_collective(frame.format("threading.py")) is False
    assert ends_in_collective("") is None
