"""Files that import each other are followed: what a helper does is judged by who calls it."""

from textwrap import dedent

import pytest

from paceline.check.finding import Severity
from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint

TRAIN = """
    import os
    import torch
    import torch.distributed as dist
    {imports}

    def main():
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        total = torch.ones(1, device="cuda")
        if {asks}():
            total = {mean}(total)

    if __name__ == "__main__":
        main()
"""

COMM = """
    import torch.distributed as dist

    def leads():
        return dist.get_rank() == 0

    def mean(tensor):
        dist.all_reduce(tensor)
        return tensor / dist.get_world_size()

    if __name__ == "__main__":
        if leads():
            dist.barrier()
"""


def found(files: dict[str, str], *, hints: bool = False) -> set[tuple[str, str, int | None]]:
    sources = {path: dedent(text).strip().encode() for path, text in files.items()}
    return {
        (one.id, one.where.path, one.where.line)
        for one in lint(sources, Context())
        if hints or one.severity is not Severity.INFO
    }


@pytest.mark.parametrize(
    ("train", "comm", "imports", "prefix"),
    [
        ("train.py", "comm.py", "from comm import leads, mean", ""),
        ("train.py", "lib/comm.py", "from lib.comm import leads, mean", ""),
        ("train.py", "lib/comm.py", "from lib import comm", "comm."),
        ("train.py", "lib/comm.py", "import lib.comm", "lib.comm."),
        ("train.py", "lib/comm.py", "import lib.comm as c", "c."),
        ("scripts/train.py", "lib/comm.py", "from lib.comm import leads, mean", ""),
        ("pkg/train.py", "pkg/comm.py", "from .comm import leads, mean", ""),
        ("pkg/run/train.py", "pkg/comm.py", "from ..comm import leads, mean", ""),
        ("pkg/train.py", "pkg/comm.py", "from .comm import *", ""),
        ("train.py", "comm.py", "from comm import leads as leads, mean as mean", ""),
    ],
)
def test_a_collective_in_another_file_is_found_under_the_importers_condition(
    train, comm, imports, prefix
):
    text = TRAIN.format(imports=imports, asks=f"{prefix}leads", mean=f"{prefix}mean")
    wanted = ("collective-mismatch", train, 11)
    assert found({train: text, comm: COMM.split("if __name__")[0]}, hints=True) == {wanted}


def test_what_a_package_hands_on_is_followed_to_the_file_that_defines_it():
    text = TRAIN.format(imports="from lib import leads, mean", asks="leads", mean="mean")
    files = {
        "train.py": text,
        "lib/__init__.py": "from .comm import leads, mean",
        "lib/comm.py": COMM.split("if __name__")[0],
    }
    assert found(files, hints=True) == {("collective-mismatch", "train.py", 11)}


def test_what_an_imported_file_does_as_a_program_is_not_done_by_its_importer():
    text = TRAIN.format(imports="from comm import leads, mean", asks="leads", mean="mean")
    ids = found({"train.py": text.replace("if leads():", "if True:"), "comm.py": COMM})
    assert ids == {("collective-mismatch", "comm.py", 12)}


def test_a_fault_of_a_helper_is_shown_in_the_helpers_file():
    train = """
        import torch.distributed as dist
        from saving import save

        dist.init_process_group("nccl")
        save({"step": 1})
    """
    saving = """
        import torch

        def save(state):
            torch.save(state, "last.pt")
    """
    place = ("all-ranks-save-same-file", "saving.py", 4)
    assert found({"train.py": train, "saving.py": saving}, hints=True) == {place}
    guarded = train.replace("save({", "if dist.get_rank() == 0:\n            save({")
    assert found({"train.py": guarded, "saving.py": saving}, hints=True) == set()


def test_a_line_of_another_file_is_said_with_its_file():
    train = """
        import torch.distributed as dist
        from comm import only_first

        dist.init_process_group("nccl")
        only_first(dist.barrier)
    """
    comm = """
        import torch.distributed as dist

        def only_first(call):
            if dist.get_rank() == 0:
                dist.barrier()
    """
    sources = {"train.py": dedent(train).encode(), "comm.py": dedent(comm).encode()}
    (finding,) = [one for one in lint(sources, Context()) if one.severity is not Severity.INFO]
    assert (finding.where.path, finding.where.line) == ("comm.py", 6)


def test_two_files_that_import_each_other_end():
    first = "from b import g\n\ndef f():\n    return g()\n"
    second = "from a import f\n\ndef g():\n    return f()\n"
    assert found({"a.py": first, "b.py": second}) == set()


def test_a_folder_that_is_called_like_a_library_does_not_hide_the_library():
    train = """
        from torch.utils.data import DataLoader
        from datasets import load_dataset

        DataLoader(load_dataset("imdb"), shuffle=True, sampler=object())
    """
    files = {"train.py": train, "datasets/__init__.py": "", "torch/utils/data.py": "x = 1"}
    assert found(files) == {("sampler-and-shuffle", "train.py", 4)}


def test_a_broken_helper_leaves_its_importer_readable():
    train = "from helper import f\nimport torch.distributed as dist\nf()\n"
    assert found({"train.py": train, "helper.py": "def f(:"}) == set()


def test_own_decorators_are_followed():
    train = """
        import torch.distributed as dist
        from deco import on_rank

        @on_rank(0)
        def summary(tensor):
            dist.all_reduce(tensor)

        @on_rank(0)
        def say(text):
            print(text)

        dist.init_process_group("gloo")
        summary(1)
        say("done")
    """
    deco = """
        import functools
        import torch.distributed as dist

        def on_rank(rank):
            def outer(function):
                @functools.wraps(function)
                def inner(*args, **kwargs):
                    if dist.get_rank() != rank:
                        return None
                    return function(*args, **kwargs)
                return inner
            return outer
    """
    wanted = {("collective-mismatch", "train.py", 6)}
    assert found({"train.py": train, "deco.py": deco}, hints=True) >= wanted
