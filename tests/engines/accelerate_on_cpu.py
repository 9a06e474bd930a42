"""Lets Accelerate take FSDP2 on CPUs, where it falls back to DDP. For these tests alone: starts
`train.py` after telling Accelerate that its ranks have GPUs."""

import runpy

from accelerate.state import PartialState
from accelerate.utils import DistributedType

PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
runpy.run_path("train.py", run_name="__main__")
