"""Each rank of a DDP run loads the file that it saved itself."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
    path = f"state_rank{rank}.pt"
    if os.path.exists(path):
        model.load_state_dict(torch.load(path))
    torch.save(model.state_dict(), path)


main()
