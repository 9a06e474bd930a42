"""Each rank looks on its own machine's disk for a checkpoint that all of them read."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard


def main(model):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    fully_shard(model)
    state = model.state_dict()
    if os.path.exists("/tmp/run/last"):  # expect: divergent-filesystem-branch
        dcp.load(state, checkpoint_id="/tmp/run/last")
    dist.destroy_process_group()
