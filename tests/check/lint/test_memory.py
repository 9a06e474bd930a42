"""What lint found before is taken again only where nothing that it depends on has changed."""

import pytest

from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint_files
from paceline.check.lint.memory import Memory, memory_as_bytes, memory_of_bytes

HELPER = b"import torch.distributed as dist\n\ndef is_first():\n    return dist.get_rank() == 0\n"
TRAIN = b"""import torch.distributed as dist
from helper import is_first

def main():
    dist.init_process_group("nccl")
    if is_first():
        dist.barrier()

if __name__ == "__main__":
    main()
"""
OTHER = b"import torch.distributed as dist\n\nprint(dist.get_rank())\n"
FILES = {
    "train.py": TRAIN,
    "helper.py": HELPER,
    "other.py": OTHER,
    "notes.json": b'{"password": "hunter2hunter2"}\n',
    "ds.json": b'{"zero_optimization": {"stage": 2}, "steps_per_print": 1, "zero_stagee": 1}\n',
    "notes.ipynb": b"{}",
    "run.sh": b"torchrun --nproc_per_node=2 train.py\n",
}


class Run:
    """A run over files, and which programs it judged."""

    def __init__(self, files, before=None, context=None):
        kept = memory_as_bytes(before.memory, "v1") if before is not None else b""
        self.memory = memory_of_bytes(kept, "v1")
        self.judged = []

        def judge_all(judge, paths):
            self.judged = sorted(paths)
            return map(judge, paths)

        context = context or Context()
        self.linted = lint_files(files, context, judge_all=judge_all, memory=self.memory)
        anew = lint_files(files, context)
        assert self.linted.findings == anew.findings
        assert self.linted.kinds == anew.kinds


def test_unchanged_files_are_judged_once():
    first = Run(FILES)
    assert first.judged == ["helper.py", "other.py", "train.py"]
    assert {"collective-mismatch", "secret-in-file", "ds-config-silent-keys"} <= {
        one.id for one in first.linted.findings
    }
    second = Run(FILES, first)
    assert second.judged == []
    assert not second.memory.has_changed


def test_a_changed_helper_judges_anew_what_read_it_and_nothing_else():
    everywhere = HELPER.replace(b"dist.get_rank() == 0", b"True")
    second = Run(FILES | {"helper.py": everywhere}, Run(FILES))
    assert second.judged == ["helper.py", "train.py"]
    assert "collective-mismatch" not in {one.id for one in second.linted.findings}


@pytest.mark.parametrize(
    ("files", "context"),
    [
        (FILES | {"utils.py": b"x = 1\n"}, None),
        ({path: data for path, data in FILES.items() if path != "other.py"}, None),
        (FILES | {"run.sh": b"torchrun --nproc_per_node=4 train.py\n"}, None),
        (FILES, Context(gpu="V100")),
    ],
    ids=["a program is added", "a program is gone", "a launch line changed", "another context"],
)
def test_what_all_programs_depend_on_judges_all_anew(files, context):
    wanted = sorted(path for path in files if path.endswith(".py"))
    assert Run(files, Run(FILES), context).judged == wanted


def test_a_changed_text_is_read_anew():
    second = Run(FILES | {"notes.json": b'{"password": ""}\n'}, Run(FILES))
    assert "secret-in-file" not in {one.id for one in second.linted.findings}


def test_damaged_foreign_and_old_memories_are_none():
    data = memory_as_bytes(Run(FILES).memory, "v1")
    assert memory_of_bytes(data, "v1").before
    head, _, body = data.partition(b"\n")
    for wrong in (
        b"",
        data[:-10],
        data.replace(b"error", b"wrong", 1),
        head + b"\n" + body + b" ",
        b"\xff\xfe" * 50,
        memory_as_bytes(Memory(is_on=True), "v0"),
    ):
        assert not memory_of_bytes(wrong, "v1").before
    assert not memory_of_bytes(data, "v2").before


def test_a_file_whose_name_is_no_utf_8_is_judged_each_time():
    files = FILES | {"na\udcffme.py": OTHER}
    assert Run(files, Run(files)).judged == ["na\udcffme.py"]
