"""`paceline diagnose` on the command line: what it reads, what it prints, how it ends."""

import errno
import gzip
import json
import os
import pickle
import re
import threading

import pytest
from click.testing import CliRunner

from paceline.catalog.failure import load_failures
from paceline.cli.diagnose import command
from paceline.errors import JobError
from paceline.job.script import Script, ScriptSpec
from paceline.record import log_files
from paceline.record.run import create_script_run
from paceline.report.diagnose_text import MAX_LINES

EXCEPTION = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 17, in main
    load(x)
KeyError: 'labels'
"""


def run(*arguments, text=None):
    return CliRunner().invoke(
        command, [str(each) for each in arguments], input=text, standalone_mode=False
    )


def test_a_folder_of_one_file_for_each_rank_names_the_rank(tmp_path):
    for rank in range(3):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(EXCEPTION if rank == 2 else "step 1\n")
    result = run(tmp_path)
    assert result.return_value == 0
    assert "rank 2" in result.output
    assert "KeyError: 'labels'" in result.output
    assert "attempt_0/2/stderr.log:4" in result.output
    assert len(result.output.splitlines()) <= MAX_LINES


def test_json_has_the_same_answer_with_why_and_fix(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("[rank1]: " + EXCEPTION.replace("\n", "\n[rank1]: "))
    data = json.loads(run("--json", log).output)
    assert data["concluded"]
    cause = data["causes"][0]
    assert (cause["id"], cause["rank"], cause["confidence"]) == ("user-exception", 1, "certain")
    assert cause["fix"]
    assert cause["why"]
    assert cause["evidence"][0]["where"]["line"] == 4


def test_the_exit_code_says_whether_a_cause_is_known(tmp_path):
    assert run("-", text="step 1\n").return_value == 0
    assert run("-", text="frobnicator: fatal: cannot open gate\n").return_value == 1


@pytest.mark.parametrize("words", ["my cat ate the cable", "an error when it starts"])
def test_s3_3_words_of_no_known_symptom_are_no_sign_that_all_is_well(words):
    result = run(words)
    assert result.return_value == 1
    assert "these words match no known symptom; give the log: paceline diagnose FILE" in " ".join(
        result.output.split()
    )
    assert json.loads(run("--json", words).output)["concluded"] is False


def test_s3_3_a_cause_is_named_by_its_published_id_too():
    text = " ".join(run("training hangs, no error").output.split())
    assert "rank-divergent-decision (possible)" in text


def test_a_quote_that_is_cut_is_cut_behind_its_message(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    log = (
        "[rank0]:[E102 11:20:31.100200300 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=4021, OpType=ALLREDUCE, NumelIn=262144, "
        "NumelOut=262144, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.\n"
    )
    text = " ".join(run("-", text=log).output.split())
    assert "-:1: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4021, OpT" in text


def test_each_cause_that_words_may_have_comes_with_its_check():
    text = " ".join(run("hangs at step 500").output.split())
    assert text.startswith("cause 1. uneven-inputs-hang")
    assert (
        "symptom Ranks waited for a rank that did not reach the collective check print len" in text
    )
    assert text.count("Check: ") == len(re.findall(r"also \d\. ", text)) == 2


def test_what_is_certain_comes_before_its_likely_reason():
    log = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total"
        " capacity of 79.15 GiB of which 1.21 GiB is free. Of the allocated memory 66.02 GiB is "
        "allocated by PyTorch, and 10.81 GiB is reserved by PyTorch but unallocated.\n"
    )
    output = run("-", text=log).output
    text = " ".join(output.split())
    assert text.startswith("cause CUDA out of memory (certain); likely reason: OOM through alloc")
    assert "has 10.81 GiB reserved and unused: more than was asked for" in text
    assert "\nalso" not in output


def test_a_rank_that_only_prints_its_steps_is_missed_in_the_collective_that_others_wait_in():
    steps = "".join(f"[rank{rank}]: step {1500 - rank} loss 2.1\n" for rank in range(4))
    waits = "".join(
        f"[rank{rank}]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5121, "
        "OpType=ALLREDUCE, NumelIn=1000, NumelOut=1000, Timeout(ms)=600000) ran for 600012 "
        "milliseconds before timing out.\n"
        for rank in range(3)
    )
    output = run("-", text=steps + waits).output
    assert "rank 3 reported nothing" in " ".join(output.split())
    assert re.search(r"(?m)^where +rank 3 first", output)
    assert output.rstrip().endswith("ranks up to 3")


@pytest.mark.parametrize(
    ("prefixes", "last"),
    [
        (["[rank0]: "], "other ranks, give their logs too (paceline diagnose LOG LOG)"),
        (["[rank0]: ", "[rank3]: "], "166 B, ranks up to 3"),
        ([""], "74 B"),
    ],
)
def test_a_log_of_one_rank_that_shows_no_certain_cause_asks_for_the_other_ranks_logs(
    prefixes, last
):
    log = "".join(
        f"{each}WorkNCCL(SeqNum=42, OpType=ALLREDUCE) Caught collective operation timeout\n"
        for each in prefixes
    )
    assert " ".join(run("-", text=log).output.split()).endswith(last)


@pytest.mark.parametrize("shown", ["cpu-oom", "slurm-job-pending", "cuda-oom"])
def test_why_and_fix_are_whole_however_long(shown):
    failure = load_failures()[shown]
    text = " ".join(run("-", text=f"{failure.shows[0]}\n").output.split())
    assert f"cause {shown}" in text
    assert " ".join(failure.why.split()) in text
    assert " ".join(failure.fix.split()) in text


def test_a_row_that_is_cut_to_a_sentence_ends_without_a_semicolon():
    log = (
        "node1:12:12 [0] NCCL INFO NCCL_ALGO set by environment to Ring\n"
        "node1:12:12 [0] NCCL INFO Using network Socket\n"
        "node1:12:30 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    )
    lines = run("-", text=log).output.splitlines()
    assert any(line.startswith("unset") for line in lines)
    assert not any(line.endswith(";") for line in lines)


def test_s3_3_words_in_which_a_message_stands_have_possible_causes_and_a_log_a_certain_one():
    words = "CUDA out of memory when saving a checkpoint"
    causes = json.loads(run("--json", words).output)["causes"]
    assert [each["id"] for each in causes[:2]] == ["fsdp-full-state-dict-gather", "cuda-oom"]
    assert {each["confidence"] for each in causes} == {"possible"}
    (cause,) = json.loads(run("--json", "-", text="RuntimeError: CUDA out of memory.\n").output)[
        "causes"
    ][:1]
    assert (cause["id"], cause["confidence"]) == ("cuda-oom", "certain")


def test_s3_3_words_beside_a_log_are_answered_behind_what_the_log_shows(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("RuntimeError: CUDA out of memory.\n")
    causes = json.loads(run("--json", log, "same order every epoch").output)["causes"]
    ids = [each["id"] for each in causes]
    assert ids[0] == "cuda-oom"
    assert "set-epoch-missing" in ids
    log.write_text("step 1 loss 2.31\n")
    (first, *_) = json.loads(run("--json", log, "same order every epoch").output)["causes"]
    assert (first["id"], first["confidence"]) == ("set-epoch-missing", "possible")


def test_s3_3_several_sentences_are_one_and_a_slash_makes_no_path_of_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    causes = json.loads(run("--json", "loss is nan", "with fp16").output)["causes"]
    assert causes[0]["id"] == "fp16-loss-scale-collapse"
    assert run("tokens/s fall and the loss is nan").output.startswith("cause  ")
    assert "cannot be read" in str(run("logs/my train.log").exception)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_argument_is_refused_and_the_folder_is_not_read(name):
    error = run(name).exception
    assert isinstance(error, JobError)
    assert "an argument is empty" in str(error)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "empty"), (bytes(range(256)) * 400, "binary"), (b"\x7fELF" + b"\0" * 99, "core dump")],
)
def test_what_is_no_log_is_refused_with_what_it_is(tmp_path, content, said):
    path = tmp_path / "it.log"
    path.write_bytes(content)
    result = run(path)
    assert isinstance(result.exception, JobError)
    assert said in str(result.exception)


def test_a_name_that_leads_nowhere_is_refused(tmp_path):
    assert "V010" in str(run(tmp_path / "nope.log").exception)
    assert "there is no log" in str(run(tmp_path).exception)


def test_a_loop_of_links_ends(tmp_path):
    (tmp_path / "rank-0.log").write_text(EXCEPTION)
    os.symlink(tmp_path, tmp_path / "again")
    result = run(tmp_path)
    assert "1 log," in result.output


def test_bytes_that_are_no_utf8_packed_logs_and_utf16_are_read(tmp_path):
    (tmp_path / "a.log").write_bytes(b"caf\xe9 \xff\xfe\n" + EXCEPTION.encode())
    (tmp_path / "b.log.gz").write_bytes(gzip.compress(EXCEPTION.encode()))
    (tmp_path / "c.log").write_bytes(EXCEPTION.encode("utf-16"))
    for path in sorted(tmp_path.iterdir()):
        assert "KeyError" in run(path).output, path


def test_a_packed_log_that_ends_early_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "cut.log.gz"
    packed = gzip.compress(EXCEPTION.encode() + os.urandom(200_000).hex().encode(), 1)
    path.write_bytes(packed[: len(packed) // 2])
    assert "not read to its end" in run(path).output


def test_ten_thousand_lines_of_eight_ranks_become_a_few_kinds_with_their_ranks():
    lines = [f"[rank{n % 8}]: step {n} loss {n / 7:.3f} tok/s {n * 3}" for n in range(10_000)]
    lines[5000] = "[rank5]: UserWarning: slow reader"
    result = run("--unique", "-", text="\n".join(lines) + "\n")
    told = result.output.splitlines()
    assert len(told) == 4
    assert "9,999" in told[1]
    assert "0-7" in told[1]
    assert told[2].split()[:2] == ["1", "5"]


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"entries": [{"record_id": 1}], "pg_config": {}})[:30],
        pickle.dumps({"pg_config": {}, "entries": []}),
        b'{"entries": [{"collective_seq_id": "a"}, 5, null]}',
        b"\x80\x02}q\x00X\x07\x00\x00\x00entriesq\x01cposix\nsystem\nq\x02s.",
    ],
)
def test_dumps_that_tell_nothing_are_no_clean_run(tmp_path, content):
    for rank in range(2):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(content)
    error = run(tmp_path).exception
    assert isinstance(error, JobError)
    assert "V011" in str(error)
    assert error.exit_code == 2


@pytest.fixture
def closed_folder(tmp_path, monkeypatch):
    """A folder that this user may not open; root may open all, so the system call refuses."""
    folder = tmp_path / "node1"
    folder.mkdir()
    (folder / "rank-1.log").write_text(EXCEPTION)
    as_it_was = os.scandir

    def refuse(path="."):
        if str(path) == str(folder):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return as_it_was(path)

    monkeypatch.setattr(os, "scandir", refuse)
    return folder


def test_a_folder_that_cannot_be_opened_is_refused(closed_folder):
    error = run(closed_folder).exception
    assert isinstance(error, JobError)
    assert f"{closed_folder} cannot be read: Permission denied" in str(error)


def test_a_folder_inside_that_cannot_be_opened_is_said_and_the_rest_is_read(closed_folder):
    (closed_folder.parent / "rank-0.log").write_text("step 1\n")
    for flags in ([], ["--unique"]):
        told = " ".join(run(*flags, closed_folder.parent).output.split())
        assert "step 1" in told or "nothing" in told
        assert f"Permission denied: {closed_folder}" in told
        assert "KeyError" not in told


def test_a_pipe_that_nobody_writes_to_is_said_and_then_read(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "_PATIENCE_S", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    later = threading.Timer(0.2, lambda: pipe.write_text(EXCEPTION))
    later.start()
    result = run(pipe)
    later.join()
    assert "is a pipe; waiting until something writes to it" in result.stderr
    assert "KeyError: 'labels'" in result.output


def test_evidence_can_be_searched_for_in_the_log():
    line = "[   99.9]  worker:   RuntimeError: CUDA error: out of memory"
    assert line in run("-", text=f"{line}\n").output


WAITS = """\
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
"""


def test_s3_4_the_script_that_is_given_names_the_line_of_a_hang(tmp_path):
    (tmp_path / "train.py").write_text(WAITS)
    script = tmp_path / "train.py"
    assert f"{script}:5" in run("training hangs, no error", "--script", script).output
    script.write_text("def f(")
    assert "never closed" in str(run("training hangs", "--script", script).exception)
    assert "there is no" in str(run("training hangs", "--script", tmp_path / "no.py").exception)


def test_s3_4_the_script_of_a_run_is_read_without_being_given(tmp_path):
    (tmp_path / "train.py").write_text('load = {}\nprint(load["labels"])\n')
    script = Script(
        spec=ScriptSpec(command=["python", "train.py"]), folder=tmp_path, source="job.yaml"
    )
    ran = create_script_run(script, folder=None, runs=tmp_path / "runs")
    log = EXCEPTION.replace("/home/u/train.py", str(tmp_path / "train.py")).replace("17", "2")
    ran.rank_log(0).write_text(log)
    shown = " ".join(run(ran.path).output.split())
    assert 'train.py:2: print(load["labels"])' in shown
    assert "changed after" not in shown
    os.utime(tmp_path / "train.py", (2e9, 2e9))
    assert "was changed after" in " ".join(run(ran.path).output.split())
