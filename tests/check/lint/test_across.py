"""What several configurations say together: each contradiction is told, wherever it stands."""

import pytest

from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint, lint_files


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["NCCL_ALGO"] = "Bogus"',
        'os.environ.setdefault("NCCL_ALGO", "Bogus")',
        'os.putenv("NCCL_ALGO", "Bogus")',
        'os.environ.update({"A": "1", "NCCL_ALGO": "Bogus", **more})',
        'os.environ.update(A="1", NCCL_ALGO="Bogus")',
        'os.environ |= {"NCCL_ALGO": "Bogus"}',
    ],
)
def test_s4_5_a_variable_of_nccl_is_seen_however_a_program_sets_it(line):
    found = lint({"train.py": f"import os\n\n{line}\n".encode()}, Context())
    assert [(one.where.line, "no value `Bogus`" in one.what) for one in found] == [(3, True)]
    other = line.replace("environ", "settings").replace("putenv", "show")
    assert not lint({"train.py": other.encode()}, Context())


def test_a_program_is_judged_with_the_nodes_of_the_line_that_starts_it():
    script = b"""import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
"""

    def faults(nodes: int) -> list[str]:
        start = f"torchrun --nnodes={nodes} --nproc-per-node=8 train.py\n".encode()
        found = lint({"train.py": script, "run.sh": start}, Context())
        return [one.id for one in found if one.where.path == "train.py"]

    assert "invalid-device-ordinal" in faults(2)
    assert "invalid-device-ordinal" not in faults(1)


def test_the_rank_in_a_group_is_not_the_rank_of_the_job():
    script = b"""import torch
from torch.distributed import distributed_c10d

def shard(model, group):
    return model.to(torch.device(f"cuda:{distributed_c10d.get_rank(group)}"))
"""
    assert not [one for one in lint({"a.py": script}, Context()) if "ordinal" in one.id]
    script = script.replace(b"get_rank(group)", b"get_rank()")
    assert [one.id for one in lint({"a.py": script}, Context())] == ["invalid-device-ordinal"]


@pytest.mark.parametrize(
    ("first", "kind"),
    [("#!/usr/bin/env python3", "python"), ("#!/bin/sh", None), ("# python", None)],
)
def test_a_file_without_an_ending_is_a_program_by_its_first_line(first, kind):
    read = lint_files({"bin/train": f"{first}\nimport torch\n".encode()}, Context())
    assert (read.kinds.get("bin/train") == "python") is (kind == "python")
