"""The words that a job, a layout and a plan choose between, each list once.

A job file may also say `auto`. What each word means is the help of the job file's field.
"""

from typing import Literal

Sharding = Literal["none", "zero1", "zero2", "full", "hybrid"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe-v"]
ContextKind = Literal["ring", "ulysses"]
# What recomputes more comes later.
Recompute = Literal["none", "selective", "full"]
NetworkKind = Literal[
    "infiniband", "roce", "efa", "slingshot", "omni-path", "tcpx", "thunderbolt", "tcp", "rdma"
]
Offload = Literal["none", "cpu", "nvme"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Attention = Literal["flash", "fused", "flex", "unfused"]
Fp8Recipe = Literal["tensorwise", "rowwise", "mxfp8"]
Optimizer = Literal["adamw", "adamw-8bit", "muon", "adafactor", "sgd"]
Compression = Literal["none", "bf16", "fp16", "powersgd"]
Objective = Literal["time", "cost", "ranks"]
BatchPolicy = Literal["keep", "shrink"]
