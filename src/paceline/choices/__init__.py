"""The words that a job, a layout and a plan choose between, each list once; what Paceline knows of
each word stands beside its list.

A job file may also have `auto`. What each word means is the help of the job file's field.
"""

from collections.abc import Mapping
from typing import Literal

from paceline.choices.optimizers import Optimizer
from paceline.choices.pipeline_schedules import Schedule
from paceline.choices.recomputes import Recompute

__all__ = [
    "COMPRESSION_RISKS",
    "Attention",
    "BatchPolicy",
    "Compression",
    "ContextKind",
    "Fp8Recipe",
    "NetworkKind",
    "Objective",
    "Offload",
    "Optimizer",
    "Precision",
    "Recompute",
    "Schedule",
    "Sharding",
    "TokenDispatcher",
]

Sharding = Literal["none", "zero1", "zero2", "full", "hybrid"]
ContextKind = Literal["ring", "ulysses"]
NetworkKind = Literal[
    "infiniband", "roce", "efa", "slingshot", "omni-path", "tcpx", "thunderbolt", "tcp", "rdma"
]
Offload = Literal["none", "cpu", "nvme"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Attention = Literal["flash", "fused", "flex", "unfused"]
Fp8Recipe = Literal["tensorwise", "rowwise", "mxfp8"]
TokenDispatcher = Literal["alltoall", "deepep"]
Compression = Literal["none", "bf16", "fp16", "powersgd"]
COMPRESSION_RISKS: Mapping[Compression, str] = {
    "fp16": "gradients are summed in fp16, which overflows above 65,504 and loses what is below "
    "6e-8; bf16 sends as few bytes without either",
    "powersgd": "gradients are approximated with low rank, and the errors carried from step to "
    "step are in no checkpoint: a resumed run differs from an uninterrupted one",
}
"""What a compression of gradients may do to the numbers, besides rounding them."""
Objective = Literal["time", "cost", "ranks"]
BatchPolicy = Literal["keep", "shrink"]
