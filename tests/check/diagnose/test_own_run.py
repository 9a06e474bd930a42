"""A run's own events beside its logs: who was lost, what was a drill, how it ended."""

import msgspec

from paceline.check.diagnose.diagnose import diagnose
from paceline.record.events import (
    SCRIPT_PHASE,
    CorruptionFound,
    FaultInjected,
    Recovered,
    RunFinished,
    TrainingStarted,
    WorkerLost,
    WorkerStarted,
    WorkerStuck,
)
from paceline.record.log_files import Log
from paceline.report.diagnose_text import diagnosis_lines
from paceline.report.event_text import describe


def lost(**changes):
    fields = {"rank": 1, "node": 0, "pid": 11, "how": "killed by SIGKILL", "detail": None}
    return WorkerLost(**{"at": 1.0, "generation": 1, "last_step": 29} | fields | changes)


def ended(outcome, reason=None):
    return RunFinished(
        at=2.0,
        generation=2,
        outcome=outcome,
        step=60,
        state_digest=None,
        held_out_loss=None,
        restarts=1,
        reason=reason,
        baseline_bytes=[],
        peak_bytes=[],
    )


def told(*events, logs=()):
    text = b"".join(msgspec.json.encode(each) + b"\n" for each in events)
    return diagnose([*logs, Log(name="events.jsonl", blocks=[text])])


def test_a_rank_that_the_drill_killed_is_a_fact_and_no_failure():
    fault = FaultInjected(at=1.0, generation=1, fault="rank=1@step=30", rank=1, pid=11)
    diagnosis = told(fault, lost(), ended("finished"))
    assert not diagnosis.causes
    assert not diagnosis.has_failed
    assert "killed by SIGKILL, by the drill" in diagnosis.facts["run"]


DRILL = FaultInjected(at=1.0, generation=1, fault="kill rank=1 step=30", rank=1, pid=11)


def screen(*events):
    text = "".join(f"20:56:50  {describe(each)}\n" for each in events)
    return Log(name="drill.log", blocks=[text.encode()])


def test_a_drills_own_kill_is_the_cause_though_the_runs_screen_names_sigkill():
    diagnosis = told(DRILL, lost(), ended("finished"), logs=[screen(DRILL, lost())])
    assert not diagnosis.causes
    first, *rest = diagnosis_lines(diagnosis)
    fault = "kill rank=1 step=30 (rank 1 killed by SIGKILL)"
    assert first == f"cause       the drill's own fault: {fault}"
    assert "memory" not in " ".join(rest)
    assert not diagnose([screen(DRILL, lost())]).causes  # of the screen alone


def test_a_run_that_a_drills_kill_ended_failed_of_it():
    end = ended("failed", "rank 1: killed by SIGKILL")
    log = screen(DRILL, lost())
    log.blocks.append(b"why         rank 1: killed by SIGKILL\n")
    diagnosis = told(DRILL, lost(), end, logs=[log])
    assert not diagnosis.causes
    assert next(diagnosis_lines(diagnosis)).startswith("cause       the drill's own fault: kill")


def test_a_kill_that_follows_a_drills_is_none_of_its():
    met = TrainingStarted(
        at=1.5,
        generation=2,
        first_step=30,
        checkpoint=None,
        source="replica",
        pids=[10, 12],
        backend="gloo",
        world_size=2,
    )
    later = lost(at=1.7, pid=12, generation=2, last_step=44)
    events = (DRILL, lost(), met, later)
    for logs in ([screen(*events)], []):
        diagnosis = told(*events, ended("failed"), logs=logs)
        assert diagnosis.causes[0].id == "host-oom-sigkill"
        assert "drill" not in diagnosis.facts
    [evidence] = diagnose([screen(*events)]).causes[0].evidence
    assert (evidence.where.line, evidence.text[-2:]) == (4, "44")


def test_a_rank_that_something_else_killed_is_named_with_the_line_that_says_so():
    diagnosis = told(lost(), lost(pid=12), ended("failed", "3 restarts got no further"))
    cause = diagnosis.causes[0]
    assert (cause.id, cause.rank) == ("host-oom-sigkill", 1)
    assert cause.evidence[0].where.line == 1
    assert "(killed by SIGKILL) 2 times" in diagnosis.facts["run"]


def test_the_last_words_of_a_rank_are_its_cause_though_its_log_is_gone():
    cause = told(lost(how="exited with 1", detail="KeyError: 'labels'"), ended("failed")).causes[0]
    assert cause.rank == 1
    assert "KeyError" in cause.what


def stands(rank, *frames):
    stacks = f'Process {40 + rank}: python train.py\n\nThread {40 + rank} (idle): "MainThread"\n'
    return WorkerStuck(
        at=1.0,
        generation=1,
        rank=rank,
        node=0,
        pid=40 + rank,
        kind="silent",
        phase=SCRIPT_PHASE,
        step=4,
        waited_s=30.0,
        limit_s=30.0,
        stacks=stacks + "".join(f"    {frame}\n" for frame in frames),
    )


BACKWARD = ("_engine_run_backward (torch/autograd/graph.py:979)", "train (train.py:13)")
BARRIER = ("barrier (torch/distributed/distributed_c10d.py:5356)", "train (train.py:18)")


def test_s3_4_ranks_of_a_script_that_hang_are_named_with_collective_and_line():
    hung = [stands(0, *BACKWARD), stands(1, *BARRIER), stands(2, *BACKWARD)]
    cause = told(*hung, ended("failed", "no rank has printed anything")).causes[0]
    assert (cause.id, cause.rank) == ("rank-divergent-decision", 1)
    assert "stands in barrier, train.py:18 in train; 2 others in backward" in cause.what
    assert not told(*hung, ended("finished")).causes


REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:3252)", "train (train.py:11)")
BROADCAST = ("broadcast (torch/distributed/distributed_c10d.py:3151)", "train (train.py:11)")


def test_s3_4_ranks_in_two_collectives_of_one_line_are_told_apart():
    cause = told(stands(0, *BROADCAST), stands(1, *REDUCE), ended("failed", "silence")).causes[0]
    assert cause.id == "rank-divergent-decision"
    assert "in broadcast, train.py:11 in train; rank 1 in all_reduce, train.py:11" in cause.what


def test_s3_4_ranks_that_all_stand_in_one_collective_may_bring_sizes_that_differ():
    """Gloo's all-reduce of 2 million elements with one of 3 million ends no rank."""
    cause = told(*(stands(rank, *REDUCE) for rank in range(3)), ended("failed", "silence")).causes[
        0
    ]
    assert (cause.id, str(cause.confidence), cause.rank) == ("gloo-size-mismatch", "possible", None)
    assert (
        cause.what == "all 3 ranks stand in all_reduce, train.py:11 in train, and it does not end"
    )
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in cause.check
    waits = [stands(rank, *BARRIER) for rank in range(2)]  # which has no size
    assert not told(*waits, ended("failed", "silence")).causes


def test_s3_4_the_ends_of_the_logs_name_the_collective_of_each_rank_that_failed():
    aborted = b"""what():  op.preamble.length <= op.nbytes. 20 vs 4
Fatal Python error: Aborted

Current thread 0x00007f01bb (most recent call first):
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 3123 in all_reduce
  File "/home/u/train.py", line 15 in main
"""
    raised = b"""Traceback (most recent call last):
  File "/home/u/train.py", line 10, in main
    loss.backward()
  File "/v/site-packages/torch/autograd/graph.py", line 979, in _engine_run_backward
    return Variable._execution_engine.run_backward(
RuntimeError: Read error: Connection reset by peer
"""
    logs = [Log(name=f"rank-{n}.log", rank=n, blocks=[t]) for n, t in enumerate((aborted, raised))]
    assert told(ended("failed"), logs=logs).facts["collectives"] == (
        "rank 0 in all_reduce, /home/u/train.py:15 in main; "
        "rank 1 in backward, /home/u/train.py:10 in main"
    )
    empty = [Log(name="rank-0.log", rank=0, blocks=[b"Traceback (most recent call last):\n"])]
    assert "collectives" not in told(ended("failed"), logs=empty).facts


def test_what_a_run_came_through_is_said_to_have_done_no_harm():
    log = Log(name="rank-1.log", rank=1, blocks=[b"KeyError: 'labels'\n"])
    diagnosis = told(lost(how="exited with 1"), ended("finished"), logs=[log])
    assert diagnosis.causes[0].id == "user-exception"
    assert "the run trained to its end despite it" in diagnosis.notes


def test_damaged_and_later_events_say_nothing():
    text = b'{"event":"Unheard","at":1.0}\n{"event":"WorkerLost","at":\n\xff\n'
    diagnosis = diagnose([Log(name="events.jsonl", blocks=[text])])
    assert not diagnosis.causes
    assert diagnosis.facts["run"] == "its end was not written"


def test_s0_13_a_rank_that_python_refused_memory_is_out_of_memory_as_the_run_says():
    how = "out of memory: MemoryError: "
    detail = 'Traceback (most recent call last):\n  File "mine.py", line 3, in f\nMemoryError\n'
    cause = told(lost(how=how, detail=detail), ended("failed", f"rank 1: {how}")).causes[0]
    assert (cause.id, cause.rank) == ("cpu-oom", 1)


def wrong(step=29, **changes):
    fields = {"ranks": [1], "suspects": [], "tensors": ["model/a", "model/b"]}
    fields |= {"verdict": "majority", "healed": "replica", "goes_on_after": step}
    return CorruptionFound(**{"at": 1.0, "generation": 1, "step": step} | fields | changes)


def shown(diagnosis):
    return " ".join(" ".join(diagnosis_lines(diagnosis)).split())


START = WorkerStarted(at=0.0, generation=1, rank=1, node=3, pid=11)


def test_a_run_that_repaired_wrong_numbers_names_rank_tensor_repair_and_what_is_left_to_do():
    diagnosis = told(START, wrong(), ended("finished"))
    assert diagnosis.is_concluded
    assert not diagnosis.causes
    assert shown(diagnosis).startswith(
        "repaired after step 29 model/a and 1 more are wrong on rank 1 (most replicas differ "
        "from it); repaired from a replica to do nothing for this run; if rank 1 (node 3) is "
        "named again, test its memory"
    )


def test_a_machine_that_was_wrong_twice_is_to_be_tested():
    facts = told(START, wrong(), wrong(40), ended("finished")).facts
    assert "rank 1 (node 3) was wrong 2 times: test its memory" in facts["to do"]


def test_numbers_that_differ_between_two_ranks_blame_nobody_and_count_the_repeated_steps():
    one = wrong(ranks=[], suspects=[0, 1], verdict="undecided", healed="initial", goes_on_after=0)
    facts = told(one, ended("finished")).facts
    assert "differ on ranks 0, 1, and which is right is not known" in facts["repaired"]
    assert facts["repaired"].endswith("training begins again, 29 steps repeated")
    assert "recovery.fingerprint_every=1" in facts["to do"]


def test_a_bit_that_the_drill_flipped_leaves_nothing_to_do():
    fault = FaultInjected(at=1.0, generation=1, fault="flip rank=1 step=12", rank=1, pid=11)
    facts = told(START, fault, wrong(), wrong(40), ended("finished")).facts
    assert "by the drill" in facts["repaired"]
    assert facts["to do"] == "nothing for this run"


def back(source="replica", steps_lost=0):
    times = dict.fromkeys(("detect_s", "fence_s", "start_s", "restore_s", "first_step_s"), 0.1)
    return Recovered(
        at=1.5,
        generation=2,
        lost_rank=1,
        failed_after_step=29,
        resumed_from_step=29 - steps_lost,
        steps_lost=steps_lost,
        source=source,
        in_place=True,
        downtime_s=0.5,
        **times,
    )


def test_a_run_that_recovered_shows_the_lost_rank_and_where_its_state_came_from():
    diagnosis = told(lost(), back(), ended("finished"))
    assert "nothing no sign" not in shown(diagnosis)
    assert diagnosis.facts["recovered"] == (
        "rank 1 was lost after step 29 (killed by SIGKILL): no finished step lost, state from a "
        "replica"
    )
    assert "the kernel's log of node 0" in diagnosis.facts["to do"]
    assert "4 finished steps repeated" in told(lost(), back("checkpoint", 4)).facts["recovered"]


def test_what_a_failed_run_repaired_before_is_a_fact_beside_its_cause():
    diagnosis = told(wrong(), lost(how="exited with 1", detail="KeyError: 'x'"), ended("failed"))
    assert diagnosis.causes
    assert "repaired" in diagnosis.facts
    assert "to do" not in diagnosis.facts
