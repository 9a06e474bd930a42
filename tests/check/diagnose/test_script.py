"""A diagnosis beside the script that ran: its line and operation are named."""

import pytest
from tests.check.diagnose.corpus import diagnose_text

from paceline.check.diagnose.diagnose import diagnose
from paceline.check.diagnose.script import with_script
from paceline.check.lint.facts.source import Unreadable
from paceline.record.log_files import Log
from paceline.report.diagnose_text import diagnosis_lines

TRAIN = b"""\
import torch.distributed as dist
from mine import sync

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(9):
        if rank == 0:
            dist.barrier()
        sync(step)
    x = {}["labels"]

main()
"""
MINE = b"""\
import torch.distributed as dist

def sync(step):
    dist.barrier()
"""
FILES = {"src/train.py": TRAIN, "src/mine.py": MINE, "src/other.py": TRAIN}
HANGS = diagnose([Log(name="words", blocks=[b"training hangs, no error"], is_words=True)])


def beside(diagnosis, files=None):
    return with_script(diagnosis, "src/train.py", files or FILES)


def raised(*frames):
    lines = "".join(f'  File "{path}", line {line}, in f\n    x\n' for path, line in frames)
    return diagnose_text(f"Traceback (most recent call last):\n{lines}KeyError: 'labels'\n")


def test_s3_4_a_hang_told_in_words_is_answered_with_the_line_and_operation_of_the_script():
    assert HANGS.causes[0].id != "collective-mismatch"
    diagnosis = beside(HANGS)
    cause = diagnosis.causes[0]
    assert (cause.id, str(cause.confidence)) == ("collective-mismatch", "likely")
    assert cause.what.startswith("src/train.py:9:13: only the main process reaches barrier")
    assert diagnosis.facts["script"].startswith("src/train.py:9: dist.barrier() (every rank")
    assert "src/train.py:9" in "\n".join(diagnosis_lines(diagnosis))


def test_s3_4_the_line_that_a_traceback_names_is_shown_as_it_stands_in_the_script():
    diagnosis = beside(raised(("/home/u/src/train.py", 11)))
    assert diagnosis.causes[0].id == "user-exception"
    assert diagnosis.facts["script"] == 'src/train.py:11: x = {}["labels"]'


def test_s3_4_a_place_in_a_file_that_the_script_imports_is_its_operation():
    diagnosis = beside(raised(("/home/u/src/train.py", 10), ("/home/u/src/mine.py", 4)))
    assert diagnosis.facts["script"].startswith("src/mine.py:4: dist.barrier() (every rank")


def test_a_file_that_the_script_does_not_import_is_no_part_of_the_answer():
    assert "script" not in beside(raised(("/home/u/src/other.py", 11))).facts
    alone = beside(HANGS, {"src/train.py": b"import torch\n", "src/other.py": TRAIN})
    assert alone.causes == HANGS.causes


def stands(number, *frames):
    text = f'Process {40 + number}: python train.py\n\nThread {40 + number} (idle): "MainThread"\n'
    text += "".join(f"    {frame}\n" for frame in frames)
    return Log(name=f"rank-{number}.log", rank=number, blocks=[text.encode()])


def hung(line):
    barrier = ("barrier (torch/distributed/distributed_c10d.py:5356)", f"main (train.py:{line})")
    reduce = ("all_reduce (torch/distributed/distributed_c10d.py:3123)", "main (train.py:10)")
    return diagnose([stands(0, *barrier), stands(1, *reduce), stands(2, *reduce)])


def test_s3_4_the_rank_that_stood_at_the_finding_is_named_with_it():
    cause = beside(hung(9)).causes[0]
    assert (cause.id, cause.rank) == ("collective-mismatch", 0)


def test_s3_4_of_two_ranks_in_unlike_collectives_the_one_that_the_script_sent_there_is_named():
    script = b"""\
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(9):
    if step == 5 and dist.get_rank() == 1:
        dist.broadcast(t, src=1)
        continue
    dist.all_reduce(t)
"""
    broadcast = ("broadcast (torch/distributed/distributed_c10d.py:3151)", "<module> (train.py:6)")
    reduce = ("all_reduce (torch/distributed/distributed_c10d.py:3252)", "<module> (train.py:8)")
    seen = diagnose([stands(0, *reduce), stands(1, *broadcast)])
    cause = with_script(seen, "train.py", {"train.py": script}).causes[0]
    assert (cause.id, cause.rank) == ("collective-mismatch", 1)
    assert cause.what.startswith("train.py:6:9: ")


def test_a_rank_that_stood_elsewhere_says_more_than_what_lint_finds():
    assert beside(hung(7)).causes[0].id == hung(7).causes[0].id == "rank-divergent-decision"


def test_a_file_that_is_no_python_program_is_refused():
    with pytest.raises(Unreadable):
        beside(HANGS, {"src/train.py": b"def f("})
