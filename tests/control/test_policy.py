"""What a loss means and what is done about it."""

import pytest

from paceline.control.error_texts import names_lost_peer
from paceline.control.messages import Crashed
from paceline.control.policy import (
    Cause,
    History,
    Loss,
    Rules,
    Verdict,
    cause_of,
    judge,
    note_repair,
    sign,
)
from paceline.errors import EXIT_CODES, CrashLoop

RULES = Rules(max_restarts=5)


def loss(cause: Cause = "process", *, worker: int = 0, node: int = 0, slot: int = 1) -> Loss:
    return Loss(slot=slot, node=node, worker=worker, how="killed by SIGKILL", cause=cause)


def crash(
    *,
    worker: int = 0,
    kind: str = "ValueError",
    step: int | None = 7,
    samples: tuple[int, ...] = (3, 9),
    **more: bool,
) -> Loss:
    told = Crashed(
        kind=kind,
        message="no",
        where="",
        retry=more.get("may_retry", True),
        parks=more.get("is_sound", True),
        step=step,
        samples=list(samples),
        exit_code=4,
    )
    cause = cause_of(f"{kind}: no")
    return Loss(slot=1, node=0, worker=worker, how=f"{kind}: no", cause=cause, crash=told)


def judged(history: History, event: Loss, rules: Rules = RULES, *, reached: int = 6) -> Verdict:
    return judge(history, event, rules, reached=reached, now_s=100.0)


def test_a_first_exception_is_retried_in_its_process_and_a_second_replaces_it():
    history = History()
    assert judged(history, crash()).rung == "retry"
    assert judged(history, crash()).rung == "replace process"


def test_an_exception_of_another_kind_is_tried_again():
    history = History()
    judged(history, crash())
    assert judged(history, crash(kind="KeyError")).rung == "retry"


def test_an_exception_after_the_run_got_further_is_a_first_one():
    history = History()
    judged(history, crash())
    assert judged(history, crash(step=9), reached=8).rung == "retry"


def test_a_process_that_is_not_sound_is_replaced_at_once():
    assert judged(History(), crash(is_sound=False)).rung == "replace process"


def test_the_same_exception_for_the_same_samples_on_two_processes_is_a_poison_batch():
    history = History()
    judged(history, crash(worker=0))
    judged(history, crash(worker=0))
    verdict = judged(history, crash(worker=4))
    assert (verdict.cause, verdict.rung) == ("data or software", "stop")
    assert verdict.exit_code == CrashLoop.exit_code
    assert verdict.reason is not None
    assert verdict.reason.endswith("a poison batch, sample ids 3, 9")


@pytest.mark.parametrize("other", [{"samples": (4,)}, {"step": 6}, {"kind": "KeyError"}])
def test_what_differs_in_kind_step_or_samples_is_no_poison_batch(other):
    history = History()
    judged(history, crash(worker=0))
    assert judged(history, crash(worker=4, **other)).cause == "exception"


def test_a_poison_batch_is_skipped_once_where_the_job_allows_it():
    history, rules = History(), Rules(max_restarts=5, poison="skip")
    judged(history, crash(worker=0), rules)
    assert judged(history, crash(worker=4), rules).rung == "skip"
    assert history.poison == {7: (3, 9)}
    assert judged(history, crash(worker=5), rules).rung == "stop"


def test_the_breaker_stops_with_an_exit_code_of_its_own():
    history, rules = History(), Rules(max_restarts=2)
    assert judged(history, loss(), rules).rung == "replace process"
    assert judged(history, loss(), rules).rung == "clear"
    verdict = judged(history, loss(), rules)
    assert verdict.rung == "stop"
    assert verdict.reason is not None
    assert "2 restarts in a row made no progress, last finished step 6" in verdict.reason
    assert "again and again" in EXIT_CODES[verdict.exit_code]


def test_progress_gives_the_breaker_its_patience_back():
    history, rules = History(), Rules(max_restarts=1)
    for reached in range(1, 20):
        assert judged(history, loss(), rules, reached=reached).rung != "stop"


def test_a_step_finished_after_a_restart_is_progress_though_the_run_was_further_once():
    history, rules = History(), Rules(max_restarts=2)
    for reached in (50, *range(20, 33)):
        assert judged(history, loss(), rules, reached=reached).rung not in ("clear", "stop")


def test_a_run_that_falls_back_to_the_same_step_each_time_is_given_up_wherever_it_fails():
    history, rules = History(), Rules(max_restarts=3)
    rungs, resumed_at = [], None
    for reached in (50, 45, 48, 44, 49):
        verdict = judge(history, loss(), rules, reached=reached, now_s=100.0, resumed_at=resumed_at)
        rungs.append(verdict.rung)
        resumed_at = 40
    assert rungs[-1] == "stop"
    assert "stop" not in rungs[:-1]
    assert verdict.reason is not None
    assert "fell back 4 times to step 40 or before it, from step 50 or before" in verdict.reason


def test_a_run_that_falls_to_two_steps_in_turn_is_given_up_too():
    history, rules, rungs = History(), Rules(max_restarts=3), []
    for reached, resumed_at in ((74, None), (70, 50), (73, 60), (71, 50), (72, 60), (69, 50)):
        verdict = judge(history, loss(), rules, reached=reached, now_s=100.0, resumed_at=resumed_at)
        rungs.append(verdict.rung)
    assert "stop" in rungs
    assert "stop" not in rungs[:4]


def test_falls_from_further_each_time_or_to_a_newer_checkpoint_are_progress():
    history, rules = History(), Rules(max_restarts=1)
    for reached, resumed_at in ((50, None), (60, 40), (70, 40), (75, 40), (72, 60), (80, 70)):
        verdict = judge(history, loss(), rules, reached=reached, now_s=100.0, resumed_at=resumed_at)
        assert verdict.rung != "stop"


def test_a_run_that_got_further_than_ever_in_its_last_attempt_is_not_given_up():
    history, rules = History(), Rules(max_restarts=3)
    resumed_at = None
    for reached in (95, 94, 93, 96, 92, 91, 90, 97, 96, 95):
        verdict = judge(history, loss(), rules, reached=reached, now_s=100.0, resumed_at=resumed_at)
        assert verdict.rung != "stop"
        resumed_at = 50
    rungs = [
        judge(history, loss(), rules, reached=reached, now_s=100.0, resumed_at=50).rung
        for reached in (94, 97)
    ]
    assert "stop" not in rungs[:1]
    assert rungs[-1] == "stop"


def test_no_step_finished_after_a_restart_is_no_progress_wherever_it_failed():
    history, rules = History(), Rules(max_restarts=1)
    judged(history, loss(), rules, reached=50)
    again = judge(history, loss(), rules, reached=20, now_s=100.0, advanced=False)
    assert again.rung == "stop"


def test_the_last_attempt_leaves_a_state_that_lives_alone():
    history, rules = History(), Rules(max_restarts=2)
    rungs = [
        judge(history, loss(), rules, reached=6, now_s=100.0, state_lives=True).rung
        for _ in range(3)
    ]
    assert rungs == ["replace process", "replace process", "stop"]


@pytest.mark.parametrize(
    "text",
    [
        "NCCL timeout in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77",
        "NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO ...)",
        "NCCL error in: x.cpp:7, remote process exited or there was a network error",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
        "[unbound_buffer.cc:78] Timed out waiting 7200000ms for recv operation to complete",
        "Application timeout caused pair closure",
    ],
)
def test_a_peer_that_does_not_come_is_a_lost_connection_in_the_words_of_nccl_and_gloo(text):
    assert names_lost_peer(text)
    assert cause_of(f"DistBackendError: {text}") == "network"


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error in: x.cpp:77, unhandled cuda error",
        "CUDA error: an illegal memory access was encountered",
    ],
)
def test_an_accelerator_that_fails_is_no_lost_connection(text):
    assert not names_lost_peer(text)
    assert cause_of(f"DistBackendError: {text}") == "accelerator"


def test_a_lost_connection_strikes_no_node():
    history, rules = History(), Rules(max_restarts=9, node_strikes=1)
    judged(history, loss("network"), rules)
    assert not history.set_aside


def test_a_run_that_may_not_restart_fails_as_it_failed():
    assert judged(History(), loss(), Rules(max_restarts=0)).exit_code == 4


@pytest.mark.parametrize(
    ("max_restarts", "rungs"),
    [
        (1, ["replace process", "stop"]),
        (2, ["replace process", "clear", "stop"]),
        (3, ["replace process", "replace process", "clear", "stop"]),
    ],
)
def test_the_last_restart_is_the_last_resort_unless_it_is_the_only_one(max_restarts, rungs):
    history, rules = History(), Rules(max_restarts=max_restarts)
    assert [judged(history, loss(), rules).rung for _ in rungs] == rungs


def test_a_lost_connection_without_a_lost_process_only_makes_them_meet_again():
    assert judged(History(), loss("network")).rung == "meet again"


def test_a_node_that_fails_three_times_in_the_window_is_set_aside_and_told_once():
    history = History()
    for reached, at in enumerate([0.0, 10.0, 20.0, 30.0], start=1):
        verdict = judge(history, loss(node=1), RULES, reached=reached, now_s=at)
        assert verdict.strikes == (3 if reached == 3 else 0)
    assert history.set_aside == {1}


def test_failures_further_apart_than_the_window_do_not_add_up():
    history = History()
    for reached in range(1, 9):
        judge(history, loss(node=1), RULES, reached=reached, now_s=reached * 3000.0)
    assert not history.set_aside


@pytest.mark.parametrize(
    "text",
    [
        "MemoryError: ",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_a_full_memory_is_a_class_of_its_own_and_strikes_no_node(text):
    assert cause_of(text) == "out of memory"
    history, rules = History(), Rules(max_restarts=9, node_strikes=1)
    judged(history, loss("out of memory"), rules)
    assert not history.set_aside


def test_a_broken_accelerator_strikes_its_node():
    history, rules = History(), Rules(max_restarts=9, node_strikes=1)
    verdict = judged(history, crash(kind="AcceleratorError", is_sound=False), rules)
    assert (verdict.cause, verdict.rung) == ("accelerator", "replace node")


def test_a_sign_of_a_failing_accelerator_is_a_strike_against_its_node():
    history, rules = History(), Rules(max_restarts=5, node_strikes=3)
    assert sign(history, 4, rules, 100.0) == 0
    assert sign(history, 4, rules, 101.0) == 0  # of the same failure
    assert sign(history, 4, rules, 200.0) == 0
    judge(history, loss("accelerator", node=4), rules, reached=5, now_s=210.0)  # the same failure
    lost = loss("accelerator", node=4)
    verdict = judge(history, lost, rules, reached=6, now_s=300.0)
    assert (verdict.rung, verdict.strikes) == ("replace node", 3)
    assert history.set_aside == {4}


def test_signs_alone_set_a_node_aside():
    history, rules = History(), Rules(max_restarts=5, node_strikes=2)
    assert [sign(history, 1, rules, at) for at in (100.0, 200.0, 300.0)] == [0, 2, 0]


def test_a_second_worker_lost_after_a_sign_is_a_failure_of_its_own():
    history, rules = History(), Rules(max_restarts=5, node_strikes=2)
    assert sign(history, 4, rules, 100.0) == 0
    found = [
        judge(history, loss(node=4), rules, reached=reached, now_s=at).strikes
        for reached, at in ((5, 110.0), (6, 120.0))
    ]
    assert found == [0, 2]


def test_repairs_that_go_back_to_the_same_step_are_counted_and_have_a_bound():
    history, rules = History(), Rules(max_restarts=2)
    reasons = [note_repair(history, rules, step=step, back_to=10) for step in (14, 13, 14)]
    assert reasons[:2] == [None, None]
    assert reasons[2] == (
        "the state was found wrong after step 14; the run fell back 3 times to step 10 or before "
        "it, from step 14 or before it"
    )


def test_repairs_that_go_back_to_newer_checkpoints_are_progress():
    history, rules = History(), Rules(max_restarts=0)
    for step in range(15, 200, 10):
        assert note_repair(history, rules, step=step, back_to=step - 5) is None


def test_a_run_that_restarts_and_repairs_by_turns_from_one_step_to_another_has_a_bound():
    history, rules = History(), Rules(max_restarts=3)
    judge(history, loss(), rules, reached=14, now_s=100.0)
    stopped = []
    for _ in range(2):
        verdict = judge(history, loss(), rules, reached=14, now_s=100.0, resumed_at=10)
        stopped += [verdict.rung == "stop"]
        stopped += [note_repair(history, rules, step=14, back_to=10) is not None]
    assert stopped[0] is False
    assert stopped[-1] is True


def test_s0_13_a_rank_out_of_memory_ends_this_layout_at_once_where_the_job_asks_to_refit():
    refits = Rules(max_restarts=5, on_oom="refit")
    full = crash(kind="MemoryError", is_sound=False)
    assert judged(History(), full).rung == "replace process"
    verdict = judged(History(), full, refits)
    assert (verdict.rung, verdict.cause) == ("stop", "out of memory")
    assert judged(History(), loss("out of memory"), refits).rung == "stop"
    assert judged(History(), crash(), refits).rung == "retry"
