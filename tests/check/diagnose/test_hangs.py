"""Hangs that real ranks were led into over gloo: the guilty rank and its line are named.

tests/check/hangs holds what the ranks wrote, made by `benchmarks/diagnose_hangs.py --record`.
"""

from pathlib import Path

import pytest
from tests.check.diagnose.corpus import diagnose_text

from paceline.catalog.failure import load_failures
from paceline.catalog.load import read_shipped
from paceline.check.diagnose.diagnose import diagnose
from paceline.check.diagnose.hang import stand
from paceline.check.diagnose.line import read_line
from paceline.check.diagnose.seen import Seen, Watched
from paceline.check.diagnose.stacks import compare, read_stacks
from paceline.record.log_files import Log

HANGS = Path(__file__).parent.parent / "hangs"
GUILTY = {
    "skipped-collective": (2, {"rank-divergent-decision"}),
    "stuck-in-data": (1, {"dataloader-timeout"}),
    "save-on-one-rank": (0, {"rank0-only-collective-save"}),
    "evaluation-on-one-rank": (0, {"rank0-only-validation"}),
    "uneven-batches": (1, {"uneven-inputs-hang"}),
    "other-collective": (2, {"collective-mismatch"}),
}
"""Hang -> the rank that does what the others do not, and what it is."""


def blamed(name, ending):
    files = sorted((HANGS / name).glob(f"rank-*{ending}"))
    return diagnose(
        Log(name=path.name, rank=int(path.name[5]), blocks=[path.read_bytes()]) for path in files
    ).causes[0]


def guilty_line(name):
    lines = (HANGS / name / "train.txt").read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if "# guilty" in line)


@pytest.mark.parametrize("name", GUILTY)
def test_stacks_and_recordings_together_name_the_rank_the_line_and_the_kind(name):
    cause = blamed(name, "")
    rank, kinds = GUILTY[name]
    assert cause.rank == rank
    assert cause.id in kinds


@pytest.mark.parametrize(
    ("line", "kind"), [(7, "straggler-throttle"), (9, "rank-divergent-decision")]
)
def test_a_rank_above_the_line_at_which_the_other_waits_is_late_and_took_no_branch(line, kind):
    """It read: rank 0 took a different branch. Rank 0 waited, and rank 1 slept a line above."""
    waits = "    barrier (torch/distributed/distributed_c10d.py:5356)\n    <module> (slow.py:8)"
    stands = (waits, f"    <module> (slow.py:{line})")
    stacks = [
        stack
        for rank, text in enumerate(stands)
        for stack in read_stacks(
            f'Thread 1 (idle): "MainThread"\n{text}\n', source=str(rank), rank=rank
        )
    ]
    found = compare(stacks)
    assert found is not None
    assert (found.id, found.ranks) == (kind, (1,))


@pytest.mark.parametrize("name", sorted(GUILTY.keys() - {"uneven-batches", "save-on-one-rank"}))
def test_stacks_show_the_line_in_which_the_guilty_rank_stands(name):
    assert f"train.py:{guilty_line(name)} in" in blamed(name, "stacks.txt").place


@pytest.mark.parametrize("name", GUILTY)
def test_either_alone_names_the_rank(name):
    assert blamed(name, "stacks.txt").rank == GUILTY[name][0]
    assert blamed(name, ".pickle").rank == GUILTY[name][0]


def test_gloo_that_ends_a_process_over_a_size_says_so_though_nothing_was_recorded():
    assert blamed("other-shape", ".log").id == "gloo-size-mismatch"


WAITED = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/home/u/train.py", line 41, in {function}
[rank{rank}]:     dist.all_reduce(torch.ones(8))
[rank{rank}]:   File "/opt/site-packages/torch/distributed/distributed_c10d.py", line 3, in f
[rank{rank}]:     work.wait()
[rank{rank}]: RuntimeError: [/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting \
5000ms for recv operation to complete
"""


def logs_of(*functions):
    """A log of each rank, which waited in that function; empty where it is None."""
    return [
        Log(
            name=f"rank-{rank}.log",
            rank=rank,
            blocks=[WAITED.format(rank=rank, function=name).encode()] if name else [],
        )
        for rank, name in enumerate(functions)
    ]


@pytest.mark.parametrize(
    ("functions", "rank", "why"),
    [
        (("train", "train", None), 2, "the others wait for rank 2, which reports nothing"),
        (("train", "save", "train"), 1, "the others wait for rank 1, which waits elsewhere"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named_where_it_reports_nothing_itself(
    functions, rank, why
):
    cause = diagnose(logs_of(*functions)).causes[0]
    assert (cause.rank, why in cause.what) == (rank, True)


@pytest.mark.parametrize("functions", [("train",) * 3, ("train", None, None)])
def test_nobody_is_named_where_no_rank_differs_from_most(functions):
    assert not any(
        "the others wait" in cause.what for cause in diagnose(logs_of(*functions)).causes
    )


WATCHDOG = (
    "[rank{rank}]:[E501 12:00:00.1 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=900, NumelOut=900, "
    "Timeout(ms)=600000) ran for 600010 milliseconds before timing out.\n"
)


@pytest.mark.parametrize(
    ("before", "op", "seq", "name", "why"),
    [
        (
            "FSDP\nSaving checkpoint to /c",
            "ALLGATHER",
            900,
            "fsdp-full-state-dict-gather",
            "a save",
        ),
        ("Saving checkpoint to /c", "ALLREDUCE", 900, "rank0-only-collective-save", "being saved"),
        ("mixtral, zero3", "ALLGATHER", 900, "zero3-moe-hang", "its parameters are sharded"),
        ("mixtral", "ALLGATHER", 900, "zero3-moe-hang", "the model has experts"),
        ("Running tokenizer on dataset", "ALLREDUCE", 1, "rank0-preprocess-timeout", "prepared"),
        ("torch.compile", "ALLREDUCE", 900, "compile-rank-skew", "graphs were being compiled"),
        ("step 99/100", "ALLREDUCE", 900, "uneven-inputs-hang", "the end of an epoch"),
        ("RTX 4090", "ALLREDUCE", 2, "acs-p2p-hang", "between GPUs of one machine"),
    ],
)
def test_what_the_run_did_last_says_why_its_ranks_waited(before, op, seq, name, why):
    waits = "".join(WATCHDOG.format(rank=rank, seq=seq, op=op) for rank in (0, 1))
    cause = diagnose_text(f"{before}\n{waits}").causes[0]
    assert (cause.id, str(cause.confidence), why in cause.what) == (name, "likely", True)


def test_an_all_gather_alone_speaks_for_no_save_and_first_for_what_any_collective_may_wait_for():
    waits = "".join(WATCHDOG.format(rank=rank, seq=900, op="_ALLGATHER_BASE") for rank in (0, 1))
    causes = diagnose_text(waits).causes
    named = [cause.id for cause in causes]
    assert named[:2] == ["uneven-inputs-hang", "rank-divergent-decision"]
    assert "fsdp-full-state-dict-gather" not in named
    assert all("gathered" in each.what for each in causes if each.id.startswith("zero3"))


def test_ranks_that_all_wait_are_in_what_happened_and_none_of_them_is_where_it_is():
    waits = "".join(WATCHDOG.format(rank=rank, seq=900, op="ALLREDUCE") for rank in (0, 1))
    cause = diagnose_text(waits).causes[0]
    assert (cause.rank, "ranks 0-1 waited 600 s" in cause.what) == (None, True)


CLOSED = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "train.py", line 14, in <module>
[rank{rank}]:     dist.all_reduce(p.grad)
[rank{rank}]: RuntimeError: [gloo/transport/tcp/pair.cc:553] {why}
"""
PEER_CLOSED = "Connection closed by peer [127.0.0.1]:53989."
TABLE = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  time      : 2026-11-28_20:05:38
  host      : localhost
  rank      : {victim} (local_rank: {victim})
  exitcode  : {code} (pid: 1824)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_20:05:38
  host      : localhost
  rank      : {first} (local_rank: {first})
  exitcode  : 1 (pid: 1825)
"""


def of_ranks(why, *ranks, **more):
    texts = {f"rank-{rank}.log": CLOSED.format(rank=rank, why=why) for rank in ranks} | more
    logs = []
    for name, text in texts.items():
        rank = int(name[5]) if name.startswith("rank-") else None
        logs.append(Log(name=name, rank=rank, blocks=[text.encode()]))
    return diagnose(logs)


def test_the_rank_whose_log_just_stops_while_the_others_lose_a_peer_is_where_it_is():
    causes = of_ranks(PEER_CLOSED, 0, 1, **{"rank-2.log": "step 5 loss 0.3\n"}).causes
    assert causes[0].rank == 2


def test_a_rank_that_ended_first_by_itself_is_where_it_is_though_its_log_is_not_given():
    table = TABLE.format(victim=2, code=-15, first=1)
    diagnosis = of_ranks(PEER_CLOSED, 0, 2, launcher=table)
    assert diagnosis.causes[0].rank == 1
    assert "rank 1 ended first, with exit code 1: give its log, which has why" in diagnosis.notes
    assert not any("is the cause" in note for note in diagnosis.notes)


def test_a_rank_that_the_launcher_names_and_that_did_not_time_out_is_waited_for():
    table = TABLE.format(victim=1, code=-15, first=0)
    diagnosis = of_ranks("Timed out waiting 25000ms for send operation", 0, 2, launcher=table)
    assert diagnosis.causes[0].rank == 1
    assert "the others wait for rank 1, which reports nothing" in diagnosis.causes[0].what


def test_every_reason_of_a_hang_is_of_a_failure_and_of_facts_that_are_defined():
    rows = read_shipped("hang_reasons.toml")
    texts = {name for part in ("near", "last", "run", "op") for name in rows[part]}
    reasons = [
        reason for part in ("likely", "possible", "fits") for reason in rows[part]["reasons"]
    ]
    assert {name for name, _, _ in reasons} <= set(load_failures())
    used = {need.lstrip("!") for _, needs, _ in reasons for need in needs.split()}
    waited = Watched(line=read_line("x", source="-", number=1), rank=0, seq=3)
    standing = stand(Seen(watched=[waited]))
    assert standing is not None
    assert used == texts | {*standing.facts} - {"seq"} | {"epoch_end"}
