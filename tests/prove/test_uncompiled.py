"""A process that only proves does without torch's compiler."""

import subprocess
import sys

PROVES = """
import sys
from paceline.prove.uncompiled import leave_out_compiler
leave_out_compiler()
import paceline.prove.prove
import torch
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
print("optimizer", "torch._dynamo.eval_frame" in sys.modules)
from torch._dynamo.eval_frame import OptimizedModule
import torch._dynamo
print("asked for", torch._dynamo.OptimizedModule is OptimizedModule)
"""


def test_the_compiler_is_left_out_until_someone_asks_for_more_of_it():
    done = subprocess.run([sys.executable, "-c", PROVES], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["optimizer False", "asked for True"], done.stderr
