"""The root cause first: what wins over what, which rank was first, and what stays unknown."""

import os
import random
import re
from collections.abc import Iterator
from multiprocessing import active_children

import pytest
from tests.check.diagnose.corpus import diagnose_text

from paceline.catalog.failure import load_failures
from paceline.catalog.load import read_shipped
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.diagnose import diagnose
from paceline.check.diagnose.matcher import Matcher, all_patterns
from paceline.launch.in_processes import MapAhead
from paceline.record.log_files import Log

INTERLEAVED = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/home/u/train.py", line 30, in <module>
[rank0]:   File "/home/u/train.py", line 31, in <module>
[rank1]:     main()
[rank1]:   File "/home/u/train.py", line 17, in main
[rank1]:     raise ValueError("x")
[rank0]:     dist.all_reduce(t)
[rank1]: ValueError: sample 17: expected 8 features, got 7
[rank0]:   File "/opt/lib/python3.10/site-packages/torch/distributed/c10d.py", line 3, in all_reduce
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:31337
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  time      : 2024-03-21_02:07:08
  host      : node1
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 12)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2024-03-21_02:07:07
  host      : node1
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 11)
  error_file: <N/A>
"""


def test_an_exception_wins_over_its_victims_also_when_torchrun_names_a_victim():
    diagnosis = diagnose_text(INTERLEAVED)
    cause = diagnosis.causes[0]
    assert (cause.id, cause.rank, cause.host) == ("user-exception", 1, "node1")
    assert "expected 8 features" in cause.what
    assert cause.place == "/home/u/train.py:17 in main"
    assert any("torchrun names rank 0" in note for note in diagnosis.notes)
    assert "gloo-peer-closed" in {each.id for each in diagnosis.consequences}


def test_blocks_may_be_cut_anywhere():
    text = INTERLEAVED.encode()
    pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
    assert diagnose([Log(name="-", blocks=pieces)]) == diagnose([Log(name="-", blocks=[text])])


def _matching_examples() -> Iterator[tuple[int, str]]:
    """(number of a pattern, line of its failure's examples that it matches)."""
    known = load_failures()
    for number, pattern in enumerate(all_patterns()):
        failure = known.get(pattern.name)
        for text in failure.shows if failure else ():
            yield from ((number, line) for line in text.split("\n") if pattern.text.search(line))


def test_every_line_is_found_that_a_pattern_matches_also_with_other_digits():
    chance, examples, missed = random.Random(0), list(_matching_examples()), []
    matcher = Matcher(range(len(all_patterns())))
    for number, line in examples:
        others = ["".join(chance.choice("0123456789") for _ in range(len(line))) for _ in range(8)]
        variants = [re.sub(r"\d", lambda at, o=other: o[at.start()], line) for other in others]
        matching = [each for each in (line, *variants) if all_patterns()[number].text.search(each)]
        block = "\n".join((*variants, line)).encode() + b"\n"
        hits = {
            block[start:end].decode()
            for start, end, numbers, _ in matcher.find(block)
            if number in numbers
        }
        missed += [each for each in matching if each not in hits]
    assert len({number for number, _ in examples}) > len(all_patterns()) // 2
    assert missed == []


def test_a_line_is_found_by_its_digits_among_a_thousand_that_differ_in_them_alone():
    [number] = [
        at for at, each in enumerate(all_patterns()) if each.text.pattern == r"Error 1\d\d\b"
    ]
    lines = [
        f"{step} id {step * 0x9E3779B97F4A7C15 % 2**64:016x}: Error 0{step:02}"
        for step in range(1000)
    ]
    lines[700] = "700 id 0123456789abcdef: Error 137"
    block = "\n".join(lines).encode()
    hits = Matcher([number]).find(block)
    assert [block[start:end].decode() for start, end, *_ in hits] == [
        line for line in lines if re.search(r"Error 1\d\d\b", line)
    ]


@pytest.mark.parametrize(
    ("line", "is_wanted"),
    [
        (
            "NCCL INFO AllReduce: opCount 1f count 64 op 0 root 0 comm 0x7f12ab0012cd [nranks=8]",
            False,
        ),
        ("NCCL INFO comm 0x7f12ab0012cd rank 3 nranks 8 cudaDev 3 busId 3b000", True),
    ],
)
def test_nccls_lines_are_read_for_ranks_and_not_for_each_collective(line, is_wanted):
    readers = [at for at, each in enumerate(all_patterns()) if each.name == "nccl-info"]
    assert bool(Matcher(readers).find(f"node1:12:13 [3] {line}\n".encode())) is is_wanted


def test_a_fatal_line_behind_many_usual_errors_is_shown():
    text = "retry: error 5\n" * 30_000 + "frobnicator: fatal: cannot open gate 7\n"
    assert any("gate 7" in each.text for each in diagnose_text(text).unknown)


def test_a_log_of_a_healthy_run_has_nothing_wrong():
    diagnosis = diagnose_text(
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default\n"
        "[rank0]:[W reducer.cpp:327] Warning: Grad strides do not match bucket view strides.\n"
        "step 10 loss 2.31 mean_squared_error 0.2\nstep 20 loss 2.30\ntraining finished\n"
    )
    assert not diagnosis.causes
    assert not diagnosis.has_failed
    assert diagnosis.is_concluded


def test_what_no_pattern_knows_stays_unknown_with_its_lines():
    diagnosis = diagnose_text("step 1\nfrobnicator: fatal: cannot open gate 7\nstep 2\n")
    assert not diagnosis.causes
    assert not diagnosis.is_concluded
    assert [each.where.line for each in diagnosis.unknown] == [2]


def test_out_of_memory_says_its_numbers_and_fragmentation_only_when_they_speak_for_it():
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {want} GiB. GPU 5 has a"
        " total capacity of 23.43 GiB of which 210.06 MiB is free. Of the allocated memory 20.1"
        " GiB is allocated by PyTorch, and 2.57 GiB is reserved by PyTorch but unallocated.\n"
    )
    fits = diagnose_text(text.format(want="1.96"))
    assert fits.causes[0].id == "cuda-oom-fragmentation"
    full = diagnose_text(text.format(want="5.00"))
    assert full.causes[0].id == "cuda-oom"
    assert "asked for 5.00 GiB on GPU 5" in full.causes[0].what


def test_another_process_is_suspected_only_where_the_message_names_two():
    """In a container torch calls the failing rank itself `Process N`: it was another process."""
    head = (
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 3 "
        "has a total capacity of 79.11 GiB of which 1.02 GiB is free. "
    )
    own = "Process 41290 has 78.08 GiB memory"
    rest = " in use. Of the allocated memory 70.41 GiB is allocated by PyTorch, and 6.20 GiB is "
    other = " in use. Process 7 has 3.00 GiB memory"
    for more, is_suspected in (("", False), (other, True)):
        text = f"{head}{own}{more}{rest}reserved by PyTorch but unallocated."
        found = [cause.id for cause in diagnose_text(text).causes]
        assert ("accelerator-in-use" in found) is is_suspected


def test_a_pattern_that_matches_everywhere_is_counted_and_then_left_out():
    line = b"[rank%d]: loss: nan\n"
    text = b"".join(line % (number % 8) for number in range(400_000))
    diagnosis = diagnose([Log(name="-", blocks=[text])])
    assert diagnosis.causes[0].id == "nan-loss-undetected"
    assert list(diagnosis.causes[0].ranks) == list(range(8))
    assert "nan-loss-undetected" in diagnosis.saturated
    assert diagnosis.num_lines == 400_000


def _repeating(chance: random.Random) -> Iterator[bytes]:
    """Eight blocks with more lines of one error than are looked for, ids, and a traceback."""
    for number in range(8):
        lines = [
            f"[rank{chance.randrange(64)}]: Retrying after ReadTimeoutError: "
            f"/c4/{chance.randbytes(8).hex()} exit code 1{chance.randrange(40):02}\n"
            for _ in range(12_000)
        ]
        lines.insert(5000, f"[rank{number}]: Traceback (most recent call last):\n")
        lines.insert(5003, f"[rank{number}]: KeyError: 'sample {number}'\n")
        yield "".join(lines).encode()


@pytest.mark.skipif(os.cpu_count() == 1, reason="processes help where there are several cores")
@pytest.mark.parametrize("is_killed", [False, True])
def test_blocks_that_other_processes_search_give_the_same_diagnosis(is_killed: bool):
    expected = diagnose([Log(name="-", blocks=list(_repeating(random.Random(3))))])

    def blocks() -> Iterator[bytes]:
        for at, block in enumerate(_repeating(random.Random(3))):
            if at == 6 and is_killed:
                assert active_children()
                for process in active_children():
                    process.kill()
                    process.join()
            yield block

    with MapAhead(1) as map_ahead:
        assert diagnose([Log(name="-", blocks=blocks())], map_ahead) == expected
    assert expected.saturated
    assert expected.causes
    assert not active_children()


def test_the_log_of_the_earliest_rank_wins_over_the_order_of_files():
    late = b"2024-05-01 12:00:09,000 ERROR x\n[rank0]: KeyError: 'late'\n"
    one = Log(
        name="rank-0.log", rank=0, blocks=[b"2024-05-01 12:00:09,000 ERROR KeyError: 'late'\n"]
    )
    two = Log(
        name="rank-1.log", rank=1, blocks=[b"2024-05-01 12:00:01,000 ERROR KeyError: 'soon'\n"]
    )
    assert late
    assert "soon" in diagnose([one, two]).causes[0].what


def test_confidence_is_certain_only_for_a_message_of_its_own():
    weak = diagnose_text("node1:1:1 [0] NCCL INFO NCCL_GRAPH_FILE set by environment to /x\n")
    assert all(cause.confidence is Confidence.POSSIBLE for cause in weak.causes)


def test_a_peer_that_left_without_an_error_is_the_cause_of_a_closed_connection():
    text = (
        "[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:6\n"
        "E1122 08:07:34.1 4075 torch/distributed/elastic/multiprocessing/api.py:1002] failed "
        "(exitcode: 1) local_rank: 1 (pid: 4205) of binary: /usr/bin/python\n"
    )
    cause = diagnose_text(text).causes[0]
    assert (cause.id, cause.confidence) == ("uneven-inputs-hang", Confidence.LIKELY)
    killed = text.replace("exitcode: 1)", "exitcode: -9)")
    assert diagnose_text(killed).causes[0].id == "host-oom-sigkill"


TEED = """\
[default5]:Traceback (most recent call last):
[default0]:waiting
[default5]:  File "/app/data.py", line 31, in __getitem__
[default5]:KeyError: 'img_00017'
"""
WATCHDOG = (
    "[default{local}]:[rank{rank}]:[E1122 10:11:12.123 ProcessGroupNCCL.cpp:632] [Rank {rank}] "
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=20, OpType=ALLREDUCE, NumelIn=1,"
    " NumelOut=1, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.\n"
)
TABLE = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_10:11:30
  host      : node1
  rank      : {rank} (local_rank: 2)
  exitcode  : -6 (pid: 123)
"""


@pytest.mark.parametrize("first", [0, 8])
def test_a_local_rank_is_told_as_the_rank_it_is_on_its_node(first):
    watched = "".join(
        WATCHDOG.format(local=local, rank=first + local) for local in range(8) if local != 5
    )
    diagnosis = diagnose_text(TEED + watched + TABLE.format(rank=first + 2))
    (cause,) = diagnosis.causes  # what the time-outs might have been is no alternative to it
    assert (cause.id, cause.rank) == ("user-exception", first + 5)
    assert not diagnosis.resembling
    assert any(f"torchrun names rank {first + 2}" in note for note in diagnosis.notes)


def test_a_local_rank_is_told_as_that_where_nothing_says_more():
    cause = diagnose_text(TEED).causes[0]
    assert (cause.rank, cause.what.split(":")[0]) == (None, "Local rank 5")


def test_a_message_at_the_end_of_a_very_long_line_is_read():
    text = "x" * 3_000_000 + " RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\nstep\n"
    cause = diagnose_text(text).causes[0]
    assert cause.id == "cuda-oom"
    assert "Tried to allocate 2.00 GiB" in cause.evidence[0].text


def test_a_gloo_time_out_is_told_as_one_and_a_renamed_variable_is_no_reason_for_it():
    renamed = "Warning: Environment variable NCCL_ASYNC_ERROR_HANDLING is deprecated; use another\n"
    waited = (
        "RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for "
    )
    diagnosis = diagnose_text(renamed + waited + "recv operation to complete\n")
    assert "waited 4 s for another rank, which did not send" in diagnosis.causes[0].what
    assert "nccl-env-deprecated" not in {each.id for each in diagnosis.causes}


def test_the_host_that_ran_out_of_memory_is_named_as_ray_says_it():
    killed = "1 Workers (tasks / actors) killed due to memory pressure (OOM)"
    by_prefix = f"(RayTrainWorker pid=1, ip=10.0.0.2) step\n(raylet, ip=10.0.0.3) {killed}\n"
    by_text = f"(raylet) node_manager.cc:3064: {killed} at node (ID: 7a9c, IP: 10.0.0.3)\n"
    for text in (by_prefix, by_text):
        assert diagnose_text(text).causes[0].host == "10.0.0.3", text


def test_every_second_fact_and_every_sentence_is_of_a_known_failure_and_names_what_it_finds():
    texts = {"in_run", "in_line", "not_in_run", "not_in_line"}
    for name, facts in read_shipped("second_facts.toml").items():
        assert name in load_failures()
        for row in facts.get("facts", [facts]):
            assert row.keys() & {*texts, "often", "last_line"}
            assert row.keys() <= {*texts, "often", "last_line", "fact"}
            named = [re.compile(row[each]).groupindex for each in texts & row.keys()]
            row["fact"].format_map(dict.fromkeys(name for each in named for name in each))
    for name, row in read_shipped("said.toml").items():
        failures = [each for each in load_failures().values() if each.id.startswith(name)]
        forms = [*row.get("find", ()), *(form for each in failures for form in each.log)]
        forms += [form for each in failures for form in each.weak_log]
        named = [re.compile(form).groupindex for form in forms]
        known = dict.fromkeys(name for each in named for name in each)
        assert all(each.format_map(known) for each in row["say"])


def test_s3_3_a_loss_scale_below_one_comes_before_the_nan_that_follows_it():
    text = "step 410 loss 2.31\n" + "".join(
        f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}\n"
        for scale in ("64.0", "1.0", "0.0078125")
    )
    causes = diagnose_text(text + "step 411 loss nan\n").causes
    assert [each.id for each in causes] == ["fp16-loss-scale-collapse", "nan-loss-undetected"]
    assert diagnose_text(text.partition("0.0078125")[0] + "512.0\n").causes == []


def test_s3_3_weights_of_another_size_are_told_from_states_cut_for_other_ranks():
    text = (
        "[rank0]: RuntimeError: Error(s) in loading state_dict for Net:\n"
        "[rank0]: \tsize mismatch for layers.0.weight: copying a param with shape "
        "torch.Size([2048, 1024]) from checkpoint, the shape in current model is torch.Size({}).\n"
    )
    assert diagnose_text(text.format("[4096, 1024]")).causes[0].id == "state-dict-mismatch"
    assert diagnose_text(text.format("[0]")).causes[0].id != "state-dict-mismatch"


def test_s3_3_a_rank_that_skipped_a_batch_went_another_way_than_those_that_wait_for_it():
    waits = "".join(
        f"[rank{rank}]:[E1128 10:22:31.1 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=8123, OpType=ALLREDUCE, NumelIn=25557032, "
        "NumelOut=25557032, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.\n"
        for rank in (3, 0, 1)
    )
    assert diagnose_text(waits).causes[0].id == "uneven-inputs-hang"
    first = diagnose_text(waits + "[rank2]: skipping bad batch 8122\n").causes[0]
    assert first.id == "rank-divergent-decision"
    assert "a batch was skipped" in first.what


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        ('/opt/torch/optim/adamw.py", line 220, in step', "optimizer states"),
        ('/opt/torch/autograd/graph.py", line 8, in _engine_run_backward', "in the backward pass"),
        (
            '/opt/torch/nn/modules/module.py", line 9, in _apply',
            "parameters, as the model is moved",
        ),
        ('/opt/torch/nn/functional.py", line 9, in cross_entropy', "in the forward pass"),
    ],
)
def test_s0_13_what_the_memory_was_for_is_told_by_the_frames_and_where_by_the_program(frame, what):
    text = (
        "Traceback (most recent call last):\n"
        '  File "/app/train.py", line 61, in main\n'
        f'  File "{frame}\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 1 has a "
        "total capacity of 79.15 GiB of which 100.00 MiB is free. Of the allocated memory 77.60 "
        "GiB is allocated by PyTorch, and 310.00 MiB is reserved by PyTorch but unallocated.\n"
    )
    first = diagnose_text(text).causes[0]
    assert (first.id, first.place) == ("cuda-oom", "/app/train.py:61 in main")
    assert what in first.what


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (
            "/v/site-packages/fast_cuda.cpython-310-x86_64-linux-gnu.so: undefined symbol: _ZN2at4",
            "fast_cuda.cpython-310-x86_64-linux-gnu.so was built for other versions",
        ),
        (
            "cannot import name 'Old' from 'peft.tuners' (/v/site-packages/peft/tuners.py)",
            "the peft.tuners that is installed has no Old",
        ),
        (
            "/lib/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by /v/op.so)",
            "libstdc++.so.6 has no GLIBCXX_3.4.29",
        ),
    ],
)
def test_a_package_of_another_version_is_named_and_is_no_error_of_the_program(error, what):
    first = diagnose_text(f"{_IN_MAIN}ImportError: {error}\n").causes[0]
    assert (first.id, first.confidence) == ("requirements-not-met", Confidence.CERTAIN)
    assert what in first.what


def test_a_name_that_ones_own_file_lacks_is_an_error_of_the_program():
    error = "ImportError: cannot import name 'Net' from 'models' (/app/models.py)\n"
    assert diagnose_text(_IN_MAIN + error).causes[0].id == "user-exception"


_IN_MAIN = 'Traceback (most recent call last):\n  File "/app/train.py", line 6, in main\n'
