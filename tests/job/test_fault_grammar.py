"""The grammar of a drill's faults."""

import pytest

from paceline.job.fault_grammar import KINDS, PHASES, expand, parse_fault, shifted


def test_a_fault_says_its_kind_rank_step_and_phase():
    fault = parse_fault("kill rank=1 step=20 phase=apply")
    assert (fault.kind, fault.ranks, fault.step, fault.phase) == ("kill", (1,), 20, "apply")


def test_a_fault_has_the_phase_of_its_kind_unless_told():
    assert parse_fault("nan rank=0 step=3").phase == "vote"
    assert parse_fault("flip rank=0 step=3").phase == "start"


def test_the_short_way_of_writing_a_kill_means_the_same():
    assert parse_fault("rank=1@step=20").phase == "backward"
    assert parse_fault("rank=1@step=20@save").phase == "save"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil rank=1 step=2", "did you mean `kill`?"),
        ("kill rank=1", "step= is missing"),
        ("kill rank=one step=2", "'one' is not a whole number"),
        ("kill rank=1 step=2 phase=middle", "phase is one of start, forward"),
        ("kill rank=1 step=2 for=3", "'for=3' is none of rank="),
        ("raise rank=1 step=2 phase=parked", "a parked worker runs no code"),
        ("poison", "poison needs sample=ID"),
        ("flip rank=1 step=2 of=loss", "`parameters` or `optimizer`"),
        ("", "is not a fault"),
        (
            "kill rank=1 rank=2 step=3",
            "rank= is written twice; keep one of them, or write rank=1+2",
        ),
        ("kill rank=1 step=3 step=4", "step= is written twice; keep one of them"),
        ("kill rank=1 step=3 times=0", "leave the fault out, or write times=1"),
        ("kill rank=0+1+0 step=3", "rank 0 is named twice; write rank=0+1"),
    ],
)
def test_a_text_that_is_no_fault_is_told_what_is_wrong_with_it(text, says):
    with pytest.raises(ValueError) as caught:
        parse_fault(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_written_with_rank_and_step(kind):
    sample = " sample=7" if "sample" in KINDS[kind].takes else ""
    fault = parse_fault(f"{kind} rank=0 step=2{sample}")
    assert fault.phase in PHASES
    assert fault.row.does


def test_what_a_worker_does_itself_happens_on_each_rank_it_names():
    assert expand(["raise rank=0+1 step=2"]) == ("raise rank=0 step=2", "raise rank=1 step=2")


def test_what_an_agent_does_happens_to_all_ranks_at_once():
    (text,) = expand(["kill rank=0+1 step=2"])
    assert parse_fault(text).victims(0) == (0, 1)


def test_a_fault_that_happens_often_is_written_once_for_each_time():
    assert expand(["raise rank=1 step=2 times=3"]) == ("raise rank=1 step=2",) * 3


def test_the_store_is_rank_0_whoever_passes_the_place():
    assert parse_fault("store rank=2 step=2").victims(2) == (0,)


def test_a_fault_can_be_moved_to_later_steps():
    assert shifted("stop rank=1 step=3 phase=vote", 40) == "stop rank=1 step=43 phase=vote"
