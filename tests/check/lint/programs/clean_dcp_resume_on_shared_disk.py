"""All ranks look on one shared file system."""

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
    if os.path.exists("/shared/run/last"):
        dcp.load(state, checkpoint_id="/shared/run/last")
    dist.destroy_process_group()
