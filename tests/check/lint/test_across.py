"""What several configurations say together: each contradiction is told, wherever it stands."""

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
