import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = FSDP(torch.nn.Linear(4, 4).cuda())
    path = f"checkpoint_rank{rank}.pt"
    if os.path.exists(path):
        model.load_state_dict(torch.load(path))  # expect: ckpt-world-size-mismatch
    torch.save(model.state_dict(), path)


main()
