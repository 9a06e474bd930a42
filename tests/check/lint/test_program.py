"""The program model: names, arguments, own functions, guards and loops are read right."""

from textwrap import dedent

import pytest
from tests.check.lint.marked_cases import lint_program

from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.program import Program, read_program
from paceline.check.lint.facts.source import Unreadable
from paceline.check.lint.facts.values import DATA, RANK, TIME


def read(text: str) -> Program:
    return read_program("train.py", dedent(text))


def only(calls: list[Call]) -> Call:
    assert len(calls) == 1, [call.name for call in calls]
    return calls[0]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.nn.parallel.DistributedDataParallel(m)",
        "import torch.nn as nn\nnn.parallel.DistributedDataParallel(m)",
        "from torch.nn.parallel import DistributedDataParallel as DDP\nDDP(m)",
        "from torch.nn.parallel.distributed import DistributedDataParallel as W\nwrap = W\nwrap(m)",
        "from torch.nn import parallel as p\nkw = dict(x=1)\np.DistributedDataParallel(m, **kw)",
    ],
)
def test_a_class_has_one_name_however_it_is_imported(text):
    call = only(read(text).calls("torch.nn.parallel.DistributedDataParallel"))
    assert call.result.wrapper == "ddp"


def test_arguments_are_found_through_splatted_dicts_and_constants():
    program = read(
        """
        from torch.utils.data import DataLoader
        SHUFFLE = True
        kwargs = dict(batch_size=4)
        more = {"shuffle": SHUFFLE, **kwargs}
        DataLoader(ds, **more)
        """
    )
    call = only(program.calls("torch.utils.data.DataLoader"))
    assert call.argument(2, "shuffle").const is True
    assert call.argument(1, "batch_size").const == 4
    assert not call.has_argument(3, "sampler")


def test_own_functions_are_followed_with_what_they_are_given():
    program = read(
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        def evaluate(net, batch):
            return net(batch)

        def main():
            model = DDP(torch.nn.Linear(1, 1))
            evaluate(model, x)
            evaluate(model.module, x)

        main()
        """
    )
    wrapped, bare = program.forwards
    assert wrapped.forward_of.wrapper == "ddp"
    assert bare.forward_of.wrapper is None
    assert bare.forward_of.instance == "torch.nn.Linear"


@pytest.mark.parametrize(
    ("condition", "main"),
    [
        ("dist.get_rank() == 0", True),
        ("not dist.get_rank()", True),
        ("0 == dist.get_rank()", True),
        ('int(os.environ["RANK"]) == 0', True),
        ("is_main()", True),
        ("args.is_main_process and step > 3", True),
        ("dist.get_rank() > 0", False),
        ("not is_main()", False),
        ("args.local_rank not in [-1, 0]", False),
        ("args.local_rank in (-1, 0)", True),
        ("args.local_rank != -1", None),
        ("dist.is_initialized()", None),
        ('os.environ.get("RANK") is not None', None),
    ],
)
def test_a_condition_says_whether_only_the_main_process_passes(condition, main):
    program = read(
        f"""
        import os
        import torch.distributed as dist

        def is_main():
            if not dist.is_initialized():
                return True
            return dist.get_rank() == 0

        def f(args, step):
            if {condition}:
                here()

        f(a, 1)
        """
    )
    call = only([one for one in program.all_calls if one.node.func.__dict__.get("id") == "here"])
    assert call.guards[0].main is main
    assert call.guards[0].by_rank is (main is not None)


def test_early_returns_and_continues_guard_what_follows():
    program = read(
        """
        import os
        def save(rank, path):
            if rank != 0:
                return
            write(path)

        def loop(loader):
            for batch in loader:
                if batch.isnan().any():
                    continue
                step(batch)
            after()
        """
    )
    guards = {call.node.func.id: call.guards for call in program.all_calls if call.method is None}
    assert [one.main for one in guards["write"]] == [True]
    assert guards["step"][0].divergent == {DATA}
    assert guards["after"] == ()


def test_what_a_collective_writes_is_the_same_on_all_ranks():
    program = read(
        """
        import time, torch, torch.distributed as dist
        flag = torch.tensor(int(time.time()))
        a = flag.item()
        dist.broadcast(flag, src=0)
        b = flag.item()
        """
    )
    before, after = program.calls(method="item")
    assert before.result.taints == {TIME}
    assert after.result.taints == frozenset()


def test_argparse_arguments_keep_their_defaults():
    program = read(
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--grad-accum", type=int, default=4)
        parser.add_argument("--local_rank", type=int, default=-1)
        args = parser.parse_args()
        use(args.grad_accum, args.local_rank)
        """
    )
    call = program.all_calls[-1]
    assert call.args[0].likely() == 4
    assert not call.args[0].const
    assert RANK in call.args[1].taints


def test_methods_of_own_classes_know_their_fields():
    program = read(
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP

        class Trainer:
            def __init__(self, model, rank):
                self.rank = rank
                self.model = DDP(model)

            def run_batch(self, x):
                return self.model(x)

            def train(self):
                if self.rank == 0:
                    self.run_batch(1)

        def main(rank):
            Trainer(torch.nn.Linear(1, 1), rank).train()

        torch.multiprocessing.spawn(main, nprocs=2)
        """
    )
    forward = only(program.forwards)
    assert forward.forward_of.wrapper == "ddp"
    assert [one.main for one in forward.guards] == [True]
    assert forward.at_depth(forward.guards[0].depth).lineno == 15


def test_functions_that_nobody_calls_are_read_too():
    program = read("import torch.distributed as dist\ndef f():\n    dist.barrier()\n")
    assert only(program.calls("torch.distributed.barrier")).root == 1


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (b"def f(:\n  pass\n", 1),
        (b"x = 1\nprint 'two'\n", 2),
        (b"\x00\x01\x02", None),
        (b"\xff\xfe\xfa x", None),
        (b"x = " + b"(" * 3000 + b")" * 3000, None),
    ],
)
def test_what_is_no_program_says_where_reading_stopped(source, line):
    with pytest.raises(Unreadable) as caught:
        read_program("x.py", source)
    assert line is None or caught.value.line == line


def test_recursion_and_star_imports_end():
    program = read("from x import *\ndef f(n):\n    return f(n - 1) + g(n)\nf(3)\n")
    assert program.has_call("own.f")


def test_a_file_without_python_content_has_no_findings():
    assert lint_program("empty.py", b"", Context()) == []
