"""What several configurations say together: each contradiction is told, wherever it stands."""

import pytest

from paceline.check.finding import Severity
from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint


def test_the_worst_that_is_said_of_a_line_is_told():
    line = b"#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=4\npython train.py\n"
    script = b"import torch.distributed as dist\ndist.init_process_group('nccl')\n"
    alone, together = (
        [one.severity for one in lint(files, Context()) if one.id == "launcher-plain-python"]
        for files in ({"run.sh": line}, {"run.sh": line, "train.py": script})
    )
    assert (alone, together) == ([Severity.INFO], [Severity.ERROR])


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
    assert not lint({"train.py": line.replace("environ", "settings").encode()}, Context()) or (
        "putenv" in line
    )
